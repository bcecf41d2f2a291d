"""The boxes of a rank are those that torch.chunk gives, cut by cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import UnsupportedError
from ckpttools.hooks.placements import Cut, held_boxes


def chunk(tensor: torch.Tensor, dim: int, part: int, parts: int) -> torch.Tensor:
    """Return one of ``parts`` chunks, empty where torch.chunk gives fewer."""
    found = torch.chunk(tensor, parts, dim)
    return found[part] if part < len(found) else tensor.narrow(dim, 0, 0)


def apply(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return what one cut leaves; a strided one takes its part of each of several chunks."""
    if cut.split_factor == 1:
        return chunk(tensor, cut.dim, cut.part, cut.parts)
    pieces = [chunk(tensor, cut.dim, i, cut.split_factor) for i in range(cut.split_factor)]
    taken = [chunk(piece, cut.dim, cut.part, cut.parts) for piece in pieces]
    return torch.cat(taken, cut.dim)


def filled(shape: tuple[int, ...], cuts: list[Cut], local: torch.Tensor) -> torch.Tensor:
    """Return the local tensor as the boxes tell it, of elements that are their own numbers."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    made = torch.full(tuple(local.shape), -1)
    for held in held_boxes(shape, cuts, tuple(local.shape), where="w"):
        assert held.box.numel
        stops = map(int.__add__, held.local_offsets, held.box.lengths)
        place = tuple(map(slice, held.local_offsets, stops))
        assert (made[place] == -1).all()
        made[place] = whole[held.box.slices]
    return made


cut_lists = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), max_size=3)


@given(st.tuples(st.integers(0, 11), st.integers(0, 7)), cut_lists, st.data())
def test_each_rank_s_boxes_are_what_torch_chunk_leaves(
    shape: tuple[int, int], mesh: list[tuple[int, int]], data: st.DataObject
) -> None:
    cuts = [Cut(dim, data.draw(st.integers(0, parts - 1)), parts) for dim, parts in mesh]
    local = torch.arange(math.prod(shape)).reshape(shape)
    for cut in cuts:
        local = apply(local, cut)
    assert torch.equal(filled(shape, cuts, local), local)


@pytest.mark.parametrize("rows", range(14))
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (4, 3)])
def test_fsdp_over_tensor_parallelism_cuts_the_tensor_rank_s_rows(
    rows: int, dp: int, tp: int
) -> None:
    """Every rank's boxes, and together each row once, where nothing divides."""
    shape = (rows, 2)
    whole = torch.arange(rows * 2).reshape(shape)
    count = np.zeros(shape, dtype=int)
    for d, t in itertools.product(range(dp), range(tp)):
        local = chunk(chunk(whole, 0, t, tp), 0, d, dp)
        cuts = [Cut(0, d, dp, split_factor=tp), Cut(0, t, tp)]
        assert torch.equal(filled(shape, cuts, local), local)
        for held in held_boxes(shape, cuts, tuple(local.shape), where="w"):
            count[held.box.slices] += 1
    assert (count == 1).all()


def test_a_strided_cut_of_one_dimension_is_several_boxes() -> None:
    cuts = [Cut(0, 1, 2, split_factor=3)]
    local = apply(torch.arange(12 * 2).reshape(12, 2), cuts[0])
    assert torch.equal(filled((12, 2), cuts, local), local)
    found = held_boxes((12, 2), cuts, (6, 2), where="w")
    assert [str(held.box) for held in found] == ["[2:4, 0:2]", "[6:8, 0:2]", "[10:12, 0:2]"]


def test_a_tensor_without_dimensions_is_one_box() -> None:
    (held,) = held_boxes((), [], (), where="w")
    assert (held.box.numel, held.local_offsets) == (1, ())


def test_a_local_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"w: the local tensor must have the shape \(2, 3\)"):
        held_boxes((4, 3), [Cut(0, 0, 2)], (3, 3), where="w")
