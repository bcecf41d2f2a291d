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
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpttools.errors import StorageError
from ckpttools.storage.journal import Journal

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


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
        name = f".{self.destination.name}.partial-{self.job[:12]}"
        self.path = self.destination.parent / name
        self.journal_path = self.destination.parent / f"{name}.journal"
        self._published = False
        self._journal: Journal | None = None

    @property
    def journal(self) -> Journal:
        """The journal of this work; open between entering and leaving."""
        if self._journal is None:
            raise StorageError(f"{self.journal_path}: must be open, got a staging not entered")
        return self._journal

    @property
    def others(self) -> list[str]:
        """Names of staging directories of other work for the same destination."""
        prefix = f".{self.destination.name}.partial-"
        names = (path.name for path in self.destination.parent.iterdir() if path.is_dir())
        return sorted(n for n in names if n.startswith(prefix) and n != self.path.name)

    def __enter__(self) -> Self:
        repair(self.destination)
        check_destination(self.destination, overwrite=self.overwrite)
        try:
            journal = Journal.start(self.journal_path, {"job": self.job})
        except OSError as error:
            raise _not_writable(self.path.parent, error) from error
        if journal.known and not self.resume:
            journal.close()
            raise StorageError(
                f"{self.path}: unfinished work of the same kind must be resumed or removed, got "
                f"{len(journal.known)} finished tiles",
                hint=f"give --resume to go on with it, or remove it and {journal.path.name}",
            )
        if not journal.known:
            shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            journal.close()
            raise _not_writable(self.path.parent, error) from error
        self._journal = journal
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        journal = self.journal
        self._journal = None
        keep = isinstance(error, StorageError) and not self._published and journal.count
        if keep and isinstance(error, StorageError):
            error.hint = (
                f"{error.hint}; " if error.hint else ""
            ) + f"then give --resume to go on, or remove {self.path.name} beside the destination"
        else:
            if self.path.is_symlink() or self.path.is_file():  # what --overwrite took the place of
                self.path.unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            journal.remove()
        journal.close()

    def publish(self) -> None:
        """Sync the staging directory to disk and make it the destination.

        Raises:
            StorageError: the system refuses; the destination is then as it was.
        """
        try:
            sync_tree(self.path)
            if self.overwrite and os.path.lexists(self.destination):
                _exchange(self.path, self.destination)
            else:
                _rename_new(self.path, self.destination)
            self._published = True
            _sync(self.destination.parent)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{self.destination}: can't publish it: {error.strerror or error}"
            ) from error


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


def _exchange(src: Path, dst: Path) -> None:
    """Swap two paths atomically, or by two renames where the filesystem can't."""
    code = _renameat2(src, dst, _RENAME_EXCHANGE)
    if code in _UNSUPPORTED:
        old = dst.parent / f".{dst.name}.old-{secrets.token_hex(4)}"
        dst.rename(old)
        try:
            src.rename(dst)
        except OSError:
            old.rename(dst)
            raise
        old.rename(src)
        return
    if code:
        raise OSError(code, os.strerror(code), str(dst))
