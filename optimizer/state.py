"""What is one rank's part of the state, as plain data by name? Out, and in again.

The dict that :func:`rank_state` returns can be saved with ``torch.save`` by any rank at any time,
since making it takes no communication. It carries rank, world size and names, so a reader knows
what it is a part of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.layout.sharded import Topology
from ckpttools.layout.slots import SCALE_SUFFIX, WEIGHT
from ckpttools.optimizer.live import LivePiece, StateOwner

FORMAT = "ckpttools-rank-state"
FORMAT_VERSION = 1


def rank_state(optimizer: StateOwner) -> dict[str, Any]:
    """Return this rank's masters, moments and steps by name, its groups, and who it is.

    Tensors are views. A parameter that is cut between ranks is there with the part of its
    flattened elements, ``start`` to ``stop``, that this rank owns; of ``zero2`` with a list of
    such parts, one a bucket. fp32 parameters have no master of their own.
    """
    parts: dict[str, Any] = {}
    for piece in optimizer.pieces:
        if optimizer.kind == "zero1":
            parts[piece.name] = _part(piece)
        else:
            parts.setdefault(piece.name, []).append(_part(piece))
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": optimizer.kind,
        **identity(optimizer),
        "names": list(optimizer.steps),
        "steps": dict(optimizer.steps),
        "state": parts,
        "param_groups": groups_by_name(optimizer),
        "grad_scaler": optimizer.scaler.state_dict() if optimizer.scaler is not None else None,
    }


def identity(optimizer: StateOwner) -> dict[str, int]:
    """Return this rank's place in every parallel dimension."""
    tp, pp, dp = optimizer.tp, optimizer.pp, optimizer.dp
    place = {
        "dp_rank": dp.rank,
        "dp_size": dp.size,
        "tp_rank": tp.rank,
        "tp_size": tp.size,
        "pp_rank": pp.rank,
        "pp_size": pp.size,
    }
    topology = Topology(tp=tp.size, pp=pp.size, dp=dp.size)
    rank = topology.rank_of(tp=tp.rank, dp=dp.rank, pp=pp.rank)
    return {"rank": rank, "world_size": topology.world_size, **place}


def _part(piece: LivePiece) -> dict[str, Any]:
    """Return the state of one piece; the scale of 16-bit values is a number."""
    return {
        "shape": list(piece.slot.param.shape),
        "start": piece.range.param.start,
        "stop": piece.range.param.end,
        **{
            slot: tensor.item() if slot.endswith(SCALE_SUFFIX) else tensor
            for slot, tensor in piece.stored().items()
        },
    }


def groups_by_name(optimizer: StateOwner) -> list[dict[str, Any]]:
    """Return the parameter groups with names for members."""
    name_of = {id(managed.param): managed.name for managed in optimizer.managed}
    hidden = ("params", "param_names")
    return [
        {
            **{key: value for key, value in group.items() if key not in hidden},
            "params": [name_of[id(param)] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def load_rank_state(optimizer: StateOwner, state: Mapping[str, Any]) -> None:
    """Load what :func:`rank_state` returned on the same rank of an equal optimizer.

    Everything is checked before anything is changed.

    Raises:
        OptimizerError: it is something else, or of another rank, world or model.
    """
    where = "load_state_dict"
    if state.get("format") != FORMAT or state.get("format_version") != FORMAT_VERSION:
        raise OptimizerError(
            f"{where}: must be a rank's state of format {FORMAT} {FORMAT_VERSION}, got "
            f"{state.get('format')!r:.40} {state.get('format_version')!r:.20}"
        )
    for key, mine in {"kind": optimizer.kind, **identity(optimizer)}.items():
        if state.get(key) != mine:
            raise OptimizerError(
                f"{where}: {key} must be {mine}, got {state.get(key)!r:.40}",
                hint="another topology's checkpoint is loaded from its directory, not rank by rank",
            )
    _check_names(where, "names", list(optimizer.steps), list(state.get("names", ())))
    parts = state.get("state", {})
    mine_by_name: dict[str, list[LivePiece]] = {}
    for piece in optimizer.pieces:
        mine_by_name.setdefault(piece.name, []).append(piece)
    _check_names(where, "state", list(mine_by_name), list(parts))
    copies = [
        pair
        for name, pieces in mine_by_name.items()
        for piece, part in zip(pieces, _parts(where, name, parts[name], len(pieces)), strict=True)
        for pair in _copies(where, piece, part)
    ]
    steps = _steps(where, state, optimizer)
    groups = matched_groups(optimizer, state.get("param_groups", ()), where)
    scaler = state.get("grad_scaler")
    if scaler and optimizer.scaler is None:
        raise OptimizerError(
            f"{where}: grad_scaler must be none as in this run, got {scaler!r:.60}"
        )
    if scaler is not None and optimizer.scaler is not None:
        optimizer.scaler.load_state_dict(scaler)  # refuses before it changes anything
    for live, saved in zip(optimizer.param_groups, groups, strict=True):
        live.update(saved)
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    optimizer.steps.update(steps)


def matched_groups(optimizer: StateOwner, groups: object, where: str) -> list[dict[str, Any]]:
    """Return the saved settings for each of our groups: those of the group of the same members.

    Raises:
        OptimizerError: a group of ours has other members than every saved one.
    """
    mine = groups_by_name(optimizer)
    theirs = list(groups) if isinstance(groups, (list, tuple)) else []
    by_members = {frozenset(group["params"]): group for group in theirs}
    for group in mine:
        if frozenset(group["params"]) not in by_members:
            raise OptimizerError(
                f"{where}: a parameter group must have the members of ours "
                f"({', '.join(group['params'][:3])}…), got none of {len(theirs)} that has",
                hint="build the optimizer with the groups that the state was saved with",
            )
    saved = [by_members[frozenset(group["params"])] for group in mine]
    return [{key: value for key, value in one.items() if key != "params"} for one in saved]


def _parts(where: str, name: str, entry: object, count: int) -> list[Mapping[str, Any]]:
    """Return the parts of a parameter that a rank saved.

    Raises:
        OptimizerError: there are more or fewer of them than here.
    """
    parts = entry if isinstance(entry, list) else [entry]
    found = [part for part in parts if isinstance(part, Mapping)]
    if len(found) != count or len(parts) != count:
        raise OptimizerError(f"{where}: {name}: must have {count} parts, got {len(parts)}")
    return found


def _copies(where: str, piece: LivePiece, saved: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return (target, source) for each slot of a piece, checked."""
    part = piece.range.param
    expected = (list(piece.slot.param.shape), part.start, part.end)
    got = (list(saved.get("shape", ())), saved.get("start"), saved.get("stop"))
    if expected != got:
        raise OptimizerError(
            f"{where}: {piece.name}: shape and range must be {expected}, got {got}"
        )
    pairs = []
    slots = piece.stored()
    _check_names(
        where,
        piece.name,
        sorted(slots),
        sorted(key for key in saved if key not in ("shape", "start", "stop")),
    )
    for slot, target in slots.items():
        source = saved[slot]
        if slot.endswith(SCALE_SUFFIX):
            source = torch.full((1,), float(source))
        if not isinstance(source, Tensor) or source.shape != target.shape:
            raise OptimizerError(
                f"{where}: {piece.name} ({slot}): must be a tensor of {tuple(target.shape)}, got "
                f"{tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__}"
            )
        if source.dtype != target.dtype:
            raise OptimizerError(
                f"{where}: {piece.name} ({slot}): must be {target.dtype}, got {source.dtype}"
            )
        if slot == WEIGHT:
            if not torch.equal(target, source):
                raise OptimizerError(
                    f"{where}: {piece.name}: the model must have the weights of the state, which "
                    f"are half of its masters, got others",
                    hint="load the model's weights before the optimizer's state",
                )
            continue
        pairs.append((target, source))
    return pairs


def _check_names(where: str, what: str, mine: list[str], theirs: list[str]) -> None:
    """Check that two lists hold the same names, in whatever order."""
    for name in mine:
        if name not in set(theirs):
            raise OptimizerError(f"{where}: {what}: must have {name}, got none")
    for name in theirs:
        if name not in set(mine):
            raise OptimizerError(f"{where}: {what}: must not have {name}, got it")


def _steps(where: str, state: Mapping[str, Any], optimizer: StateOwner) -> dict[str, int]:
    steps = state.get("steps")
    if not isinstance(steps, Mapping) or set(steps) != set(optimizer.steps):
        raise OptimizerError(f"{where}: steps must be there for every parameter, got {steps!r:.60}")
    for name, step in steps.items():
        if type(step) is not int or step < 0:
            raise OptimizerError(f"{where}: {name}: step must be a whole number, got {step!r:.40}")
    return dict(steps)
