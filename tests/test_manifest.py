"""A Manifest keeps its promises or doesn't come to be, and it can express the hard cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ckpttools.dtypes import DType, dtype
from ckpttools.errors import LayoutError, PlanError
from ckpttools.layout.blocks import Blocks, shard_boxes
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    HALF_AWAY,
    MASTER,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    SCALED,
    WEIGHT,
    WIDEN,
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
    boxes_of,
    part_bytes,
    summary_by_slot,
)
from ckpttools.plan import make_plan, pieces

F32, BF16, F16 = dtype("float32"), dtype("bfloat16"), dtype("float16")
I16, U8 = dtype("int16"), dtype("uint8")
WHOLE = Box.whole((3, 5))


def manifest(
    specs: Sequence[TensorSpec], chunks: Sequence[Chunk], *sizes: int, root: str = "root"
) -> Manifest:
    files = tuple(File(f"f{i}", size) for i, size in enumerate(sizes))
    return Manifest("test", root, files, tuple(specs), tuple(chunks))


def spec(
    shape: Sequence[int] = (3, 5), slot: str = WEIGHT, *, name: str = "w", padding: int = 0
) -> TensorSpec:
    return TensorSpec(name, slot, F32, tuple(shape), padding)


def dense(region: Region, offset: int = 0, *, tensor: int = 0, file: int = 0, r: int = 0) -> Chunk:
    part = Part(Extent(file, offset, region.numel * 4), F32)
    return Chunk(tensor, region, (part,), replica_id=r)


def whole_of(shape: Sequence[int]) -> Manifest:
    box = Box.whole(shape)
    return manifest([spec(shape)], [dense(box)], box.numel * 4, root="dst")


# --- the promises ------------------------------------------------------------------------------

TOP, REST = WHOLE.split(0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: manifest([spec()], [dense(TOP)], 60),
            "w (weight): chunks must cover [0:3, 0:5] exactly once, got a hole at [1:3, 0:5]",
        ),
        (
            lambda: manifest([spec()], [], 60),
            "w (weight): chunks must cover [0:3, 0:5] exactly once, got a hole at [0:3, 0:5]",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE), dense(TOP)], 60),
            "w (weight): chunks must cover [0:3, 0:5] exactly once, got an overlap at [0:1, 0:5]",
        ),
        (
            lambda: manifest([spec()], [dense(TOP), dense(REST, r=1)], 60),
            "w (weight): chunks must cover [0:3, 0:5] exactly once, got a hole at [1:3, 0:5]",
        ),
        (
            lambda: manifest([spec(padding=2)], [dense(WHOLE)], 60),
            "w (weight): chunks must cover [0:5, 0:5] exactly once, got a hole at [3:5, 0:5]",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE)], 59),
            "f0: w (weight): bytes 0 to 60 must lie inside the file, got a file of 59 bytes",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE, -4)], 60),
            "f0: w (weight): bytes -4 to 56 must lie inside the file, got a file of 60 bytes",
        ),
        (
            lambda: manifest([spec()], [Chunk(0, WHOLE, (Part(Extent(0, 0, 56), F32),))], 60),
            "f0: w (weight): a chunk of [0:3, 0:5] in float32 must take 60 bytes, got 56",
        ),
        (
            lambda: manifest([spec(), spec()], [dense(WHOLE), dense(WHOLE, tensor=1)], 60),
            "w (weight): a name and slot must be there once, got it twice",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE), dense(Box((0, 4), (1, 2)))], 60),
            "w (weight): a chunk must lie inside [0:3, 0:5], got [0:1, 4:6]",
        ),
        (
            lambda: manifest([spec()], [dense(FlatRange(0, 1, Box.whole((4, 5))))], 60),
            "w (weight): a chunk must lie inside [0:3, 0:5], got [0:4, 0:5]",
        ),
        (
            lambda: manifest([spec()], [dense(Box.whole((15,)))], 60),
            "w (weight): a chunk must lie inside [0:3, 0:5], got [0:15]",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE, tensor=1)], 60),
            "root: a chunk must be of one of 1 tensors, got 1",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE, tensor=-1)], 60),
            "root: a chunk must be of one of 1 tensors, got -1",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE, file=-1)], 60),
            "w (weight): an extent must lie in one of 1 files, got -1",
        ),
        (
            lambda: manifest([spec()], [dense(WHOLE, file=1)], 60),
            "w (weight): an extent must lie in one of 1 files, got 1",
        ),
        (
            lambda: manifest([spec()], [Chunk(0, WHOLE, (Part(Extent(0, 0, 30), BF16),))], 60),
            "f0: w (weight): must be stored as float32 under the codec identity, got bfloat16",
        ),
        (
            lambda: Chunk(0, WHOLE, ()),
            "Chunk: [0:3, 0:5] must have at least one part, got none",
        ),
        (
            lambda: Chunk(0, WHOLE, (Part(Extent(0, 0, 60), F32),) * 2),
            "Chunk: [0:3, 0:5] must have 1 part under the codec identity, got 2",
        ),
        (
            lambda: Chunk(0, WHOLE, (Part(Extent(0, 0, 60), F32, (1,)),)),
            "Chunk: [0:3, 0:5] must have a stride for each dimension, got (1,)",
        ),
        (
            lambda: Chunk(0, FlatRange(0, 15, WHOLE), (Part(Extent(0, 0, 60), F32, (5, 1)),)),
            "Chunk: a flat range must be dense, got strides (5, 1)",
        ),
        (
            lambda: Part(Extent(0, 0, 60), F32, (5, -1)),
            "Part: strides must be at least 0, got (5, -1)",
        ),
        (
            lambda: spec((), padding=1),
            "w (weight): padding rows must be at least 0 and need a dimension, got 1 for shape ()",
        ),
        (
            lambda: spec((3,), padding=-1),
            "padding rows must be at least 0 and need a dimension, got -1 for shape (3,)",
        ),
    ],
)  # fmt: skip
def test_a_broken_promise_is_refused_by_place_rule_and_value(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


def test_what_is_listed_can_be_found_again() -> None:
    specs = [spec(), spec((2,), MASTER), spec((), "exp_avg", name="v")]
    chunks = [dense(Box.whole(s.shape), tensor=i) for i, s in enumerate(specs)]
    replica = dense(WHOLE, r=1)
    made = manifest(specs, [chunks[2], replica, *chunks[:2]], 60)
    assert made.index() == {("w", "weight"): 0, ("w", "fp32_param"): 1, ("v", "exp_avg"): 2}
    assert made.by_tensor() == [[replica, chunks[0]], [chunks[1]], [chunks[2]]]
    assert made.slots() == ("weight", "fp32_param", "exp_avg")
    assert made.state_bytes == 60 + 8 + 4
    assert summary_by_slot([*specs, spec((7,), name="u")])["weight"] == (2, 88)


def test_padding_is_stored_but_not_content() -> None:
    padded = spec((3, 5), padding=2)
    assert (padded.shape, padded.stored_shape) == ((3, 5), (5, 5))
    assert (padded.numel, padded.size_bytes) == (15, 60)
    assert manifest([padded], [dense(Box.whole((5, 5)))], 100).state_bytes == 60


@pytest.mark.parametrize(
    ("lengths", "strides", "span"),
    [((3, 5), None, 15), ((3, 5), (5, 1), 15), ((3, 5), (1, 3), 15), ((3, 5), (7, 1), 19),
     ((3, 1), (9, 100), 19), ((0, 5), (5, 1), 0), ((), (), 1), ((), None, 1)],
)  # fmt: skip
def test_a_part_spans_from_its_first_element_to_its_last(
    lengths: tuple[int, ...], strides: tuple[int, ...] | None, span: int
) -> None:
    assert part_bytes(Box.whole(lengths), Part(Extent(0, 0, 0), F32, strides)) == span * 4
    if strides is not None and span:  # numpy counts the same
        view = np.lib.stride_tricks.as_strided(
            np.zeros(200, "f4"), lengths, [4 * s for s in strides]
        )
        low, high = np.lib.array_utils.byte_bounds(view)
        assert high - low == span * 4


# --- the hard cases ----------------------------------------------------------------------------


def test_a_value_can_be_of_two_parts_in_two_files() -> None:
    box = Box((1, 0), (2, 5))
    parts = (Part(Extent(0, 4, 20), BF16), Part(Extent(1, 6, 20), I16))
    top = (Part(Extent(0, 24, 10), BF16), Part(Extent(1, 26, 10), I16))
    chunks = [Chunk(0, box, parts, REMAINDER), Chunk(0, TOP, top, REMAINDER)]
    made = manifest([spec()], chunks, 34, 36)
    columns = pieces(made.chunks, ndim=2)
    assert (columns.codec, columns.dtypes) == ("bf16_remainder", (BF16, I16))
    assert columns.itemsizes == (2, 2)
    assert columns.file.tolist() == [[0, 1], [0, 1]]
    assert columns.start_bytes.tolist() == [[4, 6], [24, 26]]
    assert columns.strides_bytes.tolist() == [[[10, 2], [10, 2]]] * 2
    assert columns.offsets.tolist() == [[1, 0], [0, 0]]
    plan = make_plan(made, whole_of((3, 5)))
    assert [(len(op.srcs), op.cost_bytes) for op in plan.ops()] == [(2, 40), (2, 20)]
    assert plan.read_bytes == plan.write_bytes == 60


def test_a_value_is_never_written_in_parts() -> None:
    parts = (Part(Extent(0, 0, 30), BF16), Part(Extent(1, 0, 30), I16))
    two = manifest([spec()], [Chunk(0, WHOLE, parts, REMAINDER)], 30, 30)
    message = "w (weight): must be written under the codec identity, got bf16_remainder"
    for source in (whole_of((3, 5)), two):
        with pytest.raises(PlanError, match=re.escape(message)):
            make_plan(source, two)


def test_chunks_of_other_parts_are_not_mixed_in_one_column() -> None:
    two = Chunk(0, TOP, (Part(Extent(0, 0, 10), BF16), Part(Extent(0, 0, 10), I16)), REMAINDER)
    message = (
        "[1:3, 0:5]: the chunks of a tensor must be stored in one way, got identity float32 and "
        "bf16_remainder bfloat16 int16"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        pieces([dense(REST), two], ndim=2)
    halves = [coded(WIDEN, (kind, None), region=r) for kind, r in ((BF16, TOP), (F16, REST))]
    with pytest.raises(PlanError, match="got widened bfloat16 and widened float16"):
        pieces(halves, ndim=2)


def coded(
    codec: str, *parts: tuple[DType, tuple[int, ...] | None], region: Region = WHOLE
) -> Chunk:
    """Return a chunk under a codec: all of its parts at the beginning of file 0."""
    made = []
    for kind, strides in parts:
        size = part_bytes(region, Part(Extent(0, 0, 0), kind, strides))
        made.append(Part(Extent(0, 0, size), kind, strides))
    return Chunk(0, region, tuple(made), codec)


@pytest.mark.parametrize(
    ("codec", "parts", "kind"),
    [
        (REMAINDER, [(BF16, None), (I16, None)], F32),
        (SCALED, [(F16, None), (F32, (0, 0))], F32),
        (SCALED, [(BF16, (1, 3)), (F32, (0, 0))], F32),
        (WIDEN, [(F16, None)], F32),
        (WIDEN, [(BF16, None)], F32),
        (HALF_AWAY, [(F32, None)], BF16),
        (NEAREST_EVEN, [(F32, (1, 3))], BF16),
        (REMAINDER_NEAREST_EVEN, [(BF16, None), (I16, (1, 3))], BF16),
    ],
)
def test_each_codec_makes_its_dtype_of_its_parts_and_no_other(
    codec: str, parts: list[tuple[DType, tuple[int, ...] | None]], kind: DType
) -> None:
    chunk = coded(codec, *parts)
    made = Manifest("test", "", (File("f", 60),), (replace(spec(), dtype=kind),), (chunk,))
    assert pieces(made.chunks, ndim=2).codec == codec
    for other in {F32, BF16, F16, I16} - {kind}:
        message = f"w (weight): the codec {codec} makes {kind}, got {other}"
        with pytest.raises(LayoutError, match=re.escape(message)):
            Manifest("test", "", made.files, (replace(spec(), dtype=other),), (chunk,))
    odd = [(U8, strides) for _, strides in parts]
    for i in range(len(parts)):
        message = r"must have a part of \w+( or \w+)? under the codec " + codec + ", got uint8"
        with pytest.raises(LayoutError, match=message):
            coded(codec, *parts[:i], odd[i], *parts[i + 1 :])
    for wrong in ([*parts, parts[0]], parts[1:]):
        with pytest.raises(LayoutError, match=r"must have (1|2|at least one) parts?\b.*, got"):
            coded(codec, *wrong)


def test_a_scale_is_one_number_for_its_chunk_which_is_a_box() -> None:
    one = coded(SCALED, (F16, None), (F32, (0, 0)))
    assert one.parts[1].extent.length == 4
    for strides in (None, (5, 1), (0, 1)):
        message = f"must have one scale, of strides 0, got strides {strides}"
        with pytest.raises(LayoutError, match=re.escape(message)):
            coded(SCALED, (F16, None), (F32, strides))
    with pytest.raises(LayoutError, match="must have one scale, of strides 0, got strides None"):
        coded(SCALED, (F16, None), (F32, None), region=FlatRange(0, 7, WHOLE))
    coded(SCALED, (F16, None), (F32, ()), region=Box.whole(()))


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"Chunk: codec must be one of identity, .*, got zip"):
        coded("zip", (F32, None))


def test_a_column_split_is_one_copy() -> None:
    shape = (100, 24)
    parts = [shard_boxes(shape, 1, Blocks((1,)), 8, r)[0][1] for r in range(8)]
    src = manifest([spec(shape)], [dense(b, i * 1200) for i, b in enumerate(parts)], 9600)
    ops = list(make_plan(src, whole_of(shape)).ops())
    assert len(ops) == 8
    assert ops[3].box == Box((0, 9), (100, 3))
    assert ops[3].srcs[0].strides_bytes == (12, 4)
    assert ops[3].dsts[0].strides_bytes == (96, 4)
    assert (ops[3].srcs[0].start_bytes, ops[3].dsts[0].start_bytes) == (3600, 36)


def test_a_transposed_tensor_is_a_part_with_strides() -> None:
    part = Part(Extent(0, 0, 60), F32, (1, 3))
    made = manifest([spec()], [Chunk(0, WHOLE, (part,))], 60)
    (op,) = make_plan(made, whole_of((3, 5))).ops()
    assert (op.srcs[0].strides_bytes, op.dsts[0].strides_bytes) == ((4, 12), (20, 4))


def test_an_extent_may_lie_inside_the_extent_of_another_tensor() -> None:
    # a whole file kept as bytes in a tensor of another file
    outer = TensorSpec("blob", WEIGHT, U8, (200,))
    chunks = [
        Chunk(0, Box.whole((200,)), (Part(Extent(0, 8, 200), U8),)),
        dense(WHOLE, 8 + 64, tensor=1),
    ]
    made = manifest([outer, spec()], chunks, 208)
    inside = manifest([spec()], [dense(WHOLE)], 60)
    plan = make_plan(made, inside, left_out=[outer.key])
    assert [op.srcs[0].start_bytes for op in plan.ops()] == [72]
    assert plan.left_out == (("blob", "weight"),)


def test_a_flat_range_may_cut_across_the_halves_of_a_fused_tensor() -> None:
    shape, parts = (8, 3), 2
    chunks, order = [], []
    for rank in range(parts):  # a rank's flat buffer of [gate; up], cut unevenly over data ranks
        offset = rank * 48
        for local, whole in shard_boxes(shape, 0, Blocks((1, 1)), parts, rank):
            first = local.offsets[0] * 3
            for low, high in ((0, 2), (2, local.numel)):
                flat = FlatRange(low, high, whole)
                chunks.append(dense(flat, offset + (first + low) * 4))
                order += boxes_of(flat)
    made = manifest([spec(shape)], chunks, 96)
    assert len(order) > len(chunks)  # the cuts are inside rows
    buffer = np.full(24, -1)
    values = np.arange(24).reshape(shape)
    for rank in range(parts):
        gate, up = np.split(values, 2)
        local = np.concatenate([np.split(gate, parts)[rank], np.split(up, parts)[rank]])
        buffer[rank * 12 : rank * 12 + 12] = local.ravel()
    result = np.full(24, -1)
    for op in make_plan(made, whole_of(shape)).ops():
        src, dst = op.srcs[0], op.dsts[0]
        for index in np.ndindex(*op.box.lengths):
            a, b = (
                v.start_bytes + sum(i * s for i, s in zip(index, v.strides_bytes, strict=True))
                for v in (src, dst)
            )
            result[b // 4] = buffer[a // 4]
    assert (result.reshape(shape) == values).all()


def test_a_scalar_an_empty_tensor_and_more_ranks_than_elements_are_ordinary() -> None:
    scalar, empty, tiny = spec(()), spec((0, 5), name="e"), spec((3,), name="t")
    chunks = [dense(Box.whole(()), 0), dense(Box.whole((0, 5)), 4, tensor=1)]
    ranks = [FlatRange(min(r, 3), min(r + 1, 3), Box.whole((3,))) for r in range(7)]
    chunks += [dense(flat, 4 + 4 * flat.start, tensor=2) for flat in ranks]
    made = manifest([scalar, empty, tiny], chunks, 16)
    plan = make_plan(made, made)
    assert [op.tensor[0] for op in plan.ops()] == ["w", "t", "t", "t"]
    assert next(plan.ops()).box == Box((), ())
    assert plan.read_bytes == plan.write_bytes == 16


def test_an_empty_tensor_needs_no_chunk() -> None:
    made = manifest([spec((0, 5)), spec((5, 0), name="e")], [])
    assert make_plan(made, made).op_count == 0
