"""Which tiles of an interrupted conversion were written? An append-only file beside the staging.

The first line names the job; each further line is one finished tile: its number, the pieces that
were written for it (file, offset, length, CRC-32) and the CRC-32C of its content where a digest
is wanted. Every line ends with its own CRC-32, so a torn or damaged line, and all behind it,
count as not written. A line proves nothing by itself: who resumes reads the pieces back and
compares their CRC-32.

The file is locked as long as its writer lives, so two processes can't write one destination.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ckpttools.errors import StorageError

FORMAT = "ckpttools-journal-1"


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

    def __init__(self, path: Path, descriptor: int, header: bytes) -> None:
        self.path = path
        self.known: tuple[Done, ...] = ()
        self.count = 0
        self._descriptor = descriptor
        self._header = header
        self._lock = threading.Lock()

    @classmethod
    def start(cls, path: Path, job: Mapping[str, object]) -> Journal:
        """Open the journal of ``job``; ``known`` is what an earlier run of it has written.

        A file of another job, or of none, begins anew.

        Raises:
            StorageError: another process has it open.
            OSError: the system refuses.
        """
        while (descriptor := _open_locked(path)) is None:
            pass
        journal = cls(path, descriptor, _line({"format": FORMAT, **job}))
        end = -1
        try:
            known, end = _read(descriptor, journal._header)
            if end:
                os.ftruncate(descriptor, end)
                os.lseek(descriptor, end, os.SEEK_SET)
                journal.known, journal.count = known, len(known)
            else:
                journal.restart()
        except BaseException:
            if not end:
                journal.remove()
            journal.close()
            raise
        return journal

    def add(self, done: Done) -> None:
        """Note a finished tile.

        Raises:
            StorageError: the system refuses.
        """
        pieces = [[p.file, p.offset, p.length, p.crc32] for p in done.pieces]
        line = _line([done.number, pieces, done.crc32c])
        with self._lock:
            try:
                _write(self._descriptor, line)
            except OSError as error:
                raise _cant_write(self.path, error) from error
            self.count += 1

    def restart(self) -> None:
        """Forget what is known: the work begins anew.

        Raises:
            StorageError: the system refuses.
        """
        try:
            self.forget()
            _write(self._descriptor, self._header)
        except OSError as error:
            raise _cant_write(self.path, error) from error

    def forget(self) -> None:
        """Leave a file that is the journal of no work.

        Raises:
            OSError: the system refuses.
        """
        self.known, self.count = (), 0
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def close(self) -> None:
        """Close the file, which another process may then open."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the file. While it is open nobody else has a journal of this name."""
        self.path.unlink(missing_ok=True)


def _cant_write(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: can't write it: {error.strerror or error}")


def is_open(path: Path) -> bool:
    """Say whether a process that lives has this journal open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    """Open and lock the file; None if it was removed between the two, as its last writer does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    free = named = False
    try:
        free = _lock(descriptor, fcntl.LOCK_EX)
        named = free and _is_at(path, descriptor)
    finally:
        if not named:
            os.close(descriptor)
    if not free:
        raise StorageError(
            f"{path}: must be free, got another process that is writing this destination"
        )
    return descriptor if named else None


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file and say whether that is possible; a filesystem without locks keeps nobody out.

    The lock is gone when its process is, however it ends.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Say whether an open file still has this name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _write(descriptor: int, data: bytes) -> None:
    """Write all of ``data``; the system may take it in parts."""
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])


def _line(value: object) -> bytes:
    """Return a line: JSON, its CRC-32, a newline."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return text + b" %08x\n" % zlib.crc32(text)


def _read(descriptor: int, header: bytes) -> tuple[tuple[Done, ...], int]:
    """Return the tiles that a journal with this header names, and where its sound part ends."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        if file.readline(len(header)) != header:
            return (), 0
        found: dict[int, Done] = {}
        end = len(header)
        for line in file:
            done = _parse(line)
            if done is None:
                break
            found[done.number] = done
            end += len(line)
    return tuple(found.values()), end


def _parse(line: bytes) -> Done | None:
    """Return the tile of a line; None if the line is not whole, or of something else."""
    text, _, _ = line.rpartition(b" ")
    if line != text + b" %08x\n" % zlib.crc32(text):
        return None
    try:
        number, pieces, crc32c = json.loads(text)
        done = Done(number, tuple(Piece(*piece) for piece in pieces), crc32c)
        numbers = [number, *chain.from_iterable(pieces), 0 if crc32c is None else crc32c]
    except (ValueError, TypeError):
        return None
    return done if all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) else None
