"""Which step does a run go on from? The newest that is sound; damaged ones are passed over.

Rank 0 names the steps, the latest first. What is done with one, a check of its bytes or a whole
restore, is the caller's; where it fails on the files' account, the next older one is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckpttools import api
from ckpttools.errors import (
    EvidenceError,
    FormatError,
    PlanError,
    StorageError,
    UnknownFormatError,
)
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.step_check import check_share
from ckpttools.hooks.step_directory import StepDirectory
from ckpttools.optimizer import RemoteError

T = TypeVar("T")

DAMAGE = (FormatError, UnknownFormatError, StorageError, EvidenceError, PlanError)
"""Errors that say something of the files, and nothing of the run that reads them."""


@dataclass(frozen=True, slots=True, eq=False)
class Sound(Generic[T]):
    """The newest sound step, what came of it, and a remark on each that was passed over."""

    step: int
    result: T
    damaged: Mapping[int, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, newest step first."""
        return tuple(self.damaged.values())


def newest_sound(
    directory: StepDirectory, crew: Crew, attempt: Callable[[int], T]
) -> Sound[T] | None:
    """Return what came of ``attempt`` with the newest step whose files don't make it fail.

    A collective call, as ``attempt`` must be: it raises on every rank or on none. None where there
    is no step.

    Raises:
        StorageError: there are steps, and none of them is sound.
        Exception: ``attempt`` has failed on another account than the files'.
    """
    damaged: dict[int, str] = {}
    for step in crew.together(lambda: directory.newest_first() if crew.rank == 0 else [])[0]:
        try:
            result = attempt(step)
        except Exception as error:
            if not _is_damage(error, crew):
                raise
            damaged[step] = f"step {step}: damaged, so passed over: {error}"
            continue
        return Sound(step, result, damaged)
    if damaged:
        first = next(iter(damaged.values()))
        raise StorageError(f"{directory.root}: must hold a sound step, got {len(damaged)}: {first}")
    return None


def check_step(directory: StepDirectory, crew: Crew, step: int) -> None:
    """Check a step's bytes, each rank its share, and on rank 0 the evidence; a collective call.

    Raises:
        CkptError: they are not what was saved; raised on every rank.
    """
    place = directory.path(step)
    crew.together(lambda: check_share(place, crew.rank, crew.size))
    crew.together(lambda: crew.rank != 0 or api.open_checkpoint(place).format.name != "")


def _is_damage(error: Exception, crew: Crew) -> bool:
    """Say whether the files are at fault, as any rank sees it, and no rank sees another fault.

    A collective call of ranks that all have an error.
    """
    kind = 0 if isinstance(error, RemoteError) else 1 if isinstance(error, DAMAGE) else 2
    return crew.agree([kind]) == [1]
