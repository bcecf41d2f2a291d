"""How do ranks learn of each other's writes without a word on the network? From small files.

While training goes on its groups belong to it, so the threads that write behind it meet in a
directory beside the one that is being written::

    rank-00001.lock     locked as long as rank 1 lives
    rank-00001.done     what vouches for its files: they are on disk
    rank-00001.failed   why they are not
    verdict             rank 0's word, once: published, or why not

Files appear by a rename, whole. A rank that dies loses its lock at once, so nobody waits for it;
for one that hangs there is a deadline. The locks are POSIX record locks, which a forked child
doesn't inherit; where the filesystem has none, the deadline is all there is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ckpttools.errors import FormatError, StorageError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.storage.crcfold import Share
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import check_known, check_seal, parse_json, serialize

FORMAT = "ckpttools-rendezvous"
FORMAT_VERSION = 1
VERDICT = "verdict"

_MAX_BYTES = 1 << 30
_POLL_S = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Rendezvous:
    """The meeting of the ``size`` ranks of one save, as ``rank`` sees it.

    Raises:
        StorageError: this rank can't see the directory, or can't write there.
    """

    def __init__(self, root: Path, rank: int, size: int) -> None:
        self.root = root
        self.rank = rank
        self.size = size
        try:
            self._lock = os.open(
                self._place(rank, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise StorageError(
                f"{root}: every rank must see this directory and write there, got: "
                f"{error.strerror or error}"
            ) from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._lock)
                raise StorageError(f"{root}: can't lock a file: {error.strerror}") from error

    def close(self) -> None:
        """Leave: from now on this rank counts as gone."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def done(self, files: list[StatedFile]) -> None:
        """Say that this rank's files are on disk."""
        stated = {file.path: _document(file) for file in files}
        self._put(self._place(self.rank, "done"), {"files": stated})

    def failed(self, reason: str) -> None:
        """Say why they are not."""
        self._put(self._place(self.rank, "failed"), {"reason": reason})

    def give_verdict(self, reason: str) -> None:
        """Tell all ranks that the save is published, or with a reason why it isn't."""
        self._put(self.root / VERDICT, {"reason": reason})

    def check(self) -> None:
        """Return if nothing is known against the save, so that it is worth while to go on.

        Raises:
            StorageError: it has failed already.
        """
        try:
            names = [entry.name for entry in os.scandir(self.root)]
        except OSError:
            return
        for name in sorted(names):
            if name == VERDICT or (self.rank == 0 and name.endswith(".failed")):
                found = self._get(self.root / name)
                who = "" if name == VERDICT else f"rank {int(name[5:10])}: "
                if found is not None and found["reason"]:
                    raise StorageError(f"{who}{found['reason']}")

    def wait_for_all(self, deadline: float) -> list[StatedFile]:
        """Return what vouches for the files of all ranks, once all are done.

        ``deadline`` is a time of ``time.monotonic``.

        Raises:
            StorageError: a rank failed, died, or was late.
        """
        files: list[StatedFile] = []
        for rank in range(self.size):
            found = self._wait(
                partial(self._of_rank, rank),
                who=rank,
                what="have its files on disk",
                deadline=deadline,
            )
            files += _stated(found, self._place(rank, "done"))
        return files

    def wait_for_verdict(self, deadline: float) -> None:
        """Return when rank 0 has published the save.

        Raises:
            StorageError: it hasn't, or died, or was late.
        """
        found = self._wait(
            lambda: self._get(self.root / VERDICT),
            who=0,
            what="publish the save",
            deadline=deadline,
        )
        if found["reason"]:
            raise StorageError(str(found["reason"]))

    def _of_rank(self, rank: int) -> Mapping[str, object] | None:
        failed = self._get(self._place(rank, "failed"))
        if failed is not None:
            raise StorageError(f"rank {rank}: {failed['reason']}")
        return self._get(self._place(rank, "done"))

    def _wait(
        self,
        look: Callable[[], Mapping[str, object] | None],
        *,
        who: int,
        what: str,
        deadline: float,
    ) -> Mapping[str, object]:
        """Look until there is something to see.

        Raises:
            StorageError: the rank that should make it so is gone, or it is too late.
        """
        while True:
            gone = who != self.rank and not self._lives(who)  # before looking: it may be done
            if (found := look()) is not None:
                return found
            if gone:
                raise StorageError(f"rank {who}: must {what}, got a process that has ended")
            if time.monotonic() > deadline:
                raise StorageError(f"rank {who}: must {what} before the deadline, got silence")
            time.sleep(_POLL_S)

    def _lives(self, rank: int) -> bool:
        """Say whether a rank's process holds its lock; yes where there are no locks."""
        try:
            descriptor = os.open(self._place(rank, "lock"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _place(self, rank: int, what: str) -> Path:
        return self.root / f"rank-{rank:05d}.{what}"

    def _put(self, place: Path, content: Mapping[str, object]) -> None:
        """Make a file appear, whole.

        Raises:
            StorageError: the system refuses.
        """
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, **content}
        temporary = place.with_name(f".{place.name}")
        try:
            temporary.write_bytes(serialize(document))
            temporary.replace(place)
        except OSError as error:
            raise StorageError(f"{place}: can't write it: {error.strerror or error}") from error

    @staticmethod
    def _get(place: Path) -> Mapping[str, object] | None:
        """Return a file's content; None where there is no such file yet."""
        if not place.exists():
            return None
        data = read_small_file(place, limit_bytes=_MAX_BYTES)
        where = str(place)
        document = check_known(
            parse_json(data, where), name=FORMAT, version=FORMAT_VERSION, where=where
        )
        check_seal(document, data, where)
        return document


def _document(file: StatedFile) -> dict[str, object]:
    """Return what vouches for a file as plain data."""
    shares = None
    if file.shares is not None:
        shares = [[*key, one.value, one.length_bytes] for key, one in file.shares.items()]
    return {"header_sha256": file.header_sha256, "crc32": dict(file.crcs), "shares": shares}


def _stated(document: Mapping[str, object], place: Path) -> list[StatedFile]:
    files = document.get("files")
    if not isinstance(files, dict):
        raise FormatError(f"{place}: files must be a table, got {files!r:.60}")
    return [
        StatedFile(
            path,
            one["header_sha256"],
            {key: int(c) for key, c in one["crc32"].items()},
            _shares(one["shares"]),
        )
        for path, one in files.items()
    ]


def _shares(rows: list[tuple[str, str, int, int]] | None) -> dict[tuple[str, str], Share] | None:
    if rows is None:
        return None
    return {(name, slot): Share(value, length) for name, slot, value, length in rows}
