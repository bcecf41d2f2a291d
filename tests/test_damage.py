"""One flipped bit in what we wrote, anywhere, is found, named, and ends with exit code 3."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import megatron_edit as edit
import oracle_megatron as oracle
import pytest
from safetensors import safe_open

from ckpttools import api
from ckpttools.api import Resources, Target
from ckpttools.errors import FormatError
from ckpttools.formats.consolidated.read import _headers, check_directory
from ckpttools.formats.consolidated.state import FORMAT, FORMAT_VERSION, STATE_FILE, parse
from ckpttools.storage.sealed_json import serialize
from ckpttools.storage.torchzip import read_torch_file
from ckpttools.storage.torchzip_check import check_torch_file

FLIPS = 300
ONE_WORKER = Resources(budget_bytes=1 << 20, workers=1)
SOURCES: dict[str, tuple[str, Target | str]] = {
    "gqa tp2 to tp1 pp2 dp4": ("gqa_tp2_pp1_dp2", Target(tp=1, pp=2, dp=4)),
    "tied to pp2": ("tied_tp1_pp1_dp2", Target(pp=2)),
    "fp32 tp2 to tp1 dp3": ("tied_tp2_pp1_dp1_fp32", Target(tp=1, dp=3)),
    "interleaved to pp1 dp3": ("deep_tp1_pp2_dp1_vpp2", Target(pp=1, dp=3)),
    "deep to interleaved": ("deep_tp1_pp1_dp2", Target(pp=2, vpp=2)),
    "gathered": ("gqa_tp1_pp1_dp2", "safetensors"),
    "gathered to zarr": ("gqa_tp1_pp1_dp2", "zarr"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A bit of a file: ``bit`` counts from the file's first one."""

    file: Path
    bit: int


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@contextmanager
def flipped(place: Place) -> Iterator[None]:
    """Flip a bit for the time being."""
    at, mask = place.bit // 8, 1 << place.bit % 8
    descriptor = os.open(place.file, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte[0] ^ mask]), at)
        try:
            yield
        finally:
            os.pwrite(descriptor, byte, at)
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module", params=SOURCES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, target = SOURCES[request.param]
    out = tmp_path_factory.mktemp("damage") / "out"
    if isinstance(target, str):
        api.gather(oracle.case(name).directory, out, to=target)
    else:
        api.reshard(oracle.case(name).directory, out, target=target)
    return out


def some_places(root: Path, seed: int, count: int) -> list[Place]:
    """Draw bits, equally many from each file."""
    rng = random.Random(seed)  # noqa: S311  # a repeatable draw
    files = files_of(root)
    return [
        Place(file, rng.randrange(8 * file.stat().st_size))
        for file in (files[i % len(files)] for i in range(count))
    ]


def owners(root: Path) -> dict[str, list[tuple[int, int, str]]]:
    """Return by safetensors file which tensor owns which bytes, as the library sees it."""
    table: dict[str, list[tuple[int, int, str]]] = {}
    for path in root.glob("*.safetensors"):
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        with safe_open(path, "pt") as file:
            for key in file.offset_keys():
                size = file.get_tensor(key).nbytes
                table.setdefault(path.name, []).append((start, start + size, key))
                start += size
    return table


def named(root: Path, place: Place, tensors: dict[str, list[tuple[int, int, str]]]) -> list[str]:
    """Return what a message about the place must mention: its file, or its tensor."""
    for start, stop, key in tensors.get(place.file.name, []):
        if start <= place.bit // 8 < stop:
            name = key.removeprefix("state.").rsplit(".", 1)
            return [f"{key} (weight)", f"{name[0]} ({name[-1]})"]
    path = place.file.relative_to(root)
    if path.parts[0] == "model" and "c" in path.parts:  # a chunk of a zarr array
        return [str(path), f"{path.parts[1]} (weight)"]
    if path.parts[0] == "optimizer" and "c" in path.parts:
        return [str(path), f"{path.parts[1]} ({path.parts[2]})"]
    return [str(path)]


@pytest.mark.parametrize("count", [60, pytest.param(FLIPS, marks=pytest.mark.soak)])
def test_every_one_of_many_flips_is_found_by_checksums_alone_and_named(
    result: Path, count: int
) -> None:
    assert api.verify(result, resources=ONE_WORKER).ok
    tensors = owners(result)
    for place in some_places(result, seed=1, count=count):
        with flipped(place):
            found = api.verify(result, cross_check=False, resources=ONE_WORKER)
        assert found.damage, place
        mentions = named(result, place, tensors)
        assert any(mention in found.damage[0] for mention in mentions), (place, found.damage)
    assert api.verify(result, resources=ONE_WORKER).ok


def test_flips_are_found_with_the_cross_check_too(result: Path) -> None:
    for place in some_places(result, seed=2, count=12):
        with flipped(place):
            assert api.verify(result, resources=ONE_WORKER).damage, place


def test_verify_of_a_flipped_file_exits_with_3_and_says_where(result: Path) -> None:
    sound = edit.run_cli("verify", result)
    assert (sound.code, sound.err.count("error")) == (0, 0)
    for place in some_places(result, seed=3, count=min(24, 2 * len(files_of(result)))):
        with flipped(place):
            outcome = edit.run_cli("verify", result)
        assert outcome.code == 3, (place, outcome)
        assert outcome.out.startswith("damaged: ")
        assert outcome.out.endswith("NOT OK\n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small result: a checkpoint of one layer, resharded."""
    root = tmp_path_factory.mktemp("tiny")
    api.reshard(edit.tiny(root / "src"), root / "out", target=Target(tp=2, dp=2))
    return root / "out"


@pytest.fixture(scope="module")
def tiny_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    api.gather(edit.tiny(root / "src"), root / "out")
    return root / "out"


def bits_outside_of_tensors(file: Path) -> list[int]:
    """Return every bit of a torch file that is in no storage's payload."""
    content = read_torch_file(file)
    covered = bytearray(file.stat().st_size)
    for storage in content.storages.values():
        offset, length = content.payload(storage)
        covered[offset : offset + length] = b"\1" * length
    return [8 * at + bit for at, taken in enumerate(covered) if not taken for bit in range(8)]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", [edit.MODEL, edit.OPTIMIZER])
def test_every_single_bit_of_a_torch_file_outside_of_tensors_is_checked(
    name: str, part: int, tiny: Path
) -> None:
    file = edit.rank_files(tiny, name)[1]
    bits = bits_outside_of_tensors(file)
    assert len(bits) > 8 * 1000
    for bit in bits[part::4]:
        with flipped(Place(file, bit)):
            assert check_torch_file(file), (name, bit)


@pytest.mark.parametrize("name", [edit.MODEL, edit.OPTIMIZER])
def test_a_bit_of_the_end_records_is_damage_for_verify_and_no_unknown_format(
    name: str, tiny: Path
) -> None:
    # Without them a zip archive isn't recognised at all.
    file = edit.rank_files(tiny, name)[0]
    size = file.stat().st_size
    for bit in range(8 * (size - 98), 8 * size, 7):
        with flipped(Place(file, bit)):
            found = api.verify(tiny, resources=ONE_WORKER)
        assert found.damage, bit
        assert str(file) in found.damage[0]


def test_every_single_bit_of_the_tracker_is_damage_and_never_an_unknown_format(
    tiny: Path,
) -> None:
    tracker = tiny / "latest_checkpointed_iteration.txt"
    for bit in range(8 * tracker.stat().st_size):
        with flipped(Place(tracker, bit)):
            outcome = edit.run_cli("verify", tiny)
        assert outcome.code == 3, (bit, outcome)
        assert tracker.name in outcome.out


def test_every_single_bit_of_a_state_file_is_refused() -> None:
    data = bytearray(
        serialize(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "step": 3.0,
                "tensors": {"a.weight": {"shape": [5, 3], "crc32c": "0badcafe"}},
                "not_carried": ["h\u00e9"],
            }
        )
    )
    assert parse(bytes(data), "f")["step"] == 3.0
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="^f: "):
            parse(bytes(data), "f")
        data[bit // 8] ^= 1 << bit % 8


def test_bits_all_over_the_state_file_of_a_result_are_damage(tiny_whole: Path) -> None:
    file = tiny_whole / STATE_FILE
    for bit in range(0, 8 * file.stat().st_size, 127):
        with flipped(Place(file, bit)):
            found = api.verify(tiny_whole, resources=ONE_WORKER)
        assert found.damage, bit
        assert file.name in found.damage[0]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_every_single_bit_of_a_safetensors_header_is_checked(name: str, tiny_whole: Path) -> None:
    file = tiny_whole / name
    size = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    stated = parse((tiny_whole / STATE_FILE).read_bytes(), "f")["headers"]
    assert isinstance(stated, dict)
    mine = {"headers": {name: stated[name]}}
    assert list(_headers(tiny_whole, mine)) == [name]
    for bit in range(8 * size):
        with flipped(Place(file, bit)), pytest.raises(FormatError, match=re.escape(str(file))):
            _headers(tiny_whole, mine)


def test_bits_all_over_an_object_of_a_whole_result_is_checked(tiny_whole: Path) -> None:
    file = tiny_whole / "objects" / "args.json"
    assert check_directory(tiny_whole) == []
    for bit in range(0, 8 * file.stat().st_size, 3):
        with flipped(Place(file, bit)):
            assert check_directory(tiny_whole), bit


def test_damage_in_the_state_file_or_a_header_is_exit_code_3(tiny_whole: Path) -> None:
    for file in files_of(tiny_whole):
        for bit in (0, 7, 100, 8 * 60 + 3):
            with flipped(Place(file, bit)):
                outcome = edit.run_cli("verify", tiny_whole)
            assert outcome.code == 3, (file, bit, outcome)


@pytest.mark.parametrize("length", [0, 1, 500, -100, -22, -1])
def test_a_file_that_is_cut_short_is_damage(length: int, tmp_path: Path) -> None:
    root = edit.tiny(tmp_path / "src")
    for name in (edit.MODEL, edit.OPTIMIZER):
        (file,) = edit.rank_files(root, name)
        data = file.read_bytes()
        file.write_bytes(data[:length])
        outcome = edit.run_cli("verify", root)
        assert outcome.code == 3
        assert str(file) in outcome.out
        file.write_bytes(data)


def test_bytes_behind_the_end_of_a_file_are_damage(tiny_whole: Path, tiny: Path) -> None:
    for root in (tiny, tiny_whole):
        for file in files_of(root):
            data = file.read_bytes()
            file.write_bytes(data + b"\0")
            assert edit.run_cli("verify", root).code == 3, file
            file.write_bytes(data)


def test_a_file_that_is_gone_is_damage(tiny_whole: Path, tiny: Path) -> None:
    for root in (tiny, tiny_whole):
        for file in files_of(root):
            if file.name == STATE_FILE:  # then nothing says that this was ours
                continue
            data = file.read_bytes()
            file.unlink()
            outcome = edit.run_cli("verify", root)
            assert outcome.code == 3, (file, outcome)
            assert file.name in outcome.out
            file.write_bytes(data)
