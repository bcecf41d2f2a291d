"""What does this rank hold of a model and its optimizer? Tensors by name and slot, and the rest.

1. A parameter's slots are ``weight`` and the keys of its entry in the optimizer's state; a buffer
   is a weight too, for it belongs to the model.
2. ``step`` is a number for each parameter. What else is no tensor is kept as it is, by name.
3. A parameter without state has none: what an optimizer makes late stays not made.

Nothing is copied: the tensors are the live ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ckpttools.errors import UnsupportedError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.hooks.local_tensors import LocalTensor, local_of
from ckpttools.hooks.model_state import ModelTensor, model_tensors
from ckpttools.manifest import WEIGHT
from ckpttools.storage.inert_encoder import encode

STEP = "step"
_NOT_SETTINGS = ("params", "param_names")
_NOT_HERE = ("ZeroRedundancyOptimizer", "LBFGS")
"""Optimizers whose state isn't that of one parameter each."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """A tensor of the run. ``is_buffer``: ranks may differ in it, and the first one's counts."""

    name: str
    slot: str
    local: LocalTensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """What a rank holds.

    ``steps`` are those of the parameters that have one; ``values`` what else of the optimizer's
    state is no tensor, by parameter and key.
    """

    tensors: tuple[LiveTensor, ...]
    steps: Mapping[str, int | float]
    values: Mapping[str, Mapping[str, object]]
    groups: tuple[ParamGroup, ...]


def capture(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Captured:
    """Return what this rank holds; without an optimizer, the model alone.

    Raises:
        UnsupportedError: some of it is of a kind that has no place in a checkpoint.
        UsageError: the optimizer has parameters that are not the model's.
    """
    found = model_tensors(model)
    if optimizer is None:
        return Captured(tuple(map(_weight, found)), {}, {}, ())
    names = parameter_names(found, optimizer)
    tensors: list[LiveTensor] = []
    steps: dict[str, Tensor | int | float] = {}
    values: dict[str, dict[str, object]] = {}
    for one in found:
        tensors.append(_weight(one))
        state = optimizer.state.get(one.tensor, {}) if id(one.tensor) in names else {}
        plain: dict[str, object] = {}
        before = len(tensors)
        for key, value in state.items():
            where = f"{one.name} ({key})"
            if key == STEP and _is_number(value):
                steps[one.name] = value
            elif isinstance(value, Tensor):
                _check_slot(key, where)
                tensors.append(LiveTensor(one.name, key, local_of(value, where)))
            else:
                encode({key: value}, where=where)
                plain[str(key)] = value
        if plain or (one.name in steps and len(tensors) == before):
            values[one.name] = plain
    return Captured(tuple(tensors), _numbers(steps), values, tuple(_groups(optimizer, names)))


def parameter_names(
    found: Sequence[ModelTensor], optimizer: torch.optim.Optimizer
) -> dict[int, str]:
    """Return the names of an optimizer's parameters by their identity.

    Raises:
        UsageError: it has one that is not the model's.
        UnsupportedError: it keeps state of another kind than that of its parameters.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if odd := next((kind for kind in _NOT_HERE if kind in kinds), None):
        raise UnsupportedError(f"optimizer: must keep state for each parameter alone, got {odd}")
    names = {id(one.tensor): one.name for one in found if not one.is_buffer}
    mine: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise UsageError(
                    f"optimizer: group {number}: parameters must be the model's, got another of "
                    f"shape {tuple(param.shape)}",
                    hint="give the model that the optimizer was built from",
                )
            mine[id(param)] = names[id(param)]
    for key in optimizer.state:
        if id(key) not in mine:
            shown = tuple(key.shape) if isinstance(key, Tensor) else f"{key!r:.40}"
            raise UnsupportedError(
                f"optimizer: state must be of its parameters, got that of {shown}"
            )
    return mine


def group_settings(group: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the settings of a parameter group as plain data, numbers of torch and numpy too.

    Raises:
        FormatError: a setting is something else than plain data.
    """
    settings = {k: _plain(value) for k, value in group.items() if k not in _NOT_SETTINGS}
    encode(settings, where=where)
    return settings


def _plain(value: object) -> object:
    """Return a number that torch or numpy holds as Python's; anything else as it is."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    return value


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[ParamGroup]:
    for number, group in enumerate(optimizer.param_groups):
        members = tuple(names[id(param)] for param in group["params"])
        yield ParamGroup(group_settings(group, f"param_groups[{number}]"), members)


def _weight(one: ModelTensor) -> LiveTensor:
    return LiveTensor(one.name, WEIGHT, local_of(one.tensor, one.name), one.is_buffer)


def _check_slot(key: object, where: str) -> None:
    if not isinstance(key, str) or key == WEIGHT or not key:
        raise UnsupportedError(
            f"{where}: a key of the state must be text other than {WEIGHT!r}, got {key!r:.40}"
        )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.dtype.is_complex
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(steps: Mapping[str, Tensor | int | float]) -> dict[str, int | float]:
    """Return steps as numbers; those on one device are fetched together."""
    numbers: dict[str, int | float] = {}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, step in steps.items():
        if isinstance(step, Tensor):
            local = local_of(step, f"{name} ({STEP})").data
            by_device.setdefault(local.device, {})[name] = local.reshape(()).double()
        else:
            numbers[name] = step
    for tensors in by_device.values():
        fetched = torch.stack(list(tensors.values())).tolist()
        numbers.update(zip(tensors, fetched, strict=True))
    return {
        name: int(numbers[name]) if float(numbers[name]).is_integer() else numbers[name]
        for name in steps
    }
