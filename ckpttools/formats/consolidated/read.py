"""How is a consolidated directory read back? Every entry of ``state.json`` against the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpttools.dtypes import dtype
from ckpttools.errors import CkptError, FormatError
from ckpttools.formats import Candidate, Problem, Reading
from ckpttools.formats.consolidated.entries import (
    carried_of,
    check_listed,
    crc,
    name_and_slot,
    objects_of,
    table,
)
from ckpttools.formats.consolidated.state import MAX_STATE_BYTES, STATE_FILE, parse
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.local import read_small_file
from ckpttools.storage.safetensors_header import SafetensorsHeader, StoredTensor, read_header
from ckpttools.storage.sealed_json import sha256


def read_directory(path: Path) -> Reading:
    """Read a directory that ``gather`` wrote.

    Raises:
        FormatError: a file is missing, changed or not in ``state.json``.
    """
    document = _document(path)
    headers = _headers(path, document)
    entries = table(document, "tensors", str(path / STATE_FILE))
    files: list[File] = []
    tensors: list[TensorSpec] = []
    chunks: list[Chunk] = []
    digests: dict[tuple[str, str], int] = {}
    for name, header in headers.items():
        files.append(File(name, header.size_bytes))
        for stored in header.tensors:
            entry = entries.get(stored.key)
            if not isinstance(entry, dict) or entry.get("file") != name:
                raise FormatError(
                    f"{path / name}: {stored.key}: must be in {STATE_FILE}, got no entry"
                )
            spec = _spec(entry, stored, path / name)
            extent = Extent(len(files) - 1, stored.offset, stored.length)
            part = Part(extent, stored.dtype)
            chunks.append(Chunk(len(tensors), Box.whole(stored.shape), (part,)))
            tensors.append(spec)
            digests[spec.key] = crc(entry, f"{path / STATE_FILE}: {stored.key}")
    missing = sorted(entries.keys() - {s.key for h in headers.values() for s in h.tensors})
    if missing:
        raise FormatError(f"{path}: {missing[0]}: must be in a safetensors file, got none")
    carried = carried_of(path, document, str(path / STATE_FILE), ".json")
    objects = objects_of(document, digests, carried)
    manifest = Manifest(
        "safetensors", str(path), tuple(files), tuple(tensors), tuple(chunks), objects
    )
    return Reading((Candidate(("whole tensors",), manifest),))


def check_directory(path: Path) -> list[Problem]:
    """Check the SHA-256 of every file that ``state.json`` lists; further files are passed over."""
    try:
        document = _document(path)
        _headers(path, document)
    except CkptError as error:
        return [Problem(str(path), str(error))]
    return check_listed(path, document, str(path / STATE_FILE))


def _document(path: Path) -> dict[str, object]:
    place = path / STATE_FILE
    return parse(read_small_file(place, limit_bytes=MAX_STATE_BYTES), str(place))


def _headers(path: Path, document: Mapping[str, object]) -> dict[str, SafetensorsHeader]:
    """Read every safetensors file and compare its header's bytes."""
    headers = {}
    for name, stated in table(document, "headers", str(path / STATE_FILE)).items():
        header = read_header(path / name)
        if sha256(header.raw) != stated:
            raise FormatError(f"{path / name}: the header must have the SHA-256 {stated}")
        headers[name] = header
    return headers


def _spec(entry: Mapping[str, object], stored: StoredTensor, where: Path) -> TensorSpec:
    """Return the tensor that an entry describes, which must be the one that is stored."""
    stated = entry.get("dtype"), entry.get("shape")
    if stated != (stored.dtype.name, list(stored.shape)):
        raise FormatError(
            f"{where}: {stored.key}: must be {stated[0]} {stated[1]} as in {STATE_FILE}, got "
            f"{stored.dtype} {list(stored.shape)}"
        )
    name, slot = name_and_slot(entry, f"{where}: {stored.key}")
    return TensorSpec(name, slot, dtype(stored.dtype.name), stored.shape)
