"""Which tiles of an interrupted conversion were written? An append-only file beside the staging.

The first line names the job; each further line is one finished tile: its number, the pieces that
were written for it (file, offset, length, CRC-32) and the CRC-32C of its content where a digest
is wanted. Every line ends with its own CRC-32, so a torn or damaged line, and all behind it,
count as not written. A line proves nothing by itself: who resumes reads the pieces back and
compares their CRC-32.

The file is locked as long as its writer lives, so two processes can't write one destination.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import StorageError

FORMAT = "ckpttools-journal-1"
_HEADER_FORMAT = "format"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that were written, and their CRC-32."""

    file: int
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Done:
    """A finished tile."""

    number: int
    pieces: tuple[Piece, ...]
    crc32c: int | None = None


class Journal:
    """An open journal. :meth:`add` may be called from several threads."""

    def __init__(self, path: Path, descriptor: int, known: tuple[Done, ...]) -> None:
        self.path = path
        self.known = known
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @classmethod
    def start(cls, path: Path, job: Mapping[str, object], *, resume: bool) -> Journal:
        """Open the journal of ``job``, going on with what an earlier run of it has written.

        With ``resume`` off, or where the file is of another job, it begins anew.

        Raises:
            StorageError: another process has it open, or the system refuses.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(f"{path}: can't open it: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(
                f"{path}: must be free, got another process that is writing this destination"
            ) from error
        header = _line({_HEADER_FORMAT: FORMAT, **job})
        known, end = _read(descriptor, header) if resume else ((), 0)
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        journal = cls(path, descriptor, known)
        if end == 0:
            journal._append(header)
        return journal

    def add(self, done: Done) -> None:
        """Note a finished tile."""
        pieces = [[p.file, p.offset, p.length, p.crc32] for p in done.pieces]
        self._append(_line([done.number, pieces, done.crc32c]))

    def sync(self) -> None:
        """Flush the journal to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which another process may then open."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        with self._lock:
            try:
                os.write(self._descriptor, line)
            except OSError as error:
                raise StorageError(
                    f"{self.path}: can't write it: {error.strerror or error}"
                ) from error


def _line(value: object) -> bytes:
    """Return a line: JSON, its CRC-32, a newline."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _read(descriptor: int, header: bytes) -> tuple[tuple[Done, ...], int]:
    """Return the tiles that a journal with this header names, and where its sound part ends."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    if not data.startswith(header):
        return (), 0
    found: dict[int, Done] = {}
    end = len(header)
    while (stop := data.find(b"\n", end)) >= 0:
        done = _parse(data[end : stop + 1])
        if done is None:
            break
        found[done.number] = done
        end = stop + 1
    return tuple(found.values()), end


def _parse(line: bytes) -> Done | None:
    """Return the tile of a line; None if the line is not whole."""
    text, _, _ = line.rpartition(b" ")
    if line != text + b" %08x\n" % zlib.crc32(text):
        return None
    number, pieces, crc32c = json.loads(text)
    return Done(number, tuple(Piece(*piece) for piece in pieces), crc32c)


def read_job(path: Path) -> Mapping[str, Sequence[object] | object]:
    """Return the job that a journal names; empty where it has no sound first line."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 20)
    except OSError:
        return {}
    text, _, _ = line.rpartition(b" ")
    if not text or line != text + b" %08x\n" % zlib.crc32(text):
        return {}
    job = json.loads(text)
    return job if isinstance(job, dict) else {}
