"""How does sharded state look in torch's own form, whole and by index? Out and in again.

``{"state": {index: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{…, "params": [index]}]}``,
as ``torch.optim.AdamW.state_dict`` returns it: indices count through the groups, tensors have the
parameters' shapes. 16-bit parameters have their ``fp32_param`` besides. Parameters that never took
a step have no entry, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.manifest import MASTER, WEIGHT
from ckpttools.optimizer.gather import Gathered, gather_to_zero
from ckpttools.optimizer.live import LivePiece, StateOwner

_HIDDEN = ("params", "param_names")

TORCH_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
}
"""What torch's Adam has in a group and this one doesn't offer, as it is here."""


def gathered_torch_state(optimizer: StateOwner) -> dict[str, Any] | None:
    """Gather the state to data-parallel rank zero in torch's form; None elsewhere.

    A collective call. Rank zero gets the whole state in host memory.
    """
    index = _indices(optimizer)
    first = optimizer.dp.rank == 0
    state: dict[int, dict[str, Tensor]] = {}
    if first:
        for name, step in optimizer.steps.items():
            if step:
                state[index[name]] = {"step": torch.tensor(float(step))}

    def keep(got: Gathered) -> None:
        if got.slot == WEIGHT:
            return
        buffer = optimizer.buffers[got.buffer]
        low = buffer.layout.bucket_starts[got.bucket] + got.start
        high = low + got.data.numel()
        for slot, start in zip(buffer.slots, buffer.layout.starts, strict=True):
            a, b = max(low, start), min(high, start + slot.param.numel())
            if a < b and index[slot.name] in state:
                entry = state[index[slot.name]]
                if got.slot not in entry:
                    entry[got.slot] = torch.empty(slot.param.shape, dtype=got.data.dtype)
                entry[got.slot].view(-1)[a - start : b - start] = got.data[a - low : b - low]

    gather_to_zero(optimizer, keep)
    if not first:
        return None
    for slot in (slot for buffer in optimizer.buffers for slot in buffer.slots):
        if index[slot.name] in state and not slot.param.numel():  # no rank has a piece of it
            empty = torch.empty(slot.param.shape)
            state[index[slot.name]] |= {"exp_avg": empty, "exp_avg_sq": empty.clone()}
    names = {id(managed.param): managed.name for managed in optimizer.managed}
    fused = optimizer.config.kernel == "fused"
    groups = [
        {
            **TORCH_SETTINGS,
            "fused": fused or None,
            "foreach": None if fused else True,
            "decoupled_weight_decay": optimizer.config.decoupled_weight_decay,
            **{key: value for key, value in group.items() if key not in _HIDDEN},
            "params": [index[names[id(param)]] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def load_torch_state(optimizer: StateOwner, state: Mapping[str, Any]) -> None:
    """Take this rank's part of a state in torch's form; every rank is given the whole.

    Masters of 16-bit parameters are taken where they are there, and stay as they are otherwise
    (fp32 masters of weights that were loaded: ``reload_model_params``). Everything is checked
    before anything is changed.

    Raises:
        OptimizerError: groups or shapes are another model's.
    """
    where = "load_torch_state_dict"
    index = _indices(optimizer)
    groups = state.get("param_groups", ())
    counts = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if counts != mine:
        raise OptimizerError(f"{where}: groups must have {mine} parameters, got {counts}")
    saved = state.get("state", {})
    copies: list[tuple[LivePiece, str, Tensor]] = []
    for piece in optimizer.pieces:
        entry = saved.get(index[piece.name])
        part = piece.range.param
        for slot in piece.logical_slots():
            if entry is None:
                if slot != MASTER:
                    copies.append((piece, slot, torch.zeros(part.size)))
                continue
            if slot not in entry:
                if slot == MASTER:
                    continue
                raise OptimizerError(f"{where}: {piece.name}: must have {slot}, got none")
            if entry[slot].shape != piece.slot.param.shape:
                raise OptimizerError(
                    f"{where}: {piece.name} ({slot}): shape must be "
                    f"{tuple(piece.slot.param.shape)}, got {tuple(entry[slot].shape)}"
                )
            if entry[slot].dtype != torch.float32:
                raise OptimizerError(
                    f"{where}: {piece.name} ({slot}): dtype must be {torch.float32}, got "
                    f"{entry[slot].dtype}"
                )
            copies.append((piece, slot, entry[slot].reshape(-1)[part.start : part.end]))
    steps = {name: _step(where, name, saved.get(index[name])) for name in optimizer.steps}
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        live.update({key: group[key] for key in live if key in group and key not in _HIDDEN})
    for piece, slot, values in copies:
        piece.put(slot, values)
    optimizer.steps.update(steps)


def _step(where: str, name: str, entry: Mapping[str, Any] | None) -> int:
    """Return the step of a parameter; one without an entry never took any."""
    if entry is None:
        return 0
    step = float(entry["step"]) if "step" in entry else float("nan")
    if not step.is_integer() or step < 0:
        raise OptimizerError(f"{where}: {name}: step must be a whole number, got {step}")
    return int(step)


def _indices(optimizer: StateOwner) -> dict[str, int]:
    """Return torch's index of each parameter: a count through the groups."""
    names = {id(managed.param): managed.name for managed in optimizer.managed}
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {names[id(param)]: i for i, param in enumerate(params)}
