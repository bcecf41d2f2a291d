"""Whole tensors as a zarr group: what plain zarr reads there is what the live run held.

The suite turns warnings into errors, so zarr has none to give, neither when it writes nor when it
reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import megatron_edit as edit
import numpy as np
import oracle_megatron as oracle
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from whole_tensors import CHUNK, EDGES, whole

from ckpttools import api
from ckpttools.dtypes import BY_NAME, dtype
from ckpttools.errors import UsageError
from ckpttools.formats.consolidated import zarr_store
from ckpttools.formats.consolidated.zarr_store import array_layout, chunk_rows
from ckpttools.manifest import WEIGHT, TensorSpec

SLOTS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
FIXTURE = oracle.case("gqa_tp2_pp2_dp1")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_store, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def store(tmp_path: Path, small_chunks: None) -> Path:
    """Tensors with all kinds of shapes in many chunks."""
    del small_chunks
    api.gather(whole(tmp_path / "whole", EDGES), tmp_path / "store", to="zarr")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture's store; not to be changed."""
    path = tmp_path_factory.mktemp("zarr") / "store"
    api.gather(FIXTURE.directory, path, to="zarr")
    return path


def path_of(name: str, slot: str) -> str:
    return f"model/{name}" if slot == WEIGHT else f"optimizer/{name}/{slot}"


def arrays(root: Path) -> dict[str, Any]:
    """Return every array of a store by its path, as plain zarr finds them."""
    group = zarr.open_group(root, mode="r")
    return {path: node for path, node in group.members(None) if isinstance(node, zarr.Array)}


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_holds(root: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Plain zarr must find these tensors and no others, bit for bit."""
    found = arrays(root)
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        array, kind = found[path], str(tensor.dtype).removeprefix("torch.")
        assert array.attrs["ckpttools_dtype"] == kind
        stored = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
        assert (array.dtype, array.shape) == (stored.get(kind, kind), tensor.shape), path
        assert np.asarray(array[...]).tobytes() == bytes_of(tensor), path


# --- content ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_plain_zarr_reads_what_the_live_run_held(case: oracle.Case, tmp_path: Path) -> None:
    api.gather(case.directory, tmp_path / "out", to="zarr")
    truth = oracle.logical_rows(case.truth_tensors(), case.model["vocab_size"])
    expected = {}
    for key, tensor in truth.items():
        part, name = key.split("/", 1)
        expected[path_of(name, SLOTS.get(part, WEIGHT))] = tensor
    assert_holds(tmp_path / "out", expected)


def test_every_dtype_and_shape_comes_back_bit_for_bit(store: Path) -> None:
    assert_holds(store, {path_of(*key): tensor for key, tensor in EDGES.items()})
    assert arrays(store)["model/scalar"].shape == ()
    assert set(BY_NAME) == {str(t.dtype).removeprefix("torch.") for t in EDGES.values()}


def test_arrays_are_plain_uncompressed_and_in_whole_rows(real: Path) -> None:
    for path, array in arrays(real).items():
        meta = json.loads((real / path / "zarr.json").read_text())
        assert meta["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}]
        assert meta["fill_value"] == 0
        assert array.chunks[1:] == array.shape[1:]


def test_the_attributes_say_what_state_json_says(real: Path, tmp_path: Path) -> None:
    api.gather(FIXTURE.directory, tmp_path / "out")
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    attributes = dict(zarr.open_group(real, mode="r").attrs)
    container = ("tensors", "headers", "files", "sha256")
    assert {k: v for k, v in attributes.items() if k not in container} == {
        k: v for k, v in state.items() if k not in container
    }
    by_key = {(e["name"], e["slot"]): e for e in state["tensors"].values()}
    for path, entry in attributes["tensors"].items():
        other = by_key.pop((entry["name"], entry["slot"]))
        assert path == entry["file"] == path_of(entry["name"], entry["slot"])
        assert all(entry[key] == other[key] for key in ("dtype", "shape", "crc32c"))
    assert by_key == {}


def test_objects_are_groups_with_attributes(real: Path, tmp_path: Path) -> None:
    api.gather(FIXTURE.directory, tmp_path / "out")
    objects = zarr.open_group(real, mode="r")["objects"]
    assert isinstance(objects, zarr.Group)
    files = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out" / "objects").iterdir()}
    assert {name: dict(node.attrs) for name, node in objects.members()} == files
    assert files["args"]["num_layers"] == 2


# --- chunks -----------------------------------------------------------------------------------


def chunk_files(root: Path) -> set[str]:
    found = (path for path in root.rglob("*") if path.is_file() and path.name != "zarr.json")
    return {str(path.relative_to(root)) for path in found}


def chunks_of(path: str, array: Any) -> Iterator[str]:
    """Yield the paths of an array's chunks by its own account, in zarr's default encoding."""
    for place in product(*map(range, array.cdata_shape)):
        yield "/".join([path, "c", *map(str, place)])


@pytest.mark.parametrize("name", ["store", "real"])
def test_every_chunk_has_a_file_all_zero_ones_too_and_there_is_no_other(
    name: str, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(name)
    found = arrays(root)
    assert chunk_files(root) == {f for path, a in found.items() for f in chunks_of(path, a)}
    for array in found.values():
        assert array.nchunks_initialized == array.nchunks


def test_many_chunks_are_many_and_as_large_as_asked_for(store: Path) -> None:
    found = arrays(store)
    assert found["model/zeros"].cdata_shape == (4, 1)
    assert (found["model/ragged"].chunks, found["model/ragged"].nchunks) == ((4, 3), 3)
    assert (found["model/whole"].chunks, found["model/whole"].nchunks) == ((4, 3), 3)
    assert (found["model/wide"].chunks, found["model/wide"].nchunks) == ((1, 101), 3)
    assert (found["model/scalar"].chunks, found["model/scalar"].nchunks) == ((), 1)
    assert [found[f"model/{name}"].nchunks for name in ("empty", "no_rows", "no_columns")] == [
        0
    ] * 3
    assert (store / "model/zeros/c/1/0").read_bytes() == bytes(48)


def test_a_last_chunk_of_fewer_rows_is_filled_up_with_zeros(store: Path) -> None:
    ragged = EDGES["ragged", WEIGHT]
    last = (store / "model/ragged/c/2/0").read_bytes()
    assert last == bytes_of(ragged[8:]) + bytes(12)


@given(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(sorted(BY_NAME)),
    st.integers(1, 300),
)
def test_rows_of_a_chunk_fit_and_divide_where_that_costs_less_than_half(
    shape: tuple[int, ...], kind: str, limit: int
) -> None:
    spec = TensorSpec("a", WEIGHT, dtype(kind), shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_store, "CHUNK_BYTES", limit)
        rows = chunk_rows(spec)
        boxes = [box for _, box in array_layout(spec).chunks()]
    assert sum(box.numel for box in boxes) == spec.numel
    if not spec.numel or not shape:
        assert rows == 1
        return
    row_bytes = spec.size_bytes // shape[0]
    most = max(1, min(shape[0], limit // row_bytes))
    divisors = [n for n in range(most // 2 + 1, most + 1) if shape[0] % n == 0]
    assert rows == max(divisors, default=most)
    assert len(boxes) == -(-shape[0] // rows)
    assert all(box.offsets[0] == i * rows for i, box in enumerate(boxes))


def test_a_store_with_chunks_of_another_size_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert zarr_store.CHUNK_BYTES > CHUNK
    assert api.verify(store, against=store.parent / "whole").ok


# --- against the other forms ------------------------------------------------------------------


def test_both_forms_and_the_source_have_one_content(real: Path, tmp_path: Path) -> None:
    api.gather(FIXTURE.directory, tmp_path / "out")
    for a, b in (
        (real, tmp_path / "out"),
        (tmp_path / "out", real),
        (real, FIXTURE.directory),
        (FIXTURE.directory, real),
    ):
        result = api.verify(a, against=b, require=frozenset({"optimizer"}))
        assert result.ok, result
        assert f"content equals {b}" in result.checked
    assert (
        api.digest(real)[0] == api.digest(tmp_path / "out")[0] == api.digest(FIXTURE.directory)[0]
    )
    found = api.inspect(real)
    assert (found["format"], found["iteration"], found["step"]) == ("zarr", 3, 3.0)


def test_from_one_form_to_the_other_and_back_nothing_is_lost(store: Path, tmp_path: Path) -> None:
    api.gather(store, tmp_path / "again")
    api.gather(tmp_path / "again", tmp_path / "store2", to="zarr")
    assert_holds(tmp_path / "store2", {path_of(*key): tensor for key, tensor in EDGES.items()})
    assert api.digest(tmp_path / "store2")[0] == api.digest(tmp_path / "whole")[0]


def test_a_difference_between_the_forms_exits_3_and_names_the_tensor(
    tmp_path: Path, small_chunks: None
) -> None:
    del small_chunks
    other = {**EDGES, ("ragged", "exp_avg"): EDGES["ragged", "exp_avg"].clone()}
    changed = other["ragged", "exp_avg"].view(torch.int32)
    changed[9, 2] ^= 1
    api.gather(whole(tmp_path / "a", EDGES), tmp_path / "store", to="zarr")
    whole(tmp_path / "b", other)
    for sides in (("store", "b"), ("b", "store")):
        src, against = (tmp_path / side for side in sides)
        outcome = edit.run_cli("verify", src, "--against", against)
        assert outcome.code == 3
        line = "differs: ragged (exp_avg): 1 of 33 elements differ, first at [9, 2]"
        assert line in outcome.out.splitlines()


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b", "/a", "", ".a", "..", "__a", "a\0b"])
def test_a_name_that_can_be_no_path_is_refused(name: str) -> None:
    for spec, piece in (
        (TensorSpec(name, WEIGHT, dtype("int8"), (1,)), name),
        (TensorSpec("a", name, dtype("int8"), (1,)), name),
    ):
        with pytest.raises(UsageError, match="a zarr path must be plain names, got ") as caught:
            array_layout(spec)
        assert str(caught.value).endswith(repr(piece))


def test_without_zarr_writing_is_refused_at_once_and_reading_goes_on(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(UsageError, match="^--to zarr: needs the package zarr, got ") as caught:
        api.gather(FIXTURE.directory, tmp_path / "out", to="zarr")
    assert caught.value.hint == "pip install 'ckpttools[zarr]'"
    assert list(tmp_path.iterdir()) == []
    assert api.verify(real).ok
    assert api.gather(real, tmp_path / "out").dst_format == "safetensors"


def test_a_topology_is_refused(tmp_path: Path) -> None:
    message = "^--to zarr: whole tensors have no topology, got sizes for one$"
    with pytest.raises(UsageError, match=message):
        api.reshard(FIXTURE.directory, tmp_path / "out", to="zarr", target=api.Target(tp=2))
    assert list(tmp_path.iterdir()) == []
