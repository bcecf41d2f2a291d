"""Which state does an optimizer keep for each parameter? Found out without a step.

What is there already says it. Where nothing is there yet, a stand-in of the same class with
parameters that have no memory (on torch's ``meta`` device) is asked to make its state, as torch's
own optimizers do at the beginning of a step: dtypes, shapes and cuts over ranks come out as they
will be. An optimizer that can't be asked keeps what a checkpoint holds: what has the shape of its
parameter is cut as that is, and of anything else every rank has the whole.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpttools.hooks.local_tensors import as_distributed, local_data

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

State = Mapping[str, object]
"""The state of one parameter by key; tensors on ``meta`` are not made yet."""


def expected_states(optimizer: torch.optim.Optimizer) -> dict[int, State | None]:
    """Return the state of each parameter by its identity; None where nothing tells it."""
    made = _made_by_stand_in(optimizer)
    found: dict[int, State | None] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            live = optimizer.state.get(param, {})
            known = {key: value for key, value in live.items() if value is not None}
            state = made.get(id(param))
            found[id(param)] = {**(state or {}), **known} if known else state
    return found


def _made_by_stand_in(optimizer: torch.optim.Optimizer) -> dict[int, State]:
    """Return the state that the optimizer would make for each parameter at a first step."""
    make = getattr(type(optimizer), "_init_group", None)
    if make is None:
        return {}
    stand_in: Any = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer))
    stand_in.state = defaultdict(dict)
    lists = len(inspect.signature(make).parameters) - 2  # after self and the group
    found: dict[int, State] = {}
    try:
        for group in optimizer.param_groups:
            copies = [_without_memory(param) for param in group["params"]]
            settings = {**group, "params": copies} | _plain_kernel(group)
            make(stand_in, settings, *([] for _ in range(lists)))
            for param, copy in zip(group["params"], copies, strict=True):
                found[id(param)] = dict(stand_in.state[copy]) | _made_late(optimizer, group, copy)
    except Exception:  # noqa: BLE001  # the code of any optimizer runs here; then nothing is known
        return {}
    return found


def _plain_kernel(group: Mapping[str, object]) -> dict[str, object]:
    """Return the settings under which a step's state is made where a fused kernel wants it."""
    settings: dict[str, object] = {}
    if group.get("fused"):  # its check of devices knows no meta
        settings["fused"] = False
        if "capturable" in group:
            settings["capturable"] = True
    if "foreach" in group:
        settings["foreach"] = False
    return settings


def _made_late(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], copy: Tensor
) -> dict[str, object]:
    """Return the momentum of SGD, which is made of the first gradient only."""
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        return {"momentum_buffer": torch.empty_like(copy)}
    return {}


def _without_memory(param: Tensor) -> nn.Parameter:
    """Return a parameter of the same shape, dtype and cuts that has no memory, with a gradient."""
    distributed = as_distributed(param)
    if distributed is None:
        copy = torch.empty_like(param, device="meta")
    else:
        meta = torch.empty_like(local_data(distributed), device="meta")
        copy = like_distributed(meta, distributed)
    stand_in = nn.Parameter(copy, requires_grad=copy.is_floating_point() or copy.is_complex())
    stand_in.grad = torch.empty_like(copy) if stand_in.requires_grad else None
    return stand_in


def like_distributed(local: Tensor, like: DTensor) -> Tensor:
    """Return a DTensor with this local part, cut as another one is."""
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
