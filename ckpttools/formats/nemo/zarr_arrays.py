"""Which arrays does a directory of megatron-core's ``zarr`` backend hold? zarr v2, one a key.

Each key is a directory with ``.zarray`` and one uncompressed file a chunk, ``0.0.0``; chunks at the
far edge are stored in full size. bfloat16 stands under that name, which zarr itself hasn't. A key
without ``.zarray`` is an object: ``shard_<offsets>_<sizes>.pt`` for each of its places. Every chunk
is written, so a missing one is damage, not a fill value. Source:
``megatron/core/dist_checkpointing/strategies/zarr.py`` of core 0.8; the zarr v2 specification.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from ckpttools.dtypes import BY_NAME, DType
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.layout.box import row_major_strides
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json
from ckpttools.storage.torchzip import load_small_payloads, read_torch_file

ARRAY_FILE = ".zarray"
_MAX_ZARRAY_BYTES = 1 << 16
_MAX_DIMS = 32
_MAX_CHUNKS = 10_000_000
_BY_NUMPY = {
    d.carrier.str: d for d in BY_NAME.values() if d.name != "bfloat16" and d.name[:6] != "float8"
}
_DTYPES = {**_BY_NUMPY, "bfloat16": BY_NAME["bfloat16"]}


@dataclass(frozen=True, slots=True)
class ArrayChunk:
    """A stored chunk: its box, its file from the start of which it lies there, strides."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    path: str
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array by its key."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[ArrayChunk, ...]


def read_arrays(path: Path) -> Iterator[ZarrArray]:
    """Read every array of a directory, by name.

    Raises:
        FormatError: one is damaged, or a chunk is missing.
        UnsupportedError: one is compressed, or stored in another way than megatron-core does.
    """
    for child in sorted(path.iterdir()):
        if (child / ARRAY_FILE).is_file():
            yield _read_array(path, child.name)


def read_shard_objects(path: Path) -> dict[str, object]:
    """Read every object of a directory, by ``<key>/shard_<offsets>_<sizes>``."""
    found: dict[str, object] = {}
    for child in sorted(path.iterdir()):
        if child.is_dir() and not (child / ARRAY_FILE).is_file():
            for place in sorted(child.glob("shard_*.pt")):
                file = read_torch_file(place)
                load_small_payloads(file, file.tree)
                found[f"{child.name}/{place.stem}"] = file.tree
    return found


def _read_array(root: Path, key: str) -> ZarrArray:
    where = str(root / key / ARRAY_FILE)
    document = parse_json(
        read_small_file(root / key / ARRAY_FILE, limit_bytes=_MAX_ZARRAY_BYTES), where
    )
    if not isinstance(document, dict) or document.get("zarr_format") != 2:
        raise FormatError(f"{where}: must be of zarr_format 2, got something else")
    for name, wanted in (("compressor", None), ("filters", None), ("order", "C")):
        if (got := document.get(name, wanted)) != wanted:
            raise UnsupportedError(f"{where}: {name} must be {wanted}, got {got!r:.60}")
    kind = document.get("dtype")
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise FormatError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, got {kind!r:.40}")
    shape = _numbers(document.get("shape"), 0, f"{where}: shape")
    chunks = _numbers(document.get("chunks"), 1, f"{where}: chunks")
    if len(shape) != len(chunks):
        raise FormatError(f"{where}: chunks must have {len(shape)} sizes, got {len(chunks)}")
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise FormatError(f"{where}: dimension_separator must be . or /, got {separator!r:.20}")
    dtype = _DTYPES[kind]
    counts = [ceil(n / c) for n, c in zip(shape, chunks, strict=True)]
    if prod(counts) > _MAX_CHUNKS:
        raise FormatError(f"{where}: must have at most {_MAX_CHUNKS} chunks, got {prod(counts)}")
    size = prod(chunks) * dtype.itemsize
    found = []
    for index in itertools.product(*map(range, counts)):
        name = separator.join(map(str, index)) or "0"
        _check_chunk(root / key / name, size)
        offsets = tuple(i * c for i, c in zip(index, chunks, strict=True))
        lengths = tuple(min(c, n - o) for c, n, o in zip(chunks, shape, offsets, strict=True))
        found.append(ArrayChunk(offsets, lengths, f"{key}/{name}", row_major_strides(chunks)))
    return ZarrArray(key, dtype, shape, tuple(found))


def _check_chunk(place: Path, size: int) -> None:
    if not place.is_file():
        raise FormatError(f"{place}: every chunk must be there, got none")
    if (got := place.stat().st_size) != size:
        raise FormatError(f"{place}: must have {size} bytes, got {got}")


def _numbers(value: object, least: int, what: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMS
        or not all(type(n) is int and n >= least for n in value)
    ):
        raise FormatError(f"{what} must be whole numbers of at least {least}, got {value!r:.60}")
    return tuple(value)
