"""Runs are the stretches that a box makes in a row-major buffer; a tagged array is the oracle."""

from __future__ import annotations

import itertools
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.runs import run_count, runs
from ckpttools.testing import boxes, boxes_in


def oracle(box: Box, within: Box) -> list[tuple[int, int]]:
    """Number the buffer's elements, pick the box, group what is consecutive."""
    grid = np.full(within.stops, -1)
    grid[within.slices] = np.arange(within.numel).reshape(within.lengths)
    picked = np.asarray(grid[box.slices]).ravel()
    groups = np.split(picked, np.flatnonzero(np.diff(picked) != 1) + 1)
    return [(int(group[0]), len(group)) for group in groups if len(group)]


@st.composite
def nested(draw: st.DrawFn) -> tuple[Box, Box]:
    within = draw(boxes())
    return draw(boxes_in(within)), within


def check(box: Box, within: Box) -> None:
    found = list(runs(box, within))
    assert found == oracle(box, within)
    assert run_count(box, within) == len(found)
    ends = [start + count for start, count in found]
    assert all(end < start for end, (start, _) in zip(ends, found[1:], strict=False)), "touching"


@given(nested())
def test_runs_cover_each_element_once_ascending_and_none_touch(pair: tuple[Box, Box]) -> None:
    check(*pair)


@pytest.mark.parametrize(
    "lengths", [(), (3,), (0,), (2, 3), (3, 1), (2, 2, 2), (1, 3, 1), (2, 0, 2)]
)
def test_runs_are_right_for_every_box_in_a_small_buffer(lengths: tuple[int, ...]) -> None:
    within = Box(tuple(range(1, len(lengths) + 1)), lengths)
    intervals = [
        [(start, stop) for start in range(low, high + 1) for stop in range(start, high + 1)]
        for low, high in zip(within.offsets, within.stops, strict=True)
    ]
    for pick in itertools.product(*intervals):
        offsets = tuple(start for start, _ in pick)
        check(Box(offsets, tuple(stop - start for start, stop in pick)), within)


def test_a_column_slice_has_one_run_per_row_and_a_row_slice_one_run() -> None:
    within = Box((10, 20), (5, 7))
    assert list(runs(Box((11, 23), (3, 2)), within)) == [(10, 2), (17, 2), (24, 2)]
    assert list(runs(Box((11, 20), (3, 7)), within)) == [(7, 21)]


def test_runs_of_a_0d_box_are_its_one_element_and_of_an_empty_box_none() -> None:
    assert list(runs(Box((), ()), Box((), ()))) == [(0, 1)]
    assert list(runs(Box((3, 0), (0, 5)), Box.whole((4, 5)))) == []
    assert run_count(Box((3, 0), (0, 5)), Box.whole((4, 5))) == 0


def test_neither_counting_nor_walking_holds_the_runs() -> None:
    rows = 10**9
    box, within = Box((0, 1), (rows, 2)), Box.whole((rows, 5))
    tracemalloc.start()
    assert run_count(box, within) == rows
    assert list(itertools.islice(runs(box, within), 3)) == [(1, 2), (6, 2), (11, 2)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 * 1024


def test_a_box_outside_the_buffer_has_no_runs_and_says_so_at_the_call() -> None:
    message = re.escape("runs: box must lie within [1:4, 0:5], got [0:2, 0:5]")
    for function in (runs, run_count):
        with pytest.raises(LayoutError, match=f"^{message}$"):
            function(Box((0, 0), (2, 5)), Box((1, 0), (3, 5)))
