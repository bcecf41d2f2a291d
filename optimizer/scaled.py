"""How are fp32 numbers kept in 16 bits with one scale for all of them?

``scale = largest absolute value / (largest number of the dtype / 2)``, and ``value / scale`` is
kept; numbers that are all zero have scale 0. The rule is that of Apex's ``DistributedFusedAdam``,
but a scale that fp32 could only hold as a subnormal is raised to the smallest normal number:
there Apex loses the numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SCALE = torch.finfo(torch.float32).tiny


def scale_of_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale under which ``values`` (fp32, 1-D, not empty) are kept: fp32, shape (1,)."""
    largest = torch.linalg.vector_norm(values, float("inf")).reshape(1)
    scale: Tensor = (largest / (torch.finfo(dtype).max / 2)).clamp_(min=_LEAST_SCALE)
    return scale.mul_(largest != 0)


def encode(values: Tensor, kept: Tensor, scale: Tensor) -> None:
    """Keep fp32 ``values`` in ``kept`` (16-bit, as long), and their scale in ``scale`` (1,)."""
    scale.copy_(scale_of_values(values, kept.dtype))
    kept.copy_(torch.where(scale == 0, values.new_zeros(()), values / scale))


def decode(kept: Tensor, scale: Tensor, values: Tensor) -> None:
    """Write the numbers that ``kept`` stands for to ``values``: one fp32 multiplication each."""
    values.copy_(kept)
    values.mul_(scale)
