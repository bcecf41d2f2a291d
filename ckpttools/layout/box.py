"""Which rectangle of a tensor's index space is meant?

A `Box` is a set of index tuples: the product of one half-open interval per dimension. Its
operations are those of sets (`&`, `-`, `in`) and of geometry (`shift`, `relative_to`, `split`).
A box with a zero length is the empty set, wherever it lies; a 0-d box holds one element.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """Name the elements ``offsets[d] <= index[d] < offsets[d] + lengths[d]`` of a tensor.

    Raises LayoutError unless both tuples have one rank and no negative entry.

    >>> a, b = Box((0, 0), (4, 6)), Box((2, 3), (9, 9))
    >>> print(a & b)
    [2:4, 3:6]
    >>> [str(rest) for rest in a - b]
    ['[0:2, 0:6]', '[2:4, 0:3]']
    """

    offsets: tuple[int, ...]
    """First index of each dimension, in elements."""
    lengths: tuple[int, ...]
    """Count of indices of each dimension."""

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise LayoutError(
                "Box: offsets and lengths must have the same rank, "
                f"got {self.offsets} and {self.lengths}"
            )
        if min(self.offsets, default=0) < 0:
            raise LayoutError(f"Box: offsets must be >= 0, got {self.offsets}")
        if min(self.lengths, default=0) < 0:
            raise LayoutError(f"Box: lengths must be >= 0, got {self.lengths}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Count of dimensions."""
        return len(self.lengths)

    @property
    def numel(self) -> int:
        """Count of elements; 1 for a 0-d box."""
        return math.prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """First index after the box, for each dimension."""
        return tuple(map(operator.add, self.offsets, self.lengths))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that picks the box out of an array of the whole tensor."""
        return tuple(map(slice, self.offsets, self.stops))

    def __str__(self) -> str:
        """Write the box as Python slices, ``[0:3, 8:16]``; a 0-d box is ``[]``."""
        sides = zip(self.offsets, self.stops, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in sides)}]"

    def __and__(self, other: Box) -> Box | None:
        """Return the box of the elements in both, or None where nothing is shared.

        An empty box shares nothing, not even with itself; two 0-d boxes share their one element.
        Raises LayoutError where the ranks differ.
        """
        self._check_rank(other.lengths)
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(map(operator.sub, map(min, self.stops, other.stops), offsets))
        return Box(offsets, lengths) if min(lengths, default=1) > 0 else None

    def __sub__(self, other: Box) -> tuple[Box, ...]:
        """Return the elements of self that are not in other, as at most ``2 * ndim`` boxes.

        The boxes are disjoint and not empty; their first elements ascend in row-major order.
        Raises LayoutError where the ranks differ.
        """
        shared = self & other
        if shared is None:
            return (self,) if self.numel else ()
        before: list[Box] = []
        after: list[Box] = []
        core = self
        for dim in range(self.ndim):
            lead, core = core.split(dim, shared.offsets[dim] - core.offsets[dim])
            core, trail = core.split(dim, shared.lengths[dim])
            before.append(lead)
            after.append(trail)
        return tuple(box for box in (*before, *reversed(after)) if box.numel)

    def __contains__(self, other: Box) -> bool:
        """Say whether self covers other."""
        return self.covers(other)

    def covers(self, other: Box) -> bool:
        """Say whether every element of other is in self; an empty box is covered by any.

        Raises LayoutError where the ranks differ.
        """
        self._check_rank(other.lengths)
        if 0 in other.lengths:
            return True
        return all(map(operator.le, self.offsets, other.offsets)) and all(
            map(operator.ge, self.stops, other.stops)
        )

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by so many indices in each dimension.

        Raises LayoutError where the ranks differ or an index would become negative.
        """
        self._check_rank(by)
        return Box(tuple(map(operator.add, self.offsets, by)), self.lengths)

    def relative_to(self, origin: Box) -> Box:
        """Return the box as seen from origin's first corner; `shift` by its offsets undoes it.

        Raises LayoutError where the ranks differ or self starts before origin.
        """
        return self.shift(tuple(map(operator.neg, origin.offsets)))

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """Cut the box in two: the first ``at`` indices of a dimension, and the rest.

        Either half is empty where ``at`` is 0 or the length. Raises LayoutError where there is no
        such dimension or ``at`` is not in it.

        >>> [str(half) for half in Box((5, 0), (3, 2)).split(0, 1)]
        ['[5:6, 0:2]', '[6:8, 0:2]']
        """
        if not 0 <= dim < self.ndim:
            raise LayoutError(f"Box.split: dim must be in 0..{self.ndim - 1} of {self}, got {dim}")
        if not 0 <= at <= self.lengths[dim]:
            raise LayoutError(
                f"Box.split: at must be in 0..{self.lengths[dim]} along dim {dim} of {self}, "
                f"got {at}"
            )
        lead_lengths, rest_lengths = list(self.lengths), list(self.lengths)
        rest_offsets = list(self.offsets)
        lead_lengths[dim] = at
        rest_lengths[dim] -= at
        rest_offsets[dim] += at
        return Box(self.offsets, tuple(lead_lengths)), Box(tuple(rest_offsets), tuple(rest_lengths))

    def _check_rank(self, other: Sequence[int]) -> None:
        if len(other) != self.ndim:
            raise LayoutError(f"Box: ranks must be equal, got {self.ndim} and {len(other)}")


def row_major_strides(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the distance between neighbours of each dimension in a dense row-major buffer.

    In elements. A stride is the product of the later lengths, so a tensor without elements has
    zeros among its strides; a 0-d tensor has none.

    >>> row_major_strides((2, 3, 5))
    (15, 5, 1)
    """
    strides: list[int] = []
    stride = 1
    for length in reversed(lengths):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))
