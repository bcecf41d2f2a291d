"""A digest depends on the content and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttools.derived import with_nearest_even_weights
from ckpttools.digests import (
    DigestLog,
    TensorDigest,
    checkpoint_digest,
    compared,
    crc32c,
    digest_manifest,
    stated,
)
from ckpttools.dtypes import dtype
from ckpttools.errors import MismatchError
from ckpttools.executor import Resources
from ckpttools.formats import Finish, Written
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import WEIGHT, Chunk, Extent, File, Manifest, Part, Region, TensorSpec
from ckpttools.plan import make_plan
from ckpttools.testing import tilings
from ckpttools.tiles import cut_tiles

ONE = Resources(workers=1)


def spec_of(shape: Sequence[int], *, name: str = "w", padding: int = 0) -> TensorSpec:
    return TensorSpec(name, WEIGHT, dtype("bfloat16"), tuple(shape), padding)


def values_of(shape: Sequence[int]) -> np.ndarray:
    return (np.arange(int(np.prod(shape)), dtype="<u2") * 257 + 3).reshape(shape)


def crc_of(values: np.ndarray) -> int:
    return int(google_crc32c.value(values.tobytes()))


def write(root: Path, spec: TensorSpec, regions: Sequence[Region], values: np.ndarray) -> Manifest:
    """Store regions of a tensor in one file, in order."""
    data, chunks = bytearray(), []
    for region in regions:
        if isinstance(region, Box):
            stored = values[region.slices].ravel()
        else:
            stored = values[region.within.slices].ravel()[region.start : region.stop]
        extent = Extent(0, len(data), stored.nbytes)
        chunks.append(Chunk(0, region, (Part(extent, spec.dtype),)))
        data += stored.tobytes()
    (root / "f").write_bytes(data)
    return Manifest("test", str(root), (File("f", len(data)),), (spec,), tuple(chunks))


@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    tile_bytes=st.integers(1, 40),
)
def test_a_tensors_digest_is_the_crc_of_its_elements_whatever_the_tiles_and_their_order(
    data: st.DataObject, shape: tuple[int, ...], tile_bytes: int
) -> None:
    spec, values = spec_of(shape), values_of(shape)
    tiles = list(cut_tiles(Box.whole(shape), 2, tile_bytes))
    log = DigestLog()
    for box in data.draw(st.permutations(tiles)):
        log.add(spec, box, values[box.slices])
    (result,) = log.result([spec])
    assert result == TensorDigest("w", WEIGHT, "bfloat16", shape, crc_of(values))


@given(rows=st.integers(0, 5), padding=st.integers(0, 5), tile_bytes=st.integers(1, 40))
def test_padding_rows_are_not_content(rows: int, padding: int, tile_bytes: int) -> None:
    spec = spec_of((rows, 3), padding=padding)
    stored = values_of(spec.stored_shape)
    log = DigestLog()
    for box in cut_tiles(Box.whole(spec.stored_shape), 2, tile_bytes):
        log.add(spec, box, stored[box.slices])
    (result,) = log.result([spec])
    assert (result.crc32c, result.shape) == (crc_of(stored[:rows]), (rows, 3))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None
)
@given(data=st.data(), shape=st.lists(st.integers(0, 7), max_size=3).map(tuple))
def test_a_checkpoints_digest_is_that_of_its_layouts(
    tmp_path: Path, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    spec, values, whole = spec_of(shape), values_of(shape), Box.whole(shape)
    boxes = data.draw(tilings(whole))
    cut = data.draw(st.integers(0, whole.numel))
    flats = [FlatRange(0, cut, whole), FlatRange(cut, whole.numel, whole)]
    for regions in ([whole], boxes, flats):
        manifest = write(tmp_path, spec, regions, values)
        (digest,) = digest_manifest(manifest, ONE)
        assert digest.crc32c == crc_of(values)


def test_a_tensor_above_a_tile_and_a_call_is_digested_in_pieces(tmp_path: Path) -> None:
    spec, values = spec_of((1031, 1033)), values_of((1031, 1033))
    assert values.nbytes > 2 << 20
    assert crc32c(values) == crc_of(values)
    manifest = write(tmp_path, spec, [Box.whole(spec.shape)], values)
    for resources in (ONE, Resources(budget_bytes=100_000, workers=3)):
        seen: list[int] = []
        (digest,) = digest_manifest(manifest, resources, seen.append)
        assert digest.crc32c == crc_of(values)
        assert sum(seen) == values.nbytes


def test_one_other_bit_gives_another_digest(tmp_path: Path) -> None:
    spec, values = spec_of((5, 7)), values_of((5, 7))
    (before,) = digest_manifest(write(tmp_path, spec, [Box.whole((5, 7))], values), ONE)
    values[4, 6] ^= 1
    (after,) = digest_manifest(write(tmp_path, spec, [Box.whole((5, 7))], values), ONE)
    assert before.crc32c != after.crc32c


def test_a_copy_is_not_read(tmp_path: Path) -> None:
    spec, values = spec_of((3,)), values_of((3,))
    manifest = write(tmp_path, spec, [Box.whole((3,))], values)
    copy = Chunk(0, Box.whole((3,)), (Part(Extent(0, 0, 6), spec.dtype),), replica_id=1)
    doubled = Manifest(
        "test", str(tmp_path), manifest.files, manifest.tensors, (copy, *manifest.chunks)
    )
    (digest,) = digest_manifest(doubled, ONE)
    assert digest.crc32c == crc_of(values)


def test_lines_are_as_documented() -> None:
    digests = [
        TensorDigest("a.b", "exp_avg", "float32", (3, 5), 0xABC),
        TensorDigest("step", "step", "int64", (), 0),
        TensorDigest('odd "name"\n', "weight", "bfloat16", (0,), 0xFFFFFFFF),
    ]
    assert [d.line() for d in digests] == [
        '"a.b" exp_avg float32 3x5 00000abc',
        '"step" step int64 scalar 00000000',
        '"odd \\"name\\"\\n" weight bfloat16 0 ffffffff',
    ]


def test_a_checkpoints_digest_does_not_depend_on_the_order_of_its_tensors() -> None:
    digests = [TensorDigest(n, WEIGHT, "float32", (2,), i) for i, n in enumerate("cab")]
    found = {checkpoint_digest(order) for order in permutations(digests)}
    text = "".join(f'"{n}" weight float32 2 {i:08x}\n' for n, i in (("a", 1), ("b", 2), ("c", 0)))
    assert found == {hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize(
    "other",
    [
        TensorDigest("v", WEIGHT, "float32", (2, 3), 7),
        TensorDigest("w", "exp_avg", "float32", (2, 3), 7),
        TensorDigest("w", WEIGHT, "int32", (2, 3), 7),
        TensorDigest("w", WEIGHT, "float32", (3, 2), 7),
        TensorDigest("w", WEIGHT, "float32", (2, 3), 8),
    ],
)
def test_a_checkpoints_digest_depends_on_each_fact(other: TensorDigest) -> None:
    digest = TensorDigest("w", WEIGHT, "float32", (2, 3), 7)
    assert checkpoint_digest([digest]) != checkpoint_digest([other])


def test_a_scalar_and_an_empty_tensor_have_digests() -> None:
    scalar, empty = spec_of(()), spec_of((0, 4), name="e")
    log = DigestLog()
    log.add(scalar, Box.whole(()), np.array(513, dtype="<u2"))
    assert [d.crc32c for d in log.result([scalar, empty])] == [
        google_crc32c.value(b"\x01\x02"),
        google_crc32c.value(b""),
    ]


def test_only_what_is_copied_as_it_is_is_held_against_the_digests_of_its_source() -> None:
    kinds = {"weight": "bfloat16", "fp32_param": "float32"}
    specs = [
        TensorSpec(name, slot, dtype(kind), (3,))
        for name in ("a", "b")
        for slot, kind in kinds.items()
    ]
    chunks, end = [], 0
    for i, spec in enumerate(specs):
        extent = Extent(0, end, spec.size_bytes)
        chunks.append(Chunk(i, Box.whole((3,)), (Part(extent, spec.dtype),)))
        end += spec.size_bytes
    told = {spec.key: number for number, spec in enumerate(specs)} | {("gone", WEIGHT): 9}
    source = Manifest("test", "", (File("f", end),), tuple(specs), tuple(chunks), {"digests": told})
    dst = Manifest("test", "d", (File("f", end),), tuple(specs), tuple(chunks))
    assert stated(source, make_plan(source, dst)) == dict(list(told.items())[:-1])
    rounded = with_nearest_even_weights(source)
    masters = {key: crc for key, crc in told.items() if key[1] == "fp32_param"}
    assert stated(source, make_plan(rounded, dst)) == masters
    names = {"a": "b", "b": "a"}
    swapped = replace(source, tensors=tuple(replace(s, name=names[s.name]) for s in specs))
    assert stated(source, make_plan(swapped, dst)) == {}


def test_a_digest_that_is_not_its_sources_stops_the_last_step() -> None:
    done = Finish()
    finish = compared(lambda _: done, {("w", WEIGHT): 0xABC}, "run")
    for digests in ({}, {("w", WEIGHT): 0xABC}, {("v", WEIGHT): 1}):
        assert finish(Written((), digests)) is done
    text = r"run: w \(weight\): content must have the CRC-32C 00000abc that it had .* got 00000001"
    with pytest.raises(MismatchError, match=text):
        finish(Written((), {("w", WEIGHT): 1}))
