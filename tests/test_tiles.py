"""Tiles cover a box once, in order; each chunk that a tile meets costs one system call."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import dtype
from ckpttools.errors import PlanError
from ckpttools.layout.box import Box
from ckpttools.layout.flat import flat_range_of
from ckpttools.manifest import Chunk, Extent, Part, part_bytes
from ckpttools.plan import Pieces, pieces
from ckpttools.storage.local import FilePool
from ckpttools.testing import boxes, boxes_in, tilings
from ckpttools.tiles import carrier, cut_tiles, read_tile, write_tile

SIZES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


# --- cutting ----------------------------------------------------------------------------


def check_tiles(box: Box, itemsize: int, tile_bytes: int) -> None:
    tiles = list(cut_tiles(box, itemsize, tile_bytes))
    position = 0
    for tile in tiles:
        run = flat_range_of(tile, box)
        assert run is not None, "a tile must be one run"
        assert (run.start, run.numel) == (position, tile.numel)
        assert 1 <= tile.numel <= max(1, tile_bytes // itemsize)
        position = run.stop
    assert position == box.numel


def test_tiles_cover_every_small_box_in_order_within_their_size() -> None:
    for lengths in [(), *product(range(4), repeat=1), *product(range(4), repeat=3)]:
        for tile_bytes in range(1, 30):
            check_tiles(Box.whole(lengths), 2, tile_bytes)


@given(boxes(max_ndim=4, max_length=7), st.sampled_from(sorted(SIZES)), st.integers(1, 999))
def test_tiles_cover_any_box_in_order_within_their_size(
    box: Box, itemsize: int, tile_bytes: int
) -> None:
    check_tiles(box, itemsize, tile_bytes)


def test_tiles_are_whole_rows_where_a_row_fits() -> None:
    tiles = list(cut_tiles(Box.whole((7, 5)), 4, tile_bytes=3 * 20 + 19))
    assert [tile.lengths for tile in tiles] == [(3, 5), (3, 5), (1, 5)]


def test_elements_are_carried_by_unsigned_numbers_of_their_size() -> None:
    for itemsize in SIZES:
        assert (carrier(itemsize).itemsize, carrier(itemsize).kind) == (itemsize, "u")


# --- reading and writing ----------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """Stands in for a pool: one file in memory, and the (offset, length) of each call."""

    data: bytearray
    calls: list[tuple[int, int]] = field(default_factory=list)

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        assert file == 0
        assert offset >= 0
        assert offset + len(buffer) <= len(self.data)
        self.calls.append((offset, len(buffer)))
        buffer[:] = self.data[offset : offset + len(buffer)]

    def write_at(self, file: int, offset: int, data: memoryview) -> None:
        assert file == 0
        self.calls.append((offset, len(data)))
        self.data[offset : offset + len(data)] = data

    def path(self, file: int) -> str:
        return f"f{file}"


def stored(
    regions: list[Box], strides: list[tuple[int, ...] | None], itemsize: int
) -> tuple[Pieces, int]:
    """Put regions one after the other in a file, 3 bytes apart; return its length too."""
    kind, end, chunks = dtype(SIZES[itemsize]), 3, []
    for region, steps in zip(regions, strides, strict=True):
        span = part_bytes(region, Part(Extent(0, 0, 0), kind, steps))
        chunks.append(Chunk(0, region, (Part(Extent(0, end, span), kind, steps),)))
        end += span + 3
    return pieces(chunks, ndim=regions[0].ndim), end


def elements(side: Pieces, data: bytearray, i: int, itemsize: int) -> np.ndarray:
    """View the elements of piece ``i`` in the file: the oracle of both directions."""
    return np.ndarray(
        tuple(side.lengths[i].tolist()),
        dtype=carrier(itemsize),
        buffer=data,
        offset=int(side.start_bytes[i, 0]),
        strides=tuple(side.strides_bytes[i, 0].tolist()),
    )


@st.composite
def stores(draw: st.DrawFn) -> tuple[Box, list[Box], list[tuple[int, ...] | None], int]:
    """Draw a box, a tiling of it, strides of each piece (dense or any order with gaps), a size."""
    whole = Box.whole(tuple(draw(st.lists(st.integers(1, 5), max_size=3))))
    regions = [r for r in draw(tilings(whole)) if r.numel]
    strides: list[tuple[int, ...] | None] = []
    for region in regions:
        steps, step = [0] * region.ndim, 1
        for dim in draw(st.permutations(range(region.ndim))):
            steps[dim] = step = step * draw(st.integers(1, 6))
            step *= region.lengths[dim]
        strides.append(tuple(steps) if draw(st.booleans()) else None)
    return whole, regions, strides, draw(st.sampled_from(sorted(SIZES)))


@given(st.data(), stores())
def test_a_tile_is_read_from_wherever_its_elements_lie(
    data: st.DataObject, store: tuple[Box, list[Box], list[tuple[int, ...] | None], int]
) -> None:
    whole, regions, strides, itemsize = store
    side, size = stored(regions, strides, itemsize)
    memory = Memory(bytearray(np.random.default_rng(size).bytes(size)))
    values = np.zeros(whole.lengths, dtype=carrier(itemsize))
    for i in range(len(side)):
        values[side.box(i).slices] = elements(side, memory.data, i, itemsize)
    box = data.draw(boxes_in(whole).filter(lambda b: b.numel))
    out = np.zeros(box.lengths, dtype=carrier(itemsize))
    read_tile(memory, side, box, out, memoryview(bytearray(out.nbytes)))  # type: ignore[arg-type]
    assert out.tobytes() == values[box.slices].tobytes()


@given(st.data(), stores(), st.sampled_from([1.0, 1.1, 2.5]))
def test_no_more_is_read_than_the_bound_allows_and_the_values_are_the_same(
    data: st.DataObject,
    store: tuple[Box, list[Box], list[tuple[int, ...] | None], int],
    most: float,
) -> None:
    whole, regions, strides, itemsize = store
    side, size = stored(regions, strides, itemsize)
    memory = Memory(bytearray(np.random.default_rng(size).bytes(size)))
    box = data.draw(boxes_in(whole).filter(lambda b: b.numel))
    out, bounded = np.zeros((2, *box.lengths), dtype=carrier(itemsize))
    read_tile(memory, side, box, out, memoryview(bytearray(out.nbytes)))  # type: ignore[arg-type]
    memory.calls.clear()
    scratch = memoryview(bytearray(2 * out.nbytes))
    read_tile(memory, side, box, bounded, scratch, most)  # type: ignore[arg-type]
    assert bounded.tobytes() == out.tobytes()
    assert sum(length for _, length in memory.calls) <= most * out.nbytes


@given(st.data(), stores())
def test_a_tile_is_written_to_wherever_its_elements_lie_and_nowhere_else(
    data: st.DataObject, store: tuple[Box, list[Box], list[tuple[int, ...] | None], int]
) -> None:
    whole, regions, strides, itemsize = store
    side, size = stored(regions, strides, itemsize)
    box = data.draw(boxes_in(whole).filter(lambda b: b.numel))
    tile = np.arange(1, box.numel + 1).astype(carrier(itemsize)).reshape(box.lengths)
    memory, expected = Memory(bytearray(size)), bytearray(size)
    for i in range(len(side)):
        shared = side.box(i) & box
        if shared is not None:
            there = elements(side, expected, i, itemsize)
            there[shared.shift(tuple(-o for o in side.box(i).offsets)).slices] = tile[
                shared.shift(tuple(-o for o in box.offsets)).slices
            ]
    told: list[tuple[int, int, bytes]] = []
    write_tile(
        memory,  # type: ignore[arg-type]
        side,
        box,
        tile,
        memoryview(bytearray(tile.nbytes)),
        lambda file, offset, piece: told.append((file, offset, bytes(piece))),
    )
    assert memory.data == expected
    assert [(offset, len(piece)) for _, offset, piece in told] == memory.calls
    assert sum(len(piece) for _, _, piece in told) == tile.nbytes
    for _, offset, piece in told:
        assert memory.data[offset : offset + len(piece)] == piece


def columns(parts: int, width: int = 6) -> tuple[Pieces, int]:
    """Cut a matrix of 8 rows in dense column blocks."""
    regions = [Box((0, i * width), (8, width)) for i in range(parts)]
    return stored(regions, [None] * parts, 4)


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_each_dense_chunk_that_a_tile_meets_costs_one_call(parts: int) -> None:
    side, size = columns(parts)
    box = Box((2, 0), (3, parts * 6))
    tile = np.ones(box.lengths, dtype="<u4")
    scratch = memoryview(bytearray(tile.nbytes))
    for direction in ("read", "write"):
        memory = Memory(bytearray(size))
        if direction == "read":
            read_tile(memory, side, box, tile, scratch)  # type: ignore[arg-type]
        else:
            write_tile(memory, side, box, tile, scratch, lambda *_: None)  # type: ignore[arg-type]
        assert [length for _, length in memory.calls] == [3 * 6 * 4] * parts


def test_a_strided_region_is_read_as_one_span_where_that_is_cheap() -> None:
    box = Box.whole((8, 4))
    tile = np.zeros((8, 4), dtype="<u4")
    for row, calls in ((8, 1), (40, 8)):  # rows of 4 elements, 8 or 40 elements apart
        side, size = stored([box], [(row, 1)], 4)
        memory = Memory(bytearray(size))
        read_tile(memory, side, box, tile, memoryview(bytearray(1 << 11)))  # type: ignore[arg-type]
        assert len(memory.calls) == calls


def test_a_transposed_chunk_is_read_in_one_call_and_turned() -> None:
    values = np.arange(35, dtype="<u4").reshape(5, 7)
    for order in permutations(range(2)):
        steps = [0, 0]
        steps[order[1]], steps[order[0]] = 1, values.shape[order[1]]
        side, size = stored([Box.whole((5, 7))], [(steps[0], steps[1])], 4)
        memory = Memory(bytearray(size))
        memory.data[3 : 3 + values.nbytes] = values.transpose(order).tobytes()
        out = np.zeros_like(values)
        scratch = memoryview(bytearray(values.nbytes))
        read_tile(memory, side, Box.whole((5, 7)), out, scratch)  # type: ignore[arg-type]
        assert (out == values).all()
        assert len(memory.calls) == 1


def test_elements_that_no_piece_holds_are_left_as_they_are() -> None:
    side, size = stored([Box((0,), (2,)), Box((5,), (3,))], [None, None], 1)
    memory = Memory(bytearray(range(1, size + 1)))
    out = np.full(9, 99, dtype=np.uint8)
    read_tile(memory, side, Box((0,), (9,)), out, memoryview(bytearray(9)))  # type: ignore[arg-type]
    assert out.tolist() == [4, 5, 99, 99, 99, 9, 10, 11, 99]


def test_backward_strides_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(40))
    side, _ = stored([Box.whole((3, 2))], [(2, 1)], 4)
    backward = Pieces(
        side.offsets,
        side.lengths,
        side.replica,
        side.file,
        side.start_bytes,
        np.array([[[-8, 4]]]),
        side.dtypes,
    )
    tile = np.ones((3, 2), dtype="<u4")
    with FilePool(str(tmp_path), ["a"], writable=True) as pool:
        message = r"a: strides must not be negative, got \[-8, 4\]"
        with pytest.raises(PlanError, match=message):
            write_tile(pool, backward, Box.whole((3, 2)), tile, memoryview(b""), lambda *_: None)
    assert (tmp_path / "a").read_bytes() == bytes(40)
