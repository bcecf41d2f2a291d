"""Where does a checkpoint not fit a run? Collected, so that one error can name the first and all.

What is missing in the checkpoint, and what the run has no place for, may be allowed: all of it
(``strict=False``), or what ``allow`` names: shell patterns for a name or ``name:slot``, or one of
the words ``optimizer`` and ``param_groups``. What has another shape or dtype never is.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from ckpttools.errors import MismatchError
from ckpttools.manifest import WEIGHT


class Differences:
    """The differences between a checkpoint and a run; ``where`` names the checkpoint."""

    def __init__(self, where: str, *, strict: bool, allow: Collection[str]) -> None:
        self._where = where
        self._strict = strict
        self._allow = tuple(allow)
        self._refused: list[str] = []
        self.notes: list[str] = []

    def missing(self, name: str, slot: str) -> None:
        """Note that the run needs a tensor that the checkpoint has not; the run's own stays."""
        self._add(name, slot, "must be in the checkpoint, got none", "not in the checkpoint")

    def unused(self, name: str, slot: str) -> None:
        """Note that the checkpoint has a tensor that the run has no place for."""
        rule = "must have a place in this run, got none"
        self._add(name, slot, rule, "no place for it in this run")

    def without(self, word: str, text: str) -> None:
        """Note that something else than a tensor is missing; ``word`` allows it."""
        if self._strict and word not in self._allow:
            self._refused.append(f"{word}: {text}")
        else:
            self.notes.append(f"{word}: {text}")

    def other(self, name: str, slot: str, text: str) -> None:
        """Note that a tensor is there but isn't the run's, which nothing allows."""
        self._refused.append(f"{name} ({slot}): {text}")

    def check(self) -> None:
        """Raise if anything is refused.

        Raises:
            MismatchError: something is; the message names the first and counts the others.
        """
        if not self._refused:
            return
        more = f" (and {len(self._refused) - 1} more)" if len(self._refused) > 1 else ""
        raise MismatchError(
            f"{self._where}: {self._refused[0]}{more}",
            hint="what may be missing or left is named with allow, a pattern for name:slot",
        )

    def _add(self, name: str, slot: str, rule: str, note: str) -> None:
        if self._strict and not self.allows(name, slot):
            self._refused.append(f"{name} ({slot}): {rule}")
        else:
            self.notes.append(f"{name} ({slot}): {note}")

    def allows(self, name: str, slot: str) -> bool:
        """Say whether ``allow`` names a tensor."""
        if slot != WEIGHT and "optimizer" in self._allow:
            return True
        return any(
            fnmatchcase(name, pattern) or fnmatchcase(f"{name}:{slot}", pattern)
            for pattern in self._allow
        )
