"""Whenever ranks are killed, the newest complete checkpoint loads, and nothing torn is the latest.

A rank kills itself at a chosen one of the file operations that it does under the directory, which
Python's audit hooks tell of, or is killed from outside after a random time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from training_runs import Run

from ckpttools import api
from ckpttools.hooks.step_directory import StepDirectory

SOON_S = 10
STEPS = 4


def die(folder: str) -> None:
    """Note when it was, beside the directory, and be killed."""
    os.close(os.open(f"{folder}-died", os.O_CREAT | os.O_WRONLY))
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_at(count: int, folder: str) -> Iterator[list[int]]:
    """Kill this process at the ``count``-th file operation under ``folder``; count them."""
    seen = [0]

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if not seen or not event.startswith(("open", "os.", "fcntl.", "shutil.")):
            return
        if any(isinstance(one, (str, bytes, Path)) and folder in str(one) for one in arguments):
            seen[0] += 1
            if seen[0] == count:
                die(folder)

    sys.addaudithook(look)
    yield seen


def note_begun(root: Path, step: int) -> None:
    """Note outside of the directory's own files that a save has begun, so those before are done."""
    temporary = root / f"begun-{dist.get_rank()}"
    temporary.write_text(str(step))
    temporary.replace(root / "begun")


def training(
    folder: str, victims: list[int], count: int, asynchronous: bool, seconds: float
) -> tuple[str, float, int]:
    """Train and save at every step; return what ended it, when, and the number of operations."""
    run = Run(asynchronous=asynchronous, keep_last=2)
    mine = dist.get_rank() in victims
    with killed_at(count if mine else 0, folder) as operations:
        if mine and seconds:
            timer = threading.Timer(seconds, die, (folder,))
            timer.daemon = True
            timer.start()
        try:
            with run.manager(Path(folder)) as manager:
                for step in range(1, STEPS + 1):
                    run.train(step, step + 1)
                    manager.save(step, run.model, run.optimizer, run.scheduler)
                    note_begun(Path(folder), step)
        except Exception as error:  # noqa: BLE001  # the network's errors are of many types
            return f"{type(error).__name__}: {error}", time.time(), operations[0]
    return "", 0.0, operations[0]


def expected_states() -> dict[int, dict[str, torch.Tensor]]:
    run, states = Run(), {}
    for step in range(1, STEPS + 1):
        run.train(step, step + 1)
        states[step] = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return states


def check_left(root: Path, states: dict[int, dict[str, torch.Tensor]]) -> int:
    """Check what a crash has left; return the step that a new run goes on from (0: none)."""
    directory = StepDirectory(root)
    for step in directory.steps():
        assert api.verify(directory.path(step)).damage == ()
    latest = directory.latest()
    begun = int((root / "begun").read_text()) if (root / "begun").exists() else 0
    assert (latest or 0) >= begun - 1  # the one before was waited for
    assert latest == max(directory.steps(), default=None)
    if latest is None:
        return 0
    run = Run()  # without leave to overwrite: a step that is there and isn't the latest would show
    with run.manager(root) as manager:
        restored = manager.restore(run.model, run.optimizer, run.scheduler)
        assert restored.objects["iteration"] == latest
        assert not [note for note in restored.notes if "damaged" in note]
        for name, param in run.model.named_parameters():
            assert torch.equal(param.detach(), states[latest][name])
        manager.save(latest + 1, run.model, run.optimizer, run.scheduler)
    left = [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert left == []
    return latest


@pytest.fixture(scope="module")
def states() -> dict[int, dict[str, torch.Tensor]]:
    return expected_states()


def crash(
    root: Path, victims: list[int], count: int, *, asynchronous: bool, seconds: float = 0.0
) -> list[Any]:
    root.mkdir()
    arguments = str(root), victims, count, asynchronous, seconds
    found = run_ranks(training, 2, *arguments, may_die=victims, timeout_s=100)
    died = root.with_name(f"{root.name}-died")
    for result in found if died.exists() else ():
        if result is not None and result[0]:
            assert result[1] - died.stat().st_mtime < SOON_S, result
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "all"])
def test_ranks_killed_at_a_file_operation_leave_a_checkpoint_that_loads(
    victims: list[int],
    asynchronous: bool,
    states: dict[int, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    whole = crash(tmp_path / "whole", [], 0, asynchronous=asynchronous)
    assert [said for said, _, _ in whole] == ["", ""]
    total = min(whole[victim][2] for victim in victims)
    reached = {check_left(tmp_path / "whole", states)}
    rng = random.Random(f"{victims} {asynchronous}")  # noqa: S311  # no secrets
    for count in (rng.randrange(total // 8, total // 2), rng.randrange(total // 2, total)):
        place = tmp_path / str(count)
        found = crash(place, victims, count, asynchronous=asynchronous)
        assert all(found[victim] is None for victim in victims) or len(victims) > 1
        reached.add(check_left(place, states))
    assert max(reached) == STEPS


@pytest.mark.soak
def test_ranks_killed_at_a_hundred_random_moments_leave_a_checkpoint_that_loads(
    states: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    rng = random.Random(11)  # noqa: S311  # no secrets
    reached = []
    killed = 0
    for number in range(100):
        victims = rng.choice([[0], [1], [0, 1]])
        place = tmp_path / str(number)
        asynchronous = bool(number % 2)
        if number % 4 < 2:
            found = crash(place, victims, rng.randrange(1, 400), asynchronous=asynchronous)
        else:
            seconds = rng.uniform(0.05, 0.8)
            found = crash(place, victims, 0, asynchronous=asynchronous, seconds=seconds)
        killed += None in found
        reached.append(check_left(place, states))
    assert killed > 30
    assert len(set(reached)) > 2
