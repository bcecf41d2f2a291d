"""How is an fp32 master kept in the 16 bits that its bfloat16 weight leaves over?

The weight is the master rounded to bfloat16, halves away from zero, and the remainder is the low
16 bits as a signed number: the difference between both, whose sign says which way the rounding
went. So weight and remainder together are the master, exactly::

    split   low = bits & 0xffff;  high = (bits >> 16) + (low >= 0x8000)
    join    bits = ((high - (low < 0)) << 16) | (low & 0xffff)

Rounding works on the pattern of bits, so a NaN of which only low bits are set has a weight that is
no NaN; its master stays exact. The rule is that of Apex's ``DistributedFusedAdam``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write fp32 ``master`` to ``weight`` (bfloat16) and ``remainder`` (int16), all 1-D."""
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # keeps the low 16 bits
    high = (bits >> 16).add_(remainder < 0)
    weight.view(torch.int16).copy_(high)


def join_master(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Write the fp32 numbers that `split_master` took apart to ``master``, all 1-D."""
    bits = master.view(torch.int32)
    bits.copy_(weight.view(torch.int16))
    bits.sub_((remainder < 0).to(torch.int32)).bitwise_left_shift_(16)
    bits.bitwise_or_(remainder.to(torch.int32).bitwise_and_(0xFFFF))
