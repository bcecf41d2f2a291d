"""Is every byte of a torch file as it was written?

torch ignores the CRC-32 of a payload on load, so rot goes unseen; here it does not. A torch file
is a function of a few free values (top folder, and each record's name, length and CRC-32) and of
its payloads. So:

1. the free values are read from the directory, and the file that torch 2.13 would write with
   them is laid out again (`lay_out_records`);
2. every byte outside the payloads must equal that layout. Each free value stands in at least two
   places (or follows from others), so a change of one place cannot hide;
3. every payload must have its CRC-32, which finds every error of up to 32 bits in a row.

Hence a change of any single bit is found. Every torch since 1.6.0 writes this layout; they
differ in which records there are, in which order, which is read from the directory. Another
writer (a zip tool) may fill the constant header fields otherwise. Its constants are taken as
meant if all records have the same ones and they are not torch's: damage to one record cannot
look like that. Then step 2 is replaced by what two places state: local header, directory entry
and data descriptor must agree, and records must follow each other without a gap.
`TorchCheck.exact` tells which it was.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpttools.errors import FormatError
from ckpttools.storage.torchzip import read_torch_file
from ckpttools.storage.torchzip_records import (
    DESCRIPTOR_SIGNATURE,
    END64,
    ENTRY,
    FLAG_DESCRIPTOR,
    LOCAL,
    LOCATOR,
    Directory,
    Record,
    Window,
    open_window,
    read_directory,
    zip64_values,
)
from ckpttools.storage.torchzip_writer import ALIGNMENT, lay_out_records

_PIECE_BYTES = 4 << 20
_MAX_ALIGNMENT = 1 << 16  # the padding's length has 16 bits
_TORCH_CONSTANTS = (0, 0, 0, 0, 0, 0)  # versions, time, date, attributes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a file that is not as it was written.

    ``record`` is the record's name (``data/3``: the payload of storage 3, or its headers), or ""
    for the archive as a whole.
    """

    record: str
    rule: str

    def __str__(self) -> str:
        return f"{self.record}: {self.rule}" if self.record else self.rule


@dataclass(frozen=True, slots=True)
class TorchCheck:
    """What a check found. ``exact``: each byte was compared, as torch's own layout allows."""

    problems: tuple[Problem, ...]
    exact: bool


def check_torch_file(path: Path, *, window: tuple[int, int] | None = None) -> list[Problem]:
    """Return what is wrong with a torch file; see `examine_torch_file`."""
    return list(examine_torch_file(path, window=window).problems)


def examine_torch_file(path: Path, *, window: tuple[int, int] | None = None) -> TorchCheck:
    """Read every byte of a torch file, or of the one in a part of a file, in bounded pieces.

    Damage is told, never raised. Where the directory cannot be read nothing else is checked.

    Raises:
        StorageError: the system refuses to read.
    """
    with open_window(path, window) as opened:
        try:
            directory = read_directory(opened)
        except FormatError as error:
            return TorchCheck((_refused(opened, error),), exact=False)
        problems = list(_payload_problems(opened, directory))
        entries = _entries(opened, directory)
        exact = not _written_otherwise(entries)
        if exact:
            problems += _layout_problems(opened, directory)
        else:
            problems += _agreement_problems(opened, directory, entries)
    if not problems:
        try:
            read_torch_file(path, window=window)
        except FormatError as error:
            problems.append(_refused(opened, error))
    return TorchCheck(tuple(problems), exact)


def _refused(window: Window, error: FormatError) -> Problem:
    return Problem("", str(error).removeprefix(f"{window.where}: "))


def _payload_problems(window: Window, directory: Directory) -> Iterator[Problem]:
    for record in directory.records.values():
        crc32 = 0
        for at in range(0, record.length, _PIECE_BYTES):
            count = min(_PIECE_BYTES, record.length - at)
            crc32 = zlib.crc32(window.read(record.offset - window.start + at, count), crc32)
        if crc32 != record.crc32:
            yield Problem(
                record.name,
                f"CRC-32 of the payload must be {record.crc32:#010x}, got {crc32:#010x}",
            )


def _layout_problems(window: Window, directory: Directory) -> Iterator[Problem]:
    """Compare everything but payloads with the layout that torch 2.13 gives these records."""
    records = list(directory.records.values())
    draft = lay_out_records(
        directory.prefix,
        [(record.name, record.length, None) for record in records],
        alignment=_alignment(window, directory),
        crc32s={record.name: record.crc32 for record in records},
    )
    for record, expected in zip(records, draft.records, strict=True):
        if record.offset - window.start != expected.offset:
            # All that follows is shifted as well, so one finding says it.
            yield Problem(
                record.name,
                f"payload must start at {expected.offset}, got {record.offset - window.start}",
            )
            return
    if draft.size != window.length:
        yield Problem("", f"file must have {draft.size} bytes, got {window.length}")
        return
    told: set[str] = set()
    for offset, data in draft.pieces:
        actual = window.read(offset, len(data))
        if actual == data:
            continue
        differs = np.frombuffer(actual, np.uint8) != np.frombuffer(data, np.uint8)
        for at in np.flatnonzero(differs).tolist():
            name, part = _place(directory, offset + at + window.start)
            if f"{name} {part}" not in told:
                told.add(f"{name} {part}")
                rule = (
                    f"{part} must have {data[at]:#04x} at byte {offset + at}, got {actual[at]:#04x}"
                )
                yield Problem(name, rule)


def _place(directory: Directory, offset: int) -> tuple[str, str]:
    """Return the record ("" for none) and the part of the archive that a byte belongs to."""
    end = directory.offset + directory.length
    if offset >= end:
        tail = ((END64.size, "zip64 end record"), (LOCATOR.size, "zip64 locator"))
        for size, name in tail:
            end += size
            if offset < end:
                return "", name
        return "", "end record"
    if offset >= directory.offset:
        at = directory.offset
        for record in directory.records.values():
            at += record.entry_bytes
            if offset < at:
                return record.name, "directory entry"
        return "", "directory"
    held = [record for record in directory.records.values() if record.header_offset <= offset]
    record = max(held, key=lambda record: record.header_offset)
    return record.name, "local header" if offset < record.offset else "data descriptor"


def _alignment(window: Window, directory: Directory) -> int:
    """Return the alignment that the file states, torch's default where it states none."""
    record = directory.records.get(".storage_alignment")
    if record is None or record.length > 6:
        return ALIGNMENT
    text = window.read(record.offset - window.start, record.length)
    value = int(text) if text.isdigit() else 0
    return value if 0 < value <= _MAX_ALIGNMENT else ALIGNMENT


def _entries(window: Window, directory: Directory) -> list[tuple[int, ...]]:
    """Return the fixed fields of each directory entry, in order."""
    data = window.read(directory.offset - window.start, directory.length)
    entries: list[tuple[int, ...]] = []
    at = 0
    while at < len(data):
        entries.append(ENTRY.unpack_from(data, at))
        at += ENTRY.size + sum(entries[-1][10:13])
    return entries


def _constants(entry: tuple[int, ...]) -> tuple[int, ...]:
    """Return versions, time, date and attributes, which do not depend on the record."""
    return (*entry[1:3], *entry[5:7], *entry[14:16])


def _written_otherwise(entries: list[tuple[int, ...]]) -> bool:
    constants = {_constants(entry) for entry in entries}
    return len(entries) > 1 and len(constants) == 1 and constants != {_TORCH_CONSTANTS}


def _agreement_problems(
    window: Window, directory: Directory, entries: list[tuple[int, ...]]
) -> Iterator[Problem]:
    """Compare what two places state about each record, and look for gaps."""
    pairs = sorted(
        zip(directory.records.values(), entries, strict=True),
        key=lambda pair: pair[0].header_offset,
    )
    end = window.start
    for record, entry in pairs:
        if record.header_offset != end:
            yield Problem(record.name, f"must start at {end}, got {record.header_offset}")
        size = record.offset - record.header_offset
        header = window.read(record.header_offset - window.start, size)
        local = LOCAL.unpack_from(header)
        if local[1:6] != entry[2:7]:
            yield Problem(
                record.name,
                f"local header must have {entry[2:7]} as the directory, got {local[1:6]}",
            )
        if zip64_values(header[LOCAL.size + local[9] :]) is None:
            yield Problem(record.name, "local header must have whole extra fields, got others")
        end = record.offset + record.length
        if record.flags & FLAG_DESCRIPTOR:
            expected = _descriptor(record)
            found = window.read(end - window.start, len(expected))
            if found != expected:
                yield Problem(
                    record.name,
                    f"data descriptor must be {expected.hex()}, got {found.hex()}",
                )
            end += len(expected)
    if end != directory.offset:
        yield Problem("", f"directory must start at {end}, got {directory.offset}")


def _descriptor(record: Record) -> bytes:
    values = (DESCRIPTOR_SIGNATURE, record.crc32, record.length, record.length)
    return struct.pack("<IIQQ" if record.zip64 else "<IIII", *values)
