"""What is built when a fused optimizer is made: the order of buckets, buffers, shards, groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.fused_buckets import FusedBuffer, FusedSlot
from ckpttools.optimizer.fused_settings import FusedSettings
from ckpttools.optimizer.fused_shards import FusedShard
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.parameters import ManagedParam
from ckpttools.optimizer.ranges import ParamRange


class FillOrder:
    """In which order are parameters put in buckets, and where does a bucket begin anew?

    By default all in one row, in the reverse of module order.
    """

    def __init__(self, trained: Sequence[ManagedParam]) -> None:
        self._trained = trained
        self._segments: list[list[str]] = []
        self._open = False
        self._placed: set[str] = set()

    def add(self, names: Iterable[str], *, own_bucket: bool) -> None:
        """Place parameters next, those that were placed before left out.

        ``own_bucket`` puts them in buckets that hold nothing else.
        """
        fresh = [name for name in dict.fromkeys(names) if name not in self._placed]
        self._placed.update(fresh)
        if own_bucket or not self._open:
            self._segments.append([])
        self._segments[-1] += fresh
        self._open = not own_bucket

    def segments(self) -> list[list[str]]:
        """Return the names of all parameters in order; each list begins a bucket."""
        rest = [m.name for m in reversed(self._trained) if m.name not in self._placed]
        found = [list(segment) for segment in self._segments]
        if rest and not self._open:
            found.append([])
        if rest:
            found[-1] += rest
        return found

    def places(self) -> dict[str, int]:
        """Return the place of each parameter in the order."""
        names = (name for segment in self.segments() for name in segment)
        return {name: place for place, name in enumerate(names)}

    def groups(self, members: Sequence[ManagedParam]) -> tuple[tuple[int, ...], ...]:
        """Return the order within one buffer as indices of its ``members``."""
        index = {member.name: i for i, member in enumerate(members)}
        found = (
            tuple(index[name] for name in segment if name in index) for segment in self.segments()
        )
        return tuple(group for group in found if group)


def build_fused_buffers(
    trained: Sequence[ManagedParam],
    settings: FusedSettings,
    dp: Collectives,
    order: FillOrder,
) -> Iterator[FusedBuffer]:
    """Build one buffer for each model chunk and parameter dtype."""
    kinds: dict[tuple[int, torch.dtype], list[ManagedParam]] = {}
    for managed in trained:
        kinds.setdefault((managed.chunk, managed.param.dtype), []).append(managed)
    for (_, kind), params in sorted(kinds.items(), key=lambda item: item[0][0]):
        yield FusedBuffer(
            params,
            settings.grad_dtype(kind),
            dp,
            rule=settings.buckets(kind),
            groups=order.groups(params),
            contiguous_params=settings.contiguous_param_buffer,
            contiguous_grads=settings.contiguous_grad_buffer,
        )


def build_fused_shards(
    buffers: Sequence[FusedBuffer],
    settings: FusedSettings,
    counts_in_norm: Callable[[FusedSlot], bool],
) -> Iterator[FusedShard]:
    """Make this rank's state of every bucket."""
    for buffer in buffers:
        ranges: dict[int, list[ParamRange]] = {}
        for part in buffer.ranges:
            ranges.setdefault(part.bucket, []).append(part)
        for bucket in buffer.buckets:
            mine = ranges.get(bucket.index, [])
            yield FusedShard(buffer, bucket, mine, settings, counts_in_norm)


def fused_config(settings: FusedSettings, adam: dict[str, Any]) -> OptimizerConfig:
    """Return the options under Megatron's names, ``adam`` among them."""
    return OptimizerConfig(
        optimizer="distributed_fused_adam",
        clip_grad=0.0,
        overlap_grad_reduce=settings.overlap_grad_sync,
        overlap_param_gather=settings.overlap_param_sync,
        grad_reduce_in_fp32=settings.grad_sync_dtype == torch.float32,
        bucket_cap_mb=settings.bucket_cap_mb,
        pipeline_size=settings.pipeline_size,
        store_params=settings.store_params,
        store_param_remainders=settings.store_param_remainders,
        with_scaled_states=settings.with_scaled_states,
        contiguous_grad_buffer=settings.contiguous_grad_buffer,
        contiguous_param_buffer=settings.contiguous_param_buffer,
        average_grad_sync=settings.average_grad_sync,
        **adam,
    )


def parallel_groups(
    groups: ParallelGroups | None,
    process_group: dist.ProcessGroup | None,
    distributed: dist.ProcessGroup | None,
    redundant: dist.ProcessGroup | None,
) -> ParallelGroups | None:
    """Return the groups that a caller gave in our way or in Apex's.

    Raises:
        ConfigError: both are given, or the sizes of Apex's contradict each other.
    """
    if process_group is None and distributed is None and redundant is None:
        return groups
    if groups is not None:
        raise ConfigError("DistributedFusedAdam: groups and process groups exclude, got both")
    if redundant is not None and distributed is None:
        raise ConfigError(
            "DistributedFusedAdam: redundant_process_group needs distributed_process_group, got it "
            "alone"
        )
    found = ParallelGroups(
        dp=process_group if distributed is None else distributed, redundant=redundant
    )
    sizes = found.size("dp"), found.size("redundant")
    whole = None if process_group is None else dist.get_world_size(process_group)
    if whole is not None and whole != sizes[0] * sizes[1]:
        raise ConfigError(
            f"DistributedFusedAdam: process_group must have {sizes[0]} x {sizes[1]} ranks, the "
            f"distributed by the redundant, got {whole}"
        )
    return found


def names_of(
    trained: Sequence[ManagedParam], params: nn.Parameter | Iterable[nn.Parameter] | None
) -> list[str]:
    """Return the names of parameters that are trained; None: of all.

    Raises:
        OptimizerError: one is not among them.
    """
    if params is None:
        return [managed.name for managed in trained]
    known = {id(managed.param): managed.name for managed in trained}
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    for param in given:
        if id(param) not in known:
            raise OptimizerError(
                f"init_params: must be given parameters that this optimizer trains, got "
                f"{type(param).__name__} of shape {tuple(param.shape)}"
            )
    return [known[id(param)] for param in given]
