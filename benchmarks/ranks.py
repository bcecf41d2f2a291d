"""How does a benchmark keep several sets of ranks alive, and let them take turns?

``Ranks`` starts N processes of a script, which stay for the whole benchmark and sleep unless
asked: so every variant is warm, its memory is its own, and rounds can alternate. A question is
one line of JSON to each rank's standard input; each answers with one line. A rank ends when its
input does, so nothing is left behind if the benchmark is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Answer = dict[str, Any]


class Ranks:
    """N processes that run ``serve`` and are one gloo group.

    ``arguments`` go to the script as ``--child`` with rank, ranks and the rendezvous file added.
    ``wrapper`` is put before the command of every process.
    """

    def __init__(
        self, script: str, arguments: Answer, *, ranks: int, wrapper: Sequence[str] = ()
    ) -> None:
        self.place = tempfile.TemporaryDirectory(prefix="ckpttools-ranks-")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # never a network card
        }
        self.processes = []
        for rank in range(ranks):
            own = {
                **arguments,
                "rank": rank,
                "ranks": ranks,
                "meeting": str(Path(self.place.name) / "meeting"),
            }
            command = [*wrapper, sys.executable, script, "--child", json.dumps(own)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, **question: object) -> list[Answer]:
        """Ask all ranks at once; return the answer of each.

        Raises:
            SystemExit: a rank has died. What it said is on standard error.
        """
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.close(kill=True)
                sys.exit(f"rank {rank}: must answer, got exit code {process.returncode}")
            answers.append(json.loads(line))
        return answers

    def close(self, *, kill: bool = False) -> None:
        """End all ranks, and wait for them."""
        for process in self.processes:
            if kill:
                process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.place.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(kill=kind is not None)


def serve(answer: Callable[[Answer], Answer]) -> None:
    """Answer questions until there are no more; what is printed meanwhile goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def join(rank: int, ranks: int, meeting: str) -> None:
    """Join the other ranks, with one thread for computing."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
