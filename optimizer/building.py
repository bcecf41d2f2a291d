"""What is built once, when an optimizer is made: buffers, shards, and torch's parameter groups."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.layout.megatron import Cuts
from ckpttools.optimizer.agreement import check_same, raise_together
from ckpttools.optimizer.buffers import GradSlot, ParamAndGradBuffer
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import SETTING_NAMES, OptimizerConfig
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.live import Items
from ckpttools.optimizer.parameters import (
    Collected,
    ManagedParam,
    Params,
    Rename,
    Sharding,
    collect,
)
from ckpttools.optimizer.shards import BucketShard


def collect_together(
    params: Params,
    shardings: Mapping[str, Sharding],
    rename: Rename | None,
    modules: Sequence[nn.Module],
    parallel: ParallelGroups,
    collectives: Collectives | None,
) -> tuple[Collected, Collectives]:
    """Collect the parameters, and make the data-parallel communication; a collective call.

    Raises:
        OptimizerError: what is wrong on any rank; raised on every rank.
    """
    given: Any = params if isinstance(params, nn.Module) else list(params)
    found = collected_or_error(given, shardings, rename, modules)
    device = found.device if isinstance(found, Collected) else _any_device([given])
    dp = collectives or parallel.collectives("dp", device)
    raise_together(dp, None if isinstance(found, Collected) else found)
    if not isinstance(found, Collected):  # raised above
        raise found
    return found, dp


def _any_device(things: Iterable[object]) -> torch.device:
    """Return the device of the first tensor in what may be no parameters at all."""
    for thing in things:
        if isinstance(thing, Tensor):
            return thing.device
        if isinstance(thing, nn.Module):
            return _any_device(thing.parameters())
        if isinstance(thing, (list, tuple, dict)) and thing:
            return _any_device(thing.values() if isinstance(thing, dict) else thing)
    return torch.device("cpu")


def collected_or_error(
    params: Params,
    shardings: Mapping[str, Sharding],
    rename: Rename | None,
    modules: Sequence[nn.Module],
) -> Collected | OptimizerError:
    """Return the parameters, or what is wrong with them."""
    try:
        return collect(params, shardings, rename, modules)
    except OptimizerError as error:
        return error


SCRATCH_NUMEL = 1 << 21
"""Elements of 16-bit gradients that are widened at once: 8 MiB of fp32, whatever the model."""


def build_buffers(
    trained: Sequence[ManagedParam], config: OptimizerConfig, dp: Collectives
) -> Iterator[ParamAndGradBuffer]:
    """Build one buffer for each model chunk and (parameter dtype, gradient dtype)."""
    kinds: dict[tuple[int, torch.dtype], list[ManagedParam]] = {}
    for managed in trained:
        kinds.setdefault((managed.chunk, managed.param.dtype), []).append(managed)
    for (_, kind), params in sorted(kinds.items(), key=lambda item: item[0][0]):
        yield ParamAndGradBuffer(
            params,
            torch.float32 if config.grad_reduce_in_fp32 else kind,
            dp,
            cuts=Cuts(config.bucket_limit(dp.size)),
            busbw=config.pad_buckets_for_high_nccl_busbw,
        )


def build_shards(
    buffers: Sequence[ParamAndGradBuffer], counts_in_norm: Callable[[GradSlot], bool]
) -> Iterator[BucketShard]:
    """Make this rank's state of every bucket; 16-bit gradients share one small fp32 scratch."""
    sizes = [
        bucket.local_grads.numel()
        for buffer in buffers
        for bucket in buffer.buckets
        if buffer.grad_dtype != torch.float32
    ]
    device = buffers[0].device if buffers else torch.device("cpu")
    scratch = torch.empty(min(SCRATCH_NUMEL, max(sizes, default=0)), device=device)
    for buffer in buffers:
        for bucket in buffer.buckets:
            yield BucketShard(buffer, bucket, scratch, counts_in_norm)


def check_ranks_agree(
    collected: Collected,
    config: OptimizerConfig,
    groups: Sequence[Collectives],
    *,
    values: bool,
    agreed: Items = (),
) -> None:
    """Check that the ranks of each group have the same settings and parameters.

    ``agreed`` are further names and values that must be the same.

    Raises:
        OptimizerError: settings, names, order, shapes, dtypes, groups or (with ``values``)
            elements differ; raised on every rank, with the first setting or parameter that does.
    """
    items = [(f"setting {name}", repr(getattr(config, name))) for name in SETTING_NAMES]
    items += agreed
    items += [(f"group {i}", repr(settings)) for i, settings in enumerate(collected.groups)]
    managed = (*collected.trained, *collected.frozen)
    for one in managed:
        param = one.param
        facts = (
            f"{param.dtype} {tuple(param.shape)}, requires_grad {param.requires_grad}, group "
            f"{one.group}, {one.sharding}"
        )
        if values:
            facts += f", CRC-32 of the elements {crc_of(param):08x}"
        items.append((one.name, facts))
    for group in groups:
        check_same(group, "parameters of the data-parallel ranks", items)


def crc_of(param: Tensor) -> int:
    """Return the CRC-32 of a tensor's elements, in row-major order."""
    flat = param.detach().contiguous().view(-1).cpu()
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def torch_defaults(config: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of a group that names none; torch's schedulers look at them."""
    return {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }


def torch_groups(collected: Collected, defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups as torch wants them: every one has its own settings.

    Raises:
        ConfigError: a group has no learning rate.
    """
    every = (*collected.trained, *collected.frozen)
    groups = []
    for index, settings in enumerate(collected.groups):
        members = sorted((m for m in every if m.group == index), key=lambda m: m.order)
        group = {**defaults, **settings}
        if group["lr"] is None:
            raise ConfigError(f"lr: must be set for parameter group {index}, got none")
        groups.append({**group, "params": [(m.name, m.param) for m in members]})
    return groups
