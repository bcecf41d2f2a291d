"""How are bytes of local files read and written? By position, whole or not at all.

A :class:`FilePool` keeps a bounded number of descriptors open, whatever the number of files, and
may be used by several threads. Reads fill the buffer they are given or raise; writes write all
of it or raise. Every error names the file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpttools.errors import StorageError

MAX_OPEN_FILES = 128
"""Descriptors that one pool keeps open; far below the usual limit of 1024 a process."""

_SYNC_FILE_RANGE_WRITE = 2


class FilePool:
    """Files under one root, addressed by their index in ``paths``."""

    def __init__(self, root: str, paths: Sequence[str], *, writable: bool = False) -> None:
        self._paths = [os.path.join(root, path) for path in paths]
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._busy: dict[int, list[int]] = {}  # file -> [descriptor, users]
        self.read_bytes = 0
        self.written_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for descriptor in self._idle.values():
                os.close(descriptor)
            self._idle.clear()

    def path(self, file: int) -> str:
        """Return the full path of a file."""
        return self._paths[file]

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``.

        Raises:
            StorageError: the file ends before, or the system refuses.
        """
        done, descriptor = 0, self._borrow(file)
        try:
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not count:
                    break
                done += count
        except OSError as error:
            raise _storage_error(self._paths[file], "read", error) from error
        finally:
            self._give_back(file)
        if done < len(buffer):
            raise StorageError(
                f"{self._paths[file]}: must have {len(buffer)} bytes from {offset}, got {done}"
            )
        with self._lock:
            self.read_bytes += done

    def write_at(self, file: int, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``.

        Raises:
            StorageError: the system refuses (disk full, for example).
        """
        view, done, descriptor = memoryview(data), 0, self._borrow(file)
        try:
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], offset + done)
        except OSError as error:
            raise _storage_error(self._paths[file], "write", error) from error
        finally:
            self._give_back(file)
        with self._lock:
            self.written_bytes += done

    def start_writeback(self, file: int, offset: int, length: int) -> None:
        """Let the disk begin on bytes that were written, where the system has a call for it.

        This promises nothing, and an error is left for the fsync that does. May wait for the disk.
        """
        function = _sync_file_range()
        if function is None:
            return
        try:
            descriptor = self._borrow(file)
        except StorageError:
            return
        try:
            extent = ctypes.c_int64(offset), ctypes.c_int64(length)
            function(descriptor, *extent, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
        finally:
            self._give_back(file)

    def _borrow(self, file: int) -> int:
        """Lend a descriptor of a file; the least recently used idle one is closed for it."""
        with self._lock:
            entry = self._busy.get(file)
            if entry is None:
                descriptor = self._idle.pop(file, -1)
                if descriptor < 0:
                    descriptor = self._open(file)
                entry = self._busy[file] = [descriptor, 0]
            entry[1] += 1
            return entry[0]

    def _give_back(self, file: int) -> None:
        with self._lock:
            entry = self._busy[file]
            entry[1] -= 1
            if not entry[1]:
                del self._busy[file]
                self._idle[file] = entry[0]

    def _open(self, file: int) -> int:
        """Open a file, closing idle ones over the bound."""
        while self._idle and len(self._idle) + len(self._busy) >= MAX_OPEN_FILES:
            os.close(self._idle.popitem(last=False)[1])
        try:
            return os.open(self._paths[file], self._flags | os.O_CLOEXEC)
        except OSError as error:
            raise _storage_error(self._paths[file], "open", error) from error


@cache
def _sync_file_range() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def create_file(path: str | Path, size_bytes: int) -> None:
    """Create a new file of ``size_bytes`` zeros, with its blocks reserved where that is possible.

    Raises:
        StorageError: it exists, or there is no room for it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _storage_error(str(path), "create", error) from error
    try:
        os.ftruncate(descriptor, size_bytes)
        if size_bytes:
            _reserve(descriptor, size_bytes)
    except OSError as error:
        raise _storage_error(str(path), f"reserve {size_bytes} bytes for", error) from error
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve blocks; a filesystem that can't is left with a sparse file."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def write_new_file(path: str | Path, data: bytes) -> None:
    """Create a new file with ``data`` in it.

    Raises:
        StorageError: it exists, or the system refuses.
    """
    try:
        with Path(path).open("xb") as file:
            file.write(data)
    except OSError as error:
        raise _storage_error(str(path), "write", error) from error


def read_small_file(path: str | Path, *, limit_bytes: int) -> bytes:
    """Read a file that must not be longer than ``limit_bytes``.

    Raises:
        StorageError: it can't be read, or is longer.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise _storage_error(str(path), "read", error) from error
    if len(data) > limit_bytes:
        raise StorageError(f"{path}: must have at most {limit_bytes} bytes, got more")
    return data


def _storage_error(path: str, verb: str, error: OSError) -> StorageError:
    """Name the file and what was tried."""
    reason = error.strerror or str(error)
    hint = "free some room, or choose another disk" if error.errno == errno.ENOSPC else ""
    return StorageError(f"{path}: can't {verb} it: {reason}", hint=hint)
