"""No byte of a zarr store that we wrote is unwatched, and no forged attributes are believed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_edit as edit
import pytest
from whole_tensors import CHUNK, EDGES, whole

from ckpttools import api
from ckpttools.errors import CkptError
from ckpttools.formats.consolidated import zarr_store
from ckpttools.formats.consolidated.zarr_read import check_store
from ckpttools.formats.consolidated.zarr_write import serialize_root
from ckpttools.storage.sealed_json import sealed


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tensors with all kinds of shapes in many chunks."""
    monkeypatch.setattr(zarr_store, "CHUNK_BYTES", CHUNK)
    api.gather(whole(tmp_path / "whole", EDGES), tmp_path / "store", to="zarr")
    return tmp_path / "store"


def assert_damaged(root: Path, *mentions: str) -> None:
    """Verify exits with 3 and its first line names one of these."""
    outcome = edit.run_cli("verify", root)
    assert outcome.code == 3, outcome
    first = outcome.out.splitlines()[0]
    assert first.startswith("damaged: ")
    assert any(mention in first for mention in mentions), first


@pytest.mark.parametrize(
    "name",
    ["model/zeros/c/1/0", "model/ragged/c/2/0", "model/scalar/c", "optimizer/ragged/exp_avg/c/0/0"],
)
def test_a_chunk_that_is_missing_or_of_another_size_is_damage(name: str, store: Path) -> None:
    data = (store / name).read_bytes()
    (store / name).unlink()
    assert_damaged(store, name)
    for other in (b"", data[:-1], data + b"\0"):
        (store / name).write_bytes(other)
        assert_damaged(store, name)
    (store / name).write_bytes(data)
    assert edit.run_cli("verify", store).code == 0


def test_bits_all_over_a_ragged_chunk_are_watched_its_filling_too(store: Path) -> None:
    name = "model/ragged/c/2/0"
    data = bytearray((store / name).read_bytes())
    for bit in {*range(0, 8 * len(data), 11), *range(8 * 35, 8 * 37), 8 * len(data) - 1}:
        data[bit // 8] ^= 1 << bit % 8
        (store / name).write_bytes(data)
        found = api.verify(store)
        mention = name if bit >= 8 * 36 else "ragged (weight): CRC-32C must be "
        assert mention in found.damage[0], bit
        data[bit // 8] ^= 1 << bit % 8
    (store / name).write_bytes(data)
    assert api.verify(store).ok
    data[-1] = 1
    (store / name).write_bytes(data)
    assert_damaged(store, f"{name}: bytes from 36 on must be zero, got others")


@pytest.mark.parametrize("name", ["zarr.json", "model/zarr.json", "model/ragged/zarr.json"])
def test_every_byte_of_the_metadata_is_watched(name: str, store: Path) -> None:
    place = store / name
    data = bytearray(place.read_bytes())
    step = max(1, len(data) // 200)
    for at in range(0, len(data), step):
        data[at] ^= 1
        place.write_bytes(data)
        (problem, *_) = check_store(store)
        assert "zarr.json" in str(problem), at
        data[at] ^= 1
    place.write_bytes(data + b"\n")
    assert_damaged(store, name)
    place.write_bytes(data)
    assert check_store(store) == []


def test_metadata_that_is_missing_is_damage(store: Path) -> None:
    (store / "optimizer/ragged/zarr.json").unlink()
    assert_damaged(store, "optimizer/ragged/zarr.json")


def forge(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the attributes of the root and sign them anew, as a forger would."""
    node = json.loads((root / "zarr.json").read_text())
    change(node["attributes"])
    node["attributes"] = sealed(node["attributes"])
    (root / "zarr.json").write_bytes(serialize_root(node))


RAGGED = "model/ragged"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "format must be 'ckpttools-consolidated'"),
        (lambda d: d.update(format_version=2), "format_version must be 1, got 2"),
        (lambda d: d.update(tensors=[]), "tensors must be an object, got []"),
        (lambda d: d["tensors"].update({RAGGED: 5}), f"{RAGGED}: must be an object, got 5"),
        (lambda d: d["tensors"][RAGGED].update(shape=[-1]), "shape must be natural numbers, got"),
        (lambda d: d["tensors"][RAGGED].update(shape=[True]), "shape must be natural numbers, got"),
        (lambda d: d["tensors"][RAGGED].update(shape=[10**15, 3]), f"{RAGGED}/c/3/0: a chunk must"),
        (lambda d: d["tensors"][RAGGED].update(shape=[11, 10**9]), f"{RAGGED}/c/0/0: must have"),
        (lambda d: d["tensors"][RAGGED].update(chunk_rows=0), "chunk_rows must be a size, got 0"),
        (lambda d: d["tensors"][RAGGED].update(chunk_rows=5), f"{RAGGED}/c/0/0: must have 60 byte"),
        (lambda d: d["tensors"][RAGGED].update(name=None), "must have a name and a slot, got None"),
        (lambda d: d["tensors"][RAGGED].update(name="x"), "must be model/x, got another path"),
        (lambda d: d["tensors"][RAGGED].update(name="../x"), "a zarr path must be plain names"),
        (lambda d: d["tensors"][RAGGED].update(dtype="float7"), "dtype must be one of float64"),
        (lambda d: d["tensors"][RAGGED].pop("dtype"), "dtype must be one of float64"),
        (lambda d: d["tensors"][RAGGED].update(crc32c="-1"), "must be eight hexadecimal digits"),
        (lambda d: d["tensors"].update({"model/y": d["tensors"][RAGGED]}), "got another path"),
        (lambda d: d["files"].update({"../x": ""}), "files must lie in the directory, got '../x'"),
    ],
)
def test_forged_attributes_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, store: Path
) -> None:
    forge(store, change)
    with pytest.raises(CkptError, match=re.escape(message)):
        api.digest(store)
    assert edit.run_cli("verify", store).code in (1, 3)
