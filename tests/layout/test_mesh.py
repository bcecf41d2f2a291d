"""Ranks in a grid and what each holds; numpy's reshape and torch.chunk itself are the oracles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.mesh import Mesh, Placement, Replicate, Shard, chunk_range, local_box
from ckpttools.testing import shapes


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    return Mesh(tuple("abc"[: len(sizes)]), tuple(sizes))


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, tuple[Placement, ...]]:
    shape, mesh = draw(shapes(max_ndim=3, max_length=7)), draw(meshes())
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return shape, mesh, tuple(draw(st.sampled_from(choices)) for _ in mesh.names)


@given(meshes())
def test_ranks_are_row_major_over_the_names(mesh: Mesh) -> None:
    grid = np.arange(mesh.size).reshape(mesh.shape)
    for place in np.ndindex(*mesh.shape):
        coordinates = dict(zip(mesh.names, place, strict=True))
        assert mesh.rank(coordinates) == grid[place]
        assert mesh.coordinates(int(grid[place])) == coordinates
        assert tuple(mesh.coordinates(int(grid[place]))) == mesh.names


@pytest.mark.parametrize("dim", [0, 1])
def test_chunk_range_equals_torch_chunk(dim: int) -> None:
    import torch

    for length, parts in itertools.product(range(18), range(1, 9)):
        tagged = torch.arange(length * 3).reshape((length, 3) if dim == 0 else (3, length))
        pieces = list(torch.chunk(tagged, parts, dim=dim))
        ranges = [chunk_range(length, parts, index) for index in range(parts)]
        pieces += [tagged.narrow(dim, length, 0)] * (parts - len(pieces))  # torch leaves them out
        for piece, (offset, count) in zip(pieces, ranges, strict=True):
            assert 0 <= offset <= length
            assert piece.shape[dim] == count, (length, parts)
            assert torch.equal(piece, tagged.narrow(dim, offset, count)), (length, parts)


def nested_chunks(
    tagged: NDArray[np.int64], mesh: Mesh, placements: Sequence[Placement], places: Sequence[int]
) -> NDArray[np.int64]:
    """Follow DTensor: chunk what is left with torch, mesh dimension after mesh dimension."""
    import torch

    local = torch.from_numpy(tagged)
    for parts, placement, place in zip(mesh.shape, placements, places, strict=True):
        if isinstance(placement, Shard):
            pieces = torch.chunk(local, parts, dim=placement.dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = pieces[place] if place < len(pieces) else empty
    kept: NDArray[np.int64] = local.numpy()
    return kept


def check_local_boxes(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]
) -> None:
    tagged = np.arange(int(np.prod(shape))).reshape(shape)
    held = np.zeros(shape, dtype=np.int64)
    for places in np.ndindex(*mesh.shape):
        coordinates = dict(zip(mesh.names, places, strict=True))
        box = local_box(shape, mesh, placements, coordinates)
        assert all(stop <= n for stop, n in zip(box.stops, shape, strict=True)), "empty ones too"
        assert np.array_equal(tagged[box.slices], nested_chunks(tagged, mesh, placements, places))
        held[box.slices] += 1
    copies = np.prod(
        [n for n, p in zip(mesh.shape, placements, strict=True) if p == Replicate()], dtype=int
    )
    assert (held == copies).all(), "each element is held once per replica"


@settings(deadline=None)  # the first example imports torch
@given(placed())
def test_local_box_equals_nested_torch_chunks(
    case: tuple[tuple[int, ...], Mesh, tuple[Placement, ...]],
) -> None:
    check_local_boxes(*case)


def test_local_box_is_right_for_all_placements_of_small_tensors_on_two_mesh_dims() -> None:
    for shape in ((), (1,), (5,), (0,), (2, 5), (3, 0), (7, 2)):
        choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, repeat=2):
            for sizes in itertools.product((1, 2, 3), repeat=2):
                check_local_boxes(shape, Mesh(("dp", "tp"), sizes), placements)


def test_local_box_shows_mesh_order_where_one_dimension_is_cut_twice() -> None:
    both = (Shard(0), Shard(0))
    place = {"dp": 0, "tp": 1}
    assert local_box((11,), Mesh(("dp", "tp"), (2, 3)), both, place) == Box((2,), (2,))
    assert local_box((11,), Mesh(("tp", "dp"), (3, 2)), both, place) == Box((4,), (2,))


def test_a_tensor_with_fewer_elements_than_ranks_leaves_ranks_empty() -> None:
    mesh = Mesh(("dp",), (5,))
    found = [local_box((3,), mesh, (Shard(0),), mesh.coordinates(rank)) for rank in range(5)]
    assert [str(box) for box in found] == ["[0:1]", "[1:2]", "[2:3]", "[3:3]", "[3:3]"]


MESH = Mesh(("dp", "tp"), (3, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shard(-1), "Shard: dim must be >= 0, got -1"),
        (
            lambda: Mesh(("dp",), (2, 3)),
            "Mesh: each name must have one size, got ('dp',) and (2, 3)",
        ),
        (lambda: Mesh(("dp", "dp"), (2, 3)), "Mesh: names must differ, got ('dp', 'dp')"),
        (lambda: Mesh(("dp", "tp"), (2, 0)), "Mesh: sizes must be >= 1, got (2, 0)"),
        (lambda: MESH.coordinates(6), "Mesh: rank must be in 0..5, got 6"),
        (lambda: MESH.coordinates(-1), "Mesh: rank must be in 0..5, got -1"),
        (
            lambda: MESH.rank({"dp": 1}),
            "Mesh: coordinates must name ('dp', 'tp'), got ('dp',)",
        ),
        (
            lambda: MESH.rank({"dp": 1, "tp": 2}),
            "Mesh: coordinate tp must be in 0..1, got 2",
        ),
        (lambda: chunk_range(-1, 2, 0), "chunk_range: length must be >= 0, got -1"),
        (lambda: chunk_range(4, 0, 0), "chunk_range: parts must be >= 1, got 0"),
        (lambda: chunk_range(4, 2, 2), "chunk_range: index must be in 0..1, got 2"),
        (lambda: chunk_range(4, 2, -1), "chunk_range: index must be in 0..1, got -1"),
        (
            lambda: local_box((4,), MESH, (Shard(0),), {"dp": 0, "tp": 0}),
            "local_box: each of ('dp', 'tp') must have one placement, got (Shard(dim=0),)",
        ),
        (
            lambda: local_box((4,), MESH, (Replicate(), Shard(1)), {"dp": 0, "tp": 0}),
            "local_box: Shard(dim=1) must be a dim of (4,), got 1",
        ),
        (
            lambda: local_box((4,), MESH, (Replicate(), Shard(0)), {"dp": 3, "tp": 0}),
            "Mesh: coordinate dp must be in 0..2, got 3",
        ),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        call()
