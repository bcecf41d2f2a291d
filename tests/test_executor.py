"""The executor must write what the one-loop definition writes, within its budget, on any plan."""

from __future__ import annotations

import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools import executor
from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError, PlanError, StorageError
from ckpttools.executor import (
    Buffers,
    Resources,
    WriteLog,
    execute,
    execute_reference,
    run_jobs,
)
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
)
from ckpttools.plan import Plan, make_plan
from ckpttools.storage.local import FilePool, create_file
from ckpttools.testing import shapes, tilings
from ckpttools.tiles import Tile

KINDS = ("uint8", "bfloat16", "float32", "int64")


# --- random manifests --------------------------------------------------------------------


@st.composite
def regions_of(draw: st.DrawFn, box: Box) -> list[Region]:
    """Draw regions that tile a box: boxes, and flat ranges of some of them."""
    found: list[Region] = []
    for tile in draw(tilings(box)):
        if draw(st.booleans()):
            found.append(tile)
            continue
        cuts = draw(st.lists(st.integers(0, tile.numel), max_size=2).map(sorted))
        found += [FlatRange(a, b, tile) for a, b in pairwise([0, *cuts, tile.numel])]
    return found


@st.composite
def part_strides(draw: st.DrawFn, region: Region) -> tuple[int, ...] | None:
    """Draw how a region's elements lie: dense, or in any order of dimensions and with gaps."""
    if not isinstance(region, Box) or draw(st.booleans()):
        return None
    strides, step = [0] * region.ndim, 1
    for dim in draw(st.permutations(range(region.ndim))):
        step *= draw(st.integers(1, 2))
        strides[dim] = step
        step *= max(1, region.lengths[dim])
    return tuple(strides)


@st.composite
def manifests(draw: st.DrawFn, specs: Sequence[TensorSpec], *, strided: bool = True) -> Manifest:
    """Draw where tensors lie: their pieces, copies of some, files, gaps, strides."""
    files = draw(st.integers(1, 3))
    ends = [draw(st.integers(0, 9)) for _ in range(files)]
    chunks = []
    for number, spec in enumerate(specs):
        regions = draw(regions_of(Box.whole(spec.stored_shape)))
        copies = draw(st.lists(st.sampled_from(regions), max_size=2)) if regions else []
        ids: Counter[int] = Counter()
        for region in [*regions, *copies]:
            strides = draw(part_strides(region)) if strided else None
            numel = region.numel
            if strides is not None and numel and isinstance(region, Box):
                spans = zip(region.lengths, strides, strict=True)
                numel = sum((n - 1) * s for n, s in spans) + 1
            file = draw(st.integers(0, files - 1))
            extent = Extent(file, ends[file], numel * spec.dtype.itemsize)
            ends[file] += extent.length + draw(st.integers(0, 3))
            part = Part(extent, spec.dtype, strides)
            chunks.append(Chunk(number, region, (part,), replica_id=ids[id(region)]))
            ids[id(region)] += 1
    table = tuple(File(f"f{i}", end) for i, end in enumerate(ends))
    return Manifest("test", "", table, tuple(specs), tuple(chunks))


@st.composite
def plans(draw: st.DrawFn, *, strided: bool = True) -> Plan:
    """Draw a plan from any manifest to any other of the same tensors."""
    specs = []
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_ndim=3, max_length=6))
        kind = dtype(draw(st.sampled_from(KINDS)))
        specs.append(TensorSpec(f"t{number}", "weight", kind, shape))
    sides = [
        [replace(s, padding_rows=draw(st.integers(0, 3)) if s.shape else 0) for s in specs]
        for _ in range(2)
    ]
    src, dst = (draw(manifests(side, strided=strided)) for side in sides)
    return make_plan(src, dst)


# --- running a plan in a directory of its own -------------------------------------------


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan that was carried out: the files that it wrote, and what was seen on the way."""

    plan: Plan
    files: list[bytes]
    log: WriteLog
    read_bytes: int
    written_bytes: int
    tiles: dict[tuple[str, str], list[Box]]
    progress: int


def place(plan: Plan, root: Path, seed: int) -> Plan:
    """Put random bytes in the source's files, and zeros in the destination's."""
    random = np.random.default_rng(seed)
    for name, manifest in (("src", plan.src), ("dst", plan.dst)):
        (root / name).mkdir()
        for file in manifest.files:
            create_file(root / name / file.path, file.size_bytes)
            if name == "src":
                (root / name / file.path).write_bytes(random.bytes(file.size_bytes))
    return replace(
        plan,
        src=replace(plan.src, root=str(root / "src")),
        dst=replace(plan.dst, root=str(root / "dst")),
    )


def outcome(plan: Plan) -> list[bytes]:
    return [Path(plan.dst.root, file.path).read_bytes() for file in plan.dst.files]


def by_reference(plan: Plan, seed: int = 7) -> list[bytes]:
    with TemporaryDirectory() as root:
        placed = place(plan, Path(root), seed)
        execute_reference(placed)
        return outcome(placed)


@dataclass(frozen=True, slots=True)
class Seen:
    """Takes the place of a digest: notes the tiles that it is shown."""

    tiles: dict[tuple[str, str], list[Box]]

    def add(self, spec: TensorSpec, box: Box, tile: Tile) -> int:
        assert tile.shape == box.lengths
        self.tiles.setdefault(spec.key, []).append(box)
        return 0

    def add_known(self, spec: TensorSpec, box: Box, crc: int) -> None:
        raise AssertionError(f"{spec}: nothing is known of {box}, got {crc}")


def run(plan: Plan, *, workers: int = 2, tile_bytes: int = 1 << 20, seed: int = 7) -> Ran:
    pools: list[FilePool] = []
    tiles: dict[tuple[str, str], list[Box]] = {}
    done: list[int] = []

    def pool(*args: object, **kwargs: object) -> FilePool:
        pools.append(FilePool(*args, **kwargs))  # type: ignore[arg-type]
        return pools[-1]

    with (
        TemporaryDirectory() as root,
        mock.patch.object(executor, "FilePool", pool),
        mock.patch.object(executor, "MAX_TILE_BYTES", tile_bytes),
        mock.patch.object(executor, "WRITEBACK_BYTES", 64),
    ):
        placed = place(plan, Path(root), seed)
        log = execute(
            placed,
            resources=Resources(workers=workers),
            digest=Seen(tiles),
            progress=done.append,
        )
        src, dst = pools
        return Ran(
            placed, outcome(placed), log, src.read_bytes, dst.written_bytes, tiles, sum(done)
        )


# --- the laws ---------------------------------------------------------------------------


@given(plans(), st.integers(8, 200), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_any_plan_gives_the_bytes_that_the_definition_gives(
    plan: Plan, tile_bytes: int, workers: int
) -> None:
    ran = run(plan, tile_bytes=tile_bytes, workers=workers)
    assert ran.files == by_reference(plan)


@given(plans(), st.integers(8, 200))
@settings(max_examples=30, deadline=None)
def test_crcs_of_what_was_written_are_those_of_the_files(plan: Plan, tile_bytes: int) -> None:
    ran = run(plan, tile_bytes=tile_bytes)
    extents = [part.extent for chunk in plan.dst.chunks for part in chunk.parts]
    extents += [Extent(i, 0, file.size_bytes) for i, file in enumerate(plan.dst.files)]
    assert ran.log.crc32(extents) == [
        zlib.crc32(ran.files[e.file][e.offset : e.offset + e.length]) for e in extents
    ]


@given(plans(strided=False), st.integers(8, 200))
@settings(max_examples=30, deadline=None)
def test_every_byte_that_the_plan_counts_is_read_and_written_once(
    plan: Plan, tile_bytes: int
) -> None:
    ran = run(plan, tile_bytes=tile_bytes)
    assert ran.read_bytes == plan.read_bytes
    assert ran.written_bytes == plan.write_bytes


@given(plans(), st.integers(8, 200))
@settings(max_examples=30, deadline=None)
def test_every_element_is_shown_in_one_tile(plan: Plan, tile_bytes: int) -> None:
    ran = run(plan, tile_bytes=tile_bytes)
    total = 0
    for tensor in plan.tensors:
        spec = tensor.dst_spec
        seen = np.zeros(spec.stored_shape, dtype=np.int64)
        for box in ran.tiles.get(spec.key, []):
            assert box.numel * spec.dtype.itemsize <= max(tile_bytes, spec.dtype.itemsize)
            seen[box.slices] += 1
        assert (seen == 1).all()
        total += seen.size * spec.dtype.itemsize
    assert ran.progress == total


def split(rows: int, columns: int, *, parts: int, dim: int, kind: str = "float32") -> Manifest:
    """Cut a matrix along one dimension into one file a part."""
    shape = (rows, columns)
    spec = TensorSpec("w", "weight", dtype(kind), shape)
    chunks, files = [], []
    for part in range(parts):
        lengths = tuple(n // parts if d == dim else n for d, n in enumerate(shape))
        offsets = tuple(part * lengths[d] if d == dim else 0 for d in range(2))
        box = Box(offsets, lengths)
        size = box.numel * spec.dtype.itemsize
        chunks.append(Chunk(0, box, (Part(Extent(part, 5, size), spec.dtype),)))
        files.append(File(f"f{part}", 5 + size))
    return Manifest("test", "", tuple(files), (spec,), tuple(chunks))


def test_files_are_the_same_bytes_for_any_number_of_workers() -> None:
    plan = make_plan(split(330, 462, parts=3, dim=0), split(330, 462, parts=7, dim=1))
    expected = by_reference(plan)
    assert any(any(data) for data in expected)
    for workers in (1, 2, 8):
        assert run(plan, workers=workers, tile_bytes=5000).files == expected


def test_a_tensor_above_the_budget_is_cut_into_tiles_within_it() -> None:
    plan = make_plan(split(1024, 1024, parts=1, dim=0), split(1024, 1024, parts=1, dim=0))
    assert plan.op_count == 1  # one copy of 4 MiB
    resources = Resources(budget_bytes=96 << 10, workers=2)
    assert resources.buffer_bytes <= 96 << 10
    tiles: dict[tuple[str, str], list[Box]] = {}
    with TemporaryDirectory() as root:
        placed = place(plan, Path(root), seed=7)
        execute(placed, resources=resources, digest=Seen(tiles))
        assert outcome(placed) == by_reference(plan)
    sizes = [4 * box.numel for box in tiles["w", "weight"]]
    assert max(sizes) <= resources.tile_bytes
    assert sum(sizes) == 4 << 20


@pytest.mark.parametrize("megabytes", [4, 16])
def test_memory_is_bounded_by_the_budget_whatever_the_size(megabytes: int) -> None:
    rows = megabytes * 256
    plan = make_plan(split(rows, 1024, parts=1, dim=0), split(rows, 1024, parts=8, dim=1))
    resources = Resources(budget_bytes=384 << 10, workers=2)
    keep = mock.patch.object(executor, "_keep_freed_memory")  # it touches no page
    with TemporaryDirectory() as root, keep:
        placed = place(plan, Path(root), seed=7)
        tracemalloc.start()
        try:
            execute(placed, resources=resources)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < resources.budget_bytes + (1 << 20) < rows * 4096


# --- errors -----------------------------------------------------------------------------


def test_the_first_error_stops_the_other_workers_and_is_raised() -> None:
    begun = threading.Barrier(3)
    done: Counter[int] = Counter()

    def work(job: int, buffers: Buffers) -> None:
        del buffers
        if not done[threading.get_ident()]:
            begun.wait(timeout=10)  # all three workers are at work
        done[threading.get_ident()] += 1
        if job == 0:
            raise StorageError("f0: disk full")

    with pytest.raises(StorageError, match="f0: disk full"):
        run_jobs(count(), work, Resources(workers=3))  # endless, but for the error
    assert len(done) == 3


def test_an_error_of_the_jobs_themselves_is_raised() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise LayoutError("no more tiles")

    with pytest.raises(LayoutError, match="no more tiles"):
        run_jobs(jobs(), lambda *_: None, Resources(workers=2))


def test_a_source_that_became_shorter_is_named(tmp_path: Path) -> None:
    plan = make_plan(split(64, 64, parts=2, dim=0), split(64, 64, parts=2, dim=1))
    placed = place(plan, tmp_path, seed=7)
    (tmp_path / "src" / "f1").write_bytes(b"short")
    with pytest.raises(StorageError, match=r"src/f1: must have \d+ bytes from \d+, got \d+"):
        execute(placed, resources=Resources(workers=2))


def test_workers_see_every_job_once_and_their_own_buffers() -> None:
    seen: list[int] = []
    owners: dict[int, int] = {}

    def work(job: int, buffers: Buffers) -> None:
        seen.append(job)
        first = buffers.first.__array_interface__["data"][0]
        assert owners.setdefault(first, threading.get_ident()) == threading.get_ident()

    run_jobs(range(1009), work, Resources(workers=4))
    assert sorted(seen) == list(range(1009))


@pytest.mark.parametrize(
    ("budget", "workers", "message"),
    [
        (1 << 20, 0, "workers: must be at least 1, got 0"),
        (3 * 4096 - 1, 1, "memory: must be at least 12288 bytes for 1 workers, got 12287"),
    ],
)
def test_resources_that_can_do_nothing_are_refused(budget: int, workers: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Resources(budget_bytes=budget, workers=workers)


@given(st.integers(4, 24).map(lambda power: 1 << power), st.integers(1, 16))
def test_buffers_never_exceed_the_budget(kilobytes: int, workers: int) -> None:
    budget = max(kilobytes << 10, workers * 3 * 4096)
    resources = Resources(budget_bytes=budget, workers=workers)
    assert resources.tile_bytes >= 4096
    assert resources.buffer_bytes <= budget
