"""Who writes what, so that each writes as much? Boxes dealt along a line of bytes.

All boxes are laid end to end, and the line is cut into as many equal parts as there are writers.
A box that a cut goes through is cut between two of its rows (indices of its first dimension); a
small one, or one without rows, goes whole to the part in which its middle lies. So there are hardly
more pieces than boxes, and parts differ by a row or a small box at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.layout.box import Box

LEAST_CUT_BYTES = 1 << 16
"""A box of fewer bytes is never cut: more pieces cost more than they even out."""

Dealt = tuple[int, Box]
"""The index of a box that was dealt, and the part of it."""


def deal(
    boxes: Sequence[tuple[Box, int]], parts: int, *, least_cut_bytes: int = LEAST_CUT_BYTES
) -> list[list[Dealt]]:
    """Deal boxes, each given with the bytes of an element, to so many parts.

    Every element is dealt once; empty boxes are not dealt at all. A pure function: all ranks that
    call it with equal arguments come to the same.

    >>> [[str(box) for _, box in part] for part in deal([(Box.whole((5, 2)), 4)], 2, \
least_cut_bytes=0)]
    [['[0:3, 0:2]'], ['[3:5, 0:2]']]
    """
    total = sum(box.numel * itemsize for box, itemsize in boxes)
    dealt: list[list[Dealt]] = [[] for _ in range(parts)]
    start = 0
    for index, (box, itemsize) in enumerate(boxes):
        size = box.numel * itemsize
        if not size:
            continue
        if size < least_cut_bytes or not box.ndim:
            middle = start + size // 2
            dealt[min(parts - 1, middle * parts // total)].append((index, box))
        else:
            for part, piece in _cut(box, start, size, total, parts):
                dealt[part].append((index, piece))
        start += size
    return dealt


def _cut(box: Box, start: int, size: int, total: int, parts: int) -> list[tuple[int, Box]]:
    """Cut a box that lies at ``start`` of the line at the borders of the parts."""
    rows = box.lengths[0]
    row_bytes = size // rows
    pieces = []
    done = 0
    for part in range(start * parts // total, parts):
        border = -(-(part + 1) * total // parts) - start  # where the part ends, in bytes of the box
        stop = rows if part == parts - 1 else min(rows, (border + row_bytes // 2) // row_bytes)
        if stop > done:
            lengths = (stop - done, *box.lengths[1:])
            pieces.append((part, Box((box.offsets[0] + done, *box.offsets[1:]), lengths)))
            done = stop
        if done == rows:
            break
    return pieces
