"""A native directory in which anything has changed is refused, and the place is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import CkptError, EvidenceError, FormatError, StorageError
from ckpttools.formats.native import Zero1Format
from ckpttools.formats.native.manifest_file import parse_manifest
from ckpttools.storage.sealed_json import serialize

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture in the native form; not to be changed."""
    path = tmp_path_factory.mktemp("native") / "out"
    source = oracle.case("tied_tp1_pp1_dp2").directory
    api.reshard(source, path, to="zero1", target=Target(tp=2, pp=2, dp=1))
    return path


@pytest.fixture
def copy(native: Path, tmp_path: Path) -> Path:
    """A native directory that may be changed."""
    return Path(shutil.copytree(native, tmp_path / "copy"))


def change_manifest(path: Path, change: Change) -> None:
    """Change ``manifest.json`` and sign it anew, as a forger would."""
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_bytes(serialize(document))


def test_a_sound_directory_has_no_problem(native: Path) -> None:
    assert Zero1Format().check(native) == []
    assert api.verify(native).ok


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_bit_anywhere_stays_unseen(native: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(native.iterdir())), label="file")
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1), label="byte")
    flipped = bytearray(content)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    try:
        path.write_bytes(flipped)
        problems = Zero1Format().check(native)
    finally:
        path.write_bytes(content)
    assert len(problems) == 1
    assert path.name in str(problems[0])


def test_a_flipped_bit_of_the_payload_is_named_by_its_key(copy: Path) -> None:
    path = copy / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = api.verify(copy)
    assert not found.ok
    assert re.search(r"rank-00001.*: 0-bfloat16\.1\.weight: CRC-32 must be", found.damage[0])


def test_a_weight_that_is_not_its_master_rounded_is_refused_even_if_it_is_signed(
    copy: Path,
) -> None:
    from ckpttools.storage.crc import crc32
    from ckpttools.storage.safetensors_header import read_header

    path = copy / "rank-00000.safetensors"
    stored = {t.key: t for t in read_header(path).tensors}["0-bfloat16.0.weight"]
    content = bytearray(path.read_bytes())
    content[stored.offset + 1] ^= 0x40
    path.write_bytes(content)
    crc = crc32(bytes(content[stored.offset : stored.offset + stored.length]))

    def change(document: dict[str, Any]) -> None:
        document["files"][path.name]["crc32"][stored.key] = f"{crc:08x}"

    change_manifest(copy, change)
    assert Zero1Format().check(copy) == []
    with pytest.raises(EvidenceError, match="must be its master rounded to bfloat16, got 1 of"):
        api.open_checkpoint(copy)


def set_entry(*path: str | int, value: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        inside: Any = document
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


def remove(*path: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        inside: Any = document
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]

    return change


RANK = "rank-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_entry("format", value="other"), "format must be 'ckpttools-sharded', got another"),
        (set_entry("format_version", value=2), "format_version must be 1, got 2"),
        (set_entry("format_version", value=True), "format_version must be 1, got True"),
        (set_entry("kind", value="zero2"), "kind must be zero1, got 'zero2'"),
        (
            set_entry("layout", "kind", value="zero2"),
            "layout: must have kind, .*, fixed, fills, got kind, ",
        ),
        (remove("carried"), "got a difference: .*carried"),
        (set_entry("extra", value=1), "got a difference: .*extra"),
        (set_entry("layout", value=[]), "layout: must have kind, .*, got list"),
        (set_entry("layout", "topology", "dp", value=1 << 60), "a file of each of"),
        (set_entry("layout", "topology", "dp", value=0), "topology: dp must be at least 1, got 0"),
        (
            set_entry("layout", "topology", "vpp", value=1 << 60),
            "a model chunk for each of 2 stages",
        ),
        (
            set_entry("layout", "params", 0, "shape", value=[1] * 40),
            "at most 32 dimensions, got 40",
        ),
        (
            set_entry("layout", "params", 1, "shape", value=[1 << 61, 1 << 61]),
            "must hold .* by the layout",
        ),
        (set_entry("layout", "variant", value="core-0.7"), "must hold .* by the layout, got"),
        (set_entry("layout", "busbw", value=True), "must hold .* by the layout, got"),
        (set_entry("files", value=[]), "files must be an object"),
        (remove("files", RANK), "a file of each of 4 ranks, got 3"),
        (
            set_entry("files", "rank-00009.safetensors", value={}),
            "must have header_sha256 and crc32",
        ),
        (set_entry("files", RANK, "header_sha256", value="0" * 64), "must have the SHA-256 0000"),
        (set_entry("files", RANK, "header_sha256", value=7), "must be 64 hexadecimal digits"),
        (
            set_entry("files", RANK, "crc32", value={}),
            "crc32 must be there for each key, got others",
        ),
        (set_entry("files", RANK, "crc32", value={"a": "x"}), "must map keys to eight hexadecimal"),
        (set_entry("objects", value=[]), "objects must be an object"),
        (set_entry("objects", "pickle", value=1), "objects: entries must be .*, got 'pickle'"),
        (
            set_entry("objects", "step", value={"map": {"w": "x"}}),
            "step: must be a number, got 'x'",
        ),
        (set_entry("objects", "step", value={"eval": 1}), "must be plain or have a known tag"),
        (set_entry("objects", "param_groups", value={}), "param_groups: must be a list"),
        (set_entry("objects", "param_groups", value=[1]), r"param_groups\[0\]: must have settings"),
        (
            set_entry("objects", "param_groups", 0, "params", value=[1]),
            r"param_groups\[0\]: params must be names",
        ),
        (set_entry("carried", value=1), "carried must be an object"),
    ],
)
def test_a_forged_manifest_is_refused_with_its_place(
    copy: Path, change: Change, message: str
) -> None:
    change_manifest(copy, change)
    with pytest.raises(FormatError, match=message):
        Zero1Format().read(copy, api.ReadOptions())
    if "objects" not in message and "param_groups" not in message:
        assert api.verify(copy, format="zero1").ok is False


def test_a_newer_version_is_refused_with_its_number_and_a_hint(copy: Path) -> None:
    change_manifest(copy, set_entry("format_version", value=7))
    with pytest.raises(FormatError, match="got 7") as raised:
        api.open_checkpoint(copy)
    assert raised.value.hint == "a newer ckpttools wrote it"


def test_a_file_that_is_listed_too_often_is_refused(copy: Path) -> None:
    entry = json.loads((copy / "manifest.json").read_text())["files"][RANK]
    change_manifest(copy, set_entry("files", "rank-00004.safetensors", value=entry))
    with pytest.raises(FormatError, match="list the 4 files .*, got 'rank-00004.* listed"):
        api.open_checkpoint(copy)


def missing(path: Path) -> None:
    (path / RANK).unlink()


def one_more(path: Path) -> None:
    shutil.copy(path / RANK, path / "rank-00007.safetensors")


def shorter(path: Path) -> None:
    with (path / RANK).open("r+b") as file:
        file.truncate((path / RANK).stat().st_size - 1)


def longer(path: Path) -> None:
    with (path / RANK).open("ab") as file:
        file.write(b"\0")


def swapped(path: Path) -> None:
    (path / RANK).rename(path / "x")
    (path / "rank-00000.safetensors").rename(path / RANK)
    (path / "x").rename(path / "rank-00000.safetensors")


def rewritten(path: Path) -> None:
    tensors = load_file(path / RANK)
    save_file({"other": torch.zeros(3), **tensors}, path / RANK)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, f"{RANK}: every rank's file must be there, got none"),
        (one_more, "rank-00007.safetensors: must not be there, got a file of another layout"),
        (shorter, f"{RANK}: must have .* bytes, got"),
        (longer, f"{RANK}: must have .* bytes, got"),
        (swapped, "the header must have the SHA-256"),
        (rewritten, f"{RANK}: the header must have the SHA-256"),
    ],
)
def test_files_that_are_not_those_of_the_manifest_are_refused(
    copy: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(copy)
    with pytest.raises(FormatError, match=message):
        api.open_checkpoint(copy)
    found = api.verify(copy)
    assert any(re.search(message, line) for line in found.damage)


def test_other_files_beside_are_passed_over(copy: Path) -> None:
    (copy / "notes.txt").write_text("mine")
    assert api.verify(copy).ok


def test_a_directory_without_manifest_is_of_no_known_format(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    with pytest.raises(CkptError, match="must be of exactly one known format, got none"):
        api.open_checkpoint(copy)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        api.open_checkpoint(copy, format="zero1")


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_bytes_that_are_no_manifest_are_a_clear_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="^here: "):
        parse_manifest(data, kind="zero1", where="here")


def test_a_key_that_stands_twice_in_the_json_is_a_changed_byte(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"kind"', '"kind": "zero1",\n "kind"', 1))
    with pytest.raises(FormatError, match="must have the SHA-256 that it states"):
        api.open_checkpoint(copy)
