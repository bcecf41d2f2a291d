"""How does ``torch.amp.GradScaler`` drive an optimizer whose ranks hold different gradients?

Each rank's scaler looks at that rank's own gradients and sets its own scale by what it finds. So
all must find the same: where one rank's gradients aren't finite, they are made so on every rank
before any scaler looks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.buffers import GradSlot
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.grad_scaler import GradScaler
from ckpttools.optimizer.live import LivePiece
from ckpttools.optimizer.norms import count_non_finite


def spread_non_finite(
    pieces: Sequence[LivePiece], slots: Sequence[GradSlot], groups: Sequence[Collectives]
) -> None:
    """Make reduced gradients infinite on every rank of ``groups`` if they aren't finite on one."""
    device = slots[0].main_grad.device if slots else torch.device("cpu")
    found = count_non_finite([piece.grad for piece in pieces], device)
    for group in groups:
        group.all_reduce(found)
    if bool(found):
        for slot in slots:
            if slot.used:
                slot.main_grad.fill_(float("inf"))


def found_by_amp(optimizer: torch.optim.Optimizer, *, ranks: int) -> bool | None:
    """Return whether the scaler that drives this step found non-finite gradients here.

    None where no scaler does.

    Raises:
        OptimizerError: it had no gradients to look at, or it looked before ``ranks`` agreed.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return None
    if not isinstance(found, Tensor):
        raise OptimizerError(
            "torch.amp: must find gradients in param.grad, got none",
            hint="turn grad_reduce_in_fp32 off, or use loss_scale or fp16 in its place",
        )
    if ranks > 1 and getattr(optimizer, "grad_scale", None) is None:
        raise OptimizerError(
            f"torch.amp: gradients must be unscaled by step, since a rank of {ranks} has only its "
            f"own part of them, got a call of the scaler's unscale_",
            hint="leave unscale_ out, and set clip_grad in place of clip_grad_norm_",
        )
    return bool(found)


def scale_of(scaler: object, optimizer: torch.optim.Optimizer) -> float:
    """Return the scale of a torch.amp scaler that is handed to a step.

    Raises:
        OptimizerError: it is no such scaler or has no scale yet, or ``unscale_`` was called, which
            finds no gradients where they are sharded.
    """
    if not isinstance(scaler, torch.amp.GradScaler) or scaler._scale is None:
        raise OptimizerError(
            f"grad_scaler: must be a torch.amp.GradScaler that scaled a loss, got "
            f"{type(scaler).__name__}"
        )
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is not OptState.READY:
        raise OptimizerError(
            "torch.amp: gradients must be unscaled by step, since they are sharded, got a call of "
            "the scaler's unscale_",
            hint="call the optimizer's unscale_grads, or leave unscale_ out",
        )
    return float(scaler._scale)


def tell_scaler(scaler: object, optimizer: torch.optim.Optimizer, found: Tensor) -> None:
    """Tell a torch.amp scaler whether gradients overflowed on any rank: fp32, one element."""
    if isinstance(scaler, torch.amp.GradScaler):
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {found.device: found}


def loss_scale(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> float:
    """Return what the loss was multiplied by: the scale of torch.amp, the optimizer's own, or 1."""
    amp = getattr(optimizer, "grad_scale", None)
    if amp is not None:
        return float(amp)
    return 1.0 if scaler is None else float(scaler.scale)
