"""A plan must move every element once, to its place, and refuse what would lose or invent one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools import plan as plan_module
from ckpttools.dtypes import dtype
from ckpttools.errors import PlanError
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    MASTER,
    WEIGHT,
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
    part_bytes,
)
from ckpttools.plan import Pieces, Plan, Strided, make_plan, pieces, same_bytes
from ckpttools.testing import tilings

F32 = dtype("float32")
ITEM = F32.itemsize


def manifest_of(
    spec: TensorSpec, regions: Sequence[Region], *, files: int = 1, replicas: int = 0
) -> Manifest:
    """Store regions one after the other, dealt to files; ``replicas`` of them are stored again."""
    ends = [8] * files  # a header before the payload
    chunks = []
    for i, region in enumerate([*regions, *regions[:replicas]]):
        extent = Extent(i % files, ends[i % files], region.numel * ITEM)
        ends[i % files] += extent.length
        copy = int(i >= len(regions))
        chunks.append(Chunk(0, region, (Part(extent, spec.dtype),), replica_id=copy))
    table = tuple(File(f"f{i}", end) for i, end in enumerate(ends))
    return Manifest("test", "", table, (spec,), tuple(chunks))


def spec_of(shape: Sequence[int], *, padding: int = 0) -> TensorSpec:
    return TensorSpec("w", WEIGHT, F32, tuple(shape), padding)


def whole(shape: Sequence[int], *, padding: int = 0) -> Manifest:
    spec = spec_of(shape, padding=padding)
    return manifest_of(spec, [Box.whole(spec.stored_shape)])


# --- applying a plan, element by element ---------------------------------------------------------

Memory = list[dict[int, int]]


def store(manifest: Manifest, values: np.ndarray) -> Memory:
    """Return the source's files as {byte: value of the element that starts there}."""
    files: Memory = [{} for _ in manifest.files]
    for chunk in manifest.chunks:
        region = chunk.region
        if isinstance(region, Box):
            elements = values[region.slices].ravel().tolist()
        else:
            inside = values[region.within.slices].ravel()
            elements = inside[region.start : region.stop].tolist()
        extent = chunk.parts[0].extent
        for i, value in enumerate(elements):
            assert files[extent.file].setdefault(extent.offset + i * ITEM, value) == value
    return files


def places(view: Strided, lengths: Sequence[int]) -> list[int]:
    return [
        view.start_bytes + sum(i * s for i, s in zip(index, view.strides_bytes, strict=True))
        for index in np.ndindex(*lengths)
    ]


def apply(plan: Plan, src: Memory) -> Memory:
    dst: Memory = [{} for _ in plan.dst.files]
    for op in plan.ops():
        (a,), (b,) = op.srcs, op.dsts
        assert op.cost_bytes == op.box.numel * ITEM
        for at, to in zip(places(a, op.box.lengths), places(b, op.box.lengths), strict=True):
            assert to not in dst[b.file], "an element must be written once"
            dst[b.file][to] = src[a.file][at]
    return dst


def numbered(shape: Sequence[int]) -> np.ndarray:
    return np.arange(100, 100 + int(np.prod(shape))).reshape(shape)


@st.composite
def regions_of(draw: st.DrawFn, box: Box) -> list[Region]:
    """Draw regions that tile a box: boxes, and flat ranges of some of them."""
    found: list[Region] = []
    for tile in draw(tilings(box)):
        if draw(st.booleans()):
            found.append(tile)
            continue
        cuts = draw(st.lists(st.integers(0, tile.numel), max_size=3).map(sorted))
        bounds = [0, *cuts, tile.numel]
        found += [FlatRange(a, b, tile) for a, b in pairwise(bounds)]
    return found


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_any_tiling_becomes_any_other_element_by_element(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    box = Box.whole(shape)
    spec, values = spec_of(shape), numbered(shape)
    src = manifest_of(
        spec, data.draw(regions_of(box)), files=2, replicas=data.draw(st.integers(0, 2))
    )
    dst = manifest_of(
        spec, data.draw(regions_of(box)), files=3, replicas=data.draw(st.integers(0, 2))
    )
    plan = make_plan(src, dst)
    written = apply(plan, store(src, values))
    assert written == store(dst, values)  # every destination byte, replicas too, and no other
    ops = list(plan.ops())
    assert plan.op_count == len(ops)
    assert plan.read_bytes == values.size * ITEM
    assert plan.write_bytes == sum(op.cost_bytes for op in ops) == ITEM * sum(map(len, written))


@given(st.data(), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_padding_rows_are_carried_dropped_or_left_fresh(
    data: st.DataObject, rows: int, src_padding: int, dst_padding: int
) -> None:
    values = numbered((rows + src_padding, 3))
    src_spec = spec_of((rows, 3), padding=src_padding)
    dst_spec = spec_of((rows, 3), padding=dst_padding)
    src = manifest_of(src_spec, data.draw(regions_of(Box.whole(src_spec.stored_shape))))
    dst = manifest_of(dst_spec, data.draw(regions_of(Box.whole(dst_spec.stored_shape))))
    plan = make_plan(src, dst)
    kept = rows + min(src_padding, dst_padding)
    expected = np.zeros((rows + dst_padding, 3), dtype=int)
    expected[:kept] = values[:kept]
    written = apply(plan, store(src, values))
    assert written == [{k: v for k, v in f.items() if v} for f in store(dst, expected)]
    (tensor,) = plan.tensors
    assert tensor.fresh_rows == max(0, dst_padding - src_padding)
    assert tensor.dropped_rows == max(0, src_padding - dst_padding)
    assert plan.read_bytes == kept * 3 * ITEM
    assert plan.write_bytes == (rows + dst_padding) * 3 * ITEM


def test_padding_of_a_vocabulary_without_rows_is_still_read() -> None:
    plan = make_plan(whole((0, 3), padding=2), whole((0, 3), padding=5))
    assert (plan.read_bytes, plan.write_bytes) == (24, 60)


@pytest.mark.parametrize("at_once", [1, 7])
def test_pairs_are_the_same_however_many_are_taken_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Box((i, 0), (1, 12)) for i in range(12)]
    columns = [Box((0, i), (12, 3)) for i in range(0, 12, 3)]
    grid = [Box((i, j), (6, 4)) for i in (0, 6) for j in (0, 4, 8)]
    sides = [manifest_of(spec_of((12, 12)), boxes) for boxes in (rows, columns, grid)]
    pairs = [(a, b) for a in sides for b in sides]
    expected = [make_plan(a, b).to_json() for a, b in pairs]
    monkeypatch.setattr(plan_module, "_PAIRS_AT_ONCE", at_once)
    assert [make_plan(a, b).to_json() for a, b in pairs] == expected
    assert [len(make_plan(a, b).tensors[0].pairs) for a, b in pairs] == [
        12, 48, 36, 48, 4, 12, 36, 12, 6,
    ]  # fmt: skip


def test_a_column_split_over_eight_is_eight_copies() -> None:
    columns = [Box((0, i), (1000, 8)) for i in range(0, 64, 8)]
    split, one = manifest_of(spec_of((1000, 64)), columns), whole((1000, 64))
    assert make_plan(split, one).op_count == 8
    assert make_plan(one, split).op_count == 8


# --- refusals ------------------------------------------------------------------------------------


def two(*specs: TensorSpec) -> Manifest:
    chunks = tuple(
        Chunk(i, Box.whole(s.shape), (Part(Extent(0, 0, s.size_bytes), s.dtype),))
        for i, s in enumerate(specs)
    )
    return Manifest("test", "", (File("f", 1000),), specs, chunks)


W, M = spec_of((3, 5)), TensorSpec("w", MASTER, F32, (3, 5))


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ((W,), (W, M), "w (fp32_param): must have a source, got none"),
        (
            (W, M),
            (W,),
            "a source tensor must be used or named as left out, got 1 with no place in the dest",
        ),
        (
            (W,),
            (TensorSpec("w", WEIGHT, dtype("int32"), (3, 5)),),
            "w (weight): must keep dtype and shape, got float32 (3, 5) to int32 (3, 5)",
        ),
        (
            (W,),
            (spec_of((5, 3)),),
            "w (weight): must keep dtype and shape, got float32 (3, 5) to float32 (5, 3)",
        ),
        (
            (W,),
            (spec_of((15,)),),
            "w (weight): must keep dtype and shape, got float32 (3, 5) to float32 (15,)",
        ),
    ],
)  # fmt: skip
def test_what_would_lose_or_invent_a_tensor_is_refused(
    src: tuple[TensorSpec, ...], dst: tuple[TensorSpec, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan(two(*src), two(*dst))


def test_what_is_left_out_on_purpose_is_listed() -> None:
    plan = make_plan(two(W, M), two(W), left_out=[M.key])
    assert plan.left_out == (("w", "fp32_param"),)
    assert [op.tensor for op in plan.ops()] == [("w", "weight")]


def test_sources_that_reach_an_element_twice_are_refused() -> None:
    src = whole((3, 5))
    # A Manifest can't be that wrong; the plan's own proof doesn't rest on it.
    object.__setattr__(src, "chunks", (*src.chunks, src.chunks[0]))
    message = "w (weight): 15 elements of [0:3, 0:5] must be written once each, got 30"
    with pytest.raises(PlanError, match=re.escape(message)):
        make_plan(src, whole((3, 5)))
    object.__setattr__(src, "chunks", ())
    with pytest.raises(PlanError, match=re.escape("must be written once each, got 0")):
        make_plan(src, whole((3, 5)))


# --- the plan as data ----------------------------------------------------------------------------


def test_a_plan_goes_to_json_whole() -> None:
    halves = [Box((0, 0), (3, 2)), Box((0, 2), (3, 3))]
    plan = make_plan(manifest_of(spec_of((3, 5)), halves, files=2), whole((3, 5)))
    document = plan.to_json()
    assert json.loads(json.dumps(document)) == document
    assert document == {
        "src_files": ["f0", "f1"],
        "dst_files": ["f0"],
        "read_bytes": 60,
        "write_bytes": 60,
        "ops": [
            {
                "tensor": ["w", "weight"],
                "offsets": [0, 0],
                "lengths": [3, 2],
                "srcs": [[0, 8, [8, 4]]],
                "dsts": [[0, 8, [20, 4]]],
            },
            {
                "tensor": ["w", "weight"],
                "offsets": [0, 2],
                "lengths": [3, 3],
                "srcs": [[1, 8, [12, 4]]],
                "dsts": [[0, 16, [20, 4]]],
            },
        ],
    }


_SCRIPT = """
import json, sys
from ckpttools import api
from ckpttools.api import Target
source = api.read_manifest(sys.argv[1], cross_check=False)
print(json.dumps(api.plan_reshard(source, Target(tp=2, pp=2, dp=3)).to_json()))
"""


def test_a_plan_is_the_same_under_every_hash_seed() -> None:
    import oracle_megatron as oracle

    source = str(oracle.case("gqa_tp1_pp1_dp2").directory)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, source],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    texts = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(texts[0]) > 10_000
    assert texts[0] == texts[1]


def test_twenty_thousand_chunks_on_either_side_are_planned_in_seconds_and_little_memory() -> None:
    n = 20_000
    spec = spec_of((n * 3 + 1, 2))
    src = manifest_of(
        spec,
        [FlatRange(6 * i, 6 * i + 6 + 2 * (i == n - 1), Box.whole(spec.shape)) for i in range(n)],
    )
    dst = manifest_of(
        spec, [Box((max(0, 3 * i - 1), 0), (3 - (i == 0) + 2 * (i == n - 1), 2)) for i in range(n)]
    )
    start = time.process_time()
    plan = make_plan(src, dst)
    assert time.process_time() - start < 10  # comparing all pairs took 37
    assert plan.op_count == 2 * n - 1
    (tensor,) = plan.tensors
    tracemalloc.start()
    try:
        plan_module._intersect(tensor.src, tensor.dst)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50 << 20


# --- the same bytes ------------------------------------------------------------------------------


def side(*chunks: tuple[Region, int, tuple[int, ...] | None], file: int = 0) -> Pieces:
    made = []
    for region, offset, strides in chunks:
        size = part_bytes(region, Part(Extent(0, 0, 0), F32, strides))
        made.append(Chunk(0, region, (Part(Extent(file, offset, size), F32, strides),)))
    return pieces(made, ndim=2)


def test_bytes_are_the_same_however_they_are_cut_and_not_where_one_piece_lies_elsewhere() -> None:
    box = Box.whole((3, 5))
    one = side((box, 8, None))
    ranges = [(FlatRange(a, b, box), 8 + 4 * a, None) for a, b in pairwise([0, 4, 11, 15])]
    assert same_bytes(one, side(*ranges))
    assert same_bytes(side(*ranges), one)
    columns = [(Box((0, 0), (3, 2)), 8, (5, 1)), (Box((0, 2), (3, 3)), 16, (5, 1))]
    assert same_bytes(one, side(*columns))
    for i in range(3):
        moved = [(r, at + 4 * (i == j), s) for j, (r, at, s) in enumerate(ranges)]
        assert not same_bytes(one, side(*moved))
    assert not same_bytes(one, side((box, 8, (1, 3))))
    assert not same_bytes(one, side((box, 8, None), file=1))
    assert not same_bytes(one, pieces([], ndim=2))
    row = Box((0, 0), (1, 5))
    assert same_bytes(side((row, 8, (99, 1))), side((row, 8, None)))  # along one element, any
