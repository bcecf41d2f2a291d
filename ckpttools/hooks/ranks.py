"""How do the ranks of any run act as one? Through a process group; an error on one is on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ckpttools.errors import UsageError
from ckpttools.optimizer import RemoteError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group as one of them sees it; None is the default group.

    Without torch.distributed it is this process alone.

    Raises:
        UsageError: this process isn't in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self._group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError("group: this rank must be in it, got a group of others")

    def gather(self, value: T) -> list[T]:
        """Return what each rank passed, in the order of ranks. For small plain data."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank and return what each returned, in the order of ranks.

        Raises:
            Exception: this rank's own error.
            RemoteError: another rank's.
        """
        error: Exception | None = None
        results: list[T] = []
        try:
            results.append(work())
        except Exception as caught:  # noqa: BLE001  # whatever it is, the other ranks wait for this one
            error = caught
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = self.gather((text, results))
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(found):
            if failure is not None:
                raise RemoteError(f"rank {rank}: {failure}")
        return [values[0] for _, values in found]
