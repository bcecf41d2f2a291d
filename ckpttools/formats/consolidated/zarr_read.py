"""How is the zarr form read back? Our own stores only, every file against the root's attributes.

Plain ``zarr.open`` reads them too; this reader needs places of bytes, not values, and no zarr.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ckpttools.dtypes import dtype
from ckpttools.errors import CkptError, FormatError, StorageError
from ckpttools.formats import Candidate, Problem, Reading
from ckpttools.formats.consolidated.entries import (
    carried_of,
    check_listed,
    crc,
    name_and_slot,
    objects_of,
    table,
)
from ckpttools.formats.consolidated.state import MAX_STATE_BYTES, check
from ckpttools.formats.consolidated.zarr_store import ROOT, ArrayLayout, array_layout
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json, sealed


def read_store(path: Path) -> Reading:
    """Read a zarr group that ``gather --to zarr`` wrote.

    Raises:
        FormatError: a file is missing, changed or not in the attributes.
    """
    document = _document(path)
    files: list[File] = []
    tensors: list[TensorSpec] = []
    chunks: list[Chunk] = []
    digests: dict[tuple[str, str], int] = {}
    for array, entry in _arrays(path, document):
        where = f"{path / ROOT}: {array.path}"
        for name, box in array.chunks():
            size = _size(path / name, array)
            extent = Extent(len(files), 0, box.numel * array.spec.dtype.itemsize)
            chunks.append(Chunk(len(tensors), box, (Part(extent, array.spec.dtype),)))
            files.append(File(name, size))
        tensors.append(array.spec)
        digests[array.spec.key] = crc(entry, where)
    nodes = carried_of(path, document, str(path / ROOT), f"/{ROOT}")
    objects = objects_of(document, digests, {k: _attributes(v) for k, v in nodes.items()})
    manifest = Manifest("zarr", str(path), tuple(files), tuple(tensors), tuple(chunks), objects)
    return Reading((Candidate(("whole tensors",), manifest),))


def check_store(path: Path) -> list[Problem]:
    """Check the metadata's SHA-256, and that what fills up a last chunk is zero.

    It ends at the first chunk that isn't there: a forged shape may name more than can be counted.
    """
    problems: list[Problem] = []
    try:
        document = _document(path)
        problems += check_listed(path, document, str(path / ROOT))
        for array, _ in _arrays(path, document):
            for name, box in array.chunks():
                used = box.numel * array.spec.dtype.itemsize
                if used < _size(path / name, array) and not _zero_from(path / name, used):
                    problems.append(
                        Problem(str(path / name), f"bytes from {used} on must be zero, got others")
                    )
    except CkptError as error:
        problems.append(Problem(str(path), str(error)))
    return problems


def _document(path: Path) -> dict[str, object]:
    """Return the root's attributes, which vouch for themselves and everything else."""
    place = path / ROOT
    data = read_small_file(place, limit_bytes=MAX_STATE_BYTES)
    node = parse_json(data, str(place))
    if not isinstance(node, dict) or node.get("node_type") != "group":
        raise FormatError(f"{place}: must be a zarr v3 group, got something else")
    document = check(node.get("attributes"), str(place))
    expected = {"attributes": sealed(document), "zarr_format": 3, "node_type": "group"}
    if json.dumps(expected, indent=2).encode() != data:
        raise FormatError(f"{place}: must have the SHA-256 that it states, got changed bytes")
    return document


def _arrays(
    path: Path, document: Mapping[str, object]
) -> list[tuple[ArrayLayout, Mapping[str, object]]]:
    """Return the layout of every array, which must be the one that we write."""
    result: list[tuple[ArrayLayout, Mapping[str, object]]] = []
    for name, entry in table(document, "tensors", str(path / ROOT)).items():
        where = f"{path / ROOT}: {name}"
        if not isinstance(entry, dict):
            raise FormatError(f"{where}: must be an object, got {entry!r:.40}")
        shape, rows = entry.get("shape"), entry.get("chunk_rows")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise FormatError(f"{where}: shape must be natural numbers, got {shape!r:.40}")
        if type(rows) is not int or rows < 1:
            raise FormatError(f"{where}: chunk_rows must be a size, got {rows!r:.40}")
        spec = TensorSpec(
            *name_and_slot(entry, where), dtype(str(entry.get("dtype"))), tuple(shape)
        )
        if array_layout(spec).path != name:
            raise FormatError(f"{where}: must be {array_layout(spec).path}, got another path")
        result.append((ArrayLayout(spec, name, rows), entry))
    return result


def _attributes(node: object) -> object:
    """Return the attributes of a group, which hold an object."""
    return node.get("attributes") if isinstance(node, dict) else None


def _size(place: Path, array: ArrayLayout) -> int:
    """Return the size of a chunk's file; a missing one is damage, since all are written."""
    try:
        size = place.stat().st_size
    except OSError as error:
        raise FormatError(f"{place}: a chunk must be there, got: {error.strerror}") from error
    if size != array.chunk_bytes:
        raise FormatError(f"{place}: must have {array.chunk_bytes} bytes, got {size}")
    return size


def _zero_from(place: Path, offset: int) -> bool:
    """Say whether a file is zero from ``offset`` on."""
    try:
        with place.open("rb") as file:
            file.seek(offset)
            while block := file.read(1 << 20):
                if block.count(0) != len(block):
                    return False
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
    return True
