"""How do I test code that works on layouts?

With the strategies that ckpttools tests itself with (they need hypothesis): small shapes, boxes
in a box and tilings of a box. 0-d, empty and one-element values are drawn like any other.
"""

from __future__ import annotations

from hypothesis import strategies as st

from ckpttools.layout.box import Box

__all__ = ["boxes", "boxes_in", "shapes", "tilings"]


def shapes(*, max_ndim: int = 4, max_length: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the shape of a small tensor; 0-d and empty ones are among them."""
    return st.lists(st.integers(0, max_length), max_size=max_ndim).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, *, max_ndim: int = 4, max_length: int = 5) -> Box:
    """Draw a small box that may lie anywhere, as the buffer of a piece of a tensor does."""
    lengths = draw(shapes(max_ndim=max_ndim, max_length=max_length))
    return Box(tuple(draw(st.integers(0, 7)) for _ in lengths), lengths)


@st.composite
def boxes_in(draw: st.DrawFn, within: Box) -> Box:
    """Draw a box that ``within`` covers; it may be empty, or all of it."""
    offsets, lengths = [], []
    for start, stop in zip(within.offsets, within.stops, strict=True):
        low, high = sorted((draw(st.integers(start, stop)), draw(st.integers(start, stop))))
        offsets.append(low)
        lengths.append(high - low)
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def tilings(draw: st.DrawFn, whole: Box, *, max_cuts: int = 6) -> tuple[Box, ...]:
    """Draw boxes, in any order and some of them empty, that hold each element of a box once."""
    tiles = [whole]
    for _ in range(draw(st.integers(0, max_cuts)) if whole.ndim else 0):
        tile = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, whole.ndim - 1))
        tiles.extend(tile.split(dim, draw(st.integers(0, tile.lengths[dim]))))
    return tuple(draw(st.permutations(tiles)))
