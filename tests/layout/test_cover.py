"""Boxes tile a whole; counting them in a numpy array of its shape is the oracle."""

from __future__ import annotations

import itertools
import re
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.cover import check_cover
from ckpttools.testing import boxes, boxes_in, tilings


def refusal(whole: Box, found: Sequence[Box]) -> str | None:
    """The text after "got" of the error, or None where the boxes are accepted."""
    try:
        check_cover(whole, found, where="w")
    except LayoutError as error:
        rule, text = str(error).split(", got ", 1)
        assert rule == f"w: chunks must cover {whole} exactly once"
        return text
    return None


def parse(text: str) -> Box:
    sides = [tuple(map(int, side.split(":"))) for side in re.findall(r"\d+:\d+", text)]
    return Box(tuple(low for low, _ in sides), tuple(high - low for low, high in sides))


def check_verdict(whole: Box, found: Sequence[Box]) -> None:
    """Compare with counts per element; all boxes lie inside."""
    counts = np.zeros(whole.stops, dtype=np.int64)
    for box in found:
        counts[box.slices] += 1
    inside = counts[whole.slices]
    tags = np.full(whole.stops, -1)
    tags[whole.slices] = np.arange(whole.numel).reshape(whole.lengths)
    text = refusal(whole, found)
    wrong = np.flatnonzero(inside.ravel() != 1)
    assert (text is None) is (len(wrong) == 0)
    if text is None:
        return
    named = parse(text)
    named_tags = np.ravel(tags[named.slices])
    assert wrong[0] in named_tags, "the first wrong element is named"
    if inside.ravel()[wrong[0]] == 0:
        assert text.startswith("a hole at ")
        assert (counts[named.slices] == 0).all()
        assert named_tags[0] == wrong[0]
    else:
        assert text.startswith("an overlap at ")
        assert (counts[named.slices] > 1).all()


@given(st.data())
def test_every_tiling_is_accepted(data: st.DataObject) -> None:
    whole = data.draw(boxes())
    check_cover(whole, data.draw(tilings(whole)), where="w")


@given(st.data())
def test_a_tiling_with_a_box_missing_moved_or_doubled_is_judged_as_counting_does(
    data: st.DataObject,
) -> None:
    whole = data.draw(boxes())
    tiles = list(data.draw(tilings(whole)))
    for _ in range(data.draw(st.integers(1, 2))):
        if tiles:
            tiles.pop(data.draw(st.integers(0, len(tiles) - 1)))
    tiles += data.draw(st.lists(boxes_in(whole), max_size=2))
    check_verdict(whole, tiles)


@given(st.data())
def test_any_boxes_are_judged_as_counting_does(data: st.DataObject) -> None:
    whole = data.draw(boxes())
    check_verdict(whole, data.draw(st.lists(boxes_in(whole), max_size=5)))


@pytest.mark.parametrize(("shape", "most"), [((), 2), ((3,), 4), ((2, 2), 4), ((0, 2), 2)])
def test_all_sets_of_few_boxes_in_a_small_whole_are_judged_as_counting_does(
    shape: tuple[int, ...], most: int
) -> None:
    intervals = [[(low, high - low) for high in range(n + 1) for low in range(high)] for n in shape]
    candidates = [
        Box(tuple(low for low, _ in pick), tuple(length for _, length in pick))
        for pick in itertools.product(*intervals)
    ]
    candidates += [Box(shape, (0,) * len(shape))] if shape else []
    for count in range(most + 1):
        for pick in itertools.combinations_with_replacement(candidates, count):
            check_verdict(Box.whole(shape), pick)


def test_a_pinwheel_that_no_straight_cut_divides_is_accepted_and_its_hole_found() -> None:
    whole = Box((5, 7), (3, 3))
    arms = [Box((5, 7), (1, 2)), Box((5, 9), (2, 1)), Box((7, 8), (1, 2)), Box((6, 7), (2, 1))]
    assert refusal(whole, arms) == "a hole at [6:7, 8:9]"
    assert refusal(whole, [*arms, Box((6, 8), (1, 1))]) is None


def test_a_hole_grows_along_its_row_first() -> None:
    whole = Box.whole((3, 4))
    around = [Box((0, 0), (3, 2)), Box((1, 3), (1, 1)), Box((2, 2), (1, 2))]
    assert refusal(whole, around) == "a hole at [0:1, 2:4]"
    assert refusal(whole, [*around, Box((0, 3), (1, 1))]) == "a hole at [0:2, 2:3]"


def test_equal_counts_of_elements_do_not_hide_an_overlap_behind_a_hole() -> None:
    whole = Box.whole((4, 3))
    assert refusal(whole, [Box((0, 0), (2, 3)), Box((1, 0), (2, 3))]) == "an overlap at [1:2, 0:3]"
    assert refusal(whole, [Box((1, 0), (2, 3)), Box((2, 0), (2, 3))]) == "a hole at [0:1, 0:3]"


def test_the_error_names_the_place_the_rule_and_the_region() -> None:
    lead, rest = Box.whole((5, 7)).split(1, 3)
    cases = [
        ((lead,), "got a hole at [0:5, 3:7]"),
        ((lead, rest, Box((2, 1), (1, 4))), "got an overlap at [2:3, 1:3]"),
        ((lead, rest, lead), "got an overlap at [0:5, 0:3]"),
        ((lead, Box((0, 3), (5, 5))), "got [0:5, 3:8] outside"),
        ((Box((0,), (5,)),), "got [0:5] outside"),
        ((), "got a hole at [0:5, 0:7]"),
    ]
    for found, got in cases:
        message = re.escape(f"decoder.fc1: chunks must cover [0:5, 0:7] exactly once, {got}")
        with pytest.raises(LayoutError, match=f"^{message}$"):
            check_cover(Box.whole((5, 7)), found, where="decoder.fc1")


def test_an_empty_whole_is_covered_by_empty_boxes_or_none() -> None:
    check_cover(Box.whole((0, 7)), [], where="w")
    check_cover(Box.whole((0, 7)), [Box.whole((0, 7)), Box((0, 3), (0, 2))], where="w")
    assert refusal(Box.whole((0, 7)), [Box((0, 0), (1, 7))]) == "[0:1, 0:7] outside"


def test_a_0d_whole_is_covered_by_exactly_one_box() -> None:
    scalar = Box((), ())
    check_cover(scalar, [scalar], where="w")
    assert refusal(scalar, []) == "a hole at []"
    assert refusal(scalar, [scalar, scalar]) == "an overlap at []"


def test_indices_that_do_not_fit_64_bits_are_refused_in_words() -> None:
    lead, rest = Box.whole((2**63,)).split(0, 5)
    message = re.escape(f"w: indices must be below 2**63, got [0:{2**63}]")
    with pytest.raises(LayoutError, match=f"^{message}$"):
        check_cover(Box.whole((2**63,)), [lead, rest], where="w")


def test_cuts_along_hostile_many_dimensions_are_refused_in_words() -> None:
    whole = Box.whole((2,) * 30)
    corners = [Box((0,) * 30, (1,) * 30), Box((1,) * 30, (1,) * 30)]
    with pytest.raises(LayoutError, match=r"^w: chunks must cut at most 8 dimensions, got 30$"):
        check_cover(whole, corners, where="w")
    check_cover(whole, whole.split(17, 1), where="w")


def scattered(count: int) -> tuple[Box, list[Box]]:
    """Cut a 4-d whole at random places into many boxes."""
    whole = Box.whole((1009, 1013, 1019, 1021))
    rng = np.random.default_rng(7)
    tiles = [whole]
    while len(tiles) < count:
        pick, dim = int(rng.integers(len(tiles))), int(rng.integers(4))
        if tiles[pick].lengths[dim] > 1:
            at = int(rng.integers(1, tiles[pick].lengths[dim]))
            tiles[pick : pick + 1] = tiles[pick].split(dim, at)
    return whole, tiles


def test_ten_thousand_boxes_take_a_moment_and_little_memory() -> None:
    whole, tiles = scattered(10_000)
    begun = time.process_time()
    check_cover(whole, tiles, where="w")
    assert refusal(whole, [*tiles[:6007], *tiles[6008:]]) is not None
    assert refusal(whole, [*tiles, Box((501, 2, 3, 4), (2, 3, 5, 7))]) is not None
    assert time.process_time() - begun < 15, "10**8 comparisons in Python take longer"
    tracemalloc.start()
    check_cover(whole, tiles, where="w")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 * 2**20


def test_a_hole_of_one_element_among_ten_thousand_boxes_is_named() -> None:
    whole, tiles = scattered(10_000)
    lead = tiles[4321]
    for dim in range(4):
        lead, _ = lead.split(dim, 1)
    rest = tiles[4321] - lead
    check_cover(whole, [*tiles[:4321], lead, *rest, *tiles[4322:]], where="w")
    assert refusal(whole, [*tiles[:4321], *rest, *tiles[4322:]]) == f"a hole at {lead}"
