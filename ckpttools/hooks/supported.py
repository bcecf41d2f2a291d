"""Can the run of a training library be saved at all? Asked when it begins, not at the first save.

Saved are plain modules, under DistributedDataParallel or `fully_shard` too, and optimizers that
keep state for each parameter. A library can also be told to keep parameters otherwise (flattened
by FullyShardedDataParallel, in the engine of DeepSpeed or of XLA): there the module that a hook
gets isn't what is trained, so the way is refused by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpttools.errors import UnsupportedError
from ckpttools.hooks.capture import capture
from ckpttools.hooks.ranks import Ranks
from ckpttools.optimizer import ShardedOptimizer

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_OTHER_STRATEGIES = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Strategies that are subclasses of those that are served, and are none of them."""

_OTHER_TYPES = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_FSDP = "FSDP"


def check_strategy(strategy: object) -> None:
    """Refuse a strategy of Lightning's that keeps parameters elsewhere than in the module.

    Raises:
        UnsupportedError: it is such a strategy.
    """
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    known = any(name in kinds for name in _STRATEGIES)
    if not known or any(name in kinds for name in _OTHER_STRATEGIES):
        raise UnsupportedError(
            f"strategy: must be one of {', '.join(_STRATEGIES)}, got {type(strategy).__name__}",
            hint="ModelParallelStrategy, with fully_shard (FSDP2) in configure_model",
        )


def check_accelerator(accelerator: Any) -> None:
    """Refuse an ``Accelerator`` that keeps parameters elsewhere than in the module.

    Raises:
        UnsupportedError: it is such a one.
    """
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind == _FSDP and not accelerator.is_fsdp2:
        kind = "FSDP version 1"
    elif kind not in _OTHER_TYPES:
        return
    raise UnsupportedError(
        f"accelerator: must train in one process, under DDP or FSDP version 2, got {kind}",
        hint="fsdp_version=2",
    )


def check_savable(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Look at a run as a save would; a collective call of all ranks of the default group.

    Raises:
        CkptError: some of it has no place in a checkpoint; raised on every rank.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return

    def look() -> bool:
        capture(model, optimizer)
        return True

    Ranks().together(look)
