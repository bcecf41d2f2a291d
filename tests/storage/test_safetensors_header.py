"""Headers must be what the safetensors library writes and reads, and hostile ones are refused."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, StorageError
from ckpttools.storage import safetensors_header
from ckpttools.storage.safetensors_header import build_header, read_header

TENSORS = {
    "b": torch.arange(15, dtype=torch.float32).reshape(3, 5),
    "a": torch.arange(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(9, dtype=torch.int64),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
    "é.ß": torch.tensor([True, False, True]),
}


def write(path: Path, table: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file around a header, whatever it says."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(
    kind: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


# --- against the library -------------------------------------------------------------------------


def test_a_file_of_the_library_is_found_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.size_bytes == len(data)
    assert data.startswith(header.raw)
    assert {t.key for t in header.tensors} == set(TENSORS)
    for stored in header.tensors:
        tensor = TENSORS[stored.key]
        assert stored.shape == tuple(tensor.shape)
        assert f"torch.{stored.dtype}" == str(tensor.dtype)
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[stored.offset : stored.offset + stored.length] == expected


def test_the_library_reads_what_we_build(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    specs = [
        (key, dtype(str(t.dtype).removeprefix("torch.")), tuple(t.shape))
        for key, t in TENSORS.items()
    ]
    raw, offsets = build_header(specs, {"format": "pt", "note": "ünïcode"})
    size = len(raw) + sum(t.nbytes for t in TENSORS.values())
    data = bytearray(size)
    data[: len(raw)] = raw
    for key, tensor in TENSORS.items():
        payload = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        data[offsets[key] : offsets[key] + len(payload)] = payload
    path.write_bytes(data)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for key, tensor in loaded.items():
        assert tensor.dtype == TENSORS[key].dtype
        assert torch.equal(tensor, TENSORS[key])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ünïcode"}
    ours = read_header(path)
    assert {t.key: t.offset for t in ours.tensors} == offsets
    assert len(raw) % 8 == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=5,
        unique_by=lambda t: t[0],
    )
)
def test_what_is_built_is_read_again(
    tmp_path: Path, specs: list[tuple[str, str, tuple[int, ...]]]
) -> None:
    raw, offsets = build_header([(key, dtype(kind), shape) for key, kind, shape in specs], {})
    size = sum(int(np.prod(shape)) * dtype(kind).itemsize for _, kind, shape in specs)
    (tmp_path / "f").write_bytes(raw + bytes(size))
    header = read_header(tmp_path / "f")
    assert header.raw == raw
    found = [(t.key, t.dtype.name, t.shape) for t in header.tensors]
    assert found == specs
    assert {t.key: t.offset for t in header.tensors} == offsets


# --- hostile and damaged files -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "data", "message"),
    [
        (b"{", b"", "the header must fit in the file of 9 bytes, got a length of 1"),
        (b"[]", b"", "the header must be a JSON object, got list"),
        (b"{a}", b"", "the header must be JSON, got Expecting property name"),
        (b"\xff\xff", b"", "the header must be JSON, got 'utf-8' codec"),
        (b"[" * 100_000, b"", "the header must be JSON, got "),
        (b'{"a": 1, "a": 1}', b"", "header keys must be there once, got one twice"),
        ({"a": 1}, b"", "a: must have data_offsets, dtype, shape, got int"),
        ({"a": {**entry(), "x": 1}}, b"", "shape, got data_offsets, dtype, shape, x"),
        ({"a": {"dtype": "F32"}}, b"", "a: must have data_offsets, dtype, shape, got dtype"),
        ({"a": entry("F33")}, bytes(8), "a: dtype must be one of F64, F32, "),
        ({"a": entry(["F32"])}, bytes(8), "got ['F32']"),
        ({"a": entry(shape=[-2])}, bytes(8), "a: shape and data_offsets must be natural numbers"),
        ({"a": entry(shape=[2.0])}, bytes(8), "a: shape and data_offsets must be natural numbers"),
        ({"a": entry(shape=[True, 2])}, bytes(8), "a: shape and data_offsets must be natural"),
        ({"a": entry(shape=[1 << 62, 4])}, bytes(8), "a: shape and data_offsets must be natural"),
        ({"a": entry(shape=[1 << 61] * 40)}, bytes(8), " must take "),
        ({"a": entry(offsets=[0, 8, 8])}, bytes(8), "a: shape and data_offsets must be natural"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "a: float32 (2,) must take 8 bytes, got -8"),
        ({"a": entry(offsets=[0, 4])}, bytes(8), "a: float32 (2,) must take 8 bytes, got 4"),
        ({"a": entry(offsets=[4, 12])}, bytes(12),
         "a: data must follow on without gap or overlap at 0, got 4"),
        ({"a": entry(), "b": entry()}, bytes(8),
         "b: data must follow on without gap or overlap at 8, got 0"),
        ({"a": entry()}, bytes(7), " bytes, got "),
        ({"a": entry()}, bytes(9), " bytes, got "),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map text to text, got {'a': 1}"),
        ({"__metadata__": []}, b"", "__metadata__ must map text to text, got []"),
    ],
)  # fmt: skip
def test_a_file_that_breaks_a_rule_is_refused_as_the_library_does(
    tmp_path: Path, table: object, data: bytes, message: str
) -> None:
    path = write(tmp_path / "f", table, data)
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    if "there once" not in message:  # there the library takes the last one
        with pytest.raises(SafetensorError), safe_open(path, "np"):
            pass


@pytest.mark.parametrize("length", [0, 1, 3, 1 << 40, (1 << 64) - 1])
def test_a_header_length_outside_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "f", b"{}", length=length)
    message = f"{path}: the header must fit in the file of 10 bytes, got a length of {length}"
    with pytest.raises(FormatError, match=re.escape(message)):
        read_header(path)


def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234567")
    with pytest.raises(FormatError, match="must fit in the file of 7 bytes, got a length of -1"):
        read_header(tmp_path / "f")


def test_a_header_longer_than_the_library_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert safetensors_header.MAX_HEADER_BYTES == 100_000_000
    specs = [("a", dtype("float32"), (2,))]
    raw, _ = build_header(specs, {})
    (tmp_path / "f").write_bytes(raw + bytes(8))
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", len(raw) - 9)
    with pytest.raises(FormatError, match="the header must fit in the file"):
        read_header(tmp_path / "f")
    message = f"header: must be at most {len(raw) - 9} bytes, got {len(raw) - 8}"
    with pytest.raises(FormatError, match=re.escape(message)):
        build_header(specs, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    message = f"{tmp_path / 'no'}: can't read it: No such file or directory"
    with pytest.raises(StorageError, match=re.escape(message)):
        read_header(tmp_path / "no")
    with pytest.raises(StorageError, match="can't read it: Is a directory"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "a"], "header: keys must be unique and not __metadata__, got 'a' again"),
        (["__metadata__"], "header: keys must be unique and not __metadata__, got '__metadata__'"),
        (["\ud800"], "header: keys must be valid Unicode, got "),
    ],
)
def test_keys_that_a_header_cannot_hold_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        build_header([(key, dtype("float32"), (1,)) for key in keys], {})
