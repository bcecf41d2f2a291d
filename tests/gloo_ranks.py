"""Run one function of a test module on several gloo ranks, each a process of its own.

The processes are forked from a server that has torch imported already: a rank starts in
hundredths of a second, not in the seconds that the import takes. A child loads the function's
module from its file, under the name that pytest gave it, so results and arguments of the
module's own classes travel.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any


class RankFailedError(AssertionError):
    """A rank raised or died; the text holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    threads: int = 1,
    may_die: Collection[int] = (),
    process_group: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` on ranks 0 to ``world_size - 1`` and return their results.

    ``function`` is at the top level of its module; torch.distributed is initialised where it
    runs (unless ``process_group`` is false). Warnings are errors there. The first rank that
    raises ends all of them. ``may_die`` names ranks that may end without a result: theirs is None.

    Raises:
        RankFailedError: a rank raised, or died.
        TimeoutError: a rank was still running after ``timeout_s``; the text says where.
    """
    module = sys.modules[function.__module__]
    task = (function.__module__, str(module.__file__), function.__qualname__, pickle.dumps(args))
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as folder:
        store = str(Path(folder) / "store") if process_group else None
        ranks = [
            _Rank(rank, world_size, store, Path(folder) / f"stack-{rank}", task, threads)
            for rank in range(world_size)
        ]
        try:
            return _collect(ranks, time.monotonic() + timeout_s, may_die)
        finally:
            for rank in ranks:
                rank.kill()


# What every test module imports, and no more: nothing may start threads before the fork. Every
# optimizer of torch imports torch._dynamo when it is made, which takes seconds.
_PRELOADED = ["torch", "torch.distributed.device_mesh", "torch._dynamo", "pytest"]


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Read by the server when it imports torch: ranks with threads that spin hold up the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context.set_forkserver_preload(_PRELOADED)
    return context


class _Rank:
    def __init__(
        self,
        rank: int,
        world_size: int,
        store: str | None,
        stack: Path,
        task: tuple[Any, ...],
        threads: int,
    ) -> None:
        context = _context()
        self.rank = rank
        self.stack = stack
        self.connection: Connection
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: ForkServerProcess = context.Process(
            target=_child, args=(theirs, stack, rank, world_size, store, task, threads), daemon=True
        )
        self.process.start()
        theirs.close()

    def where(self) -> str:
        """Ask the process for the stacks of its threads."""
        if self.stack.exists():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            self.process.join(0.5)  # it goes on; this is the time to answer
        return self.stack.read_text() if self.stack.exists() else "not yet started"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {rank.connection: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values(), key=lambda rank: rank.rank)
            raise TimeoutError(
                f"ranks {[rank.rank for rank in late]} of {len(ranks)} were still running\n"
                + "\n".join(f"rank {rank.rank}:\n{rank.where()}" for rank in late)
            )
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                payload, failure = connection.recv()
            except EOFError:
                if rank.rank in may_die:
                    results[rank.rank] = None
                    continue
                rank.process.join(5)
                raise RankFailedError(
                    f"rank {rank.rank} ended with code {rank.process.exitcode} and no result"
                ) from None
            if failure is not None:
                raise RankFailedError(f"rank {rank.rank} of {len(ranks)}:\n{failure}")
            results[rank.rank] = pickle.loads(payload)
    return [results[rank.rank] for rank in ranks]


def _child(
    connection: Connection,
    stack: Path,
    rank: int,
    world_size: int,
    store: str | None,
    task: tuple[str, str, str, bytes],
    threads: int,
) -> None:
    # Signals may come at any time until the end, so the file stays open until then.
    faulthandler.register(signal.SIGUSR1, stack.open("w"))
    payload, failure = None, None
    try:
        payload = pickle.dumps(_run(rank, world_size, store, task, threads))
    except BaseException:  # noqa: BLE001 - raised again in the test's process
        failure = traceback.format_exc()
    connection.send((payload, failure))
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # the server holds no state to clean up, and torch takes long to leave


def _run(
    rank: int, world_size: int, store: str | None, task: tuple[str, str, str, bytes], threads: int
) -> Any:
    import torch
    import torch.distributed as dist

    module_name, file, function_name, args = task
    warnings.simplefilter("error")
    torch.set_num_threads(threads)
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # pickle imports the folders above as packages, which here they need not be.
        above = module_name.split(".")[:-1]
        for depth in range(1, len(above) + 1):
            package = ".".join(above[:depth])
            with contextlib.suppress(ImportError):
                importlib.import_module(package)
            sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function = getattr(module, function_name)
    if store is None:
        return function(*pickle.loads(args))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no name of this host needs to resolve
    # A rank that has nothing to do would end while others still connect to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        return function(*pickle.loads(args))
    finally:
        dist.destroy_process_group()
