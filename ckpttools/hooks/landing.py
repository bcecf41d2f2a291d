"""Where do bytes of a checkpoint wait until every rank has its own? Where they may be given up.

A run must be able to stay as it is until all ranks have read. Two kinds of memory allow that:

1. State that is zero in every bit, as that of a run that has just begun. It is read into where it
   is, since what it was is known: :meth:`Landing.undo` makes it zero again.
2. Fresh memory of huge pages, which is zero and whose faults are few; what comes there is copied
   when all is taken over.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_SCAN_BYTES = 1 << 20


class Landing:
    """The memory that one load reads into."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def place(self, numel: int, dtype: torch.dtype, live: Tensor | None = None) -> Tensor:
        """Return zeros on the host, 1-D: ``live`` where that is all zero, else fresh ones."""
        if live is not None and _is_zero_here(live, dtype):
            self._taken.append(live)
            return live
        return _fresh_zeros(numel, dtype)

    def undo(self) -> None:
        """Make live memory zero again."""
        with torch.no_grad():
            for live in self._taken:
                live.zero_()
        self._taken.clear()


def _fresh_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Return zeros, 1-D on the host, in huge pages where the system has them and it is worth it."""
    size = numel * dtype.itemsize
    if size < 2 * _HUGE_PAGE_BYTES:
        return torch.zeros(numel, dtype=dtype)
    pages = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    start = -room.data_ptr() % _HUGE_PAGE_BYTES
    return room[start : start + size].view(dtype)


def _is_zero_here(live: Tensor, dtype: torch.dtype) -> bool:
    """Say whether memory is the host's, and every bit of it zero."""
    if live.device.type != "cpu" or live.dtype != dtype or not live.is_contiguous():
        return False
    data = live.detach().reshape(-1).view(torch.uint8).numpy()
    return not any(data[low : low + _SCAN_BYTES].any() for low in range(0, len(data), _SCAN_BYTES))
