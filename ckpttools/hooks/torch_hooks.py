"""What of this can a script have that keeps its own ``torch.save`` and its own loop?

Three of torch's own hooks, each put on an optimizer and taken off by the handle that is returned:

* after each step, save where a manager's rule says so;
* into each ``state_dict``, the state of schedulers, counters and random generators;
* out of each ``state_dict`` that is loaded, the same, before the optimizer takes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckpttools.errors import FormatError
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.plain_state import from_plain, to_plain
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.hooks.training_state import RNG, Stateful
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode

KEY = "ckpttools_training_state"
"""The entry that is added to an optimizer's ``state_dict``."""


def save_after_step(
    manager: CheckpointManager,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    first_step: int = 0,
    **parts: Any,
) -> RemovableHandle:
    """Save after each ``step()`` of an optimizer for which the manager's rule says so.

    Steps are counted from ``first_step``: after the first call it is ``first_step + 1``. ``parts``
    are those of :meth:`CheckpointManager.save`. A scheduler that is stepped after the optimizer is
    saved as it is before that.
    """
    count = first_step

    def hook(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal count
        del args, kwargs
        count += 1
        manager.save(count, model, stepped, **parts)

    return optimizer.register_step_post_hook(hook)


def add_training_state(
    optimizer: torch.optim.Optimizer, *, rng: bool = True, **parts: Stateful
) -> tuple[RemovableHandle, RemovableHandle]:
    """Let an optimizer's ``state_dict`` carry the state of what goes with it, and take it back.

    ``parts`` are schedulers, scalers and loaders by any name. What is added, under one key, is
    plain data, so that ``torch.load(…, weights_only=True)`` reads it. A part that a loaded dict
    doesn't have stays as it is, and so does everything where the dict has no such key. Returns the
    handles of both hooks.
    """

    def give(owner: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        del owner
        states: dict[str, object] = {name: part.state_dict() for name, part in parts.items()}
        if rng:
            states[RNG] = random_state()
        coded = {name: encode(to_plain(one, name), where=name) for name, one in states.items()}
        return {**state, KEY: coded}

    def take(owner: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        del owner
        coded = state.get(KEY, {})
        if not isinstance(coded, Mapping):
            raise FormatError(f"{KEY}: must be a table, got {type(coded).__name__}")
        states = {name: from_plain(decode(one, where=name), name) for name, one in coded.items()}
        for name, part in parts.items():
            if name in states:
                part.load_state_dict(states[name])
        if rng and RNG in states:
            set_random_state(states[RNG], RNG)
        return {key: value for key, value in state.items() if key != KEY}

    post: Callable[..., RemovableHandle] = optimizer.register_state_dict_post_hook
    return post(give), optimizer.register_load_state_dict_pre_hook(take)
