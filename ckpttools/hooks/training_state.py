"""What of a training run is neither weights nor optimizer state, and who gets it back?

Schedulers, loss scalers, data loaders, the caller's own counters and the random generators. What
is equal on all ranks is common: it goes to any number of ranks. What differs from rank to rank
goes back to the same rank of as many ranks, and nowhere else. Random generators are always a
rank's own. So a loader or counter that counts samples of the whole run survives a change of the
number of ranks, and one that counts its rank's own batches doesn't.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from ckpttools.errors import FormatError, MismatchError, UsageError
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.plain_state import from_plain, to_plain
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode

TRAINING = "training"
PER_RANK = "per_rank_state"
RNG = "rng"
EXTRA = "extra"
NAMES = ("scheduler", "scaler", "dataloader")
"""What ``allow`` may name: what need not be in a checkpoint, or may stay unused in it."""

_WORLD = "world_size"
_PENDING = "pending_gradients"


@runtime_checkable
class Stateful(Protocol):
    """What has a state to be saved: schedulers, scalers, loaders."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """The parts of a run beside model and optimizer; None where it has none.

    ``extra`` is the caller's own plain data; ``rng`` says whether random generators belong to it.

    Raises:
        UsageError: a part has no ``state_dict`` and ``load_state_dict``.
    """

    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    dataloader: Stateful | None = None
    rng: bool = True
    extra: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name, part in self.parts().items():
            if not isinstance(part, Stateful):
                raise UsageError(
                    f"{name}: must have state_dict and load_state_dict, got {type(part).__name__}"
                )

    def parts(self) -> dict[str, Stateful]:
        """Return what has a state of its own, by name."""
        parts = {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "dataloader": self.dataloader,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def objects(self, crew: Crew, *, pending: Callable[[], bool]) -> dict[str, object]:
        """Return the objects of a checkpoint that hold all this; a collective call.

        ``pending`` says whether this rank has gradients that no step has used.

        Raises:
            FormatError: something is not plain data; raised on every rank.
        """
        told = crew.together(lambda: (pending(), self._encoded()))
        found = [mine for _, mine in told]
        first = found[0]
        common = {
            name: text
            for name, text in first.items()
            if name != RNG and all(mine.get(name) == text for mine in found)
        }
        training: dict[str, object] = {_WORLD: crew.size}
        if any(one for one, _ in told):
            training[_PENDING] = True
        training |= {name: _decoded(name, text) for name, text in common.items()}
        per_rank = [
            {name: _decoded(name, text) for name, text in mine.items() if name not in common}
            for mine in found
        ]
        objects: dict[str, object] = {TRAINING: training}
        if any(per_rank):
            objects[PER_RANK] = per_rank
        return objects

    def _encoded(self) -> dict[str, str]:
        """Return this rank's parts as text."""
        states: dict[str, object] = {name: part.state_dict() for name, part in self.parts().items()}
        if self.extra is not None:
            states[EXTRA] = dict(self.extra)
        if self.rng:
            states[RNG] = random_state()
        return {
            name: json.dumps(encode(to_plain(state, name), where=name))
            for name, state in states.items()
        }


def _decoded(name: str, text: str) -> object:
    return decode(json.loads(text), where=name)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a checkpoint holds for this rank, by name; ``elsewhere`` is other ranks' alone.

    ``world_size`` is the number of ranks that saved; 0 where it isn't told. ``pending``: there were
    gradients that no step had used.
    """

    states: Mapping[str, object]
    elsewhere: frozenset[str]
    world_size: int
    pending: bool


def find_states(objects: Mapping[str, object], crew: Crew, where: str) -> Found:
    """Return what a checkpoint's objects hold for this rank.

    Raises:
        FormatError: they are not what :meth:`TrainingState.objects` makes.
    """
    training = objects.get(TRAINING, {})
    per_rank = objects.get(PER_RANK, [])
    if not isinstance(training, Mapping) or not isinstance(per_rank, list):
        raise FormatError(f"{where}: {TRAINING} and {PER_RANK} must be tables, got something else")
    states = {
        str(name): state for name, state in training.items() if name not in {_WORLD, _PENDING}
    }
    of_ranks = [mine for mine in per_rank if isinstance(mine, Mapping)]
    elsewhere = names_per_rank(objects)
    if len(of_ranks) == crew.size:
        states |= {str(name): state for name, state in of_ranks[crew.rank].items()}
    values = {name: from_plain(state, f"{where}: {name}") for name, state in states.items()}
    size = training.get(_WORLD)
    return Found(
        states=values,
        elsewhere=frozenset(elsewhere - set(values)),
        world_size=size if type(size) is int else 0,
        pending=_PENDING in training,
    )


def names_per_rank(objects: Mapping[str, object]) -> set[str]:
    """Return the names of what a checkpoint's objects hold for each rank on its own."""
    per_rank = objects.get(PER_RANK)
    of_ranks = per_rank if isinstance(per_rank, list) else []
    return {str(name) for mine in of_ranks if isinstance(mine, Mapping) for name in mine}


class StateLoad:
    """Takes a checkpoint's training state over, or puts back what was there before.

    ``allow`` are names of what may be missing, or unused. With ``strict`` nothing else may be.
    """

    def __init__(
        self,
        mine: TrainingState,
        found: Found,
        *,
        where: str,
        allow: Collection[str],
        strict: bool,
    ) -> None:
        self._mine = mine
        self._found = found
        self._where = where
        self._allow = allow
        self._strict = strict
        self._undo: list[Callable[[], object]] = []

    def check(self) -> None:
        """Check that what is asked for is there, and what is there is asked for.

        Raises:
            MismatchError: it isn't.
        """
        parts, found = self._mine.parts(), self._found
        for name in parts:
            if name not in found.states and name not in self._allow:
                if name in found.elsewhere:
                    raise MismatchError(
                        f"{self._where}: {name}: must be equal on all ranks, or go to as many "
                        f"ranks as saved it, got one for each of another number of ranks",
                        hint=f'give allow=("{name}",) to start it anew',
                    )
                raise MismatchError(
                    f"{self._where}: {name}: must be in the checkpoint, got none",
                    hint=f'give allow=("{name}",) to start without it',
                )
        there = (set(found.states) | found.elsewhere) - {RNG, EXTRA}
        for name in sorted(there - set(parts)) if self._strict else ():
            if name not in self._allow:
                raise MismatchError(
                    f"{self._where}: {name}: must be taken over, got a run that has none",
                    hint=f'give allow=("{name}",) to leave it',
                )

    def load(self) -> bool:
        """Load every part that is there; what was before can be put back."""
        for name, part in self._mine.parts().items():
            if name in self._found.states:
                before = deepcopy(part.state_dict())
                self._undo.append(partial(part.load_state_dict, before))
                part.load_state_dict(self._found.states[name])
        return True

    def undo(self) -> None:
        """Put back what was there before."""
        while self._undo:
            self._undo.pop()()

    def finish(self, size: int) -> tuple[str, ...]:
        """Set the random generators; return a remark on each thing that was not taken over.

        ``size`` is the number of ranks that load.
        """
        notes: list[str] = []
        found, parts = self._found, self._mine.parts()
        if found.pending:
            notes.append("gradients: some were not used by a step when it was saved: they are lost")
        for name in sorted((set(found.states) | found.elsewhere) - {RNG, EXTRA} - set(parts)):
            notes.append(f"{name}: the checkpoint's is not taken, since this run has none")
        for name in parts:
            if name not in found.states:
                notes.append(f"{name}: the checkpoint has none for this rank, so this run's stays")
        if "dataloader" in parts and "dataloader" in found.states and size != found.world_size:
            notes.append(
                f"dataloader: {found.world_size} ranks saved it and {size} go on with it: it must "
                f"count samples of the whole run"
            )
        if EXTRA in found.elsewhere:
            notes.append("extra: it differs between ranks, of which there are more or fewer here")
        if self._mine.rng:
            notes += self._set_random_state()
        return tuple(notes)

    def _set_random_state(self) -> tuple[str, ...]:
        found = self._found
        if RNG in found.states:
            return set_random_state(found.states[RNG], f"{self._where}: {RNG}")
        if RNG in found.elsewhere:
            return ("rng: not restored, since the number of ranks is another",)
        return ("rng: the checkpoint has none, so this run's generators go on",)
