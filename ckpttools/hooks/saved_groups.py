"""What of a checkpoint's parameter groups does a torch optimizer take? Settings, by members.

How a step is computed (fused, foreach, capturable …) and whether weight decay is decoupled are the
run's own. The latter must be what the checkpoint says, where that says it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ckpttools.formats import ParamGroup
from ckpttools.hooks.differences import Differences
from ckpttools.manifest import Manifest

DECOUPLED = "decoupled_weight_decay"
_OF_THE_RUN = frozenset(
    {"params", "param_names", "step", "foreach", "fused", "capturable", "differentiable", DECOUPLED}
)
_BIAS_CORRECTION = "bias_correction"

Taken = tuple[dict[str, object], dict[str, object]]
"""A live group, and the settings that it takes."""


def taken_settings(
    manifest: Manifest,
    optimizer: torch.optim.Optimizer,
    name_of: Callable[[Tensor], str | None],
    differences: Differences,
) -> list[Taken]:
    """Return the settings that each live group takes over.

    ``name_of`` gives a parameter's name in the checkpoint. All members of a live group must have
    been in one saved group. Where a checkpoint names no members, the live settings stay.
    """
    saved = saved_groups(manifest)
    if not saved or any(group.members is None for group in saved):
        differences.notes.append(
            "parameter groups: the checkpoint names no members, so this run's settings stay"
        )
        return []
    of = {name: i for i, group in enumerate(saved) for name in group.members or ()}
    taken: list[Taken] = []
    for number, live in enumerate(optimizer.param_groups):
        found = {of.get(name_of(param) or "") for param in live["params"]} - {None}
        if len(found) > 1:
            text = (
                f"parameters of group {number} must be in one group of the checkpoint, got "
                f"{len(found)}"
            )
            differences.without("param_groups", text)
        elif found:
            settings = saved[found.pop() or 0].settings
            _check_adam(manifest, live, settings, differences)
            taken.append((live, _settings(settings, live)))
    known = _OF_THE_RUN | {_BIAS_CORRECTION} | {key for live, _ in taken for key in live}
    odd = sorted({key for group in saved for key in group.settings} - known)
    if taken and odd:
        differences.notes.append(f"parameter groups: this run's have no place for {', '.join(odd)}")
    return taken


def saved_groups(manifest: Manifest) -> Sequence[ParamGroup]:
    """Return the groups that a checkpoint tells of."""
    groups = manifest.objects.get("param_groups")
    return [g for g in groups if isinstance(g, ParamGroup)] if isinstance(groups, tuple) else []


def install(taken: Sequence[Taken]) -> None:
    """Put settings into live groups; a number in a tensor stays in the same tensor."""
    for live, settings in taken:
        for key, value in settings.items():
            held = live[key]
            if isinstance(held, Tensor) and isinstance(value, (int, float)):
                held.fill_(value)
            else:
                live[key] = value


def _settings(saved: Mapping[str, object], live: Mapping[str, object]) -> dict[str, object]:
    taken = {key: saved[key] for key in live if key in saved and key not in _OF_THE_RUN}
    for key, value in taken.items():
        if isinstance(live[key], tuple) and isinstance(value, list):
            taken[key] = tuple(value)  # a list in JSON
    return taken


def _check_adam(
    manifest: Manifest,
    live: Mapping[str, object],
    saved: Mapping[str, object],
    differences: Differences,
) -> None:
    """Check that the run does Adam as the checkpoint's did, where that tells it."""
    told = saved.get(DECOUPLED, manifest.objects.get("adam_w_mode"))
    mine = live.get(DECOUPLED)
    decays = bool(live.get("weight_decay") or saved.get("weight_decay"))
    if isinstance(told, bool) and isinstance(mine, bool) and told != mine and decays:
        differences.other("param_groups", DECOUPLED, f"must be {mine} as here, got {told}")
    if mine is not None and saved.get(_BIAS_CORRECTION) is False:
        differences.other("param_groups", _BIAS_CORRECTION, "must be True as here, got False")
