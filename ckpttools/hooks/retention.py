"""Which checkpoints are kept, and which of them with their optimizer state?

A step is kept if it is one of the last ``keep_last``, or a multiple of ``keep_every``; with
neither, all are. Of those that are kept the last ``keep_optimizer_last`` keep their optimizer
state, the others become weights alone. The latest is never touched.

1. A removed step is renamed to a hidden name first, so that no reader meets half of it; what then
   has to be deleted is deleted in a thread, since that takes about as long as a save.
2. A stripped one is written beside the old one, proven equal to it, and exchanged with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools import api
from ckpttools.errors import CkptError, UsageError
from ckpttools.executor import Resources
from ckpttools.hooks.removals import Removals
from ckpttools.hooks.step_directory import StepDirectory, remove_tree
from ckpttools.manifest import WEIGHT
from ckpttools.storage.commit import Staging

_BUDGET_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule by which steps are kept.

    Raises:
        UsageError: a number is not positive.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_optimizer_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_optimizer_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: must be at least 1, got {value}")

    def to_remove(self, steps: Sequence[int], latest: int) -> list[int]:
        """Return the steps that go; ``steps`` ascend.

        >>> Retention(keep_last=2, keep_every=100).to_remove([50, 100, 150, 200, 250], 250)
        [50, 150]
        """
        if self.keep_last is None and self.keep_every is None:
            return []
        last = set(steps[-self.keep_last :]) if self.keep_last else set()
        every = {step for step in steps if self.keep_every and step % self.keep_every == 0}
        return [step for step in steps if step not in last | every | {latest}]

    def to_strip(self, steps: Sequence[int], latest: int) -> list[int]:
        """Return the steps that keep weights alone, among those that stay.

        >>> Retention(keep_optimizer_last=1).to_strip([100, 200, 250], 250)
        [100, 200]
        """
        if self.keep_optimizer_last is None:
            return []
        return [step for step in steps[: -self.keep_optimizer_last] if step != latest]


def apply_retention(rule: Retention, directory: StepDirectory, removals: Removals) -> list[str]:
    """Remove and strip what the rule says; return a line on each step where that failed.

    What fails is tried again after the next save.
    """
    problems: list[str] = []
    latest = directory.latest()
    if latest is None:
        return problems
    gone = rule.to_remove(directory.steps(), latest)
    for step in gone:
        try:
            removals.begin(directory.hide(step))
        except CkptError as error:
            problems.append(str(error))
    left = [step for step in directory.steps() if step not in gone]
    for step in rule.to_strip(left, latest):
        try:
            _strip(step, directory)
        except CkptError as error:
            problems.append(f"{directory.path(step)}: can't leave out its optimizer state: {error}")
    return problems


def _strip(step: int, directory: StepDirectory) -> None:
    """Let a step keep its weights alone; nothing is done where it has nothing else."""
    place = directory.path(step)
    opened = api.open_checkpoint(place, cross_check=False)
    if all(spec.slot == WEIGHT for spec in opened.manifest.tensors):
        return
    weights = directory.hidden(step, "weights")
    resources = Resources(budget_bytes=_BUDGET_BYTES, workers=1)
    try:
        api.strip(place, weights, resources=resources)
        with Staging(place, overwrite=True) as staging:
            for path in weights.iterdir():
                path.rename(staging.path / path.name)
            staging.publish()
    finally:
        remove_tree(weights)
