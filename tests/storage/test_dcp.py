"""A torch.distributed.checkpoint directory must be read and written without torch, bit for bit."""

from __future__ import annotations

import io
import itertools
import pickle
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.storage.dcp_items import check_items, read_object, read_tensor
from ckpttools.storage.dcp_metadata import (
    DcpMetadata,
    is_plain_path,
    parse_metadata,
    read_metadata,
)
from ckpttools.storage.dcp_writer import DcpDraft, NewChunk, NewObject, file_bytes, lay_out_dcp

F32, BF16 = dtype("float32"), dtype("bfloat16")
STATE: dict[str, Any] = {
    "model": {
        "scalar": torch.tensor(7),
        "matrix": torch.arange(35, dtype=torch.float32).reshape(5, 7),
        "turned": torch.arange(35, dtype=torch.float64).reshape(5, 7).t(),
        "half": torch.arange(11).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "small": torch.arange(4).to(torch.float8_e4m3fn),
    },
    "optim": {"lr": 0.25, "betas": [0.5, 0.75], "steps": [torch.tensor(3.0)]},
}


def save(root: Path) -> Path:
    """Let torch write STATE."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.save(STATE, storage_writer=FileSystemWriter(root))
    return root


def load(root: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Let torch read a directory into tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(like, storage_reader=FileSystemReader(root))
    return like


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dcp") / "state")


def values(root: Path, metadata: DcpMetadata, key: str) -> np.ndarray:
    """Read a tensor by what we say of its places alone."""
    tensor = metadata.tensors[key]
    whole = np.zeros(tensor.shape, tensor.dtype.carrier)
    for chunk in tensor.chunks:
        place = read_tensor(root, tensor, chunk)
        data = (root / place.path).read_bytes()[place.offset :]
        if 0 in chunk.lengths:
            continue
        step = tuple(s * place.dtype.itemsize for s in place.strides)
        view = np.ndarray(chunk.lengths, place.dtype.carrier, data, 0, step)
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.lengths, strict=True))
        whole[box] = view
    return whole


def test_each_tensor_that_torch_saved_is_found_with_its_strides(saved: Path) -> None:
    metadata = read_metadata(saved)
    assert set(metadata.tensors) == {f"model.{k}" for k in STATE["model"]} | {"optim.steps.0"}
    for key, tensor in STATE["model"].items():
        found = values(saved, metadata, f"model.{key}")
        width = f"u{tensor.element_size()}"
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found.shape == tuple(tensor.shape)
        assert found.view(width).tobytes() == bits


def test_objects_and_their_places_in_the_nested_state_are_found(saved: Path) -> None:
    metadata = read_metadata(saved)
    found = {key: read_object(saved, key, item) for key, item in metadata.objects.items()}
    assert found == {"optim.lr": 0.25, "optim.betas": [0.5, 0.75]}
    assert metadata.paths["model.matrix"] == ("model", "matrix")
    assert metadata.paths["optim.steps.0"] == ("optim", "steps", 0)
    assert metadata.version == "1.0.0"


def test_what_torch_wrote_is_sound_in_every_byte(saved: Path) -> None:
    assert check_items(saved, read_metadata(saved)) == []


def test_a_changed_bit_anywhere_in_a_file_is_found(saved: Path, tmp_path: Path) -> None:
    metadata = read_metadata(saved)
    name = next(iter({item.path for item in metadata.objects.values()}))
    data = bytearray((saved / name).read_bytes())
    for position in range(0, len(data), 397):
        (tmp_path / name).write_bytes(
            data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]
        )
        assert check_items(tmp_path, metadata) != [], position


# --- metadata that lies ---------------------------------------------------------------


def edited(saved: Path, change: Callable[[Metadata], None]) -> bytes:
    """Return the bytes of torch's metadata after a change."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    return pickle.dumps(metadata, protocol=4)


def first_index(metadata: Metadata, key: str) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == key)


def test_a_chunk_without_a_place_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        del metadata.storage_data[first_index(metadata, "model.matrix")]

    with pytest.raises(FormatError, match=r"x: model.matrix: chunk at \[0, 0\] must be stored"):
        parse_metadata(edited(saved, change), where="x")


def test_an_object_without_a_place_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        del metadata.storage_data[first_index(metadata, "optim.lr")]

    with pytest.raises(FormatError, match="optim.lr: must be stored somewhere, got 'no place"):
        parse_metadata(edited(saved, change), where="x")


def test_a_stored_item_of_nothing_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["model.half"]

    with pytest.raises(FormatError, match="must be of a chunk that is listed, got 'model.half"):
        parse_metadata(edited(saved, change), where="x")


def test_a_chunk_outside_its_tensor_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.matrix"].size = torch.Size((4, 7))

    with pytest.raises(FormatError, match=r"a chunk must lie inside \[4, 7\], got '\[5, 7\]"):
        parse_metadata(edited(saved, change), where="x")


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b", "."])
def test_a_file_outside_the_directory_is_refused(path: str, saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.storage_data[first_index(metadata, "model.half")].relative_path = path

    assert not is_plain_path(path)
    with pytest.raises(FormatError, match="a file must be named by a plain relative path"):
        parse_metadata(edited(saved, change), where="x")


def test_a_negative_offset_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.storage_data[first_index(metadata, "model.half")].offset = -1

    with pytest.raises(FormatError, match="offset and length must be natural numbers, got -1"):
        parse_metadata(edited(saved, change), where="x")


def test_a_transformed_item_is_not_covered(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        info = metadata.storage_data[first_index(metadata, "model.half")]
        info.transform_descriptors = ["zstd"]

    with pytest.raises(UnsupportedError, match="must be stored as it is, got a transformed item"):
        parse_metadata(edited(saved, change), where="x")


def test_another_dtype_than_the_item_holds_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.matrix"].properties.dtype = torch.int32

    metadata = parse_metadata(edited(saved, change), where="x")
    tensor = metadata.tensors["model.matrix"]
    with pytest.raises(FormatError, match=r"must hold int32 \[5, 7\] as the metadata says, got fl"):
        read_tensor(saved, tensor, tensor.chunks[0])


def test_an_unknown_dtype_is_refused(saved: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.matrix"].properties.dtype = torch.complex128

    with pytest.raises(FormatError, match="dtype must be one of float64.*got 'complex128'"):
        parse_metadata(edited(saved, change), where="x")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Evil(), "must hold a Metadata, got"),
        ({"state_dict_metadata": {}}, "must hold a Metadata, got dict"),
        (Metadata({}, None, None), "storage_data must be a dict, got"),
        (Metadata({"a": 3}, None, {}), "must hold a TensorStorageMetadata, got 3"),
        (Metadata({3: 3}, None, {}), "a key must be text, got 3"),
        (Metadata({}, None, {"a": 3}), "must hold a MetadataIndex, got 'a'"),
    ],
)
def test_something_else_than_metadata_is_refused_and_not_run(
    tree: object, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FormatError, match=message):
        parse_metadata(pickle.dumps(tree, protocol=4), where="x")
    assert capfd.readouterr().out == ""


def test_a_persistent_id_is_refused() -> None:
    with pytest.raises(FormatError, match="must hold no persistent id"):
        parse_metadata(b"\x80\x02K\x03Q.", where="x")


@pytest.mark.parametrize("cut", [1, 700])
def test_a_file_cut_short_is_refused(cut: int, saved: Path, tmp_path: Path) -> None:
    metadata = read_metadata(saved)
    path = next(iter(metadata.objects.values())).path
    data = (saved / path).read_bytes()
    (tmp_path / path).write_bytes(data[:-cut])
    last = max(metadata.tensors.values(), key=lambda tensor: tensor.chunks[0].item.offset)
    with pytest.raises(FormatError, match=f"{path}.* part must lie in"):
        read_tensor(tmp_path, last, last.chunks[0])
    assert any("bytes, got" in text for _, text in check_items(tmp_path, metadata))


def test_a_missing_file_is_refused(saved: Path, tmp_path: Path) -> None:
    metadata = read_metadata(saved)
    tensor = metadata.tensors["model.half"]
    with pytest.raises(FormatError, match="must be there, since it holds model.half, got none"):
        read_tensor(tmp_path, tensor, tensor.chunks[0])
    assert "must be there" in check_items(tmp_path, metadata)[0][1]


def test_a_safetensors_container_is_told_apart(saved: Path, tmp_path: Path) -> None:
    metadata = read_metadata(saved)
    tensor = metadata.tensors["model.half"]
    item = tensor.chunks[0].item
    header = b'{"model.half":1}'
    data = len(header).to_bytes(8, "little") + header
    (tmp_path / item.path).write_bytes(bytes(item.offset) + data + bytes(item.length))
    with pytest.raises(UnsupportedError, match="must be torch archives, got a safetensors"):
        read_tensor(tmp_path, tensor, tensor.chunks[0])


# --- writing --------------------------------------------------------------------------

MATRIX = np.arange(35, dtype="<f4").reshape(5, 7)


def drafted() -> DcpDraft:
    return lay_out_dcp(
        {
            "__0_0.distcp": [
                NewChunk("a", F32, (5, 7), (0, 0), (2, 7)),
                NewChunk("none", BF16, (0, 3), (0, 0), (0, 3)),
                NewObject("o", [1, "x", {"y": (0.5, None)}]),
            ],
            "__1_0.distcp": [
                NewChunk("a", F32, (5, 7), (2, 0), (3, 7)),
                NewChunk("s", dtype("int64"), (), (), ()),
            ],
        },
        paths={"a": ("model", "a")},
        attributes={"mcore_data": {"a": {}}},
    )


def write(root: Path, draft: DcpDraft) -> Path:
    """Fill a draft with MATRIX and 7."""
    return fill(root, draft, {"a": MATRIX, "s": np.array(7, "<i8")})


def fill(root: Path, draft: DcpDraft, wholes: dict[str, np.ndarray]) -> Path:
    """Write a draft with these tensors in it, as an executor would."""
    root.mkdir()
    for file in draft.files:
        data = bytearray(file.size)
        for offset, piece in file.pieces():
            data[offset : offset + len(piece)] = piece
        crcs: dict[int, int] = {}
        for placed in file.items:
            if placed.payload is None or isinstance(placed.item, NewObject):
                continue
            item = placed.item
            box = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.lengths, strict=True))
            payload = wholes[item.key][box].tobytes()
            data[placed.payload : placed.payload + len(payload)] = payload
            crcs[placed.payload] = zlib.crc32(payload)
        for offset, piece in file.seal(crcs):
            data[offset : offset + len(piece)] = piece
        (root / file.path).write_bytes(data)
    (root / ".metadata").write_bytes(draft.metadata)
    return root


def test_torch_loads_what_we_wrote(tmp_path: Path) -> None:
    root = write(tmp_path / "out", drafted())
    like = {
        "a": torch.zeros(5, 7),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
        "s": torch.tensor(0),
        "o": None,
    }
    found = load(root, like)
    assert torch.equal(found["a"], torch.from_numpy(MATRIX))
    assert found["s"] == 7
    assert found["none"].shape == (0, 3)
    assert found["o"] == [1, "x", {"y": (0.5, None)}]


def test_torch_understands_our_metadata(tmp_path: Path) -> None:
    metadata = FileSystemReader(write(tmp_path / "out", drafted())).read_metadata()
    assert metadata.planner_data == {
        "a": ("model", "a"),
        "none": ("none",),
        "s": ("s",),
        "o": ("o",),
    }
    assert vars(metadata)["mcore_data"] == {"a": {}}
    assert metadata.state_dict_metadata["a"].properties.dtype == torch.float32
    assert [tuple(c.offsets) for c in metadata.state_dict_metadata["a"].chunks] == [(0, 0), (2, 0)]


def test_what_we_wrote_is_sound_and_read_back(tmp_path: Path) -> None:
    root = write(tmp_path / "out", drafted())
    metadata = read_metadata(root)
    assert check_items(root, metadata) == []
    assert np.array_equal(values(root, metadata, "a"), MATRIX)
    assert read_object(root, "o", metadata.objects["o"]) == [1, "x", {"y": (0.5, None)}]
    assert metadata.paths["a"] == ("model", "a")


@given(data=st.data())
def test_any_grid_of_chunks_in_any_files_reads_back_as_the_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    kind = dtype(data.draw(st.sampled_from(["float32", "bfloat16", "int64", "float8_e5m2"])))
    width = np.dtype(f"<u{kind.itemsize}")
    whole = np.arange(1, 1 + int(np.prod(shape, dtype=int)), dtype=width).reshape(shape)
    edges = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(itertools.pairwise(mine)) or [(0, 0)] for mine in edges]
    files: dict[str, list[NewChunk | NewObject]] = {"a": [], "b": [NewObject("o", [3])], "c": []}
    for box in itertools.product(*spans):
        offsets, lengths = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        chunk = NewChunk("t", kind, shape, offsets, lengths)
        files[data.draw(st.sampled_from("abc"))].append(chunk)
    with tempfile.TemporaryDirectory() as folder:
        root = fill(Path(folder) / "out", lay_out_dcp(files), {"t": whole})
        metadata = read_metadata(root)
        assert values(root, metadata, "t").tobytes() == whole.tobytes()
        assert check_items(root, metadata) == []
        assert read_object(root, "o", metadata.objects["o"]) == [3]


@pytest.mark.parametrize(
    "again",
    [
        NewChunk("a", F32, (5, 7), (0, 0), (5, 7)),
        NewChunk("a", BF16, (5, 7), (2, 0), (3, 7)),
        NewChunk("a", F32, (6, 7), (2, 0), (3, 7)),
    ],
)
def test_chunks_that_disagree_are_refused(again: NewChunk) -> None:
    first = NewChunk("a", F32, (5, 7), (0, 0), (2, 7))
    with pytest.raises(FormatError, match="a: chunks must be of one tensor, each at its own"):
        lay_out_dcp({"x": [first], "y": [again]})


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_that_is_an_object_and_a_tensor_is_refused(order: int) -> None:
    items = [NewObject("a", 1), NewChunk("a", F32, (1,), (0,), (1,))][::order]
    with pytest.raises(FormatError, match="a: an item must be there once, got it twice"):
        lay_out_dcp({"x": [items[0]], "y": [items[1]]})


def test_a_small_torch_file_is_one_that_torch_loads() -> None:
    data = file_bytes("common", {"step": 3, "lr": [0.5]})
    assert torch.load(io.BytesIO(data), weights_only=True) == {"step": 3, "lr": [0.5]}
