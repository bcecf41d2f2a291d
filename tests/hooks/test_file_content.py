"""What the files of all ranks add makes the digests, however tensors lie in them and blocks cut.

The oracle is the CRC-32C of the whole tensor's bytes. Tensors are cut in random boxes and flat
ranges, stored dense or with gaps, in parts or whole, over the files of a random number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from coded_tensors import BF16, F32, I16
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.codecs import join_remainder
from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.file_content import FileContent, Held, MemoryPool, joined_digests
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import REMAINDER, Chunk, Extent, Part, Region, TensorSpec, boxes_of
from ckpttools.testing import tilings

KINDS = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
ALIGNMENT = 8


class Rank:
    """The one file of a rank, in memory."""

    def __init__(self) -> None:
        self.data = bytearray(16)
        self.held: list[Held] = []

    def put(self, spec: TensorSpec, region: Region, values: np.ndarray, *, gaps: bool) -> None:
        part = self._part(region, values, spec, gaps=gaps)
        self.held.append((spec, Chunk(0, region, (part,))))

    def put_parts(self, spec: TensorSpec, region: Region, hi: np.ndarray, lo: np.ndarray) -> None:
        first, second = (
            Part(self._add(region, values), kind) for values, kind in ((hi, BF16), (lo, I16))
        )
        self.held.append((spec, Chunk(0, region, (first, second), REMAINDER)))

    def _part(self, region: Region, values: np.ndarray, spec: TensorSpec, *, gaps: bool) -> Part:
        if not gaps or not isinstance(region, Box):
            return Part(self._add(region, values), spec.dtype)
        stored = values[region.slices]
        wide = [n + 1 for n in stored.shape]
        padded = np.full(wide, 77, values.dtype)
        padded[tuple(map(slice, stored.shape))] = stored
        strides = row_major_strides(wide)
        count = sum((n - 1) * s for n, s in zip(stored.shape, strides, strict=True)) + 1
        extent = self._append(padded.tobytes()[: count * values.itemsize])
        return Part(extent, spec.dtype, strides)

    def _add(self, region: Region, values: np.ndarray) -> Extent:
        parts = [values[box.slices].tobytes() for box in boxes_of(region)]
        return self._append(b"".join(parts))

    def _append(self, stored: bytes) -> Extent:
        self.data += bytes(-len(self.data) % ALIGNMENT)
        extent = Extent(0, len(self.data), len(stored))
        self.data += stored
        return extent

    def stated(self, cuts: Sequence[int]) -> StatedFile:
        """Let the content see the file in blocks."""

        def read(file: int, offset: int, buffer: memoryview) -> None:
            assert file == 0
            buffer[:] = self.data[offset : offset + len(buffer)]

        content = FileContent(0, self.held, MemoryPool(read))
        ends = sorted({0, len(self.data), *(c for c in cuts if c < len(self.data))})
        for low, high in pairwise(ends):
            content.add(low, memoryview(bytes(self.data[low:high])))
        for _ in content.rest():
            pass
        return StatedFile("f", "", {}, content.shares())


@st.composite
def cut_up(draw: st.DrawFn, whole: Box) -> list[Region]:
    """Cut a tensor in boxes, and some of these in flat ranges."""
    regions: list[Region] = []
    for box in draw(tilings(whole)):
        cut = draw(st.none() | st.integers(0, box.numel))
        if cut is None:
            regions += [box] if box.numel else []
        else:
            regions += [FlatRange(0, cut, box), FlatRange(cut, box.numel, box)]
    return draw(st.permutations(regions))


@settings(deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    padding=st.integers(0, 3),
    itemsize=st.sampled_from(list(KINDS)),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_whatever_ranks_hold_of_a_tensor_they_make_its_digest(
    data: st.DataObject,
    shape: tuple[int, ...],
    padding: int,
    itemsize: int,
    ranks: int,
    seed: int,
) -> None:
    spec = TensorSpec("w", "weight", dtype(KINDS[itemsize]), shape, padding if shape else 0)
    stored = np.random.default_rng(seed).integers(0, 255, (*spec.stored_shape, itemsize), np.uint8)
    values = stored.view(f"<u{itemsize}").reshape(spec.stored_shape)
    held = [Rank() for _ in range(ranks)]
    for region in data.draw(cut_up(Box.whole(spec.stored_shape))):
        held[data.draw(st.integers(0, ranks - 1))].put(
            spec, region, values, gaps=data.draw(st.booleans())
        )
    aligned = st.integers(0, 60).map(lambda n: n * ALIGNMENT)
    stated = [rank.stated(data.draw(st.lists(aligned, max_size=5))) for rank in held]
    logical = values[: shape[0]] if shape else values
    assert joined_digests(stated, [spec]) == {spec.key: google_crc32c.value(logical.tobytes())}


@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_values_in_two_parts_are_digested_joined(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    spec = TensorSpec("w", "fp32_param", F32, shape, data.draw(st.integers(0, 2)) if shape else 0)
    random = np.random.default_rng(len(shape))
    hi = random.integers(0, 1 << 16, spec.stored_shape).astype("<u2")
    lo = random.integers(-(1 << 15), 1 << 15, spec.stored_shape).astype("<i2")
    rank = Rank()
    for region in data.draw(cut_up(Box.whole(spec.stored_shape))):
        rank.put_parts(spec, region, hi, lo)
    values = join_remainder(hi, lo)
    logical = values[: shape[0]] if shape else values
    found = joined_digests([rank.stated([])], [spec])
    assert found == {spec.key: google_crc32c.value(logical.tobytes())}


def test_large_boxes_are_taken_in_tiles_and_blocks() -> None:
    shape = (1031, 1033)
    spec = TensorSpec("w", "weight", F32, shape)
    values = np.random.default_rng(3).integers(0, 1 << 32, shape, np.uint64).astype("<u4")
    left, right = Rank(), Rank()
    left.put(spec, Box((0, 0), (1031, 700)), values, gaps=False)
    right.put(spec, Box((0, 700), (1031, 333)), values, gaps=True)
    stated = [left.stated([8 * 50_021, 8 * 170_003]), right.stated([])]
    assert joined_digests(stated, [spec]) == {spec.key: google_crc32c.value(values.tobytes())}


def test_copies_and_files_that_nobody_summed_are_known() -> None:
    spec = TensorSpec("w", "weight", F32, (3,))
    values = np.arange(3, dtype="<u4") + 7
    rank = Rank()
    rank.put(spec, Box.whole((3,)), values, gaps=False)
    (_, chunk), copy = rank.held[0], Rank()
    copy.data = rank.data
    copy.held = [(spec, Chunk(0, chunk.region, chunk.parts, replica_id=1))]
    stated = [rank.stated([]), copy.stated([])]
    assert joined_digests(stated, [spec]) == {spec.key: google_crc32c.value(values.tobytes())}
    assert joined_digests([*stated, StatedFile("g", "", {})], [spec]) is None


def test_a_hole_is_refused_by_the_tensors_name() -> None:
    spec = TensorSpec("w", "weight", F32, (3,))
    rank = Rank()
    rank.put(spec, Box((0,), (2,)), np.arange(3, dtype="<u4"), gaps=False)
    with pytest.raises(
        LayoutError, match=r"w \(weight\): crcfold: shares must be of 12 bytes, got 8"
    ):
        joined_digests([rank.stated([])], [spec])
