"""A box is a set of index tuples; numpy's own indexing of tagged arrays is the oracle.

Each element of a grid that is larger than every box carries its number, so a box is the set of
the numbers that ``grid[box.slices]`` shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.testing import boxes, boxes_in, shapes

SIDE = 13  # boxes() ends at 7 + 5


def elements(box: Box, side: int = SIDE) -> list[int]:
    grid = np.arange(side**box.ndim).reshape((side,) * box.ndim)
    picked: list[int] = np.asarray(grid[box.slices]).ravel().tolist()
    return picked


def all_boxes(ndim: int, side: int) -> list[Box]:
    """All boxes inside a cube, empty ones included."""
    sides = [(start, stop - start) for start in range(side + 1) for stop in range(start, side + 1)]
    return [
        Box(tuple(start for start, _ in pick), tuple(length for _, length in pick))
        for pick in itertools.product(sides, repeat=ndim)
    ]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    around = draw(boxes())
    return draw(boxes_in(around)), draw(boxes_in(around))


def check_set_laws(a: Box, b: Box, side: int) -> None:
    in_a, in_b = set(elements(a, side)), set(elements(b, side))
    shared = a & b
    assert (set() if shared is None else set(elements(shared, side))) == in_a & in_b
    assert shared is None or shared.numel > 0
    rest = [elements(box, side) for box in a - b]
    assert sorted(itertools.chain(*rest)) == sorted(in_a - in_b), "each element once"
    assert all(rest), "no empty remainder"
    assert [part[0] for part in rest] == sorted(part[0] for part in rest)
    assert len(rest) <= 2 * a.ndim or a.ndim == 0
    assert a.covers(b) is (b in a) is (in_b <= in_a)


@pytest.mark.parametrize(("ndim", "side"), [(0, 1), (1, 4), (2, 3)])
def test_and_sub_and_covers_are_those_of_sets_for_all_pairs_of_small_boxes(
    ndim: int, side: int
) -> None:
    for a, b in itertools.product(all_boxes(ndim, side), repeat=2):
        check_set_laws(a, b, side + 1)


@given(pairs())
def test_and_sub_and_covers_are_those_of_sets(pair: tuple[Box, Box]) -> None:
    check_set_laws(*pair, SIDE)


@given(pairs())
def test_and_is_commutative_and_idempotent(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a & b == b & a
    assert a & a == (a if a.numel else None)


def test_equal_0d_boxes_share_themselves_and_leave_nothing() -> None:
    scalar = Box((), ())
    assert scalar & scalar == scalar
    assert scalar - scalar == ()
    assert (scalar.numel, scalar.ndim, scalar.slices, str(scalar)) == (1, 0, (), "[]")


def test_an_empty_box_shares_nothing_and_is_in_any_box() -> None:
    empty, other = Box((9, 9), (0, 3)), Box((0, 0), (2, 2))
    assert empty & empty is None
    assert empty - other == ()
    assert other - empty == (other,)
    assert empty in other
    assert other not in empty


def test_sub_gives_slabs_around_the_shared_box_in_row_major_order() -> None:
    rest = Box((1, 2), (7, 11)) - Box((3, 5), (2, 3))
    assert [str(box) for box in rest] == ["[1:3, 2:13]", "[3:5, 2:5]", "[3:5, 8:13]", "[5:8, 2:13]"]


@given(boxes())
def test_numel_and_slices_are_those_of_numpy(box: Box) -> None:
    assert len(elements(box)) == box.numel
    assert np.zeros((SIDE,) * box.ndim)[box.slices].shape == box.lengths


@given(shapes())
def test_whole_covers_each_element_of_a_shape(shape: tuple[int, ...]) -> None:
    tagged = np.arange(int(np.prod(shape))).reshape(shape)
    assert np.array_equal(tagged[Box.whole(shape).slices], tagged)


@given(pairs())
def test_relative_to_sees_the_same_elements_from_the_corner(pair: tuple[Box, Box]) -> None:
    box, other = pair
    origin = Box(tuple(map(min, box.offsets, other.offsets)), box.lengths)
    grid = np.arange(SIDE**box.ndim).reshape((SIDE,) * box.ndim)
    from_corner = grid[tuple(slice(start, None) for start in origin.offsets)]
    relative = box.relative_to(origin)
    assert np.array_equal(from_corner[relative.slices], grid[box.slices])
    assert relative.shift(origin.offsets) == box


@given(boxes().filter(lambda box: box.ndim > 0), st.data())
def test_split_halves_concatenate_to_the_box(box: Box, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, box.ndim - 1))
    at = data.draw(st.integers(0, box.lengths[dim]))
    lead, rest = box.split(dim, at)
    grid = np.arange(SIDE**box.ndim).reshape((SIDE,) * box.ndim)
    joined = np.concatenate((grid[lead.slices], grid[rest.slices]), axis=dim)
    assert np.array_equal(joined, grid[box.slices])
    assert (lead.lengths[dim], rest.lengths[dim]) == (at, box.lengths[dim] - at)


@given(shapes().filter(lambda shape: 0 not in shape))
def test_row_major_strides_are_numpys_in_elements(shape: tuple[int, ...]) -> None:
    assert row_major_strides(shape) == np.empty(shape, dtype=np.int8).strides


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((7,), (1,)), ((2, 3, 5, 7), (105, 35, 7, 1)), ((3, 0), (0, 1))],
)
def test_row_major_strides_are_products_of_the_later_lengths(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert row_major_strides(shape) == strides


def test_a_box_prints_as_slices_and_is_a_frozen_hashable_value() -> None:
    box = Box((0, 8), (3, 8))
    assert str(box) == "[0:3, 8:16]"
    assert {box: 1}[Box((0, 8), (3, 8))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        box.offsets = (1, 1)  # type: ignore[misc]  # the law is that this fails


@pytest.mark.parametrize(
    ("offsets", "lengths", "message"),
    [
        ((1,), (2, 3), "Box: offsets and lengths must have the same rank, got (1,) and (2, 3)"),
        ((0, -1), (2, 3), "Box: offsets must be >= 0, got (0, -1)"),
        ((0, 1), (2, -3), "Box: lengths must be >= 0, got (2, -3)"),
    ],
)
def test_an_invalid_box_cannot_exist(
    offsets: tuple[int, ...], lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        Box(offsets, lengths)


def test_boxes_of_two_ranks_do_not_mix() -> None:
    flat, square = Box((0,), (4,)), Box((0, 0), (2, 2))
    for operation in (flat.__and__, flat.__sub__, flat.covers, flat.relative_to):
        with pytest.raises(LayoutError, match=r"^Box: ranks must be equal, got 1 and 2$"):
            operation(square)
    with pytest.raises(LayoutError, match=r"^Box: ranks must be equal, got 2 and 1$"):
        square.shift((1,))


def test_a_box_cannot_be_seen_from_a_later_corner() -> None:
    with pytest.raises(LayoutError, match=r"^Box: offsets must be >= 0, got \(-1, 2\)$"):
        Box((2, 5), (1, 1)).relative_to(Box((3, 3), (1, 1)))


@pytest.mark.parametrize(
    ("dim", "at", "message"),
    [
        (2, 0, "Box.split: dim must be in 0..1 of [1:3, 0:5], got 2"),
        (-1, 0, "Box.split: dim must be in 0..1 of [1:3, 0:5], got -1"),
        (0, 3, "Box.split: at must be in 0..2 along dim 0 of [1:3, 0:5], got 3"),
        (1, -1, "Box.split: at must be in 0..5 along dim 1 of [1:3, 0:5], got -1"),
    ],
)
def test_a_box_cannot_be_split_outside_itself(dim: int, at: int, message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        Box((1, 0), (2, 5)).split(dim, at)
