"""Tensors made of parts are read as the elements they stand for, by everything that reads."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import google_crc32c
import numpy as np
import pytest
from coded_tensors import CODECS, F32, PARTS, UNSIGNED, Store, expected, random_bits, scales
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools import executor
from ckpttools.comparison import compare
from ckpttools.digests import digest_manifest
from ckpttools.errors import PlanError
from ckpttools.executor import Resources, execute, execute_reference
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    IDENTITY,
    SCALED,
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
)
from ckpttools.plan import Plan, make_plan, pieces
from ckpttools.storage.local import FilePool, create_file
from ckpttools.testing import boxes_in, tilings
from ckpttools.tiles import carrier, read_tile, write_tile

EDGE_HIGHS = (
    *(0x0000, 0x0001, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF),
    *(0x8000, 0x8001, 0xBF80, 0xFF7F, 0xFF80, 0xFF81, 0xFFFE, 0xFFFF),
)
WAYS = [way for way in PARTS if CODECS[way] != IDENTITY]
SMALL = Resources(budget_bytes=2 * 3 * 4096, workers=2)


def parts_of(
    way: str, regions: Sequence[Region], shape: Sequence[int], seed: int
) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    parts = [random_bits(shape, kind, random) for kind in PARTS[way][0]]
    if CODECS[way] == SCALED:
        numbers = random_bits((max(1, len(regions)),), F32, random)
        parts[1] = scales(regions, shape, numbers)
    return parts


@st.composite
def regions_of(draw: st.DrawFn, box: Box, *, flat: bool) -> list[Region]:
    """Draw regions that tile a box: boxes, and flat ranges of some of them."""
    found: list[Region] = []
    for tile in draw(tilings(box)):
        if not flat or draw(st.booleans()):
            found.append(tile)
            continue
        cuts = draw(st.lists(st.integers(0, tile.numel), max_size=2).map(sorted))
        found += [FlatRange(a, b, tile) for a, b in pairwise([0, *cuts, tile.numel])]
    return found


@st.composite
def strides_of(draw: st.DrawFn, regions: Sequence[Region]) -> dict[int, tuple[int, ...]]:
    """Draw strides, in any order of dimensions and with gaps, for some of the boxes."""
    chosen = {}
    for i, region in enumerate(regions):
        if isinstance(region, Box) and draw(st.booleans()):
            steps, step = [0] * region.ndim, 1
            for dim in draw(st.permutations(range(region.ndim))):
                steps[dim] = step = step * draw(st.integers(1, 6))
                step *= max(1, region.lengths[dim])
            chosen[i] = tuple(steps)
    return chosen


def destination(root: Path, specs: Sequence[TensorSpec], *, rows: int = 0) -> Manifest:
    """Lay tensors out one after the other in a file of zeros, as elements."""
    chunks, end = [], 5
    if rows:
        specs = [replace(spec, padding_rows=rows) if spec.shape else spec for spec in specs]
    for i, spec in enumerate(specs):
        box = Box.whole(spec.stored_shape)
        extent = Extent(0, end, box.numel * spec.dtype.itemsize)
        chunks.append(Chunk(i, box, (Part(extent, spec.dtype),)))
        end += extent.length + 3
    root.mkdir(exist_ok=True)
    create_file(root / "whole", end)
    return Manifest("test", str(root), (File("whole", end),), tuple(specs), tuple(chunks))


def whole(manifest: Manifest, number: int) -> np.ndarray:
    """Return the elements of one tensor of such a destination."""
    spec, (chunk,) = manifest.tensors[number], manifest.by_tensor()[number]
    data = Path(manifest.root, "whole").read_bytes()
    extent = chunk.parts[0].extent
    found = np.frombuffer(data[extent.offset :][: extent.length], UNSIGNED[spec.dtype.itemsize])
    return found.reshape(spec.stored_shape)


# --- reading a tile -----------------------------------------------------------------------


@given(st.data(), st.sampled_from(WAYS), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None)
def test_a_tile_of_any_codec_has_the_elements_that_the_definition_gives(
    data: st.DataObject, way: str, seed: int
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    regions = data.draw(regions_of(Box.whole(shape), flat=CODECS[way] != SCALED))
    parts = parts_of(way, regions, shape, seed)
    strides = data.draw(strides_of(regions))
    kind = PARTS[way][1]
    with TemporaryDirectory() as root:
        store = Store(Path(root))
        store.add(TensorSpec("w", "s", kind, shape), way, parts, regions, strides=strides)
        manifest = store.manifest()
        side = pieces(manifest.chunks, ndim=len(shape))
        box = data.draw(boxes_in(Box.whole(shape)).filter(lambda b: b.numel))
        larger = np.zeros(tuple(n + 1 for n in box.lengths), carrier(kind.itemsize))
        out = larger[tuple(slice(0, n) for n in box.lengths)] if shape else larger
        scratch = memoryview(bytearray(data.draw(st.sampled_from([out.nbytes, 2048, 1 << 16]))))
        with FilePool(root, [f.path for f in manifest.files]) as pool:
            read_tile(pool, side, box, out, scratch)
    assert out.tobytes() == expected(way, parts)[box.slices].tobytes()
    if shape:
        larger[tuple(slice(0, n) for n in box.lengths)] = 0
    assert not shape or not larger.any(), "what is not of the box must be left as it was"


def test_a_scratch_of_the_tiles_own_size_is_enough_and_all_memory_that_is_used() -> None:
    for way in WAYS:
        shape, kind = (64, 1024), PARTS[way][1]
        box = Box.whole(shape)
        with TemporaryDirectory() as root:
            store = Store(Path(root))
            parts = parts_of(way, [box], shape, 3)
            store.add(TensorSpec("w", "s", kind, shape), way, parts)
            manifest = store.manifest()
            side = pieces(manifest.chunks, ndim=2)
            out = np.zeros(shape, carrier(kind.itemsize))
            scratch = memoryview(bytearray(out.nbytes))
            with FilePool(root, [f.path for f in manifest.files]) as pool:
                read_tile(pool, side, box, out[:1], scratch)  # what is once in a process
                tracemalloc.start()
                try:
                    read_tile(pool, side, box, out, scratch)
                    _, peak = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
        assert out.tobytes() == expected(way, parts).tobytes()
        blocks = 24 << 14 if "nearest_even" in way else 0
        nan = out.size * 6 if way in {"scaled_bf16", "scaled_f16", "widened_f16"} else 0
        assert peak < blocks + nan + (64 << 10), way


class Calls(FilePool):
    """A pool that notes what is read."""

    def __init__(self, root: str, paths: Sequence[str]) -> None:
        super().__init__(root, paths)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        self.reads.append((file, len(buffer)))
        super().read_into(file, offset, buffer)


@pytest.mark.parametrize(
    ("way", "reads"),
    [
        ("remainder", [(0, 4096), (1, 4096)]),
        ("scaled_bf16", [(0, 4096), (1, 4)]),
        ("widened_f16", [(0, 4096)]),
        ("half_away", [(0, 4096), (0, 4096)]),  # twice the tile's size, and a scratch like it
        ("remainder_nearest_even", [(0, 2048), (1, 2048)] * 2),
    ],
)
def test_each_part_of_a_dense_chunk_costs_as_few_calls_as_its_scratch_allows(
    way: str, reads: list[tuple[int, int]], tmp_path: Path
) -> None:
    shape, kind = (2048,), PARTS[way][1]
    store = Store(tmp_path)
    parts = parts_of(way, [Box.whole(shape)], shape, 3)
    store.add(TensorSpec("w", "s", kind, shape), way, parts)
    manifest = store.manifest()
    out = np.zeros(shape, carrier(kind.itemsize))
    with Calls(str(tmp_path), [f.path for f in manifest.files]) as pool:
        side = pieces(manifest.chunks, ndim=1)
        read_tile(pool, side, Box.whole(shape), out, memoryview(bytearray(out.nbytes)))
        assert pool.reads == reads
    assert out.tobytes() == expected(way, parts).tobytes()


def test_parts_that_are_no_runs_are_read_in_spans_and_not_one_by_one(tmp_path: Path) -> None:
    shape, store = (64, 48), Store(tmp_path)
    parts = parts_of("remainder", [], shape, 3)
    spec = TensorSpec("w", "s", F32, shape)
    store.add(spec, "remainder", parts, [Box.whole(shape)], strides={0: (1, 64)})
    manifest = store.manifest()
    out = np.zeros(shape, "<u4")
    with Calls(str(tmp_path), [f.path for f in manifest.files]) as pool:
        side = pieces(manifest.chunks, ndim=2)
        read_tile(pool, side, Box.whole(shape), out, memoryview(bytearray(2 * out.nbytes)))
        assert pool.reads == [(0, 2 * 64 * 48), (1, 2 * 64 * 48)]
        pool.reads.clear()
        read_tile(pool, side, Box.whole(shape), out, memoryview(bytearray(out.nbytes)))
        assert len(pool.reads) < 20
    assert out.tobytes() == expected("remainder", parts).tobytes()


def test_a_tensor_is_never_written_under_a_codec(tmp_path: Path) -> None:
    store = Store(tmp_path)
    parts = parts_of("remainder", [], (3,), 3)
    store.add(TensorSpec("w", "s", F32, (3,)), "remainder", parts)
    manifest = store.manifest()
    side = pieces(manifest.chunks, ndim=1)
    before = [bytes(data) for data in store.files.values()]
    with FilePool(str(tmp_path), [f.path for f in manifest.files], writable=True) as pool:
        tile = np.zeros(3, "<u4")
        message = "codec: what is written must be identity, got bf16_remainder"
        with pytest.raises(PlanError, match=message):
            write_tile(pool, side, Box.whole((3,)), tile, memoryview(b""), lambda *_: None)
    assert [(tmp_path / name).read_bytes() for name in store.files] == before
    message = "must be written under the codec identity, got bf16_remainder"
    with pytest.raises(PlanError, match=message):
        make_plan(manifest, manifest)


# --- whole plans --------------------------------------------------------------------------


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[tuple[TensorSpec, str, list[Region], int]], int]:
    """Draw tensors of several codecs: spec, way, regions, seed; and rows of padding to add."""
    tensors = []
    for number in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(list(PARTS)))
        shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        spec = TensorSpec(f"t{number}", "s", PARTS[way][1], shape)
        regions = draw(regions_of(Box.whole(shape), flat=CODECS[way] != SCALED))
        tensors.append((spec, way, regions, draw(st.integers(0, 1 << 20))))
    return tensors, draw(st.integers(0, 2))


def make(
    root: Path, tensors: Sequence[tuple[TensorSpec, str, Sequence[Region], int]]
) -> tuple[Manifest, list[np.ndarray]]:
    """Store tensors; return their Manifest and what their elements must be."""
    store, truth = Store(root), []
    for spec, way, regions, seed in tensors:
        parts = parts_of(way, regions, spec.shape, seed)
        store.add(spec, way, parts, regions)
        truth.append(expected(way, parts))
    return store.manifest(), truth


def both(plan: Plan, again: Manifest, resources: Resources = SMALL) -> None:
    """Carry a plan out, and by the definition into other files, which must be the same."""
    log = execute(plan, resources=resources)
    execute_reference(replace(plan, dst=again))
    data = Path(plan.dst.root, "whole").read_bytes()
    assert data == Path(again.root, "whole").read_bytes()
    (crc,) = log.crc32([Extent(0, 0, len(data))])
    assert crc == zlib.crc32(data)


@given(stores())
@settings(max_examples=100, deadline=None)
def test_any_plan_writes_the_elements_that_the_oracle_and_the_definition_give(
    drawn: tuple[list[tuple[TensorSpec, str, list[Region], int]], int],
) -> None:
    tensors, rows = drawn
    with TemporaryDirectory() as folder:
        root = Path(folder)
        source, truth = make(root / "src", tensors)
        dst, again = (destination(root / name, source.tensors, rows=rows) for name in "ab")
        plan = make_plan(source, dst)
        both(plan, again)
        for number, values in enumerate(truth):
            found = whole(dst, number)
            assert found[: len(values)].tobytes() == values.tobytes() if values.shape else True
            assert values.shape or found.tobytes() == values.tobytes()
            assert not values.shape or not found[len(values) :].any()
        comparison = compare(source, dst, SMALL)
        assert comparison.same
        assert not comparison.padding
        assert not comparison.fresh_nonzero


@given(stores())
@settings(max_examples=50, deadline=None)
def test_a_digest_is_of_the_elements_and_not_of_the_parts(
    drawn: tuple[list[tuple[TensorSpec, str, list[Region], int]], int],
) -> None:
    with TemporaryDirectory() as folder:
        source, truth = make(Path(folder), drawn[0])
        found = [digest.crc32c for digest in digest_manifest(source, SMALL)]
    assert found == [google_crc32c.value(values.tobytes()) for values in truth]


@pytest.mark.parametrize("way", WAYS)
def test_tensors_above_a_tile_are_cut_within_the_budget(way: str, tmp_path: Path) -> None:
    shape = (37, 1009)  # a row is above 4 KiB where elements have 4 bytes
    regions = [Box((0, 0), (20, 1009)), Box((20, 0), (17, 500)), Box((20, 500), (17, 509))]
    tensors = [(TensorSpec("w", "s", PARTS[way][1], shape), way, regions, 11)]
    source, (truth,) = make(tmp_path / "src", tensors)
    plan = make_plan(source, destination(tmp_path / "a", source.tensors))
    both(plan, destination(tmp_path / "b", source.tensors))
    assert whole(plan.dst, 0).tobytes() == truth.tobytes()


def test_what_is_read_is_counted_by_parts_and_a_scale_once_for_each_chunk(tmp_path: Path) -> None:
    regions = [Box((0, 0), (3, 5)), Box((3, 0), (4, 5))]
    ways = {"remainder": 35 * 4, "scaled_f16": 35 * 2 + 2 * 4, "half_away": 35 * 4}
    for way, size in ways.items():
        spec = TensorSpec("w", "s", PARTS[way][1], (7, 5))
        source, _ = make(tmp_path / way, [(spec, way, regions, 5)])
        plan = make_plan(source, destination(tmp_path / f"{way}_dst", [spec]))
        assert plan.read_bytes == size
        with Calls(source.root, [f.path for f in source.files]) as pool:
            out = np.zeros((7, 5), carrier(spec.dtype.itemsize))
            scratch = memoryview(bytearray(1024))
            read_tile(pool, plan.tensors[0].src, Box.whole((7, 5)), out, scratch)
            assert pool.read_bytes == size
        document = plan.to_json()["ops"]
        assert isinstance(document, list)
        assert [op["codec"] for op in document] == [CODECS[way]] * 2


def test_every_remainder_of_every_edge_is_written_as_the_definition_says(tmp_path: Path) -> None:
    highs = np.array(EDGE_HIGHS, "<u2")
    shape = (len(highs), 1 << 16)
    lows = np.arange(1 << 16, dtype="<u2")
    parts = [np.repeat(highs, 1 << 16).reshape(shape), np.tile(lows, len(highs)).reshape(shape)]
    store = Store(tmp_path / "src")
    store.add(TensorSpec("w", "s", F32, shape), "remainder", parts)
    source = store.manifest()
    dst = destination(tmp_path / "a", source.tensors)
    execute(make_plan(source, dst), resources=SMALL)
    found = whole(dst, 0)
    assert (found == expected("remainder", parts)).all()
    for i, high in enumerate(highs.tolist()):  # the definition, in words of the file's author
        below = (np.arange(1 << 16) >= 0x8000).astype(np.int64)
        assert (found[i] >> 16 == (high - below) % 65536).all()
        assert (found[i] & 0xFFFF == lows).all()


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_bounded_by_the_budget_under_every_codec(way: str, tmp_path: Path) -> None:
    shape, resources = (1024, 1024), Resources(budget_bytes=768 << 10, workers=2)
    parts = [part % np.uint16(0x3C00) for part in parts_of(way, [Box.whole(shape)], shape, 3)]
    store = Store(tmp_path / "src")
    store.add(TensorSpec("w", "s", PARTS[way][1], shape), way, parts)
    source = store.manifest()
    plan = make_plan(source, destination(tmp_path / "dst", source.tensors))
    with mock.patch.object(executor, "_keep_freed_memory"):  # it touches no page
        tracemalloc.start()
        try:
            execute(plan, resources=resources)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < resources.budget_bytes + (1 << 20) < plan.write_bytes
    assert whole(plan.dst, 0).tobytes() == expected(way, parts).tobytes()
