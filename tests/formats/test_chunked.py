"""A list of chunks must hold what it was given, on any number of ranks, and vouch for it all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ckpttools import api
from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, ReplicaError, UsageError
from ckpttools.formats import ParamGroup, ReadOptions
from ckpttools.formats.native.chunked import ShardedFormat
from ckpttools.formats.native.chunked.dealing import deal
from ckpttools.formats.native.chunked.document import chunk_document
from ckpttools.formats.native.chunked.files import pack_files
from ckpttools.formats.native.chunked.read import chunk_manifest
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.layout.box import Box
from ckpttools.manifest import TensorSpec
from ckpttools.storage.crc import crc32
from ckpttools.storage.sealed_json import serialize, sha256

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
DEEP = FIXTURES / "deep_tp1_pp1_dp2" / "torch"
GQA = FIXTURES / "gqa_tp2_pp1_dp2" / "torch"

Arrays = Mapping[tuple[str, str], np.ndarray[Any, Any]]


def write_chunks(
    folder: Path, arrays: Arrays, ranks: list[list[tuple[int, Box]]], objects: Mapping[str, object]
) -> Path:
    """Write a checkpoint by the format's own formula, with numpy alone."""
    specs = [
        TensorSpec(name, slot, dtype(str(array.dtype)), array.shape)
        for (name, slot), array in arrays.items()
    ]
    files = pack_files(specs, ranks)
    values = list(arrays.values())
    folder.mkdir()
    stated = []
    for file in files:
        data = {
            chunk.key: np.ascontiguousarray(values[chunk.tensor][chunk.box.slices]).tobytes()
            for chunk in file.chunks
        }
        (folder / file.path).write_bytes(file.header + b"".join(data.values()))
        crcs = {key: crc32(memoryview(one)) for key, one in data.items()}
        stated.append(StatedFile(file.path, sha256(file.header), crcs))
    text = chunk_document(specs, files, stated, objects, {}, world_size=len(ranks))
    (folder / "manifest.json").write_bytes(text)
    return folder


def small(folder: Path) -> Path:
    """Write two tensors cut by columns and rows over two ranks."""
    arrays = {
        ("a", "weight"): np.arange(35, dtype=np.float32).reshape(5, 7),
        ("b", "weight"): np.array(11, dtype=np.int64),
    }
    ranks = [
        [(0, Box((0, 0), (5, 3))), (1, Box((), ()))],
        [(0, Box((0, 3), (2, 4))), (0, Box((2, 3), (3, 4)))],
    ]
    groups = (ParamGroup({"lr": 0.5, "betas": (0.9, 0.95)}, ("a",)),)
    return write_chunks(folder, arrays, ranks, {"step": {"a": 3}, "param_groups": groups})


# ---- dealing -----------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=9)


@given(shapes, st.integers(1, 5), st.sampled_from([1, 2, 8]), st.sampled_from([0, 40]))
def test_dealing_gives_every_element_to_one_part(
    found: list[tuple[int, ...]], parts: int, itemsize: int, least: int
) -> None:
    boxes = [(Box((3,) * len(shape), shape), itemsize) for shape in found]
    counts = [np.zeros([10] * len(shape), dtype=int) for shape in found]
    for part in deal(boxes, parts, least_cut_bytes=least):
        for index, box in part:
            assert box.numel
            counts[index][box.slices] += 1
    for (box, _), count in zip(boxes, counts, strict=True):
        expected = np.zeros_like(count)
        expected[box.slices] = 1
        assert np.array_equal(count, expected)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=12), st.integers(1, 7))
def test_parts_differ_by_a_row_or_a_small_box_at_most(rows: list[int], parts: int) -> None:
    width, least = 3, 60
    boxes = [(Box.whole((count, width)), 4) for count in rows]
    sizes = [
        sum(box.numel * 4 for _, box in part) for part in deal(boxes, parts, least_cut_bytes=least)
    ]
    assert max(sizes) - min(sizes) <= 2 * max(least, width * 4)


def test_dealing_cuts_no_small_box_and_hardly_more_than_there_are_parts() -> None:
    boxes = [(Box.whole((1000, 100)), 4), (Box.whole((3, 4)), 4)] * 6
    dealt = deal(boxes, 4)
    assert sum(map(len, dealt)) <= len(boxes) + 3
    assert all(box.numel == 12 for part in dealt for i, box in part if i % 2)


# ---- files -------------------------------------------------------------------------------------


def test_keys_name_tensors_and_never_meet() -> None:
    specs = [
        TensorSpec(name, slot, dtype("float32"), (2, 2))
        for name, slot in [("a", "b"), ("a:b", "weight"), ("a", "b:weight"), ("a", "b#1")]
    ]
    rows = [(i, Box((r, 0), (1, 2))) for i in range(4) for r in range(2)]
    (file,) = pack_files(specs, [rows])
    keys = [chunk.key for chunk in file.chunks]
    assert keys == [
        "a:b",
        "a:b#1",
        "a:b:weight",
        "a:b:weight#1",
        "a:b:weight#2",
        "a:b:weight#3",
        "a:b#1#1",
        "a:b#1#2",
    ]


def test_wide_elements_come_first_and_data_starts_at_a_page() -> None:
    kinds = ["uint8", "float64", "bfloat16", "float32"]
    specs = [TensorSpec(kind, "weight", dtype(kind), (3,)) for kind in kinds]
    (file,) = pack_files(specs, [[(i, Box.whole((3,))) for i in range(4)]])
    assert [specs[c.tensor].name for c in file.chunks] == [
        "float64",
        "float32",
        "bfloat16",
        "uint8",
    ]
    assert file.chunks[0].offset % 4096 == 0
    assert file.size_bytes == file.chunks[-1].offset + 3


def test_a_rank_of_many_keys_has_several_files() -> None:
    specs = [TensorSpec(f"p{i}", "weight", dtype("float32"), (2,)) for i in range(9)]
    boxes = [(i, Box.whole((2,))) for i in range(9)]
    files = pack_files(specs, [boxes, boxes[:1]], max_header_bytes=700)
    names = [file.path for file in files]
    assert names[0] == "rank-00000-00001.safetensors"
    assert names[-1] == "rank-00001.safetensors"
    assert len(names) > 2
    assert sorted(c.tensor for f in files[:-1] for c in f.chunks) == list(range(9))


def test_any_safetensors_reader_opens_a_rank_s_file(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    arrays = load_file(folder / "rank-00001.safetensors")
    whole = np.arange(35, dtype=np.float32).reshape(5, 7)
    assert np.array_equal(arrays["a:weight"], whole[:2, 3:])
    assert np.array_equal(arrays["a:weight#1"], whole[2:, 3:])
    assert load_file(folder / "rank-00000.safetensors")["b:weight"] == 11


# ---- reading and writing -----------------------------------------------------------------------


@pytest.mark.parametrize(("source", "sizes"), [(DEEP, (3,)), (GQA, (2, 5, 1))])
def test_any_number_of_ranks_holds_what_the_source_holds(
    source: Path, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    expected, _ = api.digest(source)
    last = source
    for ranks in sizes:
        place = tmp_path / str(ranks)
        report = api.reshard(last, place, to="sharded", target=api.Target(world=ranks))
        assert report.dst_topology == {"dp": ranks}
        assert len(list(place.glob("rank-*.safetensors"))) == ranks
        result = api.verify(place, against=source)
        assert (result.damage, result.differences) == ((), ())
        assert api.digest(place)[0] == expected
        last = place


def test_a_source_s_number_of_ranks_stays_where_none_is_named(tmp_path: Path) -> None:
    api.reshard(GQA, tmp_path / "a", to="sharded")  # 2 tensor ranks, 2 data ranks
    assert api.inspect(tmp_path / "a")["topology"] == {"dp": 4}
    api.reshard(tmp_path / "a", tmp_path / "b")
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_ranks_share_the_bytes_evenly() -> None:
    specs = [TensorSpec(f"p{i}", "weight", dtype("float32"), (997, 101)) for i in range(5)]
    source = chunk_manifest(
        specs, pack_files(specs, [[(i, Box.whole((997, 101)))] for i in range(5)]), "", {}
    )
    draft = ShardedFormat().lay_out(source, api.Target(world=3), "")
    sizes = [0, 0, 0]
    for chunk in draft.manifest.chunks:
        sizes[chunk.parts[0].extent.file] += chunk.parts[0].extent.length
    assert sum(sizes) == 5 * 997 * 101 * 4
    assert max(sizes) - min(sizes) <= 101 * 4


def test_whole_tensors_and_the_native_form_come_of_chunks(tmp_path: Path) -> None:
    api.reshard(GQA, tmp_path / "chunks", to="sharded", target=api.Target(dp=3))
    api.gather(tmp_path / "chunks", tmp_path / "whole")
    assert api.diff(tmp_path / "whole", GQA).equal
    report = api.reshard(
        tmp_path / "chunks", tmp_path / "zero1", to="zero1", target=api.Target(tp=1, dp=2)
    )
    assert report.dst_format == "zero1"
    assert api.diff(tmp_path / "zero1", GQA).equal


def test_objects_come_back_with_their_types(tmp_path: Path) -> None:
    objects = {
        "iteration": 7,
        "step": {"a": 3, "b": 4.5},
        "state_values": {"a": {"momentum_buffer": None, "pair": (1, b"x")}},
        "training": {"scheduler": {"last_epoch": 3, "nan": float("nan")}},
        "per_rank_state": {"0": {"rng": b"\x00"}, "1": {}},
        "param_groups": (ParamGroup({"lr": 0.5, "betas": (0.9, 0.95)}, ("a", "b")),),
    }
    arrays = {
        (name, slot): np.ones(3, np.float32) for name in "ab" for slot in ("weight", "exp_avg")
    }
    boxes = [[(i, Box.whole((3,))) for i in range(4)], []]
    folder = write_chunks(tmp_path / "c", arrays, boxes, objects)
    read = api.read_manifest(folder).objects
    for key in ("iteration", "step", "state_values", "per_rank_state", "param_groups"):
        assert read[key] == objects[key]
    assert str(read["training"]) == str(objects["training"])  # a nan is not itself
    two = api.reshard(folder, tmp_path / "two")
    assert api.read_manifest(tmp_path / "two").objects["per_rank_state"] == read["per_rank_state"]
    assert "random and other state of each rank" in two.carried
    three = api.reshard(folder, tmp_path / "three", target=api.Target(dp=3))
    assert "per_rank_state: it belongs to the source's ranks" in three.lost
    assert api.read_manifest(tmp_path / "three").objects["step"] == {"a": 3, "b": 4.5}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (api.Target(tp=2), "--tp: must not be given for chunks"),
        (api.Target(pp=2), "--pp: must not be given for chunks"),
        (api.Target(bucket_size=100), "--bucket-size: must not be given for chunks"),
        (api.Target(masters="remainders"), "--masters: must not be given for chunks"),
        (
            api.Target(dp=2, world=3),
            "--world: must be one number of ranks, at least 1, got 2 and 3",
        ),
        (api.Target(dp=0), "--world: must be one number of ranks, at least 1, got 0"),
    ],
)
def test_a_target_that_chunks_do_not_have_is_refused(target: api.Target, text: str) -> None:
    source = api.read_manifest(DEEP)
    with pytest.raises(UsageError) as caught:
        api.plan_reshard(source, target, to="sharded")
    assert text in str(caught.value)


def test_copies_must_be_equal(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    document = json.loads((folder / "manifest.json").read_text())
    one = document["files"]["rank-00001.safetensors"]["keys"]["a:weight#1"]
    one |= {"offsets": [0, 0], "lengths": [3, 4], "replica_id": 1}
    document["files"]["rank-00001.safetensors"]["keys"]["a:weight"]["lengths"] = [2, 4]
    (folder / "manifest.json").write_bytes(serialize(document))
    with pytest.raises(FormatError, match="got a hole at"):
        api.read_manifest(folder)
    arrays = {("a", "weight"): np.arange(6, dtype=np.float32)}
    boxes = [[(0, Box.whole((6,)))], [(0, Box.whole((6,)))]]
    folder = write_chunks(tmp_path / "d", arrays, boxes, {})
    document = json.loads((folder / "manifest.json").read_text())
    document["files"]["rank-00001.safetensors"]["keys"]["a:weight"]["replica_id"] = 1
    (folder / "manifest.json").write_bytes(serialize(document))
    assert api.verify(folder).damage == ()
    place = folder / "rank-00001.safetensors"
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    with pytest.raises(ReplicaError):
        api.reshard(folder, tmp_path / "e")


# ---- damage ------------------------------------------------------------------------------------


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    assert ShardedFormat().check(folder) == []
    for place in sorted(folder.iterdir()):
        data = place.read_bytes()
        payload = len(data) - 100  # all of it; of headers and the manifest every 13th byte
        for at in (*range(0, payload, 13), *range(payload, len(data))):
            place.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert ShardedFormat().check(folder), (place.name, at)
        for short in (data[:-1], data + b"\0"):
            place.write_bytes(short)
            assert ShardedFormat().check(folder), (place.name, len(short))
        place.write_bytes(data)
    assert ShardedFormat().check(folder) == []


def test_a_changed_element_is_named(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    place = folder / "rank-00001.safetensors"
    data = bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    (problem,) = ShardedFormat().check(folder)
    assert "rank-00001.safetensors: a:weight#1: CRC-32 must be" in str(problem)


def test_a_missing_file_and_one_too_many_are_damage(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    (folder / "rank-00002.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"rank-00002.safetensors: must not be there"):
        api.read_manifest(folder)
    (folder / "rank-00002.safetensors").unlink()
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(FormatError, match=r"rank-00001.safetensors: every listed file must be"):
        api.read_manifest(folder)


def edit(document: Any, path: str, value: object) -> None:
    *parents, last = path.split("/")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    if value is ...:
        del document[last]
    else:
        document[int(last) if isinstance(document, list) else last] = value


FILE = "files/rank-00000.safetensors"
KEY = f"{FILE}/keys/a:weight"


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("format_version", 2, "format_version must be 1, got 2"),
        ("world_size", 1, "world_size must be more than every rank, got 1"),
        ("world_size", ..., "must have carried, files"),
        ("tensors", {}, "tensors must be a list"),
        ("tensors/0/dtype", "float7", "tensors[0]: dtype must be one of"),
        ("tensors/0/shape", [5, -7], "shape must be natural numbers"),
        ("tensors/0/shape", [5, 8], "got a hole at"),
        ("tensors/0/name", 3, "name must be text, got 3"),
        ("tensors/1/padding_rows", 1, "padding rows must be at least 0 and need a dimension"),
        ("tensors/1/name", "a", "a (weight): a name and slot must be there once"),
        (f"{FILE}/rank", -1, "rank must be a natural number"),
        (f"{FILE}/header_sha256", "00", "header_sha256 must be 64 hexadecimal digits"),
        (f"{FILE}/header_sha256", "0" * 64, "the header must have the SHA-256 000"),
        (f"{KEY}/tensor", 2, "tensor must be one of 2 in the list, got 2"),
        (f"{KEY}/tensor", True, "tensor must be one of 2 in the list, got True"),
        (f"{KEY}/offsets", [0], "offsets and lengths must be as many, got 1 and 2"),
        (f"{KEY}/offsets", [1, 0], "a chunk must lie inside"),
        (f"{KEY}/offsets", [0, 1], "got a hole at"),
        (f"{KEY}/lengths", [5, 2], "must be float32 [5, 2], got float32 [5, 3]"),
        (f"{KEY}/replica_id", -1, "replica_id must be a natural number"),
        (f"{KEY}/crc32", "0", "crc32 must be eight hexadecimal digits"),
        (KEY, ..., "must hold the stated keys, got a difference: a:weight"),
        ("files/..", {}, "must be named rank-NNNNN.safetensors"),
        ("objects/unknown", 1, "entries must be"),
        ("layout", {}, "manifest.json: layout"),
        ("carried", [], "carried must be an object"),
    ],
)
def test_a_manifest_that_is_not_what_it_must_be_is_refused(
    path: str, value: object, text: str, tmp_path: Path
) -> None:
    folder = small(tmp_path / "c")
    document = json.loads((folder / "manifest.json").read_text())
    edit(document, path, value)
    (folder / "manifest.json").write_bytes(serialize(document))
    with pytest.raises(FormatError) as caught:
        ShardedFormat().read(folder, ReadOptions())
    assert text in str(caught.value)


@pytest.mark.parametrize("spoil", [lambda d: d[:40], lambda d: b"[" + d, lambda d: d + b" "])
def test_a_torn_manifest_is_refused(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    place = folder / "manifest.json"
    place.write_bytes(spoil(place.read_bytes()))
    with pytest.raises(FormatError):
        ShardedFormat().read(folder, ReadOptions())
    assert len(ShardedFormat().check(folder)) == 1


def test_one_format_knows_it(tmp_path: Path) -> None:
    folder = small(tmp_path / "c")
    assert api.detect_format(folder).name == "sharded"
    assert api.inspect(folder)["layouts"] == ["chunks"]
    place = folder / "manifest.json"
    place.write_bytes(place.read_bytes()[:60])
    assert api.detect_format(folder).name == "sharded"


def test_a_megatron_checkpoint_comes_back_from_chunks_byte_for_byte(tmp_path: Path) -> None:
    api.reshard(GQA, tmp_path / "chunks", to="sharded", target=api.Target(dp=3))
    api.reshard(tmp_path / "chunks", tmp_path / "again", to="megatron")
    api.reshard(GQA, tmp_path / "straight", to="zero1")
    api.reshard(tmp_path / "straight", tmp_path / "expected", to="megatron")
    files = sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*.pt"))
    assert files
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (
            tmp_path / "expected" / file
        ).read_bytes()
