"""Small models and runs for the tests of saving and loading with torch's own optimizers.

Gradients are given, not computed, and the same on every rank. So a run takes the same steps on any
number of ranks, and one that stopped and went on elsewhere must end where one that never stopped
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.02, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.02),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.02, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.02, t0=2),
}


def build(*, bias: bool = True) -> nn.Sequential:
    """Build a model of odd sizes: one layer is narrower than the number of ranks."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(13, 29, bias=bias), nn.Tanh(), nn.Linear(29, 3), nn.Tanh(), nn.Linear(3, 1)
    )


def blank(model: nn.Module) -> nn.Module:
    """Set every tensor of a model to zero, so that what isn't loaded shows."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def set_grads(model: nn.Module, step: int, *, skip: frozenset[str] = frozenset()) -> None:
    """Give every parameter the gradient of a step: small whole numbers over eight.

    A DTensor's is distributed as its parameter is.
    """
    generator = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        values = torch.randint(-8, 9, tuple(param.shape), generator=generator) / 8
        if not param.requires_grad or name in skip:
            param.grad = None
        elif hasattr(param, "placements"):
            from torch.distributed.tensor import distribute_tensor

            param.grad = distribute_tensor(
                values.to(param.dtype), param.device_mesh, param.placements, src_data_rank=None
            )
        else:
            param.grad = values.to(param.dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    start: int,
    stop: int,
    *,
    skip: frozenset[str] = frozenset(),
) -> None:
    """Take the steps ``start`` to ``stop``."""
    for step in range(start, stop):
        set_grads(model, step, skip=skip)
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered where it is a DTensor."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return everything that a step depends on, by name, gathered."""
    state: dict[str, Any] = {name: whole(t) for name, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            state[f"{name}:{key}"] = whole(value) if isinstance(value, Tensor) else value
    for number, group in enumerate(optimizer.param_groups):
        state[f"group {number}"] = {k: v for k, v in group.items() if k != "params"}
    return state


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return what differs between two states: key, kind, dtype, shape or a bit."""
    odd = sorted(set(a) ^ set(b))
    for key in set(a) & set(b):
        x, y = a[key], b[key]
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if (x.dtype, x.shape, x.device) != (y.dtype, y.shape, y.device):
                odd.append(f"{key}: {x.dtype} {x.shape} and {y.dtype} {y.shape}")
            elif not torch.equal(_bits(x), _bits(y)):
                odd.append(f"{key}: other values")
        elif type(x) is not type(y) or x != y:
            odd.append(f"{key}: {x!r} and {y!r}")
    return odd


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """Return AdamW over what is trained."""
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=0.02, **settings)
