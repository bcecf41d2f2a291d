"""How does a new checkpoint appear? All at once, by one rename, or not at all.

1. Everything is written to ``.<name>.partial-<id>`` beside the destination; a journal beside it
   (:mod:`ckpttools.storage.journal`) notes what is finished, so that killed work can be resumed.
2. Its files and directories are synced to disk.
3. One rename publishes it, and the parent directory is synced.

With ``overwrite`` the last step exchanges staging and destination atomically
(``renameat2(RENAME_EXCHANGE)``) and then removes the old one. Whatever happens before the rename
leaves the destination as it was. Where the filesystem has no exchange, the old destination stands
as ``.<name>.old-<id>`` for the moment between two renames; :func:`repair` puts it back if a crash
fell into that moment.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpttools.errors import StorageError
from ckpttools.storage.journal import Journal, is_open

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_ID_DIGITS = 12


class Staging:
    """A directory that becomes ``destination`` when :meth:`publish` is called.

    ``job`` identifies the work (a hexadecimal digest); its journal lies beside the directory. Left
    without publishing, both are removed, but for two cases: the process is killed, or the system
    refuses a read or write after some tiles were finished (a full disk, say). Then ``resume`` goes
    on with what is there.
    """

    def __init__(
        self,
        destination: str | Path,
        *,
        job: str | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.destination = Path(os.path.abspath(destination))
        self.overwrite, self.resume = overwrite, resume
        self.job = job or secrets.token_hex(16)
        name = f".{self.destination.name}.partial-{self.job[:_ID_DIGITS]}"
        self.path = self.destination.parent / name
        self.journal_path = self.destination.parent / f"{name}.journal"
        self._syncing: threading.Thread | None = None
        self._sync_error: OSError | None = None
        self._journal: Journal | None = None
        self._resumable = True
        self._old = self.path

    @property
    def journal(self) -> Journal:
        """The journal of this work; open between entering and leaving."""
        if self._journal is None:
            raise StorageError(f"{self.journal_path}: must be open, got a staging not entered")
        return self._journal

    @property
    def others(self) -> list[str]:
        """Names of what other work for the same destination has left beside it."""
        mine = self.path.name, self.journal_path.name
        names = [p.name for p in _leftovers(self.destination) if p.name not in mine]
        return sorted({name.removesuffix(".journal") for name in names})

    def __enter__(self) -> Self:
        repair(self.destination)
        check_destination(self.destination, overwrite=self.overwrite)
        try:
            journal = Journal.start(self.journal_path, {"job": self.job})
        except StorageError:
            raise
        except OSError as error:
            raise _not_writable(self.path.parent, error) from error
        try:
            self._begin(journal)
        except BaseException:
            if not journal.known:
                journal.remove()
            journal.close()
            raise
        self._journal = journal
        return self

    def _begin(self, journal: Journal) -> None:
        """Make the staging directory, or go on with that of an earlier run."""
        check_not_written(self.destination, except_for=self.journal_path)
        try:
            if journal.known and not self.path.is_dir():
                journal.restart()
            if not journal.known:
                _remove_tree(self.path)
                self.path.mkdir()
        except OSError as error:
            raise _not_writable(self.path.parent, error) from error
        if journal.known and not self.resume:
            raise StorageError(
                f"{self.path}: unfinished work of the same kind must be resumed or removed, got "
                f"{len(journal.known)} finished tiles",
                hint=f"give --resume to go on with it, or remove it and {journal.path.name}",
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        journal = self.journal
        self._journal = None
        self._join_sync()
        try:
            if isinstance(error, StorageError) and self._resumable and journal.count:
                before = f"{error.hint}; " if error.hint else ""
                error.hint = (
                    f"{before}then give --resume to go on, or remove {self.path.name} beside the "
                    f"destination"
                )
                return
            with suppress(OSError):  # what can't be removed stands in nobody's way
                journal.forget()  # first: half of a directory must not be resumed
                _remove_tree(self._old)
                journal.remove()
        finally:
            journal.close()

    def begin_sync(self) -> None:
        """Begin to sync what is written, in a thread of its own; :meth:`publish` waits for it.

        The disk works while the files are read back and compared.
        """
        self._syncing = threading.Thread(target=self._sync_early)
        self._syncing.start()

    def _sync_early(self) -> None:
        try:
            sync_tree(self.path)
        except OSError as error:
            # Kept for publish: the system tells of an error once, and the next sync may succeed.
            self._sync_error = error

    def _join_sync(self) -> None:
        if self._syncing is not None:
            self._syncing.join()
            self._syncing = None
        if self._sync_error is not None:
            # What the disk refused may still be read back from memory, so it can't be resumed.
            self._resumable = False

    def publish(self) -> None:
        """Sync the staging directory to disk and make it the destination.

        Raises:
            StorageError: the system refuses; the destination is then as it was, unless the message
                says that it was published.
        """
        self._join_sync()
        try:
            if self._sync_error is not None:
                raise self._sync_error
            sync_tree(self.path)
        except OSError as error:
            self._resumable = False  # as above
            raise _cant_publish(self.destination, error) from error
        try:
            if self.overwrite and os.path.lexists(self.destination):
                self._old = _exchange(self.path, self.destination)
            else:
                _rename_new(self.path, self.destination)
        except OSError as error:
            raise _cant_publish(self.destination, error) from error
        self._resumable = False
        try:
            _sync(self.destination.parent)
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(
                f"{self.destination}: was published, but a power cut now may undo it: can't sync "
                f"{self.destination.parent}: {reason}"
            ) from error


def _cant_publish(destination: Path, error: OSError) -> StorageError:
    return StorageError(f"{destination}: can't publish it: {error.strerror or error}")


def _not_writable(place: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{place}: must be a writable directory, got: {reason}")


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse a destination that exists (unless ``overwrite``) or has no parent directory.

    Raises:
        StorageError: it does, or has none.
    """
    if os.path.lexists(destination) and not overwrite:
        raise StorageError(
            f"{destination}: the destination must not exist, got an existing path",
            hint="choose another, or give --overwrite",
        )
    if not destination.parent.is_dir():
        raise StorageError(f"{destination.parent}: must be a directory, got none")


def check_not_written(destination: Path, *, except_for: Path | None = None) -> None:
    """Refuse a destination that another process is writing, under whatever journal.

    Each writer looks after it has locked its own journal, so of two at least one sees the other.

    Raises:
        StorageError: one is.
    """
    for path in _leftovers(destination):
        if path.suffix == ".journal" and path != except_for and is_open(path):
            raise StorageError(
                f"{path}: must be free, got another process that is writing this destination"
            )


def _leftovers(destination: Path) -> list[Path]:
    """Return the staging directories and journals of a destination."""
    name = re.escape(destination.name)
    pattern = re.compile(rf"\.{name}\.partial-[0-9a-f]{{{_ID_DIGITS}}}(\.journal)?")
    try:
        return [p for p in destination.parent.iterdir() if pattern.fullmatch(p.name)]
    except OSError as error:
        raise _not_writable(destination.parent, error) from error


def _remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, or a file or link; there may be none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def repair(destination: Path) -> bool:
    """Put back a destination that a crash left set aside; say whether there was one.

    Raises:
        StorageError: several were set aside, or the system refuses.
    """
    if os.path.lexists(destination) or not destination.parent.is_dir():
        return False
    prefix = f".{destination.name}.old-"
    try:
        aside = [p for p in destination.parent.iterdir() if p.name.startswith(prefix)]
        if len(aside) > 1:
            raise StorageError(
                f"{destination}: at most one {prefix}* must stand beside it, got {len(aside)}",
                hint="rename the right one back by hand",
            )
        if aside:
            _rename_new(aside[0], destination)
            _sync(destination.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{destination}: can't put it back: {error.strerror or error}"
        ) from error
    return bool(aside)


def check_apart(source: Path, destination: Path) -> None:
    """Refuse a destination that lies in the source, holds it or is it, links followed.

    A checkpoint inside another would be read as part of it, and replacing a directory that holds
    the source would remove what else is there.

    Raises:
        StorageError: it does.
    """
    paths = [os.path.realpath(path) for path in (source, destination)]
    if os.path.commonpath(paths) in paths:
        raise StorageError(
            f"{destination}: the destination must lie outside of the source and not around it, "
            f"got the source {source}"
        )


def sync_tree(root: Path) -> None:
    """Flush every file and directory under ``root`` to disk."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renameat2(src: Path, dst: Path, flags: int) -> int:
    """Call renameat2 and return 0 or the errno; ENOSYS where the C library has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return errno.ENOSYS
    result = function(
        _AT_FDCWD, os.fsencode(src), _AT_FDCWD, os.fsencode(dst), ctypes.c_uint(flags)
    )
    return 0 if result == 0 else ctypes.get_errno()


_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def _rename_new(src: Path, dst: Path) -> None:
    """Rename without ever replacing what another process put there meanwhile."""
    code = _renameat2(src, dst, _RENAME_NOREPLACE)
    if code in _UNSUPPORTED:  # plain rename replaces only an *empty* directory
        if os.path.lexists(dst):
            code = errno.EEXIST
        else:
            src.rename(dst)
            return
    if code:
        raise OSError(code, os.strerror(code), str(dst))


def _exchange(src: Path, dst: Path) -> Path:
    """Put ``src`` in the place of ``dst``, atomically or by two renames; return the old one's."""
    code = _renameat2(src, dst, _RENAME_EXCHANGE)
    if code in _UNSUPPORTED:
        old = dst.parent / f".{dst.name}.old-{secrets.token_hex(4)}"
        dst.rename(old)
        try:
            src.rename(dst)
        except OSError:
            old.rename(dst)
            raise
        return old
    if code:
        raise OSError(code, os.strerror(code), str(dst))
    return src
