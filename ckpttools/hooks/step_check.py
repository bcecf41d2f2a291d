"""Is every byte of a step what was saved? The ranks that restore it share the work.

The sums that stand in ``manifest.json`` are compared: SHA-256 of the headers by every rank, CRC-32
of the keys by one rank each, about the same number of bytes on each. Other formats are checked by
rank 0 as ``verify`` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpttools import api
from ckpttools.errors import FormatError, StorageError
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, MAX_MANIFEST_BYTES
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import read_small_file
from ckpttools.storage.safetensors_header import read_header
from ckpttools.storage.sealed_json import check_seal, parse_json, sha256

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Key:
    """The bytes of one key, and their CRC-32 as hexadecimal digits."""

    place: Path
    key: str
    offset: int
    length: int
    crc: str


def check_share(path: Path, rank: int, size: int) -> bool:
    """Check this rank's share of a checkpoint; return true if nothing is wrong.

    Raises:
        FormatError: a byte has changed.
        StorageError: a file can't be read.
    """
    if not (path / MANIFEST_FILE).is_file():
        for problem in api.detect_format(path).check(path) if rank == 0 else ():
            raise FormatError(str(problem))
        return True
    keys = list(_keys(path))
    total = sum(key.length for key in keys)
    done = 0
    for key in keys:
        if done * size // max(total, 1) == rank:
            _check(key)
        done += key.length
    return True


def _keys(path: Path) -> Iterator[_Key]:
    """Yield the keys of all files, whose headers are those that the manifest states."""
    for name, header_sha256, sums in _stated(path / MANIFEST_FILE):
        file = path / name
        if not file.is_file():
            raise FormatError(f"{file}: every rank's file must be there, got none")
        header = read_header(file)
        if sha256(header.raw) != header_sha256:
            raise FormatError(f"{file}: the header must have the SHA-256 {header_sha256}")
        for tensor in header.tensors:
            yield _Key(file, tensor.key, tensor.offset, tensor.length, sums.get(tensor.key, "none"))


def _stated(place: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield each file with the SHA-256 of its header and the CRC-32 of its keys.

    The two native forms list the latter in two ways.
    """
    data = read_small_file(place, limit_bytes=MAX_MANIFEST_BYTES)
    document = parse_json(data, str(place))
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(files, dict):
        raise FormatError(f"{place}: must list files, got none")
    check_seal(document, data, str(place))
    for name, stated in sorted(files.items()):
        entry = stated if isinstance(stated, dict) else {}
        header, table = entry.get("header_sha256"), entry.get("crc32", entry.get("keys"))
        if not isinstance(header, str) or not isinstance(table, dict):
            raise FormatError(
                f"{place}: files: {name:.80}: must state header_sha256 and the sums of its keys, "
                f"got {stated!r:.60}"
            )
        sums = {k: one.get("crc32") if isinstance(one, dict) else one for k, one in table.items()}
        yield name, header, {key: str(crc) for key, crc in sums.items()}


def _check(key: _Key) -> None:
    """Compare the CRC-32 of one key's bytes."""
    crc, left = 0, key.length
    try:
        with key.place.open("rb", buffering=0) as file:
            file.seek(key.offset)
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                crc, left = crc32(block, crc), left - len(block)
    except OSError as error:
        raise StorageError(f"{key.place}: can't read it: {error.strerror or error}") from error
    if left or f"{crc:08x}" != key.crc:
        raise FormatError(f"{key.place}: {key.key}: CRC-32 must be {key.crc}, got {crc:08x}")
