"""Which ranks save and load together, and how do they agree? Those of the optimizer's groups.

With one of our optimizers they are its data, tensor and pipeline ranks, which need not be all
processes of the job. With any other optimizer they are all ranks of the default process group, or
this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.together import rank_of, together
from ckpttools.optimizer import ShardedOptimizer

T = TypeVar("T")


class Crew:
    """The ranks that act as one; every method is a collective call of all of them."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        if self._sharded is not None:
            self.rank = rank_of(self._sharded)
            self.size = self._sharded.dp.size * self._sharded.tp.size * self._sharded.pp.size
            buffers = self._sharded.buffers
            self._device = buffers[0].device if buffers else torch.device("cpu")
        else:
            ranks = Ranks()
            self.rank, self.size = ranks.rank, ranks.size
            self._device = _device_of_world()

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank and return what each returned, small plain data, by rank.

        Raises:
            Exception: this rank's own error.
            RemoteError: another rank's.
        """
        if self._sharded is None:
            return Ranks().together(work)
        found = together(self._sharded, work)
        return [found[rank] for rank in range(self.size)]

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the greatest of each number over all ranks."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        if self._sharded is None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        else:
            for group in (self._sharded.dp, self._sharded.tp, self._sharded.pp):
                if group.size > 1:
                    group.all_reduce(tensor, "max")
        return [int(number) for number in tensor.tolist()]


def _device_of_world() -> torch.device:
    """Return a device that the default group's backend serves."""
    if dist.is_available() and dist.is_initialized():
        backends = dist.get_backend_config()
        if "gloo" not in backends and "cuda" in backends:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
