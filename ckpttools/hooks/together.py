"""How do all ranks of a run act as one? An error on one is raised on all, soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckpttools.layout.sharded import Topology
from ckpttools.optimizer import RemoteError, ShardedOptimizer
from ckpttools.optimizer.describe import exchange

T = TypeVar("T")


def together(optimizer: ShardedOptimizer, work: Callable[[], T]) -> dict[int, T]:
    """Do ``work`` on every rank and return what each returned, by rank number.

    A collective call: every rank gets all results, so they are small plain data.

    Raises:
        Exception: this rank's own error.
        RemoteError: another rank's.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001  # whatever it is, the other ranks wait for this one
        error = caught
    text = None if error is None else f"{type(error).__name__}: {error}"
    found = exchange((text, result), optimizer.dp, optimizer.tp, optimizer.pp)
    if error is not None:
        raise error
    topology = _topology(optimizer)
    results: dict[int, T] = {}
    for (t, d, p), (failure, value) in found.items():
        rank = topology.rank_of(tp=t, dp=d, pp=p)
        if failure is not None or value is None:
            raise RemoteError(f"rank {rank}: {failure}")
        results[rank] = value
    return results


def rank_of(optimizer: ShardedOptimizer) -> int:
    """Return this rank's number in the run: tensor ranks first, then data, then pipeline ranks."""
    tp, dp, pp = optimizer.tp, optimizer.dp, optimizer.pp
    return _topology(optimizer).rank_of(tp=tp.rank, dp=dp.rank, pp=pp.rank)


def _topology(optimizer: ShardedOptimizer) -> Topology:
    return Topology(tp=optimizer.tp.size, pp=optimizer.pp.size, dp=optimizer.dp.size)
