"""Which part of a flat buffer is a rank's own, and how are the ranks' parts made one?

The parts are reduced in the order of ranks, so that the result depends on the values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ckpttools.errors import OptimizerError

_BLOCK_NUMEL = 1 << 20  # 16-bit pieces are widened in blocks of this many elements


def own_slice(buffer: Tensor, rank: int, size: int) -> slice:
    """Return the part of a flat buffer that is ``rank``'s: one of ``size`` equal parts.

    Raises:
        OptimizerError: the buffer isn't flat and contiguous, or can't be cut into equal parts.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise OptimizerError(
            "communication buffer: must be one contiguous dimension, "
            f"got shape {tuple(buffer.shape)} with strides {buffer.stride()}"
        )
    numel = buffer.numel()
    if numel % size:
        raise OptimizerError(
            f"communication buffer: its elements must be a multiple of {size} ranks, got {numel}"
        )
    return slice(rank * (numel // size), (rank + 1) * (numel // size))


def reduce_in_order(op: Literal["sum", "max"], parts: Sequence[Tensor], rank: int) -> None:
    """Reduce ``parts`` in their order into ``parts[rank]``; the others may be overwritten.

    16-bit floats are summed in float32 and rounded once. A NaN anywhere gives NaN.
    """
    own = parts[rank]
    if own.is_floating_point() and own.element_size() < 4 and op == "sum":
        _sum_wide(parts, own)
        return
    combine = torch.add if op == "sum" else torch.maximum
    result = parts[0]
    for index, part in enumerate(parts[1:], start=1):
        # `own` may hold partial results only once its own values are in them.
        target = own if index >= rank else parts[0]
        combine(result, part, out=target)
        result = target


def _sum_wide(parts: Sequence[Tensor], own: Tensor) -> None:
    wide = torch.empty(min(own.numel(), _BLOCK_NUMEL), dtype=torch.float32, device=own.device)
    for start in range(0, own.numel(), _BLOCK_NUMEL):
        stop = min(start + _BLOCK_NUMEL, own.numel())
        block = wide[: stop - start]
        block.copy_(parts[0][start:stop])
        for part in parts[1:]:
            block.add_(part[start:stop])
        own[start:stop].copy_(block)
