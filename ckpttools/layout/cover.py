"""Do these boxes tile the whole, each element in exactly one of them?

Write ``f`` for the count of boxes at an element, less one inside the whole: the boxes tile the
whole exactly where ``f`` is zero everywhere. The mixed difference of ``f``, one step along each
dimension, determines ``f``, and that of one box is just a sign at each of its corners. So:

1. Give each box the weight 1 and the whole -1.
2. For each dimension, replace the interval of each by its start, and by its stop with the weight
   negated; add up the weights of equal rows, drop those that cancel.
3. Nothing left: ``f`` is zero, the boxes tile the whole. Otherwise the first corner left, in
   row-major order, is the first element where ``f`` isn't zero, and its weight is ``f`` there
   (``f`` is the sum of its differences at all corners that aren't greater along any dimension):
   negative is a hole, positive an overlap.

So no pair of boxes is ever compared: n boxes cut along c dimensions cost a sort of at most
``n * 2**c`` rows, and in a regular grid most rows cancel on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box

_MAX_CUT_DIMS = 8  # bounds memory on hostile input: rows double with each dimension that is cut
_MAX_STOP = 2**63 - 1


def check_cover(whole: Box, boxes: Sequence[Box], *, where: str) -> None:
    """Prove that each element of ``whole`` is in exactly one of the boxes, and nothing else is.

    Empty boxes hold no element and are passed over, wherever they lie. Raises LayoutError, whose
    text starts with ``where``, naming: the first box that reaches outside; else, at the first
    wrong element in row-major order, a box without any cover or a box covered more than once.

    >>> halves = Box.whole((4, 6)).split(1, 2)
    >>> check_cover(Box.whole((4, 6)), halves, where="weight")
    >>> check_cover(Box.whole((4, 7)), halves, where="weight")
    Traceback (most recent call last):
        ...
    ckpttools.errors.LayoutError: weight: chunks must cover [0:4, 0:7] exactly once, \
got a hole at [0:4, 6:7]
    """
    rule = f"{where}: chunks must cover {whole} exactly once"
    for box in boxes:
        if box.ndim != whole.ndim or not whole.covers(box):
            raise LayoutError(f"{rule}, got {box} outside")
    filled = [box for box in boxes if box.numel]
    if not whole.numel or filled == [whole]:
        return
    if max(whole.stops, default=0) > _MAX_STOP:
        raise LayoutError(f"{where}: indices must be below 2**63, got {whole}")
    cut = [
        dim
        for dim, length in enumerate(whole.lengths)
        if any(box.lengths[dim] != length for box in filled)
    ]
    if len(cut) > _MAX_CUT_DIMS:
        raise LayoutError(
            f"{where}: chunks must cut at most {_MAX_CUT_DIMS} dimensions, got {len(cut)}"
        )
    weight, corner = _first_wrong_element(whole, filled, cut)
    if weight < 0:
        raise LayoutError(f"{rule}, got a hole at {_hole_at(corner, whole, filled)}")
    if weight > 0:
        raise LayoutError(f"{rule}, got an overlap at {_overlap_at(corner, filled)}")


def _first_wrong_element(whole: Box, boxes: Sequence[Box], cut: Sequence[int]) -> tuple[int, Box]:
    """Return ``f`` and a box of one element where ``f`` first isn't zero; ``(0, _)`` if nowhere."""
    corner = list(whole.offsets)
    ones = (1,) * whole.ndim
    if not cut:  # each box is the whole
        return len(boxes) - 1, Box(tuple(corner), ones)
    weights = np.array([1] * len(boxes) + [-1], dtype=np.int64)
    intervals = [
        [bound for dim in cut for bound in (box.offsets[dim], box.offsets[dim] + box.lengths[dim])]
        for box in (*boxes, whole)
    ]
    # rows x (start, stop) of each dimension that is cut; stop becomes 0 where start is a corner
    rows = np.array(intervals, dtype=np.int64)
    for column in range(0, rows.shape[1], 2):
        ends = rows.copy()
        ends[:, column] = rows[:, column + 1]
        rows = np.concatenate((rows, ends))
        rows[:, column + 1] = 0
        rows, weights = _add_equal_rows(rows, np.concatenate((weights, -weights)))
    if not len(rows):
        return 0, Box(tuple(corner), ones)
    for dim, at in zip(cut, rows[0, ::2].tolist(), strict=True):
        corner[dim] = at
    return int(weights[0]), Box(tuple(corner), ones)


def _add_equal_rows(
    rows: NDArray[np.int64], weights: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort rows, the first column first, add the weights of equal ones, drop those of weight 0."""
    if not len(rows):
        return rows, weights
    order = np.lexsort(rows.T[::-1])
    rows, weights = rows[order], weights[order]
    is_first = np.concatenate(([True], (rows[1:] != rows[:-1]).any(axis=1)))
    firsts = np.flatnonzero(is_first)
    totals = np.add.reduceat(weights, firsts)
    kept = totals != 0
    return rows[firsts[kept]], totals[kept]


def _hole_at(corner: Box, whole: Box, boxes: Sequence[Box]) -> Box:
    """Grow an element that no box holds, from the last dimension to the first, up to the boxes."""
    hole = corner
    for dim in reversed(range(whole.ndim)):
        offset = hole.offsets[dim]
        lengths = list(hole.lengths)
        lengths[dim] = whole.stops[dim] - offset
        ahead = Box(hole.offsets, tuple(lengths))
        stop = min((box.offsets[dim] for box in boxes if ahead & box), default=whole.stops[dim])
        hole, _ = ahead.split(dim, stop - offset)
    return hole


def _overlap_at(corner: Box, boxes: Sequence[Box]) -> Box:
    """Return what the first two boxes that hold an element share."""
    first, second = [box for box in boxes if box.covers(corner)][:2]
    shared = first & second
    return corner if shared is None else shared
