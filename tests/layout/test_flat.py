"""A slice of a flattened box, as boxes; slicing numpy's ravel is the oracle."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange, flat_range_of
from ckpttools.testing import boxes, boxes_in


@st.composite
def flat_ranges(draw: st.DrawFn) -> FlatRange:
    within = draw(boxes())
    ends = st.integers(0, within.numel)
    start, stop = sorted((draw(ends), draw(ends)))
    return FlatRange(start, stop, within)


def check(flat: FlatRange) -> None:
    within = flat.within
    grid = np.full(within.stops, -1)
    grid[within.slices] = np.arange(100, 100 + within.numel).reshape(within.lengths)
    expected = grid[within.slices].ravel()[flat.start : flat.stop].tolist()
    parts = flat.boxes()
    assert [tag for box in parts for tag in np.ravel(grid[box.slices]).tolist()] == expected
    assert flat.numel == len(expected)
    assert len(parts) <= max(1, 2 * within.ndim - 1)
    assert all(box.numel and box in within for box in parts)
    if len(parts) == 1:
        assert flat_range_of(parts[0], within) == flat


@given(flat_ranges())
def test_boxes_concatenate_to_the_slice_and_are_few(flat: FlatRange) -> None:
    check(flat)


@pytest.mark.parametrize(
    "lengths", [(), (5,), (0,), (2, 3), (3, 1), (1, 4), (2, 3, 2), (3, 0, 2), (2, 2, 2, 2)]
)
def test_boxes_are_right_for_every_slice_of_a_small_box(lengths: tuple[int, ...]) -> None:
    within = Box(tuple(range(1, len(lengths) + 1)), lengths)
    for start in range(within.numel + 1):
        for stop in range(start, within.numel + 1):
            check(FlatRange(start, stop, within))


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    for shape in ((5,), (3, 5), (3, 3, 3), (3, 3, 3, 3)):
        whole = Box.whole(shape)
        assert len(FlatRange(1, whole.numel - 1, whole).boxes()) == 2 * whole.ndim - 1


def test_boxes_keep_the_absolute_offsets_of_the_flattened_box() -> None:
    flat = FlatRange(4, 13, Box((10, 20), (3, 5)))
    assert [str(box) for box in flat.boxes()] == [
        "[10:11, 24:25]",
        "[11:12, 20:25]",
        "[12:13, 20:23]",
    ]


def test_a_0d_slice_is_its_box_or_nothing() -> None:
    scalar = Box((), ())
    assert FlatRange(0, 1, scalar).boxes() == (scalar,)
    assert FlatRange(0, 0, scalar).boxes() == FlatRange(1, 1, scalar).boxes() == ()


@given(st.data())
def test_flat_range_of_is_none_exactly_where_the_box_is_not_one_run(data: st.DataObject) -> None:
    within = data.draw(boxes())
    box = data.draw(boxes_in(within))
    grid = np.full(within.stops, -1)
    grid[within.slices] = np.arange(within.numel).reshape(within.lengths)
    tags = np.ravel(grid[box.slices])
    is_one_run = len(tags) > 0 and bool((np.diff(tags) == 1).all())
    flat = flat_range_of(box, within)
    assert (flat is not None) is is_one_run
    if flat is not None:
        assert (flat.start, flat.stop) == (tags[0], tags[-1] + 1)
        assert flat.boxes() == (box,)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_slice_outside_its_box_cannot_exist(start: int, stop: int) -> None:
    message = f"FlatRange: start and stop must ascend in 0..6 of [0:2, 0:3], got {start} and {stop}"
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        FlatRange(start, stop, Box.whole((2, 3)))


def test_flat_range_of_refuses_a_box_outside() -> None:
    message = re.escape("runs: box must lie within [0:2, 0:3], got [1:3, 0:3]")
    with pytest.raises(LayoutError, match=f"^{message}$"):
        flat_range_of(Box((1, 0), (2, 3)), Box.whole((2, 3)))
