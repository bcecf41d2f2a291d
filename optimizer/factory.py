"""Which optimizer does a configuration ask for? Megatron-LM's entry point, under its name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpttools.errors import ConfigError
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.distributed_fused_adam import DistributedFusedAdam
from ckpttools.optimizer.distributed_optimizer import DistributedOptimizer
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.parameters import Params, Rename, Sharding
from ckpttools.optimizer.sharded_optimizer import ShardedOptimizer

Condition = Callable[[str, nn.Parameter], bool]
"""Says of a parameter, by name, whether something holds for it."""


def get_megatron_optimizer(
    config: OptimizerConfig | argparse.Namespace | Mapping[str, object],
    model_chunks: nn.Module | Sequence[nn.Module],
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    *,
    groups: ParallelGroups | None = None,
    shardings: Mapping[str, Sharding] | None = None,
    rename: Rename | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration asks for.

    For ``optimizer`` "distributed_fused_adam" a :class:`DistributedFusedAdam` (ZeRO-2); with
    ``use_distributed_optimizer`` a :class:`DistributedOptimizer` (ZeRO-1); otherwise torch's AdamW
    or Adam. Parameter groups are Megatron's: biases and 1-D parameters, or those for which
    ``no_weight_decay_cond`` holds, don't decay (``wd_mult`` 0); those for which ``scale_lr_cond``
    holds learn at ``lr_mult`` times the rate. Source: ``_get_param_groups`` of
    megatron/core/optimizer/__init__.py, core 0.16.1.

    Raises:
        ConfigError: the configuration asks for what is not there.
    """
    settings = config if isinstance(config, OptimizerConfig) else OptimizerConfig.from_args(config)
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if settings.lr is None:
        raise ConfigError("lr: must be set, got none")
    param_groups = megatron_groups(settings, chunks, no_weight_decay_cond, scale_lr_cond, lr_mult)
    if settings.sharded:
        return _sharded(settings, param_groups, chunks, groups, shardings, rename)
    settings.require_unsharded()
    kind = torch.optim.AdamW if settings.decoupled_weight_decay else torch.optim.Adam
    return kind(
        param_groups,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )


def _sharded(
    config: OptimizerConfig,
    params: list[dict[str, object]],
    chunks: Sequence[nn.Module],
    groups: ParallelGroups | None,
    shardings: Mapping[str, Sharding] | None,
    rename: Rename | None,
) -> ShardedOptimizer:
    """Return the sharded optimizer that a configuration asks for."""
    fused = config.optimizer == "distributed_fused_adam"
    build = DistributedFusedAdam.from_config if fused else _zero1
    return build(config, params, modules=chunks, groups=groups, shardings=shardings, rename=rename)


def _zero1(config: OptimizerConfig, params: Params, **given: Any) -> ShardedOptimizer:
    return DistributedOptimizer(params, config, **given)


def megatron_groups(
    config: OptimizerConfig,
    chunks: Sequence[nn.Module],
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> list[dict[str, object]]:
    """Return Megatron's parameter groups, named members in module order.

    A group has ``wd_mult`` and ``lr_mult`` beside torch's settings. Groups without members are
    left out; frozen parameters are in none.
    """
    decays = no_weight_decay_cond or _is_bias_or_1d
    members: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    seen: set[int] = set()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if id(param) in seen or not param.requires_grad:
                continue
            seen.add(id(param))
            wd_mult = 0.0 if decays(name, param) else 1.0
            rate = lr_mult if scale_lr_cond is not None and scale_lr_cond(name, param) else 1.0
            members.setdefault((wd_mult, rate), []).append((name, param))
    lr = config.lr if config.lr is not None else 0.0
    return [
        {
            "params": named,
            "lr": lr * rate,
            "weight_decay": config.weight_decay * wd_mult,
            "wd_mult": wd_mult,
            "lr_mult": rate,
        }
        for (wd_mult, rate), named in sorted(members.items(), reverse=True)
    ]


def _is_bias_or_1d(name: str, param: nn.Parameter) -> bool:
    return name.endswith(".bias") or param.dim() == 1
