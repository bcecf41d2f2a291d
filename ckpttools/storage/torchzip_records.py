"""Where are the records of a torch zip file, and is the container what torch would write?

torch.save writes a zip archive of stored (never compressed) records under one top folder. The
reader here accepts exactly that: the central directory ends where the end record begins, every
entry agrees with its local header, no two records overlap, and no name could leave the archive.
Only headers are read. Byte layout: PKWARE APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ckpttools.errors import FormatError, StorageError

LOCAL = struct.Struct("<IHHHHHIIIHH")
ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR = struct.Struct("<IIQI")
END = struct.Struct("<IHHHHIIH")
LOCAL_SIGNATURE, ENTRY_SIGNATURE, DESCRIPTOR_SIGNATURE = 0x04034B50, 0x02014B50, 0x08074B50
END64_SIGNATURE, LOCATOR_SIGNATURE, END_SIGNATURE = 0x06064B50, 0x07064B50, 0x06054B50

FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF  # "see the zip64 field"
FLAG_DESCRIPTOR, FLAG_UTF8 = 0x0008, 0x0800
MAX_DIRECTORY_BYTES = 256 << 20  # three million records; torch has one a storage


@dataclass(frozen=True, slots=True)
class Record:
    """One file of the archive. ``name`` lacks the archive's top folder.

    ``offset`` (of the payload) and ``header_offset`` count from the start of the file, also for
    an archive that lies inside another file. ``crc32`` is what the directory states.
    """

    name: str
    offset: int
    length: int
    crc32: int
    header_offset: int
    flags: int
    zip64: bool  # the local header has a zip64 field, so the data descriptor has 8-byte sizes
    entry_bytes: int  # of the directory entry


@dataclass(frozen=True, slots=True)
class Directory:
    """The records of an archive by name, in the order of the central directory."""

    prefix: str
    records: dict[str, Record]
    offset: int  # of the central directory, from the start of the file
    length: int


class Window:
    """Bytes ``start`` to ``start + length`` of an open file; reads outside of it are refused."""

    def __init__(self, descriptor: int, where: str, start: int, length: int) -> None:
        self.descriptor = descriptor
        self.where = where
        self.start = start
        self.length = length

    def refuse(self, rule: str, got: object) -> NoReturn:
        """Raise a FormatError that names the file."""
        raise FormatError(f"{self.where}: {rule}, got {got}")

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` in the window, or refuse."""
        if offset < 0 or count < 0 or offset + count > self.length:
            self.refuse(f"must have {self.length} bytes or more", f"a range of {count} at {offset}")
        try:
            data = os.pread(self.descriptor, count, self.start + offset)
            while len(data) < count and (
                more := os.pread(
                    self.descriptor, count - len(data), self.start + offset + len(data)
                )
            ):
                data += more
        except OSError as error:
            raise StorageError(f"{self.where}: must be readable, got {error.strerror}") from error
        if len(data) < count:
            self.refuse(f"must have {count} bytes at {offset}", len(data))
        return data


@contextmanager
def open_window(path: Path, window: tuple[int, int] | None = None) -> Iterator[Window]:
    """Open a file, or the ``(offset, length)`` part of it, for reading.

    Raises:
        StorageError: the system refuses to open it.
        FormatError: the part lies outside the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: must be readable, got {error.strerror}") from error
    try:
        size = os.fstat(descriptor).st_size
        start, length = window if window is not None else (0, size)
        where = str(path) if window is None else f"{path} at {start}"
        if start < 0 or length < 0 or start + length > size:
            raise FormatError(f"{where}: part must lie in {size} bytes, got {length} at {start}")
        yield Window(descriptor, where, start, length)
    finally:
        os.close(descriptor)


def read_directory(window: Window) -> Directory:
    """Return the records of the torch zip archive that fills ``window``.

    Raises:
        FormatError: the archive is damaged, or is none that torch.save writes.
    """
    magic = window.read(0, min(4, window.length))
    if magic != b"PK\3\4":
        window.refuse(
            "must be a zip archive, as torch.save writes since 1.6 (save older files again)",
            f"first bytes {magic.hex() or 'none'}",
        )
    count, length, offset = _read_end(window)
    if length > MAX_DIRECTORY_BYTES:
        window.refuse(f"directory must have at most {MAX_DIRECTORY_BYTES} bytes", length)
    if count * ENTRY.size > length:
        window.refuse(f"directory of {length} bytes must hold its entries", count)
    data = window.read(offset, length)
    records: dict[str, Record] = {}
    prefix, at = "", 0
    for _ in range(count):
        full_name, record, at = _read_entry(window, data, at)
        top = full_name.partition("/")[0]
        prefix = prefix or top
        if top != prefix:
            window.refuse("records must share one top folder", f"{prefix!r} and {top!r}")
        if record.name in records:
            window.refuse("a record must stand once", f"{record.name!r} twice")
        records[record.name] = record
    if at != length:
        window.refuse(f"directory must end after {count} entries", f"{length - at} more bytes")
    _check_disjoint(window, records, offset)
    return Directory(prefix, records, window.start + offset, length)


def _read_end(window: Window) -> tuple[int, int, int]:
    """Return the directory's entry count, length and offset in the window."""
    end_at = window.length - END.size
    if end_at < 0 or window.read(end_at, 4) != END_SIGNATURE.to_bytes(4, "little"):
        window.refuse("must end with a zip end record", "a file cut short or with more behind it")
    _, disk, first_disk, here, count, length, offset, comment = END.unpack(
        window.read(end_at, END.size)
    )
    directory_end = end_at
    locator_at = end_at - LOCATOR.size
    if locator_at >= END64.size:
        signature, disk64, end64_at, disks = LOCATOR.unpack(window.read(locator_at, LOCATOR.size))
        if signature == LOCATOR_SIGNATURE:
            if (disk64, disks) != (0, 1):
                window.refuse("must be one disk", f"disk {disk64} of {disks}")
            if end64_at != locator_at - END64.size:
                window.refuse("zip64 end record must stand before its locator", f"{end64_at}")
            short = (here, count, length, offset)
            end64 = END64.unpack(window.read(end64_at, END64.size))
            if end64[0] != END64_SIGNATURE or end64[1] != END64.size - 12:
                window.refuse("zip64 end record must have 56 bytes", f"{end64[0]:#x}, {end64[1]}")
            disk, first_disk = disk | end64[4], first_disk | end64[5]
            here, count, length, offset = end64[6:]
            full = (FULL_16, FULL_16, FULL_32, FULL_32)
            for part, whole, limit in zip(short, end64[6:], full, strict=True):
                if part not in (whole, limit):
                    window.refuse("both end records must agree", f"{part} and {whole}")
            directory_end = end64_at
    if disk or first_disk or here != count:
        window.refuse("must be one disk", f"disk {disk}, {here} of {count} entries")
    if comment:
        window.refuse("must have no comment", f"{comment} bytes")
    if offset + length != directory_end:
        window.refuse(f"directory must end at {directory_end}", f"{length} bytes at {offset}")
    return count, length, offset


def _read_entry(window: Window, data: bytes, at: int) -> tuple[str, Record, int]:
    """Return the full name and record of the directory entry at ``at``, and the entry's end."""
    if at + ENTRY.size > len(data):
        window.refuse("directory must hold whole entries", f"{len(data) - at} bytes at {at}")
    entry = ENTRY.unpack_from(data, at)
    signature, _, _, flags, method, _, _, crc32, packed, length = entry[:10]
    name_length, extra_length, comment_length, disk, _, _, header_at = entry[10:]
    if signature != ENTRY_SIGNATURE:
        window.refuse("directory entry must start with PK 1 2", f"{signature:#010x} at {at}")
    end = at + ENTRY.size + name_length + extra_length
    if end > len(data):
        window.refuse("directory must hold whole entries", f"{len(data) - at} bytes at {at}")
    name_at = at + ENTRY.size
    raw_name = data[name_at : name_at + name_length]
    name = _checked_name(window, raw_name)
    if flags & ~(FLAG_DESCRIPTOR | FLAG_UTF8):
        window.refuse(f"{name}: record must be stored plain, not encrypted", f"flags {flags:#06x}")
    if method:
        window.refuse(f"{name}: record must be stored, not compressed", f"method {method}")
    if comment_length or disk:
        window.refuse(f"{name}: must have no comment and be on disk 0", (comment_length, disk))
    extra = data[name_at + name_length : end]
    values = [length, packed, header_at]
    missing = [i for i, value in enumerate(values) if value == FULL_32]
    stored = zip64_values(extra)
    if stored is None or len(stored) != len(missing):
        window.refuse(f"{name}: zip64 field must hold {len(missing)} values", extra.hex())
    for i, value in zip(missing, stored, strict=True):
        values[i] = value
    length, packed, header_at = values
    if packed != length:
        window.refuse(f"{name}: stored size must be {length}", packed)
    offset, zip64 = _read_local(window, name, raw_name, (flags, crc32, length, header_at))
    record = Record(
        name.partition("/")[2],
        window.start + offset,
        length,
        crc32,
        window.start + header_at,
        flags,
        zip64,
        end - at,
    )
    return name, record, end


def zip64_values(extra: bytes) -> list[int] | None:
    """Return the numbers of the zip64 field in an extra field; None if it is malformed."""
    values: list[int] = []
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            return None
        kind, size = struct.unpack_from("<HH", extra, at)
        at += 4 + size
        if at > len(extra) or (kind == 1 and (values or size % 8)):
            return None
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at - size))
    return values


def _read_local(
    window: Window, name: str, raw_name: bytes, entry: tuple[int, int, int, int]
) -> tuple[int, bool]:
    """Check a local header against its entry; return the payload's offset and zip64's presence."""
    flags, crc32, length, header_at = entry
    data = window.read(header_at, LOCAL.size + len(raw_name))
    local = LOCAL.unpack_from(data)
    if local[0] != LOCAL_SIGNATURE:
        window.refuse(f"{name}: local header must start with PK 3 4", f"{local[0]:#010x}")
    if local[9] != len(raw_name) or data[LOCAL.size :] != raw_name:
        window.refuse(f"{name}: local header must have the same name", data[LOCAL.size :])
    if (local[2], local[3]) != (flags, 0):
        window.refuse(f"{name}: local header must have flags {flags:#06x}, method 0", local[2:4])
    # With a data descriptor the header may leave these out; FULL_32 points to a zip64 field.
    late = flags & FLAG_DESCRIPTOR
    for field, value in zip(local[6:9], (crc32, length, length), strict=True):
        if field != value and not (late and field == 0) and field != FULL_32:
            window.refuse(f"{name}: local header must agree with the directory", hex(field))
    extra = window.read(header_at + LOCAL.size + len(raw_name), local[10])
    zip64 = bool(zip64_values(extra))
    return header_at + LOCAL.size + len(raw_name) + local[10], zip64


def _checked_name(window: Window, raw_name: bytes) -> str:
    """Return a record's full name; refuse one that could leave the archive's folder."""
    try:
        name = raw_name.decode("utf-8")
    except UnicodeDecodeError:
        window.refuse("a record's name must be UTF-8", raw_name)
    components = name.split("/")
    if (
        len(components) < 2
        or any(part in ("", ".", "..") for part in components)
        or any(mark == "\\" or ord(mark) < 32 for mark in name)
    ):
        window.refuse("a record's name must be a plain path under one folder", repr(name))
    return name


def _check_disjoint(window: Window, records: dict[str, Record], directory_at: int) -> None:
    """Refuse records that share bytes with each other or with the directory."""
    end, last = window.start, "the start"
    for record in sorted(records.values(), key=lambda record: record.header_offset):
        if record.header_offset < end:
            window.refuse(f"{record.name}: must not overlap {last}", record.header_offset)
        end, last = record.offset + record.length, record.name
    if end > window.start + directory_at:
        window.refuse(f"{last}: must not overlap the directory", end)
