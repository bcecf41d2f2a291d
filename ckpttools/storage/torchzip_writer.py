"""Which bytes would torch.save write around the payloads of a tree, and where does each go?

The place of every byte follows from the tree alone, so a draft comes first, without payloads:

1. the tree is pickled, storages numbered in the order of first mention;
2. records follow as torch 2.13 orders them: ``data.pkl``, ``.format_version``,
   ``.storage_alignment``, ``byteorder``, ``data/0`` …, ``version``, ``.data/serialization_id``;
3. each payload starts at a multiple of 64: the local header's extra field is padded with ``Z``.
   Sizes and CRC-32 stand in a data descriptor behind the payload (an empty record has none) and
   in the directory; a record at or beyond 4 GiB, or of that size, has a zip64 field;
4. a zip64 end record, its locator and an end record close the file, always.

Payloads may then be written in any order, by anyone. `seal` gives the patches that need their
CRC-32: a file without them loads in torch, which ignores CRCs, but is no sound zip.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError
from ckpttools.storage import inert
from ckpttools.storage.torchzip import StorageRef
from ckpttools.storage.torchzip_records import (
    DESCRIPTOR_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    ENTRY,
    ENTRY_SIGNATURE,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    FULL_16,
    FULL_32,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
)

ALIGNMENT = 64
IDENTITY = ".data/serialization_id"
END64_VERSIONS = (798, 45)  # miniz: made by Unix (3), zip 3.0; needs zip 4.5
_IDENTITY_DIGITS = 20  # each of two 64-bit numbers


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One record of a draft. ``crc32`` is None until its payload is known."""

    name: str
    offset: int
    length: int
    crc32: int | None
    crc32_at: tuple[int, ...]  # where the CRC-32 stands: descriptor (if any) and directory


@dataclass(frozen=True, slots=True)
class TorchDraft:
    """A torch file but for its large payloads.

    ``pieces`` are all other bytes, ascending, at offsets in the file; ``storages`` are the
    payloads that the caller has to write, with the offset and length in bytes of each.
    """

    size: int
    pieces: tuple[tuple[int, bytes], ...]
    storages: tuple[tuple[StorageRef, int, int], ...]
    records: tuple[DraftRecord, ...]


def lay_out_torch_file(prefix: str, tree: object) -> TorchDraft:
    """Return the draft of a torch file with top folder ``prefix`` that holds ``tree``.

    torch.save names the folder after the file, without its suffix. Storages that have a
    ``payload`` are part of the draft's pieces.

    Raises:
        FormatError: the tree or the prefix cannot be written.
    """
    _check_prefix(prefix)
    keys: dict[int, str] = {}
    storages: list[StorageRef] = []

    def persistent_id(obj: object) -> object | None:
        if not isinstance(obj, StorageRef):
            return None
        if id(obj) not in keys:
            keys[id(obj)] = str(len(storages))
            storages.append(obj)
        return ("storage", obj.torch_class, keys[id(obj)], obj.location, obj.numel)

    pickled = inert.dumps(tree, persistent_id=persistent_id, where=prefix)
    _check_payloads(prefix, storages)
    small = (
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
    )
    draft = lay_out_records(
        prefix,
        [
            *((name, len(payload), payload) for name, payload in small),
            *((f"data/{keys[id(s)]}", s.length_bytes, s.payload) for s in storages),
            ("version", 2, b"3\n"),
            (IDENTITY, 2 * _IDENTITY_DIGITS, None),
        ],
    )
    places = {record.name: record for record in draft.records}
    open_storages = tuple(
        (storage, places[f"data/{keys[id(storage)]}"].offset, storage.length_bytes)
        for storage in storages
        if storage.payload is None and storage.numel
    )
    return TorchDraft(draft.size, draft.pieces, open_storages, draft.records)


def _check_prefix(prefix: str) -> None:
    odd = not prefix or prefix in (".", "..")
    if odd or any(mark in "/\\" or ord(mark) < 32 for mark in prefix):
        raise FormatError(f"archive: top folder must be one plain name, got {prefix!r}")


def _check_payloads(prefix: str, storages: Sequence[StorageRef]) -> None:
    for key, storage in enumerate(storages):
        if storage.payload is not None and len(storage.payload) != storage.length_bytes:
            raise FormatError(
                f"{prefix}: payload of storage {key} must have {storage.length_bytes} bytes, got "
                f"{len(storage.payload)}"
            )


def lay_out_records(
    prefix: str,
    records: Sequence[tuple[str, int, bytes | None]],
    *,
    alignment: int = ALIGNMENT,
    crc32s: Mapping[str, int] | None = None,
) -> TorchDraft:
    """Return the draft of an archive of ``(name, length, payload or None)`` records.

    The CRC-32 of a payload that is None is taken from ``crc32s`` (by name), or left 0 to be
    patched by `seal`.
    """
    pieces: list[tuple[int, bytes]] = []
    laid: list[tuple[DraftRecord, int, bytes]] = []  # with the header's offset and the full name
    cursor = 0
    for name, length, payload in records:
        full_name = f"{prefix}/{name}".encode()
        header = _local_header(full_name, length, cursor, alignment)
        offset = cursor + len(header)
        crc32 = (crc32s or {}).get(name) if payload is None else zlib.crc32(payload)
        if not length:
            crc32 = 0
        descriptor = _descriptor(length, crc32 or 0, cursor)
        record = DraftRecord(name, offset, length, crc32, (offset + length + 4,) * bool(length))
        laid.append((record, cursor, full_name))
        if payload is None:
            pieces += [(cursor, header), (offset + length, descriptor)]
        else:
            pieces.append((cursor, header + payload + descriptor))
        cursor = offset + length + len(descriptor)
    directory_at = cursor
    tail = bytearray()
    done: list[DraftRecord] = []
    for record, header_at, full_name in laid:
        crc32_at = (*record.crc32_at, directory_at + len(tail) + 16)
        done.append(DraftRecord(record.name, record.offset, record.length, record.crc32, crc32_at))
        tail += _entry(full_name, record, header_at)
    tail += _end(len(laid), len(tail), directory_at)
    pieces.append((directory_at, bytes(tail)))
    return TorchDraft(directory_at + len(tail), _joined(pieces), (), tuple(done))


def seal(draft: TorchDraft, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
    """Return the ``(offset, bytes)`` patches that complete a file once its payloads are known.

    ``crcs`` maps the offset of each payload that the caller wrote to its CRC-32. The patches are
    those sums and the serialization id, which torch calls a best-effort fingerprint of the file:
    here two 64-bit numbers of a SHA-256 over the names and CRC-32 of all records.

    Raises:
        FormatError: a payload has no CRC-32, or one is given for another offset.
    """
    unknown = {
        record.offset: record
        for record in draft.records
        if record.crc32 is None and record.name != IDENTITY
    }
    if unknown.keys() != crcs.keys():
        odd = sorted(unknown.keys() ^ crcs.keys())
        raise FormatError(
            f"archive: each payload must have one CRC-32, got offsets {odd[:3]} amiss"
        )
    patches: list[tuple[int, bytes]] = []
    for offset, record in unknown.items():
        patches += _crc_patches(record, crcs[offset])
    identities = [record for record in draft.records if record.name == IDENTITY]
    for identity in identities:
        if identity.crc32 is None:
            digits = _fingerprint(draft, crcs)
            patches.append((identity.offset, digits))
            patches += _crc_patches(identity, zlib.crc32(digits))
    return patches


def _fingerprint(draft: TorchDraft, crcs: Mapping[int, int]) -> bytes:
    digest = hashlib.sha256()
    for record in draft.records:
        if record.name != IDENTITY:
            crc32 = crcs[record.offset] if record.crc32 is None else record.crc32
            digest.update(f"{record.name} {crc32:08x}\n".encode())
    first, second = struct.unpack_from("<QQ", digest.digest())
    return f"{first:0{_IDENTITY_DIGITS}d}{second:0{_IDENTITY_DIGITS}d}".encode()


def _crc_patches(record: DraftRecord, crc32: int) -> list[tuple[int, bytes]]:
    return [(at, struct.pack("<I", crc32)) for at in record.crc32_at]


def _zip64(values: Sequence[int]) -> bytes:
    """Return a zip64 extra field; none where nothing needs it."""
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _missing(length: int, header_at: int, packed: int) -> list[int]:
    """Return what does not fit the 32-bit fields: both sizes, the header's offset."""
    sizes = [length, packed] if length >= FULL_32 else []
    return sizes + ([header_at] if header_at >= FULL_32 else [])


def _flags(length: int) -> int:
    return FLAG_UTF8 | FLAG_DESCRIPTOR if length else FLAG_UTF8


def _local_header(full_name: bytes, length: int, header_at: int, alignment: int) -> bytes:
    # The packed size in a local zip64 field is 0: miniz learns it after the payload.
    zip64 = _zip64(_missing(length, header_at, 0))
    start = header_at + LOCAL.size + len(full_name) + len(zip64) + 4
    padding = -start % alignment
    extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    fixed = LOCAL.pack(
        LOCAL_SIGNATURE, 0, _flags(length), 0, 0, 0, 0, 0, 0, len(full_name), len(extra)
    )
    return fixed + full_name + extra


def _descriptor(length: int, crc32: int, header_at: int) -> bytes:
    if not length:
        return b""
    wide = _missing(length, header_at, length)
    return struct.pack("<IIQQ" if wide else "<IIII", DESCRIPTOR_SIGNATURE, crc32, length, length)


def _entry(full_name: bytes, record: DraftRecord, header_at: int) -> bytes:
    length = record.length
    extra = _zip64(_missing(length, header_at, length))
    size, at = min(length, FULL_32), min(header_at, FULL_32)
    names = (len(full_name), len(extra), 0, 0, 0, 0)
    crc32 = record.crc32 or 0
    fixed = ENTRY.pack(
        ENTRY_SIGNATURE, 0, 0, _flags(length), 0, 0, 0, crc32, size, size, *names, at
    )
    return fixed + full_name + extra


def _end(count: int, length: int, offset: int) -> bytes:
    """Return the three records behind the directory."""
    end64 = END64.pack(
        END64_SIGNATURE, END64.size - 12, *END64_VERSIONS, 0, 0, count, count, length, offset
    )
    locator = LOCATOR.pack(LOCATOR_SIGNATURE, 0, offset + length, 1)
    short = min(count, FULL_16)
    sizes = (min(length, FULL_32), min(offset, FULL_32))
    return end64 + locator + END.pack(END_SIGNATURE, 0, 0, short, short, *sizes, 0)


def _joined(pieces: Sequence[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """Return ascending pieces with neighbours joined and empty ones left out."""
    joined: list[tuple[int, bytearray]] = []
    for offset, data in pieces:
        if joined and joined[-1][0] + len(joined[-1][1]) == offset:
            joined[-1][1].extend(data)
        elif data:
            joined.append((offset, bytearray(data)))
    return tuple((offset, bytes(data)) for offset, data in joined)
