"""Which checkpoints does a run have, and which is the latest? One directory a step.

::

    step-0000000100/          a checkpoint, published by one rename
    latest                    names the one that was saved last; sealed, replaced by one rename
    .latest-…                 the next ``latest``, on disk before the step that it names
    .step-0000000200.…        being written, or being removed; nobody reads it

A directory that has its final name is complete, since it got the name when all of it was on disk.
``latest`` is moved after that. A crash between the two leaves the step and its announcement, and
then that step is the latest: a run that went on from the one before would meet it again. Where
``latest`` is missing, damaged or names what is not there, the newest complete step is the latest.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError, StorageError, UsageError
from ckpttools.storage.commit import Staging
from ckpttools.storage.journal import is_open
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import check_known, check_seal, parse_json, serialize

LATEST = "latest"
FORMAT = "ckpttools-latest"
FORMAT_VERSION = 1

_STEP = re.compile(r"step-(\d{10,})")
_LEFTOVER = re.compile(
    r"\.step-\d{10,}\.(partial|ranks|chunks|removed|weights)-([0-9a-f]{12})(\.journal)?"
)
_TEMPORARY = re.compile(r"\.latest-[0-9a-f]{12}")
_MAX_LATEST_BYTES = 4096


def step_name(step: int) -> str:
    """Return the name of a step's directory.

    >>> step_name(123)
    'step-0000000123'

    Raises:
        UsageError: the step is negative.
    """
    if step < 0:
        raise UsageError(f"step: must not be negative, got {step}")
    return f"step-{step:010d}"


@dataclass(frozen=True, slots=True)
class _Named:
    """What ``latest``, or its announcement at ``place``, says.

    ``fresh``: nothing had the step's name before it was published. ``inode``: that of the directory
    that becomes the step, where the writer knows it.
    """

    place: Path
    step: int
    fresh: bool = False
    inode: int | None = None


class StepDirectory:
    """The checkpoints of one run, under one directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, step: int) -> Path:
        """Return the directory of a step, which need not be there."""
        return self.root / step_name(step)

    def hidden(self, step: int, what: str) -> Path:
        """Return a new hidden name beside a step's directory."""
        return self.root / f".{step_name(step)}.{what}-{secrets.token_hex(6)}"

    def steps(self) -> list[int]:
        """Return the complete steps, ascending.

        Raises:
            StorageError: the directory can't be read.
        """
        try:
            names = [entry.name for entry in os.scandir(self.root) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.root}: can't read it: {error.strerror or error}") from error
        return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))

    def latest(self) -> int | None:
        """Return the step that was saved last; None where there is none."""
        if published := [one.step for one in self._announced() if self._is_published(one)]:
            return max(published)
        steps = self.steps()
        named = _read(self.root / LATEST)
        if named is not None and named.step in steps:
            return named.step
        return steps[-1] if steps else None

    def newest_first(self) -> list[int]:
        """Return all steps, the latest first, then those before it, then those after it."""
        steps = self.steps()
        latest = self.latest()
        if latest is None:
            return []
        before = [step for step in steps if step < latest]
        after = [step for step in steps if step > latest]
        return [latest, *reversed(before), *reversed(after)]

    def publish(self, step: int, staging: Staging) -> None:
        """Publish a step and let ``latest`` name it; both are durable on return.

        Raises:
            StorageError: the system refuses. ``latest`` names what it named before.
        """
        try:
            inode = staging.path.stat().st_ino
        except OSError as error:
            raise StorageError(
                f"{staging.path}: must be there, got: {error.strerror or error}"
            ) from error
        with self.announced(step, inode=inode):
            staging.publish()

    @contextmanager
    def announced(self, step: int, *, inode: int | None = None) -> Iterator[None]:
        """Let ``latest`` name a step that the body publishes, and makes durable.

        Whatever kills the process on the way, the step is the latest if and only if it is there.
        ``inode`` is that of the directory that is going to be the step: a step that replaces
        another is told from it by that.

        Raises:
            StorageError: the system refuses. ``latest`` names what it named before, or, where only
                the sync of the directory was refused, the new step.
        """
        announcement = self._announce(step, inode)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                announcement.unlink(missing_ok=True)
            raise
        try:
            announcement.replace(self.root / LATEST)
            sync_directory(self.root)
        except OSError as error:
            with suppress(OSError):
                announcement.unlink(missing_ok=True)
            raise self._cant_move(error) from error

    def _announce(self, step: int, inode: int | None) -> Path:
        """Write what is going to be ``latest``, durable on return."""
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": step,
            "directory": step_name(step),
            "fresh": not os.path.lexists(self.path(step)),
            "inode": inode,
        }
        place = self.root / f".{LATEST}-{secrets.token_hex(6)}"
        try:
            with place.open("xb") as file:
                file.write(serialize(document))
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self.root)
        except OSError as error:
            with suppress(OSError):
                place.unlink(missing_ok=True)
            raise self._cant_move(error) from error
        return place

    def _cant_move(self, error: OSError) -> StorageError:
        return StorageError(f"{self.root / LATEST}: can't move it: {error.strerror or error}")

    def _announced(self) -> list[_Named]:
        """Return what is announced; more than one only where several saves were killed."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.root))
        except OSError:
            return []
        found = (_read(self.root / name) for name in names if _TEMPORARY.fullmatch(name))
        return [one for one in found if one is not None]

    def _is_published(self, announced: _Named) -> bool:
        try:
            found = self.path(announced.step).stat()
        except OSError:
            return False
        return announced.fresh or found.st_ino == announced.inode

    def hide(self, step: int) -> Path:
        """Take a published step's name away; return the hidden one, which is to be deleted.

        Raises:
            StorageError: it is the latest, or the system refuses.
        """
        if step == self.latest():
            raise StorageError(f"{self.path(step)}: must not be the latest to be removed, got it")
        hidden = self.hidden(step, "removed")
        try:
            self.path(step).rename(hidden)
            sync_directory(self.root)
        except OSError as error:
            raise StorageError(
                f"{self.path(step)}: can't remove it: {error.strerror or error}"
            ) from error
        return hidden

    def sweep(self) -> None:
        """Remove what killed saves and removals have left; what another process writes stays.

        A step that was published by a save that was killed then becomes the latest.
        """
        with suppress(OSError):
            for announced in sorted(self._announced(), key=lambda one: one.step):
                if self._is_published(announced):
                    announced.place.replace(self.root / LATEST)
            names = sorted(entry.name for entry in os.scandir(self.root))
            busy = {
                found[2]
                for name in names
                if (found := _LEFTOVER.fullmatch(name)) and found[3] and is_open(self.root / name)
            }
            for name in names:
                found = _LEFTOVER.fullmatch(name)
                if _TEMPORARY.fullmatch(name) or (found and found[2] not in busy):
                    remove_tree(self.root / name)


def _read(place: Path) -> _Named | None:
    """Return what a sealed file says of a step; None where it says nothing, whole."""
    try:
        data = read_small_file(place, limit_bytes=_MAX_LATEST_BYTES)
        document = check_known(
            parse_json(data, str(place)), name=FORMAT, version=FORMAT_VERSION, where=str(place)
        )
        check_seal(document, data, str(place))
    except (StorageError, FormatError):
        return None
    step, fresh, inode = (document.get(key) for key in ("step", "fresh", "inode"))
    if type(step) is not int or step < 0:
        return None
    return _Named(place, step, fresh is True, inode if type(inode) is int else None)


def remove_tree(path: Path) -> None:
    """Remove a file or directory; what can't be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's names to disk.

    Raises:
        OSError: the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
