"""Which boxes of a tensor does a rank hold, cut as a device mesh says? As torch's DTensor has it.

A placement cuts one dimension of what the placements before it left, in pieces as equal as
``torch.chunk`` makes them: all of ceil(n / parts) indices but the last, which may be shorter or
empty. A *strided* placement cuts each of ``split_factor`` such pieces instead and takes its part of
every one. So a dimension is a list of runs of indices, and a tensor the boxes of their product.

FSDP over tensor parallelism writes its cut as strided although it is made last, after that of the
tensor ranks to the right of it. Where sizes don't divide, only that order gives what a rank truly
has: :func:`held_boxes` takes the order that the local shape shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ckpttools.errors import UnsupportedError
from ckpttools.layout.box import Box

Run = tuple[int, int]
"""The first index, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One dimension of the mesh: part ``part`` of ``parts`` of the tensor's dimension ``dim``.

    ``split_factor`` above 1 is a strided cut.
    """

    dim: int
    part: int
    parts: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of the whole tensor, and where in the local one its first element lies."""

    box: Box
    local_offsets: tuple[int, ...]


def held_boxes(
    shape: Sequence[int], cuts: Sequence[Cut], local_shape: Sequence[int], *, where: str
) -> tuple[HeldBox, ...]:
    """Return the boxes that make up a rank's local tensor; empty ones are left out.

    Raises:
        UnsupportedError: the local tensor isn't of the shape that the cuts give.
    """
    for ordered in (_right_to_left(cuts), cuts):
        runs = [[(0, length)] for length in shape]
        for cut in ordered:
            runs[cut.dim] = _take(runs[cut.dim], cut)
        if tuple(map(_count, runs)) == tuple(local_shape):
            return tuple(_boxes(runs))
    raise UnsupportedError(
        f"{where}: the local tensor must have the shape {tuple(map(_count, runs))} that its "
        f"placements give, got {tuple(local_shape)}"
    )


def _right_to_left(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts in the order in which they were made: a strided one after those behind it.

    A cut is left strided where ``split_factor`` isn't the number of parts that they make.
    """
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        before = [other for other in ordered if other.dim == cut.dim]
        if cut.split_factor > 1 and cut.split_factor == math.prod(c.parts for c in before):
            ordered.append(Cut(cut.dim, cut.part, cut.parts))
        else:
            ordered.insert(0, cut)
    return ordered


def _take(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """Return the runs of one part."""
    size = _count(runs)
    pieces = [(0, size)] if cut.split_factor == 1 else _chunks(0, size, cut.split_factor)
    taken: list[Run] = []
    for start, stop in pieces:
        low, high = _chunks(start, stop, cut.parts)[cut.part]
        taken += _slice(runs, low, high)
    return taken


def _chunks(start: int, stop: int, parts: int) -> list[Run]:
    """Cut a run as ``torch.chunk`` does, with empty ones at the end."""
    step = -(-(stop - start) // parts)
    return [(min(stop, start + i * step), min(stop, start + (i + 1) * step)) for i in range(parts)]


def _slice(runs: Sequence[Run], low: int, high: int) -> list[Run]:
    """Return what the positions ``low`` to ``high`` of the runs laid end to end are."""
    taken: list[Run] = []
    position = 0
    for start, stop in runs:
        first, last = max(low - position, 0), min(high - position, stop - start)
        if first < last:
            if taken and taken[-1][1] == start + first:
                taken[-1] = taken[-1][0], start + last
            else:
                taken.append((start + first, start + last))
        position += stop - start
    return taken


def _count(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _boxes(runs: Sequence[Sequence[Run]]) -> list[HeldBox]:
    """Return the boxes of the product of the runs of each dimension."""
    placed: list[list[tuple[Run, int]]] = []
    for dimension in runs:
        position, found = 0, []
        for start, stop in dimension:
            found.append(((start, stop), position))
            position += stop - start
        placed.append(found)
    return [
        HeldBox(
            Box(tuple(r[0] for r, _ in chosen), tuple(r[1] - r[0] for r, _ in chosen)),
            tuple(at for _, at in chosen),
        )
        for chosen in product(*placed)
        if all(run[0] < run[1] for run, _ in chosen)
    ]
