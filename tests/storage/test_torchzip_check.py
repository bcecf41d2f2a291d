"""No change of a torch file goes unseen."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch
from storage import hostile
from storage.torch_cases import OLD, REAL

from ckpttools.dtypes import dtype
from ckpttools.storage.torchzip import new_tensor, read_torch_file
from ckpttools.storage.torchzip_check import check_torch_file, examine_torch_file
from ckpttools.storage.torchzip_writer import lay_out_torch_file, seal


def tiny_file() -> bytes:
    """Return a file of ours with one filled and one empty storage."""
    filled, empty = new_tensor(dtype("int16"), (3,)), new_tensor(dtype("float32"), (0,))
    filled.storage.payload, empty.storage.payload = b"\1\0\2\0\3\0", b""
    draft = lay_out_torch_file("t", [filled, empty])
    data = bytearray(draft.size)
    for offset, piece in (*draft.pieces, *seal(draft, {})):
        data[offset : offset + len(piece)] = piece
    return bytes(data)


def test_every_flipped_bit_of_a_small_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    good = tiny_file()
    path.write_bytes(good)
    assert check_torch_file(path) == []
    data = bytearray(good)
    with path.open("r+b") as file:
        for at in range(len(data)):
            for bit in range(8):
                file.seek(at)
                file.write(bytes([data[at] ^ 1 << bit]))
                file.flush()
                assert check_torch_file(path) != [], (at, bit)
            file.seek(at)
            file.write(data[at : at + 1])


def test_every_flipped_byte_of_a_file_of_torchs_is_found(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"w": torch.arange(7.0), "e": torch.ones(0)}, path)
    good = path.read_bytes()
    assert check_torch_file(path) == []
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        assert check_torch_file(path) != [], at


def test_random_damage_is_told_and_never_raised(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    good, dice = tiny_file(), random.Random(7)  # noqa: S311 - dice
    for _ in range(500):
        at, count = dice.randrange(len(good)), dice.randrange(1, 70)
        for bad in (
            good[:at],
            good[:at] + good[at + count :],
            good[:at] + dice.randbytes(count) + good[at:],
            good[:at] + dice.randbytes(count) + good[at + count :],
        ):
            path.write_bytes(bad)
            assert (check_torch_file(path) == []) == (bad == good)


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_files_of_older_torch_are_sound_to_the_byte(path: Path) -> None:
    found = examine_torch_file(path)
    assert found.problems == ()
    assert found.exact


@pytest.mark.skipif(not REAL, reason="no Megatron fixtures in fixtures/megatron")
def test_real_files_are_sound_to_the_byte() -> None:
    for path in REAL:
        found = examine_torch_file(path)
        assert (found.problems, found.exact) == ((), True), path


def test_rotten_payload_is_named_by_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save([torch.arange(3), torch.arange(5)], path)
    file = read_torch_file(path)
    data = bytearray(path.read_bytes())
    data[file.records["data/1"].offset] ^= 1
    path.write_bytes(data)
    (problem,) = check_torch_file(path)
    assert problem.record == "data/1"
    assert str(problem).startswith("data/1: CRC-32 of the payload must be 0x")


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (12, "data.pkl: local header must have 0x00 at byte 12, got 0x55"),
        (60, "data.pkl: local header must have 0x5a at byte 60, got 0x55"),
        (-22 - 20 - 44, "zip64 end record must have 0x1e at byte 1439, got 0x55"),
    ],
)
def test_changed_header_byte_is_told_with_its_place(at: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    data = bytearray(tiny_file())
    data[at] = 0x55
    path.write_bytes(data)
    assert [str(problem) for problem in check_torch_file(path)] == [told]


def test_other_alignment_is_taken_from_the_file(tmp_path: Path) -> None:
    from torch.utils.serialization import config

    path = tmp_path / "t.pt"
    config.save.storage_alignment = 4096
    try:
        torch.save([torch.arange(3), torch.arange(5)], path)
    finally:
        config.save.storage_alignment = 64
    assert read_torch_file(path).records["data/1"].offset % 4096 == 0
    assert examine_torch_file(path).problems == ()


def zip_tool_file() -> bytes:
    """Return the same kind of file as Python's zipfile writes it: dates, versions, no padding."""
    return hostile.archive(hostile.records())


def test_file_of_a_zip_tool_is_sound_but_not_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "z.pt"
    path.write_bytes(zip_tool_file())
    found = examine_torch_file(path)
    assert found.problems == ()
    assert not found.exact


def test_damage_to_what_a_zip_tool_states_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "z.pt"
    good = zip_tool_file()
    entry = good.index(b"PK\1\2")
    for at in (4, 6, 8, 10, 12, 14, 18, 22, 26, 30, entry + 16, entry + 20, entry + 24, entry + 46):
        path.write_bytes(good[:at] + bytes([good[at] ^ 2]) + good[at + 1 :])
        assert check_torch_file(path) != [], at


def test_streamed_zip_is_checked_with_its_descriptors(tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        """A sink that cannot seek: zipfile then writes data descriptors."""

        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(bytes(data))  # type: ignore[call-overload]

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        for name, payload in hostile.records():
            archive.writestr(zipfile.ZipInfo(name), payload)
    path = tmp_path / "z.pt"
    path.write_bytes(pipe.data)
    assert check_torch_file(path) == []
    at = pipe.data.index(b"PK\7\10") + 4
    path.write_bytes(pipe.data[:at] + b"\x55" + pipe.data[at + 1 :])
    (problem,) = check_torch_file(path)
    assert str(problem).startswith("data.pkl: data descriptor must be 504b0708")


def test_bytes_between_records_are_found(tmp_path: Path) -> None:
    good = zip_tool_file()
    entry = good.index(b"PK\1\2")
    moved = good[:entry] + b"hidden" + good[entry:]
    at = moved.rindex(b"PK\5\6") + 16
    path = tmp_path / "z.pt"
    path.write_bytes(moved[:at] + (entry + 6).to_bytes(4, "little") + moved[at + 4 :])
    (problem,) = check_torch_file(path)
    assert str(problem) == f"directory must start at {entry}, got {entry + 6}"


def test_archive_inside_another_file_is_checked_alone(tmp_path: Path) -> None:
    path = tmp_path / "outer.bin"
    good = tiny_file()
    path.write_bytes(b"x" * 13 + good + b"y" * 3)
    assert check_torch_file(path, window=(13, len(good))) == []
    assert check_torch_file(path) != []
