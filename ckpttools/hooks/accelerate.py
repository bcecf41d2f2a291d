"""How does a loop with an ``Accelerator`` save and go on? Through a manager, with what it wrapped.

1. The model and optimizer that are saved are those that ``prepare`` wrapped, the scaler is the
   accelerator's, and objects given to ``register_for_checkpointing`` are saved too.
2. :meth:`AcceleratedCheckpoints.batches` yields the batches of an epoch that are left, and counts
   them, so the position in the data is known. Accelerate's loaders fetch one batch ahead; what
   counts is what the loop was given.
3. In the middle of an epoch, the random generators are set when the first batch is there, since to
   make an iterator of a loader draws numbers that the saved run had drawn before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import RandomSampler

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.saved_before import latest_step, restored_extra
from ckpttools.hooks.supported import check_accelerator
from ckpttools.hooks.training_state import Stateful

_POSITION = "accelerate"
_OBJECTS = "registered"
_EXTRA = "extra"


class AcceleratedCheckpoints:
    """Saves and restores what an ``Accelerator`` has prepared, in place of its ``save_state``.

    ``epoch`` is the epoch that :meth:`batches` is in or begins with, ``batch`` how many of its
    batches were given out.

    Raises:
        UnsupportedError: it trains under DeepSpeed, XLA, Megatron-LM or FSDP version 1.
    """

    def __init__(self, accelerator: Any, manager: CheckpointManager) -> None:
        check_accelerator(accelerator)
        self.accelerator = accelerator
        self.manager = manager
        self.epoch = 0
        self.batch = 0
        self._resumed_random: object = None

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of the epoch that are left; the next call yields the next epoch's.

        ``loader`` is one that ``prepare`` returned, of a known length. With ``shuffle=True`` it
        must draw its order from the epoch: ``DataLoaderConfiguration(use_seedable_sampler=True)``.

        Raises:
            UsageError: its order can't be had again.
        """
        if _draws_its_order(loader):
            raise UsageError(
                "loader: must draw its order from the epoch, got torch's RandomSampler",
                hint="Accelerator(dataloader_config="
                "DataLoaderConfiguration(use_seedable_sampler=True))",
            )
        length, epoch, first = len(loader), self.epoch, self.batch
        rest = self.accelerator.skip_first_batches(loader, first) if first else loader
        for one in (loader, rest):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        for number, batch in enumerate(rest, start=first + 1):
            if first and self._resumed_random is not None:
                set_random_state(self._resumed_random, "rng")
            self._resumed_random = None
            self.epoch, self.batch = (epoch, number) if number < length else (epoch + 1, 0)
            yield batch

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Any,
        scheduler: Stateful | None = None,
        *,
        rng: bool = True,
        dataloader: Stateful | None = None,
        extra: Mapping[str, object] | None = None,
        force: bool = False,
    ) -> bool:
        """Save as `CheckpointManager.save` does; a collective call of all processes.

        In the middle of an accumulation nothing is saved, for its gradients would be lost.

        Raises:
            UsageError: ``force`` in the middle of an accumulation.
        """
        if not self.accelerator.sync_gradients:
            if force:
                raise UsageError(
                    "save: must follow a step, got force=True in the middle of an accumulation",
                    hint="ask accelerator.sync_gradients",
                )
            return False
        told: dict[str, object] = {
            _POSITION: {"epoch": self.epoch, "batch": self.batch},
            _OBJECTS: [one.state_dict() for one in self._registered()],
        }
        if extra is not None:
            told[_EXTRA] = dict(extra)
        return self.manager.save(
            step,
            self.accelerator.unwrap_model(model),
            _inner(optimizer),
            scheduler,
            self.accelerator.scaler,
            rng=rng,
            dataloader=dataloader,
            extra=told,
            force=force,
        )

    def restore(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Stateful | None = None,
        *,
        rng: bool = True,
        dataloader: Stateful | None = None,
        step: int | None = None,
        strict: bool = True,
        allow: Collection[str] = (),
    ) -> Restored | None:
        """Restore as `CheckpointManager.restore` does; a collective call of all processes.

        Without ``step`` it returns None where nothing was saved yet. What was given to :meth:`save`
        as ``extra`` is in ``objects["extra"]["extra"]``.

        Raises:
            MismatchError: the checkpoint is none of :meth:`save`, or other objects were registered.
        """
        if step is None and latest_step(self.manager) is None:
            return None
        restored = self.manager.restore(
            self.accelerator.unwrap_model(model),
            _inner(optimizer),
            scheduler,
            self.accelerator.scaler,
            rng=rng,
            dataloader=dataloader,
            step=step,
            strict=strict,
            allow=allow,
        )
        told = restored_extra(
            restored, _POSITION, "that of AcceleratedCheckpoints", hint="restore with the manager"
        )
        registered, states = self._registered(), told[_OBJECTS]
        if len(registered) != len(states):
            raise MismatchError(
                f"{restored.path}: registered: must be the {len(states)} objects that were saved, "
                f"got {len(registered)}"
            )
        for one, state in zip(registered, states, strict=True):
            one.load_state_dict(state)
        self.epoch, self.batch = told[_POSITION]["epoch"], told[_POSITION]["batch"]
        self._resumed_random = random_state() if rng else None
        return restored

    def _registered(self) -> list[Any]:
        """Return what was given to ``register_for_checkpointing``."""
        return list(self.accelerator._custom_objects)


def _draws_its_order(loader: Any) -> bool:
    """Say whether a loader shuffles by a generator whose state is in no checkpoint."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batch_sampler, "batch_sampler"):  # Accelerate's, around that of the loader
        batch_sampler = batch_sampler.batch_sampler
    return type(getattr(batch_sampler, "sampler", None)) is RandomSampler


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that ``prepare`` has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
