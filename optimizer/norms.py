"""What do all ranks have to know before an update? One small vector, summed over the ranks.

    [sum of squares of the gradients, number of non-finite pieces, a flag for each parameter]

summed over the data-parallel group; then its first two entries over tensor and pipeline ranks,
and the flags over redundant groups, whose gradients are the same by now.
So every rank skips the same steps, clips by the same norm and updates the same parameters. A
parameter that tensor ranks hold equal copies of, and a tied copy on a later stage, count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.live import LivePiece

_HEAD = 4
"""Entries before the flags."""

CLIP_EPSILON = 1e-6
"""What Megatron-LM and torch add to the norm before they divide by it."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the ranks agreed on.

    ``norm_squared`` is of the gradients as they lie in the buffers, before any division; None
    where no norm was asked for. ``used`` says for each parameter whether any rank had a gradient.
    ``amp_agrees`` says that torch.amp, where it drives the step, found on every rank what is so.
    ``zeros`` is the number of zeros among the gradients; None where it was not asked for.
    """

    norm_squared: float | None
    non_finite: bool
    amp_agrees: bool
    zeros: int | None
    used: tuple[bool, ...]


def agree(
    pieces: Sequence[LivePiece],
    used: Sequence[bool],
    *,
    want_norm: bool,
    want_finite: bool,
    want_zeros: bool,
    amp_found: bool | None,
    dp: Collectives,
    redundant: Collectives,
    model: Sequence[Collectives],
    device: torch.device,
) -> StepFacts:
    """Exchange what a step depends on: one small all-reduce for each group of several ranks.

    ``pieces`` are this rank's, ``used`` has an entry for each parameter of the rank's model part,
    ``amp_found`` is what torch.amp found here, if it drives the step. Every rank must call it.
    """
    head = torch.zeros(_HEAD, dtype=torch.float64, device=device)
    if want_norm:
        head[0] = sum_of_squares([p.grad for p in pieces if p.exclusive], device)
    if want_finite:
        head[1] = count_non_finite([p.grad for p in pieces], device)
    if amp_found:
        head[2] = 1.0
    if want_zeros:
        head[3] = sum(int((p.grad == 0).sum()) for p in pieces if p.exclusive)
    flags = torch.tensor(list(used), dtype=torch.float64, device=device)
    vector = torch.cat([head, flags])
    dp.all_reduce(vector)
    redundant.all_reduce(vector[_HEAD:])
    ranks = dp.size
    if want_norm or want_finite or want_zeros:
        head = vector[:_HEAD].clone()
        for group in model:
            group.all_reduce(head)
            ranks *= group.size
        vector[:_HEAD] = head
    values = vector.tolist()
    non_finite = want_finite and values[1] != 0.0
    return StepFacts(
        norm_squared=values[0] if want_norm else None,
        non_finite=non_finite,
        zeros=int(values[3]) if want_zeros else None,
        amp_agrees=amp_found is None or values[2] == (ranks if non_finite else 0),
        used=tuple(value > 0 for value in values[_HEAD:]),
    )


def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of 1-D tensors as a 0-d fp64 tensor.

    Each tensor's norm is taken in fp32, and their squares are added in fp64.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32)
    return torch.stack(norms).double().square().sum()


def norm_squared(
    pieces: Sequence[LivePiece],
    dp: Collectives,
    model: Sequence[Collectives],
    device: torch.device,
) -> float:
    """Return the square of the norm of all ranks' gradients, before any division; collective."""
    total = sum_of_squares([p.grad for p in pieces if p.exclusive], device).reshape(1)
    for group in (dp, *model):
        group.all_reduce(total)
    return float(total)


def count_non_finite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any element is infinite or NaN, else 0.0, as a 0-d fp32 tensor."""
    found = torch.zeros(1, dtype=torch.float32, device=device)
    if grads:
        # The kernel that torch.amp uses: reads once, makes no temporary; multiplies by one.
        one = torch.ones(1, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found, one)
    return found[0]


def clip_divisor(norm: float, max_norm: float) -> float:
    """Return what gradients of this norm are divided by so that their norm is at most ``max_norm``.

    >>> clip_divisor(1.0, 2.0)
    1.0
    """
    if max_norm <= 0:
        return 1.0
    return max(1.0, (norm + CLIP_EPSILON) / max_norm)
