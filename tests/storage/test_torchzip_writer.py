"""Files laid out without torch are the files that torch writes."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from storage.torch_cases import CASES, REAL

from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, new_global
from ckpttools.storage.torchzip import StorageRef, TensorRef, TorchFile, new_tensor, read_torch_file
from ckpttools.storage.torchzip_check import check_torch_file
from ckpttools.storage.torchzip_writer import (
    IDENTITY,
    TorchDraft,
    lay_out_records,
    lay_out_torch_file,
    seal,
)


def written(draft: TorchDraft, payloads: list[bytes]) -> bytes:
    """Return the whole file; the payloads in the order of the draft's storages."""
    data = bytearray(b"\xee" * draft.size)
    crcs = {}
    for (_, offset, length), payload in zip(draft.storages, payloads, strict=True):
        assert len(payload) == length
        data[offset : offset + length] = payload
        crcs[offset] = zlib.crc32(payload)
    for offset, piece in (*draft.pieces, *seal(draft, crcs)):
        data[offset : offset + len(piece)] = piece
    assert len(data) == draft.size
    return bytes(data)


def payloads_of(draft: TorchDraft, file: TorchFile, data: bytes) -> list[bytes]:
    places = [file.payload(storage) for storage, _, _ in draft.storages]
    return [data[offset : offset + length] for offset, length in places]


def without_identity(data: bytes, file: TorchFile) -> bytes:
    """Blank the serialization id and its CRC-32 (torch's hash of names isn't reproducible)."""
    record = file.records[IDENTITY]
    entry_name = data.rindex(f"{file.prefix}/{IDENTITY}".encode())
    blanked = bytearray(data)
    for at, length in (
        (record.offset, record.length),
        (record.offset + record.length + 4, 4),
        (entry_name - 46 + 16, 4),
    ):
        blanked[at : at + length] = bytes(length)
    return bytes(blanked)


def assert_rebuilt(path: Path) -> None:
    file, data = read_torch_file(path), path.read_bytes()
    draft = lay_out_torch_file(file.prefix, file.tree)
    ours = written(draft, payloads_of(draft, file, data))
    assert without_identity(ours, file) == without_identity(data, file)


@pytest.mark.parametrize("label", CASES)
def test_rewritten_file_is_torchs_own_but_for_the_fingerprint(label: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save(CASES[label](), path)
    assert_rebuilt(path)


@pytest.mark.skipif(not REAL, reason="no Megatron fixtures in fixtures/megatron")
def test_real_files_are_rebuilt_from_their_trees() -> None:
    for path in REAL:
        assert_rebuilt(path)


@pytest.mark.skipif(not REAL, reason="no Megatron fixtures in fixtures/megatron")
def test_real_files_are_rebuilt_from_their_records_byte_for_byte() -> None:
    for path in REAL:
        file, data = read_torch_file(path), path.read_bytes()
        records = [
            (record.name, record.length, data[record.offset : record.offset + record.length])
            for record in file.records.values()
        ]
        draft = lay_out_records(file.prefix, records)
        assert draft.pieces == ((0, data),)


@pytest.fixture
def new_file(tmp_path: Path) -> Path:
    """A file made of nothing: shared, strided, empty, untyped and small storages, and a class."""
    shared = StorageRef(dtype("float32"), 12)
    rng = new_tensor(dtype("uint8"), (5,))
    rng.storage.payload = b"\1\2\3\4\5"
    tree = OrderedDict(
        whole=TensorRef(shared, 0, (3, 4), (4, 1)),
        column=TensorRef(shared, 1, (3,), (4,)),
        half=new_tensor(dtype("bfloat16"), (3,)),
        none=new_tensor(dtype("int64"), (0, 2)),
        eight=new_tensor(dtype("float8_e4m3fn"), (2,)),
        rng=rng,
        step=3,
        kind=new_global("torch", "bfloat16"),
        args=Inert(new_global("argparse", "Namespace"), via="newobj", state={"lr": 0.5}),
    )
    draft = lay_out_torch_file("new", tree)
    assert [storage.numel for storage, _, _ in draft.storages] == [12, 3, 2]
    numbers = torch.arange(12, dtype=torch.float32).numpy().tobytes()
    halves = b"\x80\x3f\x00\x40\x40\x40"  # 1, 2, 3
    path = tmp_path / "new.pt"
    path.write_bytes(written(draft, [numbers, halves, b"\x38\x40"]))
    return path


def test_new_file_loads_in_torch(new_file: Path) -> None:
    loaded = torch.load(new_file, weights_only=False)
    assert loaded["whole"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert loaded["column"].tolist() == [1, 5, 9]
    assert loaded["column"].untyped_storage().data_ptr() == loaded["whole"].data_ptr()
    assert loaded["half"].tolist() == [1, 2, 3]
    assert loaded["none"].shape == (0, 2)
    assert loaded["eight"].float().tolist() == [1, 2]
    assert loaded["rng"].tolist() == [1, 2, 3, 4, 5]
    assert (loaded["step"], loaded["kind"], loaded["args"].lr) == (3, torch.bfloat16, 0.5)


def test_new_file_of_plain_content_loads_with_weights_only(tmp_path: Path) -> None:
    draft = lay_out_torch_file("w", {"w": new_tensor(dtype("int16"), (3,))})
    path = tmp_path / "w.pt"
    path.write_bytes(written(draft, [b"\1\0\2\0\3\0"]))
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 2, 3]


def test_new_file_is_a_sound_zip(new_file: Path) -> None:
    with zipfile.ZipFile(new_file) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    assert check_torch_file(new_file) == []


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_new_file_satisfies_unzip(new_file: Path) -> None:
    unzip = shutil.which("unzip")
    assert unzip is not None
    done = subprocess.run([unzip, "-t", str(new_file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No errors detected" in done.stdout


def test_fingerprint_follows_the_content() -> None:
    draft = lay_out_torch_file("w", [new_tensor(dtype("int16"), (3,))])
    ((_, offset, _),) = draft.storages
    record = draft.records[-1]
    assert record.name == IDENTITY
    ids = [dict(seal(draft, {offset: crc}))[record.offset] for crc in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert all(len(i) == 40 and i.isdigit() for i in ids)


def test_every_payload_needs_its_crc_and_no_other() -> None:
    draft = lay_out_torch_file("w", [new_tensor(dtype("int16"), (3,))])
    ((_, offset, _),) = draft.storages
    for crcs in ({}, {offset: 1, 7: 2}, {7: 1}):
        with pytest.raises(FormatError, match="each payload must have one CRC-32, got offsets"):
            seal(draft, crcs)


@pytest.mark.parametrize("prefix", ["", "a/b", "..", ".", "a\\b", "a\n"])
def test_top_folder_must_be_a_plain_name(prefix: str) -> None:
    with pytest.raises(FormatError, match="archive: top folder must be one plain name, got"):
        lay_out_torch_file(prefix, [])


def test_payload_must_fill_its_storage() -> None:
    tensor = new_tensor(dtype("int16"), (3,))
    tensor.storage.payload = b"12345"
    with pytest.raises(FormatError, match="w: payload of storage 0 must have 6 bytes, got 5"):
        lay_out_torch_file("w", [tensor])


def sparse(folder: Path, name: str, length: int) -> torch.Tensor:
    """Return a tensor over a file with a hole: address space, but no memory and no disk."""
    path = folder / name
    with path.open("wb") as file:
        file.truncate(length)
    return torch.frombuffer(memoryview_of(path), dtype=torch.uint8)


def memoryview_of(path: Path) -> memoryview:
    import mmap

    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


@pytest.mark.parametrize(
    "lengths",
    [
        [(1 << 32) - 2, 3],
        [(1 << 32) - 1, 3],
        [5 << 30, 3, 0, (1 << 32) - 1],
        [3, 5 << 30, 0, (1 << 32) - 2, 7],
    ],
)
def test_sizes_and_offsets_beyond_4_gib_are_laid_out_as_torch_does(
    lengths: list[int], tmp_path: Path
) -> None:
    tree = [sparse(tmp_path, f"{i}.bin", n) if n else torch.ones(0) for i, n in enumerate(lengths)]
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data():
        torch.save(tree, path)
    file = read_torch_file(path)
    records = [
        (record.name, record.length, None if record.name.startswith("data/") else b"")
        for record in file.records.values()
    ]
    draft = lay_out_records(
        file.prefix,
        [(name, length, None) for name, length, _ in records],
        crc32s={record.name: record.crc32 for record in file.records.values()},
    )
    assert draft.size == path.stat().st_size
    with path.open("rb") as stored:
        for offset, piece in draft.pieces:
            stored.seek(offset)
            assert stored.read(len(piece)) == piece
    ours = lay_out_torch_file(file.prefix, file.tree)
    assert ours.size == draft.size
    offsets = [offset for _, offset, _ in ours.storages]
    assert offsets == [file.payload(storage)[0] for storage, _, _ in ours.storages]
