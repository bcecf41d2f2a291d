"""Where does a box lie in a row-major buffer of a larger box?

In stretches of neighbouring elements, its runs. The innermost dimension along which the box is
narrower than the buffer makes the gaps: what lies inside it is contiguous, and each index tuple
outside it starts a run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box, row_major_strides


def runs(box: Box, within: Box) -> Iterator[tuple[int, int]]:
    """Yield ``(start, count)`` element runs of ``box`` in row-major ``within``.

    The runs cover each element of ``box`` exactly once, ascending, and no two touch; all have the
    same count. Memory is constant. Raises LayoutError, at the call, unless ``within`` covers
    ``box``.

    >>> list(runs(Box((1, 2), (2, 3)), within=Box.whole((4, 5))))
    [(7, 3), (12, 3)]
    >>> list(runs(Box((1, 0), (2, 5)), within=Box.whole((4, 5))))
    [(5, 10)]
    """
    _check_within(box, within)
    if not box.numel:
        return iter(())
    corner = box.relative_to(within).offsets
    strides = row_major_strides(within.lengths)
    gap = _gap_dim(box, within)
    outer = [
        range(start * stride, (start + length) * stride, stride)
        for start, length, stride in zip(corner[:gap], box.lengths[:gap], strides, strict=False)
    ]
    base = sum(start * stride for start, stride in zip(corner[gap:], strides[gap:], strict=True))
    return _starts(base, outer, count=math.prod(box.lengths[gap:]))


def run_count(box: Box, within: Box) -> int:
    """Return how many runs `runs` yields, without walking them.

    Raises LayoutError unless ``within`` covers ``box``.
    """
    _check_within(box, within)
    return math.prod(box.lengths[: _gap_dim(box, within)]) if box.numel else 0


def _gap_dim(box: Box, within: Box) -> int:
    """Find the innermost dimension along which box is narrower than within; 0 if there is none."""
    for dim in reversed(range(box.ndim)):
        if box.lengths[dim] != within.lengths[dim]:
            return dim
    return 0


def _starts(base: int, outer: Sequence[range], count: int) -> Iterator[tuple[int, int]]:
    if not outer:
        yield base, count
        return
    for start in outer[0]:
        yield from _starts(base + start, outer[1:], count)


def _check_within(box: Box, within: Box) -> None:
    if not within.covers(box):
        raise LayoutError(f"runs: box must lie within {within}, got {box}")
