"""How does a training script save, go on after a crash, and lose at most the steps since?

1. ``save`` makes a plan with all ranks, copies the state to host memory (or writes it at once),
   and returns; threads write it behind the training (`ckpttools.hooks.background`).
2. A step's directory gets its name when all of it is on disk, and ``latest`` moves after that
   (`ckpttools.hooks.step_directory`).
3. ``restore`` takes the latest step, on any number of ranks; where that is damaged, the one before.

Every method that says so is a collective call: all ranks make it, and an error on one is raised on
all. A write that fails behind the training is raised at the next such call.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from ckpttools.errors import UsageError, system_errors
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.newest_sound import Sound, check_step, newest_sound
from ckpttools.hooks.pending_gradients import has_pending_gradients
from ckpttools.hooks.preemption import Preemption
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.retention import Retention
from ckpttools.hooks.save_forms import FORMS, SHARDED, WHOLE, gather_save, plan_save
from ckpttools.hooks.step_directory import StepDirectory
from ckpttools.hooks.step_reader import StepReader, check_allow
from ckpttools.hooks.step_writer import StepWriter
from ckpttools.hooks.training_state import Stateful, TrainingState

DEADLINE_S = 1800.0
"""How long a rank may take to write before the save counts as failed; a dead one is noticed."""


class CheckpointManager:
    """The checkpoints of one run under ``directory``, one directory a step.

    Saved is every ``every_steps`` steps and every ``every_seconds`` (of rank 0's clock), whichever
    comes first; at every call where neither is given. ``keep_last`` and ``keep_every`` say which
    steps are kept, ``keep_optimizer_last`` how many of those keep more than their weights. With
    ``asynchronous`` a save costs the training thread one copy of its state, and as much memory.
    ``overwrite`` replaces a step that is there. ``preemption_signals`` make the next
    :meth:`should_save` say yes, and :attr:`preempted` after it. As a context manager it waits at
    the end for what is being written.

    Raises:
        UsageError: settings contradict each other.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_optimizer_last: int | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        asynchronous: bool = True,
        format: str = SHARDED,  # noqa: A002  # the name of the CLI's option
        overwrite: bool = False,
        preemption_signals: Sequence[int] = (signal.SIGTERM,),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if format not in FORMS:
            raise UsageError(f"format: must be one of {', '.join(FORMS)}, got {format!r}")
        for name, value in (("every_steps", every_steps), ("every_seconds", every_seconds)):
            if value is not None and value <= 0:
                raise UsageError(f"{name}: must be positive, got {value}")
        self.directory = StepDirectory(directory)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.asynchronous = asynchronous and format not in WHOLE
        self.format = format
        self.overwrite = overwrite
        self.preempted = False
        retention = Retention(keep_last, keep_every, keep_optimizer_last)
        self._writer = StepWriter(self.directory, retention, deadline_s)
        self._preemption = Preemption(preemption_signals)
        self._crew: Crew | None = None
        self._decided: tuple[int, bool] | None = None
        self._last_step: int | None = None
        self._last_time = time.monotonic()
        self._carry: dict[str, object] = {}
        self._damaged: set[int] = set()

    # ---- what is there -------------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step that was saved last, complete and durable; None where there is none."""
        return self.directory.latest()

    def all_steps(self) -> list[int]:
        """Return the complete steps, ascending."""
        return self.directory.steps()

    # ---- saving --------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Say whether ``step`` is to be saved; a collective call with one small message.

        The answer is the same on every rank. A signal to any rank makes it yes on all. Before the
        first call that is given an optimizer, all processes of the default group are asked.

        Raises:
            CkptError: an earlier write has failed on any rank; raised on every rank.
        """
        if self._decided is not None and self._decided[0] == step:
            return self._decided[1]
        due = self.every_seconds is not None and (
            time.monotonic() - self._last_time >= self.every_seconds
        )
        crew = self._crew or self._meet(None)
        failed = self._writer.failed
        numbers = (int(due and crew.rank == 0), int(self._preemption.noted), int(failed))
        due_now, preempted, failed_now = crew.agree(numbers)
        if failed_now:
            self._writer.collect(crew)
        self.preempted = self.preempted or bool(preempted)
        always = self.every_steps is None and self.every_seconds is None
        by_step = self.every_steps is not None and step % self.every_steps == 0
        wanted = always or by_step or bool(due_now) or self.preempted
        self._decided = step, wanted and step != self._last_step
        return self._decided[1]

    @system_errors()
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        *,
        rng: bool = True,
        dataloader: Stateful | None = None,
        extra: Mapping[str, object] | None = None,
        force: bool = False,
    ) -> bool:
        """Save if :meth:`should_save` says so, or with ``force``; say whether it was saved.

        A collective call. What is saved are the values of this moment. Asynchronous, it returns
        once they are copied; a save that is still being written is waited for first. After a
        preemption signal it returns when all is on disk.

        Raises:
            CkptError: this save can't begin, or an earlier one failed, on any rank; raised on
                every rank, and ``latest`` stays.
        """
        crew = self._meet(optimizer)
        if not (force or self.should_save(step)):
            return False
        self._writer.collect(crew)
        self._writer.sweep(crew)
        state = TrainingState(scheduler, scaler, dataloader, rng=rng, extra=extra)
        objects = state.objects(crew, pending=lambda: has_pending_gradients(optimizer))
        overwrite = self.overwrite or step in self._damaged
        if self.format in WHOLE:
            self._writer.publish_by(
                step,
                crew,
                lambda: gather_save(
                    self.format,
                    self.directory.path(step),
                    model,
                    optimizer,
                    iteration=step,
                    carry=self._carry,
                    extra=objects,
                    overwrite=overwrite,
                ),
            )
        else:
            plan = plan_save(
                self.format, model, optimizer, iteration=step, carry=self._carry, extra=objects
            )
            write = self._writer.begin if self.asynchronous else self._writer.write_now
            write(step, plan, crew, overwrite=overwrite)
        self._decided = step, False
        self._last_step, self._last_time = step, time.monotonic()
        if self.preempted:
            self._writer.collect(crew)
        return True

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Get the memory for asynchronous saves now; a collective call.

        Without it the first save takes longer than those after it.
        """
        crew = self._meet(optimizer)
        self._writer.sweep(crew)
        if self.asynchronous:
            plan = plan_save(self.format, model, optimizer, iteration=0, carry=None, extra={})
            self._writer.prepare(plan, crew)

    def wait(self) -> None:
        """Wait until what is being written is durable on all ranks; a collective call.

        Raises:
            CkptError: it failed on any rank; raised on every rank.
        """
        self._writer.collect(self._crew or self._meet(None))

    def close(self) -> None:
        """Wait as :meth:`wait` does, and give the signals back; a collective call."""
        try:
            self.wait()
        finally:
            self._writer.close()
            self._preemption.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # Other ranks may be anywhere: no collective call. What was begun is still finished.
        self._writer.join()
        self._writer.close()
        self._preemption.close()

    # ---- restoring -----------------------------------------------------------------------

    @system_errors()
    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        *,
        rng: bool = True,
        dataloader: Stateful | None = None,
        step: int | None = None,
        strict: bool = True,
        allow: Collection[str] = (),
        verify: bool = True,
    ) -> Restored:
        """Take over the latest step, or ``step``, on whatever topology this run has.

        A collective call. Where the latest is damaged, the one before is taken, and ``notes`` says
        so; ``verify`` compares the sums of all its bytes first, each rank its share. ``strict``
        refuses what this run has and the checkpoint hasn't, and the other way round, but for what
        ``allow`` names: ``scheduler``, ``scaler``, ``dataloader``; with optimizers of torch also
        what `load_general` knows. Random generators are restored where the number of ranks is the
        same. Of the result's ``objects``, ``iteration`` is the step and ``extra`` what was given to
        :meth:`save`.

        Raises:
            StorageError: there is no sound step.
            CkptError: it doesn't fit this run; raised on every rank, and nothing was changed.
        """
        check_allow(allow, optimizer)
        crew = self._meet(optimizer)
        self._writer.collect(crew)
        state = TrainingState(scheduler, scaler, dataloader, rng=rng)
        reader = StepReader(self.directory, crew, model, optimizer, state, strict, allow, verify)
        resumed = reader.restore(step)
        self._damaged.update(resumed.damaged)
        self._last_step, self._last_time = resumed.step, time.monotonic()
        self._carry = dict(resumed.restored.objects)
        self._carry.pop("extra", None)
        return replace(
            resumed.restored, notes=(*resumed.restored.notes, *self._in_the_way(resumed.step))
        )

    @system_errors()
    def newest_sound(self) -> Sound[None] | None:
        """Return the step that :meth:`restore` would take, checked as it does; None without any.

        For callers that must know it before there is a model. A collective call of all processes
        of the default group. Steps found damaged are remembered as :meth:`restore` does it.

        Raises:
            StorageError: there are steps, and none of them is sound.
        """
        crew = self._meet(None)
        self._writer.collect(crew)
        found = newest_sound(self.directory, crew, partial(check_step, self.directory, crew))
        self._damaged.update(found.damaged if found is not None else ())
        return found

    # ---- within --------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """A line on each step that could not be removed, or not be stripped of its optimizer."""
        return tuple(self._writer.notes)

    def _in_the_way(self, step: int) -> list[str]:
        """Return a line on sound steps that a run from ``step`` on will meet, if there are any."""
        later = [one for one in self.all_steps() if one > step and one not in self._damaged]
        if self.overwrite or not later:
            return []
        steps = ", ".join(map(str, later[:3])) + (" …" if len(later) > 3 else "")
        told = f"later steps are there ({steps}): saving one of them again is refused without "
        return [f"{told}overwrite=True"]

    def _meet(self, optimizer: torch.optim.Optimizer | None) -> Crew:
        """Return the ranks that act as one with this optimizer."""
        self._crew = Crew(optimizer)
        return self._crew
