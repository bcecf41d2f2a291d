"""Fused dimensions cut over ranks; numpy's split and concatenate of tagged rows are the oracle."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpttools.errors import LayoutError
from ckpttools.layout.blocks import BlockPiece, Blocks, local_shape, shard_boxes
from ckpttools.layout.box import Box


@st.composite
def fused(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Blocks, int]:
    """A shape, its fused dimension, the blocks in it and a count of parts that fits."""
    weights = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    parts = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = draw(st.integers(0, 2)) * parts * sum(weights)
    return tuple(shape), dim, Blocks(weights), parts


def oracle(
    tagged: NDArray[np.int64], dim: int, weights: tuple[int, ...], parts: int
) -> list[NDArray[np.int64]]:
    """Split into sub-blocks, each of them into parts, and concatenate each rank's parts."""
    units = np.split(tagged, sum(weights), axis=dim)
    ends = list(itertools.accumulate(weights))
    blocks = [
        np.concatenate(units[end - weight : end], axis=dim)
        for end, weight in zip(ends, weights, strict=True)
    ]
    cut = [np.split(block, parts, axis=dim) for block in blocks]
    return [np.concatenate([block[index] for block in cut], axis=dim) for index in range(parts)]


def check(shape: tuple[int, ...], dim: int, blocks: Blocks, parts: int) -> None:
    tagged = np.arange(int(np.prod(shape))).reshape(shape)
    for index, expected in enumerate(oracle(tagged, dim, blocks.weights, parts)):
        pairs = shard_boxes(shape, dim, blocks, parts, index)
        local = np.full(local_shape(shape, dim, parts), -1)
        for local_part, global_part in pairs:
            assert local_part.lengths == global_part.lengths
            assert (local[local_part.slices] == -1).all(), "written twice"
            local[local_part.slices] = tagged[global_part.slices]
        assert np.array_equal(local, expected)
        for (_, before), (_, after) in itertools.pairwise(pairs):
            assert before.stops[dim] != after.offsets[dim], "neighbours that should be one pair"


@given(fused())
def test_a_ranks_tensor_is_its_parts_of_each_sub_block_concatenated(
    case: tuple[tuple[int, ...], int, Blocks, int],
) -> None:
    check(*case)


def test_shard_boxes_are_right_for_all_small_fusings() -> None:
    for count in (1, 2, 3):
        for weights in itertools.product((1, 2, 3), repeat=count):
            for parts, unit in itertools.product((1, 2, 3), (0, 1, 2)):
                length = sum(weights) * parts * unit
                check((length,), 0, Blocks(weights), parts)
                check((2, length, 3), 1, Blocks(weights), parts)


@given(fused())
def test_pieces_of_all_ranks_cover_each_index_once(
    case: tuple[tuple[int, ...], int, Blocks, int],
) -> None:
    shape, dim, blocks, parts = case
    length = shape[dim]
    held = np.zeros(length, dtype=np.int64)
    for index in range(parts):
        end = 0
        pieces = blocks.pieces(length, parts, index)
        assert len(pieces) == len(blocks.weights)
        for piece in pieces:
            assert piece.local_offset == end
            end += piece.length
            held[piece.global_offset : piece.global_offset + piece.length] += 1
        assert end == length // parts
    assert (held == 1).all()


@given(fused())
def test_one_part_is_exactly_the_whole(case: tuple[tuple[int, ...], int, Blocks, int]) -> None:
    shape, dim, blocks, _ = case
    assert shard_boxes(shape, dim, blocks, 1, 0) == ((Box.whole(shape), Box.whole(shape)),)


def test_swiglu_gives_each_rank_its_gate_rows_and_its_up_rows() -> None:
    gate_up = shard_boxes((14, 3), 0, Blocks((1, 1)), 7, 2)
    assert [(str(a), str(b)) for a, b in gate_up] == [
        ("[0:1, 0:3]", "[2:3, 0:3]"),
        ("[1:2, 0:3]", "[9:10, 0:3]"),
    ]
    unfused = shard_boxes((14, 3), 0, Blocks((1,)), 7, 2)
    assert [(str(a), str(b)) for a, b in unfused] == [("[0:2, 0:3]", "[4:6, 0:3]")]


def test_query_key_value_blocks_are_in_proportion() -> None:
    assert Blocks((4, 1, 1)).lengths(60) == (40, 10, 10)
    assert Blocks((4, 1, 1)).pieces(60, 5, 3) == (
        BlockPiece(0, 24, 8),
        BlockPiece(8, 46, 2),
        BlockPiece(10, 56, 2),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Blocks(()), "Blocks: there must be at least one weight, got ()"),
        (lambda: Blocks((1, 0)), "Blocks: weights must be >= 1, got (1, 0)"),
        (lambda: Blocks((2, 1)).lengths(7), "Blocks(2, 1): length must be a multiple of 3, got 7"),
        (
            lambda: Blocks((2, 1)).lengths(-3),
            "Blocks(2, 1): length must be a multiple of 3, got -3",
        ),
        (
            lambda: Blocks((2, 1)).pieces(6, 4, 3),
            "Blocks(2, 1): each sub-block of 6 must divide by 4, got 2",
        ),
        (lambda: Blocks((1,)).pieces(6, 2, 2), "chunk_range: index must be in 0..1, got 2"),
        (lambda: Blocks((1,)).pieces(6, 0, 0), "chunk_range: parts must be >= 1, got 0"),
        (
            lambda: shard_boxes((6,), 1, Blocks((1,)), 2, 0),
            "shard_boxes: dim must be in 0..0, got 1",
        ),
        (
            lambda: local_shape((3, 8), 1, 3),
            "local_shape: parts must divide dim 1 of (3, 8), got 3",
        ),
        (
            lambda: local_shape((3, 8), 1, 0),
            "local_shape: parts must divide dim 1 of (3, 8), got 0",
        ),
        (lambda: local_shape((3, 8), -1, 2), "local_shape: dim must be in 0..1, got -1"),
    ],
)
def test_what_does_not_divide_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        call()
