"""Where are the tensors of a safetensors file? The header, read and built with byte offsets.

A file is an 8-byte little-endian length, that many bytes of JSON (padded with spaces), then the
data section, which the tensors fill without gaps. The ``safetensors`` library gives values but no
offsets; it is the oracle in the tests. Source: the format section of its README.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckpttools.dtypes import BY_SAFETENSORS, DType
from ckpttools.errors import FormatError, StorageError

MAX_HEADER_BYTES = 100_000_000
"""The library refuses longer headers."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file; ``offset`` counts bytes from the start of the file."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header's raw bytes (length included), its tensors and the file's size."""

    raw: bytes
    tensors: tuple[StoredTensor, ...]
    size_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Read a file's header.

    Raises:
        FormatError: it breaks a rule of the format.
        StorageError: it can't be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH.size)
            length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH.size):
                raise FormatError(
                    f"{path}: the header must fit in the file of {size} bytes, got a length of "
                    f"{length}"
                )
            text = file.read(length)
    except OSError as error:
        raise StorageError(f"{path}: can't read it: {error.strerror or error}") from error
    table = _table(text, path)
    start = _LENGTH.size + length
    tensors = [_tensor(k, v, start, path) for k, v in table.items() if k != _METADATA]
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.length)):
        if tensor.offset != end:
            raise FormatError(
                f"{path}: {tensor.key}: data must follow on without gap or overlap at "
                f"{end - start}, got {tensor.offset - start}"
            )
        end += tensor.length
    if end != size:
        raise FormatError(f"{path}: must have {end} bytes, got {size}")
    return SafetensorsHeader(prefix + text, tuple(tensors), size)


def build_header(
    tensors: Sequence[tuple[str, DType, tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
) -> tuple[bytes, dict[str, int]]:
    """Return a header for these tensors in this order, and where in the file each will start.

    The first one starts at a multiple of ``alignment`` bytes; 8 is the least that readers expect.

    Raises:
        FormatError: a key is there twice, reserved or not text that UTF-8 can hold, or the header
            would be longer than the library reads.
    """
    table: dict[str, object] = {_METADATA: dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for key, dtype, shape in tensors:
        if key in table:
            raise FormatError(f"header: keys must be unique and not {_METADATA}, got {key!r} again")
        length = prod(shape) * dtype.itemsize
        table[key] = {
            "dtype": dtype.safetensors,
            "shape": list(shape),
            "data_offsets": [end, end + length],
        }
        offsets[key] = end
        end += length
    try:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"header: keys must be valid Unicode, got {error.object!r:.60}") from None
    text += b" " * (-(_LENGTH.size + len(text)) % alignment)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"header: must be at most {MAX_HEADER_BYTES} bytes, got {len(text)}")
    start = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, {key: start + at for key, at in offsets.items()}


def _table(text: bytes, path: Path) -> dict[str, object]:
    """Parse the JSON, refusing keys that are there twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise FormatError(f"{path}: header keys must be there once, got one twice")
        return table

    try:
        table = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: the header must be JSON, got {error}") from error
    if not isinstance(table, dict):
        raise FormatError(f"{path}: the header must be a JSON object, got {type(table).__name__}")
    metadata = table.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{path}: {_METADATA} must map text to text, got {metadata!r:.60}")
    return table


def _tensor(key: str, value: object, start: int, path: Path) -> StoredTensor:
    """Check one entry of the header."""
    fields: dict[str, object] = value if isinstance(value, dict) else {}
    name, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    if fields.keys() != _FIELDS:
        raise FormatError(
            f"{path}: {key}: must have {', '.join(sorted(_FIELDS))}, got "
            f"{', '.join(sorted(fields)) or type(value).__name__}"
        )
    if not isinstance(name, str) or name not in BY_SAFETENSORS:
        raise FormatError(
            f"{path}: {key}: dtype must be one of {', '.join(BY_SAFETENSORS)}, got {name!r}"
        )
    sizes, ends = _naturals(shape), _naturals(offsets)
    if sizes is None or ends is None or len(ends) != 2:
        raise FormatError(
            f"{path}: {key}: shape and data_offsets must be natural numbers, got {shape!r:.60} and "
            f"{offsets!r:.60}"
        )
    dtype = BY_SAFETENSORS[name]
    length = prod(sizes) * dtype.itemsize
    if ends[1] - ends[0] != length:
        raise FormatError(
            f"{path}: {key}: {dtype} {sizes} must take {length} bytes, got {ends[1] - ends[0]}"
        )
    return StoredTensor(key, dtype, sizes, start + ends[0], length)


def _naturals(value: object) -> tuple[int, ...] | None:
    """Return a list of sizes as a tuple; None if it is something else."""
    if not isinstance(value, list):
        return None
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return None
    return tuple(value)
