"""Which boxes is a slice of a flattened tensor?

A flat buffer of a sharded optimizer cuts tensors at any element. Such a slice is a staircase:
a broken row, whole rows, a broken row, and the same again in each broken row. So it is at most
``2 * ndim - 1`` boxes, and planning needs to know boxes only. The walk is greedy: at each
position take the largest slab that starts there and does not pass the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.runs import run_count, runs


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Name the elements ``[start, stop)`` of the row-major flattening of a box.

    Raises LayoutError unless ``0 <= start <= stop <= within.numel``.

    >>> [str(box) for box in FlatRange(3, 14, within=Box.whole((4, 5))).boxes()]
    ['[0:1, 3:5]', '[1:2, 0:5]', '[2:3, 0:4]']
    """

    start: int
    """First element, counted from the first element of ``within``."""
    stop: int
    """First element after the slice."""
    within: Box
    """The box that is flattened."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.within.numel:
            raise LayoutError(
                f"FlatRange: start and stop must ascend in 0..{self.within.numel} of "
                f"{self.within}, got {self.start} and {self.stop}"
            )

    @property
    def numel(self) -> int:
        """Count of elements."""
        return self.stop - self.start

    def boxes(self) -> tuple[Box, ...]:
        """Return the slice as disjoint boxes in the index space of ``within``.

        At most ``2 * ndim - 1`` of them (one for a 0-d box), none empty, in flat order: their
        row-major elements, one box after the other, are the slice.
        """
        found: list[Box] = []
        start = self.start
        while start < self.stop:
            box = self._slab(start)
            found.append(box)
            start += box.numel
        return tuple(found)

    def _slab(self, start: int) -> Box:
        """Take the largest box whose elements are ``[start, start + numel)`` of the slice."""
        corner: list[int] = []
        inner = start
        lengths = self.within.lengths
        for dim, stride in enumerate(row_major_strides(lengths)):
            at, inner = divmod(inner, stride)
            corner.append(at)
            count = min(lengths[dim] - at, (self.stop - start) // stride)
            if inner == 0 and count > 0:
                later = self.within.ndim - dim - 1
                box = Box((*corner, *(0,) * later), (*(1,) * dim, count, *lengths[dim + 1 :]))
                return box.shift(self.within.offsets)
        return self.within  # 0-d: the one element


def flat_range_of(box: Box, within: Box) -> FlatRange | None:
    """Return the slice of row-major ``within`` that is ``box``, or None unless that is one run.

    The inverse of `FlatRange.boxes` where that gives one box; an empty box is no run. Raises
    LayoutError unless ``within`` covers ``box``.
    """
    if run_count(box, within) != 1:
        return None
    ((start, count),) = runs(box, within)
    return FlatRange(start, start + count, within)
