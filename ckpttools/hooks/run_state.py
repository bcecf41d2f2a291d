"""What of a live run goes into a checkpoint beside tensors? The same objects that readers give.

Steps and parameter groups are by name, joined over pipeline stages; what came with an earlier
checkpoint (``carry``) goes on, unless this run knows better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttools.errors import OptimizerError
from ckpttools.formats import ParamGroup
from ckpttools.layout.sharded import ShardedLayout, ShardedParam
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.optimizer.describe import exchange
from ckpttools.optimizer.state import groups_by_name

LIVE = (
    "step",
    "param_groups",
    "grad_scaler",
    "adam_w_mode",
    "weight_rounding",
    "state_values",
    "training",
    "per_rank_state",
    "digests",
    "topology",
    "layout",
    "layers",
    "buckets",
    "sharded_layout",
)
"""Objects that describe the state itself: those of an earlier checkpoint are never handed on."""


def run_objects(
    optimizer: ShardedOptimizer,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the objects of a run; a collective call, the same value on every rank.

    ``scheduler`` is the learning-rate scheduler's state as plain data. ``carry`` is
    ``Restored.objects`` of the checkpoint that the run began with.

    Raises:
        OptimizerError: stages have groups of different settings under one place in the list.
    """
    objects = {key: value for key, value in (carry or {}).items() if key not in LIVE}
    foreign = objects.get("carried")
    for name in foreign if isinstance(foreign, Mapping) else ():
        objects.pop(name, None)  # a format's own state, of the step it was read at
    mine = dict(optimizer.steps), groups_by_name(optimizer)
    found = exchange(mine, optimizer.dp, optimizer.tp, optimizer.pp)
    steps: dict[str, int] = {}
    groups: list[tuple[dict[str, object], dict[str, None]]] = []
    for _, (stage_steps, stage_groups) in sorted(found.items(), key=lambda item: item[0][2]):
        for name, step in stage_steps.items():
            if steps.setdefault(name, step) != step:
                raise OptimizerError(f"{name}: ranks must have taken the same steps, got {step}")
        for group in stage_groups:
            if not optimizer.config.bias_correction:
                group.setdefault("bias_correction", False)
            _merge(groups, group)
    counts = set(steps.values())
    objects["step"] = counts.pop() if len(counts) == 1 else steps
    objects["param_groups"] = tuple(ParamGroup(dict(s), tuple(m)) for s, m in groups)
    objects["adam_w_mode"] = optimizer.config.decoupled_weight_decay
    if optimizer.scaler is not None and (state := optimizer.scaler.state_dict()):
        objects["grad_scaler"] = state
    if iteration is not None:
        objects["iteration"] = iteration
    if scheduler is not None:
        objects["opt_param_scheduler"] = dict(scheduler)
    return objects


def known_layout(layout: ShardedLayout, carry: Mapping[str, object] | None) -> ShardedLayout:
    """Add what the checkpoint that a run began with told of its parameters, and the run doesn't.

    Stage, layer, cut and vocabulary of a parameter by name, and a tied output layer that a single
    stage has no copy of: without them the number of tensor or pipeline ranks can't be changed
    later. What the run itself says of a parameter stays; where the run is cut over tensor ranks,
    so does how.
    """
    known = (carry or {}).get("sharded_layout")
    if not isinstance(known, ShardedLayout):
        return layout
    by_name = {param.name: param for param in known.params}
    alone = layout.topology.tp == 1
    params = [_with_facts(param, by_name.get(param.name), alone=alone) for param in layout.params]
    mine = {param.name: param for param in params}
    for param in known.params:
        original = mine.get(param.tied_to)
        if param.name not in mine and original is not None and layout.topology.pp == 1:
            params.append(
                replace(
                    original,
                    name=param.name,
                    stage=param.stage,
                    layer=param.layer,
                    tied_to=param.tied_to,
                )
            )
    return replace(layout, params=tuple(params), facts=known.facts)


def _with_facts(param: ShardedParam, known: ShardedParam | None, *, alone: bool) -> ShardedParam:
    """Return a parameter with the facts of the same one in an earlier checkpoint."""
    if known is None or param.stage is not None or param.dtype != known.dtype:
        return param
    rows = known.shape[0] if known.vocab_rows is None else known.vocab_rows
    grown = known.vocabulary and param.shape[1:] == known.shape[1:] and param.shape[0] >= rows
    if param.shape != known.shape and not grown:
        return param
    vocab = known.vocab_rows if param.vocab_rows is None else param.vocab_rows
    return replace(
        param,
        split=known.split if alone else param.split,
        stage=known.stage,
        layer=known.layer,
        vocabulary=known.vocabulary,
        vocab_rows=vocab if known.vocabulary else None,
    )


def _merge(groups: list[tuple[dict[str, object], dict[str, None]]], group: dict[str, Any]) -> None:
    """Add a stage's group to the one of equal settings; ranks of one stage repeat it."""
    settings = {key: value for key, value in group.items() if key != "params"}
    for known, members in groups:
        if known == settings:
            members.update(dict.fromkeys(group["params"]))
            return
    groups.append((settings, dict.fromkeys(group["params"])))
