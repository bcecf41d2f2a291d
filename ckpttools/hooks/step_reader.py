"""How does a run go on from its last sound step? Everything of it is taken over, or nothing.

1. All ranks together compare the sums of a step's bytes. Rank 0 also reads what is neither weights
   nor optimizer.
2. Every rank checks that what it asks for is there and what is there is asked for.
3. Schedulers and the like are loaded, then tensors; an error on any rank puts the former back, and
   the latter are not taken over. Random generators are set last.
4. A step that is damaged is passed over, and told (`ckpttools.hooks.newest_sound`); one that
   doesn't fit this run is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ckpttools import api
from ckpttools.errors import StorageError, UsageError
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.newest_sound import newest_sound
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.save_forms import load_any
from ckpttools.hooks.step_check import check_share
from ckpttools.hooks.step_directory import StepDirectory
from ckpttools.hooks.training_state import (
    EXTRA,
    NAMES,
    PER_RANK,
    TRAINING,
    StateLoad,
    TrainingState,
    find_states,
)
from ckpttools.optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """What was restored, of which step, and which steps were passed over as damaged."""

    step: int
    restored: Restored
    damaged: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepReader:
    """Restores a run from the steps of a directory; settings as in `CheckpointManager.restore`.

    Raises:
        UsageError: ``allow`` names something unknown.
    """

    directory: StepDirectory
    crew: Crew
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    state: TrainingState
    strict: bool = True
    allow: Collection[str] = ()
    verify: bool = True

    def restore(self, step: int | None) -> Resumed:
        """Restore a step, or the newest that is sound; a collective call.

        Raises:
            StorageError: there is none.
            CkptError: it doesn't fit this run; raised on every rank, and nothing was changed.
        """
        if step is not None:
            named = self.crew.together(lambda: step)[0]
            return Resumed(named, self._restore(named), ())
        found = newest_sound(self.directory, self.crew, self._restore)
        if found is None:
            raise StorageError(f"{self.directory.root}: must hold a complete step, got none")
        notes = (*found.result.notes, *found.notes)
        return Resumed(found.step, replace(found.result, notes=notes), tuple(found.damaged))

    def _restore(self, step: int) -> Restored:
        """Restore one step; a collective call."""
        crew, place = self.crew, self.directory.path(step)
        if self.verify:
            crew.together(lambda: check_share(place, crew.rank, crew.size))
        objects = crew.together(lambda: self._objects(step))[0]
        loads: list[StateLoad] = []
        extra: dict[str, object] = {}

        def check() -> bool:
            found = find_states(objects, crew, str(place))
            load = StateLoad(
                self.state, found, where=str(place), allow=self.allow, strict=self.strict
            )
            load.check()
            loads.append(load)
            if EXTRA in found.states:
                extra[EXTRA] = found.states[EXTRA]
            return True

        crew.together(check)
        load = loads[0]
        try:
            crew.together(load.load)
            restored = load_any(
                place, self.model, self.optimizer, strict=self.strict, allow=self.allow
            )
        except BaseException:
            load.undo()
            raise
        notes = crew.together(lambda: load.finish(crew.size))[crew.rank]
        told = {key: value for key, value in restored.objects.items() if key != TRAINING}
        told.pop(PER_RANK, None)
        return replace(restored, objects={**told, **extra}, notes=(*restored.notes, *notes))

    def _objects(self, step: int) -> dict[str, object]:
        """Read on rank 0 what is neither weights nor optimizer."""
        if self.crew.rank != 0:
            return {}
        opened = api.open_checkpoint(self.directory.path(step), cross_check=False)
        objects: Mapping[str, object] = opened.manifest.objects
        return {key: objects[key] for key in (TRAINING, PER_RANK) if key in objects}


def check_allow(allow: Collection[str], optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse a name that means nothing with one of our optimizers.

    With others it may be a pattern for names of tensors.

    Raises:
        UsageError: there is one.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return
    if unknown := sorted(set(allow) - set(NAMES)):
        raise UsageError(f"allow: must be among {', '.join(NAMES)}, got {unknown[0]!r}")
