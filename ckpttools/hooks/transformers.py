"""How does a run of Hugging Face's ``Trainer`` save and go on? By a callback that starts it.

1. After each step a manager is asked whether to save. It is saved at the next event in which
   nothing is left of that step: before the next step begins, or when the training stops or ends.
   What was logged and evaluated is then in the state, and random numbers drawn for it are drawn.
2. :meth:`ShardedCheckpoint.train` is ``trainer.train``, from the newest sound step if there is one.
   The Trainer gets a directory with its own state alone, by which it finds its place in the data;
   weights, optimizer and scheduler are restored when the training begins.
3. The random generators are set when the first batches are there, since to make an iterator draws
   numbers that the saved run had drawn before; but for one that had ended with its epoch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.newest_sound import Sound
from ckpttools.hooks.optional_base import based
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.saved_before import saved_extra
from ckpttools.hooks.supported import check_accelerator, check_savable

_STATE = "trainer_state"
_BETWEEN_EPOCHS = "between_epochs"
_STATE_FILE = "trainer_state.json"
_SUMMARY = "train_runtime"
_OF_THE_PROCESS = ("is_local_process_zero", "is_world_process_zero")


def _trainer_callback() -> type:
    from transformers import TrainerCallback

    found: type = TrainerCallback
    return found


class ShardedCheckpoint:
    """A callback for ``transformers.Trainer`` that saves and restores with a manager.

    For one process, DistributedDataParallel and FSDP version 2 (`fully_shard`). Give the Trainer
    ``save_strategy="no"``: its own checkpoints aren't needed, and train by :meth:`train`. After a
    signal of the manager it is saved, and the Trainer stops.

    ``restored`` tells what was restored. The manager is the caller's to close; when the training
    ends, what was saved is durable.

    Raises:
        UsageError: Transformers isn't installed.
    """

    def __new__(cls, manager: CheckpointManager) -> Self:
        """Return an instance that is also one of Transformers' ``TrainerCallback``."""
        del manager
        made: Self = object.__new__(based(cls, _trainer_callback, "transformers"))
        return made

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.restored: Restored | None = None
        self._trainer: Any = None
        self._due: int | None = None
        self._step_to_restore: int | None = None
        self._sound: Sound[None] | None = None
        self._resumed_random: object = None

    def train(self, trainer: Any, *, step: int | None = None, **options: Any) -> Any:
        """Call ``trainer.train(**options)``, going on from ``step``, or the latest if there is one.

        Where the latest is damaged, the newest that isn't is taken, and ``restored.notes`` says so.

        Raises:
            UsageError: this isn't one of the Trainer's callbacks.
            UnsupportedError: the Trainer keeps parameters in a way that can't be saved.
            StorageError: there are steps, and none of them is sound.
            CkptError: what is saved doesn't fit this run, or ``step`` is damaged; raised on every
                rank.
        """
        if self not in trainer.callback_handler.callbacks:
            raise UsageError("trainer: must have this among its callbacks, got one without")
        check_accelerator(trainer.accelerator)
        self._trainer, self._step_to_restore = trainer, None
        self._sound = None if step is not None else self.manager.newest_sound()
        if self._sound is not None:
            step = self._sound.step
        if step is None:
            return trainer.train(**options)
        with TemporaryDirectory(prefix="ckpttools-trainer-") as folder:
            return self._train_on(trainer, step, Path(folder), options)

    # ---- what the Trainer calls ----------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the Trainer was told that it goes on from.

        Raises:
            CkptError: this run can't be saved, or what is saved doesn't fit it.
        """
        del args, state, control
        check_savable(kwargs["model"], _inner(kwargs["optimizer"]))
        if self._step_to_restore is None:
            return
        restored = self.manager.restore(
            kwargs["model"],
            _inner(kwargs["optimizer"]),
            kwargs["lr_scheduler"],
            self._scaler(),
            step=self._step_to_restore,
            verify=self._sound is None,  # else its bytes were checked when it was found
        )
        passed_over = () if self._sound is None else self._sound.notes
        self.restored = replace(restored, notes=(*restored.notes, *passed_over))
        self._step_to_restore, self._sound = None, None
        extra = self.restored.objects.get("extra")
        if not (isinstance(extra, Mapping) and extra.get(_BETWEEN_EPOCHS)):
            self._resumed_random = random_state()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what is due; let the first step find the random generators as they were."""
        del args, control
        if self._resumed_random is not None:
            set_random_state(self._resumed_random, "rng")
            self._resumed_random = None
        self._save(state, kwargs, between_epochs=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask whether this step is to be saved, and stop after a signal."""
        del args, kwargs
        if self.manager.should_save(state.global_step):
            self._due = int(state.global_step)
        if self.manager.preempted:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what is due where training stops within an epoch.

        What the Trainer does at the end of an epoch, logging and evaluation, comes after this. A
        run that goes on from here does it when its epoch is over.
        """
        del args, control
        if not float(state.epoch).is_integer():
            self._save(state, kwargs, between_epochs=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save what is due, and wait until it is durable."""
        del args, control
        self._save(state, kwargs, between_epochs=float(state.epoch).is_integer())
        self.manager.wait()

    # ---- within --------------------------------------------------------------------------

    def _save(self, state: Any, objects: Mapping[str, Any], *, between_epochs: bool) -> None:
        if self._due is None:
            return
        step, self._due = self._due, None
        self.manager.save(
            step,
            objects["model"],
            _inner(objects["optimizer"]),
            objects["lr_scheduler"],
            self._scaler(),
            extra={
                _STATE: Ranks().gather(self._state(state))[0],
                _BETWEEN_EPOCHS: between_epochs,
            },
            force=True,
        )

    def _state(self, state: Any) -> dict[str, object]:
        """Return the Trainer's state as it stands in its own checkpoints, less this process's."""
        told = {k: v for k, v in asdict(state).items() if k not in _OF_THE_PROCESS}
        history = told.get("log_history")
        if history and _SUMMARY in history[-1]:  # of a run that stops, and belongs to no step
            history.pop()
        if self._trainer is not None:
            told["stateful_callbacks"] = _callback_states(self._trainer)
        return told

    def _scaler(self) -> Any:
        return None if self._trainer is None else self._trainer.accelerator.scaler

    def _train_on(self, trainer: Any, step: int, folder: Path, options: Mapping[str, Any]) -> Any:
        """Let the Trainer begin where the saved one was."""
        state = saved_extra(self.manager, step).get(_STATE)
        if not isinstance(state, dict):
            raise MismatchError(f"step {step}: extra: must hold the Trainer's state, got none")
        self._step_to_restore = step
        (folder / _STATE_FILE).write_text(json.dumps(state))
        own: Callable[..., Any] = trainer._load_from_checkpoint
        trainer._load_from_checkpoint = lambda *_, **__: None  # weights come at on_train_begin
        try:
            return trainer.train(resume_from_checkpoint=str(folder), **options)
        finally:
            trainer._load_from_checkpoint = own


def _callback_states(trainer: Any) -> dict[str, object]:
    """Return the states of the callbacks that have one, as the Trainer's own checkpoints do."""
    from transformers.trainer_callback import ExportableState

    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if not isinstance(callback, ExportableState):
            continue
        name = type(callback).__name__
        if name in states:
            earlier = states[name] if isinstance(states[name], list) else [states[name]]
            states[name] = [*earlier, callback.state()]
        else:
            states[name] = callback.state()
    return states


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
