"""How does a run of Lightning's Trainer save and go on? By a callback, each rank its own part.

1. When fitting starts, the latest step is restored where there is one: the module, its optimizer
   and schedulers, the progress of the loops, the loader where it has a state, and the callbacks.
2. After each batch that ends with a step of the optimizer, a manager is asked whether to save.
3. In the middle of an epoch, the random generators are set when the first batch is there, since to
   make an iterator of a loader draws numbers that the run had drawn before.
4. Validation is given numbers of its own, since a run that goes on doesn't repeat the one before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.optional_base import based
from ckpttools.hooks.plain_state import from_plain, to_plain
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.saved_before import latest_step, restored_extra
from ckpttools.hooks.supported import check_savable, check_strategy

_LOOP = "fit_loop"
_CALLBACKS = "callbacks"
_DATA = "datamodule"
_MODULE = "module"
_NO_POSITION = "dataloader: it had no state_dict, so this run sees other batches than that one had"


def _checkpoint_callback() -> type:
    from lightning.pytorch.callbacks import Checkpoint

    found: type = Checkpoint
    return found


class ShardedCheckpoint:
    """A callback for ``lightning.pytorch.Trainer`` that saves and restores with a manager.

    For the strategies of one device, DDP and ``ModelParallelStrategy`` (`fully_shard`, FSDP2), with
    one optimizer. Steps are the Trainer's ``global_step``. The loader of the training data should
    be a `ResumableLoader`, or another with ``state_dict``: Lightning itself can't go on in the
    middle of an epoch with others. With ``restore=False`` nothing is restored. After a signal of
    the manager it is saved, and the Trainer stops.

    ``restored`` tells what was restored. The manager is the caller's to close; when fitting ends,
    what was saved is durable.

    Raises:
        UsageError: Lightning isn't installed.
    """

    def __new__(cls, manager: CheckpointManager, *, restore: bool = True) -> Self:
        """Return an instance that is also one of Lightning's ``Checkpoint``."""
        del manager, restore
        made: Self = object.__new__(based(cls, _checkpoint_callback, "lightning"))
        return made

    def __init__(self, manager: CheckpointManager, *, restore: bool = True) -> None:
        self.manager = manager
        self.restored: Restored | None = None
        self._wants_restore = restore
        self._last_step = 0
        self._resumed_random: object = None
        self._has_loader_state = False
        self._after_batch: object = None

    # ---- what the Trainer calls ----------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Restore the latest step, once the strategy has made optimizers and schedulers.

        Raises:
            CkptError: this run can't be saved, or what is saved doesn't fit it.
        """
        check_strategy(trainer.strategy)
        check_savable(pl_module, _optimizer(trainer))
        self._after_batch = None
        if self._wants_restore and latest_step(self.manager) is not None:
            self._restore(trainer, pl_module)
        self._last_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        """Let the first batch after a restore find the random generators as they were."""
        del trainer, pl_module
        batch_index = args[1]
        if self._resumed_random is not None and (batch_index > 0 or self._has_loader_state):
            set_random_state(self._resumed_random, "rng")
        self._resumed_random = None

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *args: Any) -> None:
        """Save, if the manager says so and gradients are not being accumulated."""
        del args
        self._after_batch = random_state()
        step = int(trainer.global_step)
        if step == self._last_step:
            return
        self._last_step = step
        if self.manager.should_save(step):
            self._save(trainer, pl_module, step)
        if self.manager.preempted:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Give the random generators back to the training."""
        del trainer, pl_module
        if self._after_batch is not None:  # else it is the check before the training
            set_random_state(self._after_batch, "rng")

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Wait until what was saved is durable."""
        del trainer, pl_module
        self._after_batch = None
        self.manager.wait()

    # ---- within --------------------------------------------------------------------------

    def _save(self, trainer: Any, module: nn.Module, step: int) -> None:
        optimizer = _optimizer(trainer)
        self.manager.save(
            step,
            module,
            optimizer,
            _Schedulers(trainer),
            _scaler(trainer),
            extra=self._progress(trainer, module),
            force=True,
        )

    def _restore(self, trainer: Any, module: nn.Module) -> None:
        optimizer = _optimizer(trainer)
        self.restored = self.manager.restore(
            module, optimizer, _Schedulers(trainer), _scaler(trainer)
        )
        extra = restored_extra(
            self.restored,
            _LOOP,
            "the progress of Lightning's loops",
            hint="restore=False, and restore with the manager",
        )
        for callback in trainer.callbacks:
            if callback is not self and callback.state_key in extra[_CALLBACKS]:
                callback.load_state_dict(extra[_CALLBACKS][callback.state_key])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(extra[_DATA])
        hooks: Any = module
        hooks.on_load_checkpoint(extra[_MODULE])
        trainer.fit_loop.load_state_dict(extra[_LOOP])
        self._has_loader_state = bool(extra[_LOOP].get("state_dict", {}).get("combined_loader"))
        if not self._has_loader_state:
            self.restored = replace(self.restored, notes=(*self.restored.notes, _NO_POSITION))
        self._resumed_random = random_state()

    def _progress(self, trainer: Any, module: nn.Module) -> dict[str, object]:
        """Return what the Trainer's own checkpoints hold beside weights and optimizer."""
        of_module: dict[str, object] = {}
        hooks: Any = module
        hooks.on_save_checkpoint(of_module)
        return {
            _LOOP: trainer.fit_loop.state_dict(),
            _CALLBACKS: self._callback_states(trainer),
            _DATA: {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            _MODULE: of_module,
        }

    def _callback_states(self, trainer: Any) -> object:
        """Return the states of the other callbacks, those of rank 0 as Lightning's own files do.

        Some differ from rank to rank (times), which would tie the step to as many ranks.
        """

        def look() -> object:
            states = {
                callback.state_key: callback.state_dict()
                for callback in trainer.callbacks
                if callback is not self
            }
            return to_plain({key: state for key, state in states.items() if state}, _CALLBACKS)

        return from_plain(Ranks().together(look)[0], _CALLBACKS)


class _Schedulers:
    """All schedulers of a Trainer as one."""

    def __init__(self, trainer: Any) -> None:
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def state_dict(self) -> list[Any]:
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load_state_dict(self, states: list[Any]) -> None:
        if len(states) != len(self._schedulers):
            raise MismatchError(
                f"scheduler: must be the {len(states)} that were saved, got {len(self._schedulers)}"
            )
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _optimizer(trainer: Any) -> torch.optim.Optimizer:
    optimizers = trainer.optimizers
    if len(optimizers) != 1:
        raise UsageError(f"optimizers: must be one for a sharded save, got {len(optimizers)}")
    optimizer: torch.optim.Optimizer = optimizers[0]
    return optimizer


def _scaler(trainer: Any) -> Any:
    """Return what scales losses of 16-bit floats, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)
