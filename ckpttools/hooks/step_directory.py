"""Which checkpoints does a run have, and which is the latest? One directory a step.

::

    step-0000000100/          a checkpoint, published by one rename
    latest                    names the one that was saved last; sealed, replaced by one rename
    .step-0000000200.…        being written, or being removed; nobody reads it

A directory that has its final name is complete, since it got the name when all of it was on disk.
``latest`` is moved after that. Where it is missing, damaged or names what is not there, the newest
complete step is the latest.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from ckpttools.errors import FormatError, StorageError, UsageError
from ckpttools.storage.journal import is_open
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import check_known, check_seal, parse_json, serialize

LATEST = "latest"
FORMAT = "ckpttools-latest"
FORMAT_VERSION = 1

_STEP = re.compile(r"step-(\d{10,})")
_LEFTOVER = re.compile(
    r"\.step-\d{10,}\.(partial|ranks|removed|weights)-([0-9a-f]{12})(\.journal)?"
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
        steps = self.steps()
        named = self._named()
        return named if named in steps else steps[-1] if steps else None

    def newest_first(self) -> list[int]:
        """Return all steps, the latest first, then those before it, then those after it."""
        steps = self.steps()
        latest = self.latest()
        if latest is None:
            return []
        before = [step for step in steps if step < latest]
        after = [step for step in steps if step > latest]
        return [latest, *reversed(before), *reversed(after)]

    def set_latest(self, step: int) -> None:
        """Let ``latest`` name a step that is published and durable; durable itself on return.

        Raises:
            StorageError: the system refuses. It names what it named before, or, where only the
                sync of the directory was refused, the new step.
        """
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": step,
            "directory": step_name(step),
        }
        temporary = self.root / f".{LATEST}-{secrets.token_hex(6)}"
        try:
            with temporary.open("xb") as file:
                file.write(serialize(document))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.root / LATEST)
            sync_directory(self.root)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StorageError(
                f"{self.root / LATEST}: can't move it: {error.strerror or error}"
            ) from error

    def _named(self) -> int | None:
        """Return the step that ``latest`` names, whether or not it is there."""
        place = self.root / LATEST
        try:
            data = read_small_file(place, limit_bytes=_MAX_LATEST_BYTES)
            document = check_known(
                parse_json(data, str(place)), name=FORMAT, version=FORMAT_VERSION, where=str(place)
            )
            check_seal(document, data, str(place))
        except (StorageError, FormatError):
            return None
        step = document.get("step")
        return step if type(step) is int else None

    def remove(self, step: int) -> None:
        """Remove a published step: it has no name that readers look for from the first moment on.

        Raises:
            StorageError: it is the latest, or the system refuses.
        """
        if step == self.latest():
            raise StorageError(f"{self.path(step)}: must not be the latest to be removed, got it")
        hidden = self.hidden(step, "removed")
        try:
            self.path(step).rename(hidden)
            sync_directory(self.root)
            shutil.rmtree(hidden)
        except OSError as error:
            raise StorageError(
                f"{self.path(step)}: can't remove it: {error.strerror or error}"
            ) from error

    def sweep(self) -> None:
        """Remove what killed saves and removals have left; what another process writes stays."""
        with suppress(OSError):
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
