"""What did a run save last, and what did it say of itself? For hooks that save an ``extra``.

Some have to know where the run was before they have a model to restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttools import api
from ckpttools.errors import MismatchError, system_errors
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.training_state import EXTRA, find_states


def latest_step(manager: CheckpointManager) -> int | None:
    """Return the step that was saved last, as rank 0 sees it, once it is durable.

    A collective call of all ranks of the default group.
    """
    manager.wait()
    return Ranks().gather(manager.latest())[0]


@system_errors()
def saved_extra(manager: CheckpointManager, step: int) -> Mapping[str, object]:
    """Return what was given to `CheckpointManager.save` as ``extra``; empty if nothing was.

    A collective call of all ranks of the default group; rank 0 reads.

    Raises:
        CkptError: the step can't be read; raised on every rank.
    """
    crew = Crew()
    place = manager.directory.path(step)

    def read() -> Mapping[str, object]:
        if crew.rank != 0:
            return {}
        return dict(api.open_checkpoint(place, cross_check=False).manifest.objects)

    found = find_states(crew.together(read)[0], crew, str(place))
    extra = found.states.get(EXTRA)
    return extra if isinstance(extra, Mapping) else {}


def restored_extra(restored: Restored, key: str, what: str, *, hint: str) -> Mapping[str, Any]:
    """Return what a hook gave to `CheckpointManager.save` as ``extra``, told by its ``key``.

    Raises:
        MismatchError: this rank gets none of that hook's.
    """
    extra = restored.objects.get(EXTRA)
    if isinstance(extra, Mapping) and key in extra:
        return extra
    differs = any(note.startswith(f"{EXTRA}:") for note in restored.notes)
    got = "one for each of another number of ranks" if differs else "none"
    raise MismatchError(f"{restored.path}: extra: must be {what}, got {got}", hint=hint)
