"""How is a consolidated directory read back? Every entry of ``state.json`` against the files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpttools.dtypes import dtype
from ckpttools.errors import CkptError, FormatError
from ckpttools.formats import Candidate, ParamGroup, Problem, Reading
from ckpttools.formats.consolidated.state import MAX_STATE_BYTES, STATE_FILE, parse, sha256
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.local import read_small_file
from ckpttools.storage.safetensors_header import SafetensorsHeader, StoredTensor, read_header

_CRC = re.compile("[0-9a-f]{8}")
_OBJECTS = ("iteration", "num_floating_point_operations_so_far", "step")


def read_directory(path: Path) -> Reading:
    """Read a directory that ``gather`` wrote.

    Raises:
        FormatError: a file is missing, changed or not in ``state.json``.
    """
    document = _document(path)
    headers = _headers(path, document)
    table = _table(document, "tensors", path)
    files: list[File] = []
    tensors: list[TensorSpec] = []
    chunks: list[Chunk] = []
    digests: dict[tuple[str, str], int] = {}
    for name, header in headers.items():
        files.append(File(name, header.size_bytes))
        for stored in header.tensors:
            entry = table.get(stored.key)
            if not isinstance(entry, dict) or entry.get("file") != name:
                raise FormatError(
                    f"{path / name}: {stored.key}: must be in {STATE_FILE}, got no entry"
                )
            spec = _spec(entry, stored, path / name)
            extent = Extent(len(files) - 1, stored.offset, stored.length)
            part = Part(extent, stored.dtype)
            chunks.append(Chunk(len(tensors), Box.whole(stored.shape), (part,)))
            tensors.append(spec)
            digests[spec.key] = _crc(entry, f"{path / STATE_FILE}: {stored.key}")
    missing = sorted(table.keys() - {s.key for h in headers.values() for s in h.tensors})
    if missing:
        raise FormatError(f"{path}: {missing[0]}: must be in a safetensors file, got none")
    objects: dict[str, object] = {k: document[k] for k in _OBJECTS if document.get(k) is not None}
    objects["digests"] = digests
    objects["param_groups"] = tuple(_groups(document.get("param_groups")))
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
    problems = []
    listed = _table(document, "files", path)
    for name, stated in listed.items():
        try:
            data = read_small_file(path / name, limit_bytes=MAX_STATE_BYTES)
        except CkptError as error:
            problems.append(Problem(str(path / name), str(error)))
            continue
        if sha256(data) != stated:
            problems.append(Problem(str(path / name), f"SHA-256 must be {stated}, got another"))
    return problems


def _document(path: Path) -> dict[str, object]:
    place = path / STATE_FILE
    return parse(read_small_file(place, limit_bytes=MAX_STATE_BYTES), str(place))


def _headers(path: Path, document: Mapping[str, object]) -> dict[str, SafetensorsHeader]:
    """Read every safetensors file and compare its header's bytes."""
    headers = {}
    for name, stated in _table(document, "headers", path).items():
        header = read_header(path / name)
        if sha256(header.raw) != stated:
            raise FormatError(f"{path / name}: the header must have the SHA-256 {stated}")
        headers[name] = header
    return headers


def _table(document: Mapping[str, object], key: str, path: Path) -> dict[str, object]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{path / STATE_FILE}: {key} must be an object, got {value!r:.40}")
    for name in value:
        if key != "tensors" and (name[:1] in ("", "/") or ".." in name.split("/") or "\0" in name):
            raise FormatError(f"{path / STATE_FILE}: {key} must lie in the directory, got {name!r}")
    return value


def _crc(entry: Mapping[str, object], where: str) -> int:
    """Return the stated CRC-32C of a tensor."""
    text = entry.get("crc32c")
    if not isinstance(text, str) or _CRC.fullmatch(text) is None:
        raise FormatError(f"{where}: crc32c must be eight hexadecimal digits, got {text!r:.40}")
    return int(text, 16)


def _spec(entry: Mapping[str, object], stored: StoredTensor, where: Path) -> TensorSpec:
    """Return the tensor that an entry describes, which must be the one that is stored."""
    stated = entry.get("dtype"), entry.get("shape")
    if stated != (stored.dtype.name, list(stored.shape)):
        raise FormatError(
            f"{where}: {stored.key}: must be {stated[0]} {stated[1]} as in {STATE_FILE}, got "
            f"{stored.dtype} {list(stored.shape)}"
        )
    name, slot = entry.get("name"), entry.get("slot")
    if not isinstance(name, str) or not isinstance(slot, str):
        raise FormatError(
            f"{where}: {stored.key}: must have a name and a slot in {STATE_FILE}, got "
            f"{name!r:.40} and {slot!r:.40}"
        )
    return TensorSpec(name, slot, dtype(stored.dtype.name), stored.shape)


def _groups(value: object) -> Iterator[ParamGroup]:
    """Return the parameter groups of the document."""
    for group in value if isinstance(value, list) else []:
        if isinstance(group, dict) and isinstance(group.get("settings"), dict):
            params = group.get("params")
            members = tuple(map(str, params)) if isinstance(params, list) else None
            yield ParamGroup(group["settings"], members)
