"""How does a training run describe itself to those who save and load it? As a ShardedLayout.

Each rank knows its own stage and tensor part. :func:`describe_rank` says what it knows;
:func:`join_ranks` joins that of all model-parallel ranks to the layout of the whole run, which is
the same value on every rank, so each can tell the place of its own bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ckpttools.errors import OptimizerError
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.megatron import Cuts
from ckpttools.layout.sharded import Kind, ModelFacts, ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import MASTER, WEIGHT
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.live import LiveBuffer, StateOwner
from ckpttools.optimizer.parameters import ManagedParam
from ckpttools.optimizer.shards import MOMENTS

VARIANT = "core-0.13"
"""The layout variant of the buffers that this package builds."""


@dataclass(frozen=True, slots=True)
class RankDescription:
    """What a rank knows of its model part; equal on all its data-parallel ranks.

    ``chunks`` holds the parameters of each model chunk in module order, in global shapes.
    ``slots`` are those of each parameter dtype. ``cuts`` and ``busbw`` are zero1's; ``fixed`` and
    ``fills`` (names, by model chunk and dtype, where they differ from the default) zero2's.
    """

    kind: Kind
    chunks: tuple[tuple[ShardedParam, ...], ...]
    slots: Mapping[str, Mapping[str, str]]
    grad_dtypes: Mapping[str, str]
    cuts: Mapping[tuple[int, str], Cuts] = field(default_factory=dict)
    busbw: bool = False
    fixed: Mapping[str, FixedBuckets] = field(default_factory=dict)
    fills: Mapping[tuple[int, str], tuple[tuple[str, ...], ...]] = field(default_factory=dict)


def describe_chunks(optimizer: StateOwner) -> tuple[tuple[ShardedParam, ...], ...]:
    """Return the parameters of each model chunk of this rank, in module order."""
    count = 1 + max(managed.chunk for managed in optimizer.managed)
    chunks: list[list[ShardedParam]] = [[] for _ in range(count)]
    for managed in sorted(optimizer.managed, key=lambda item: (item.chunk, item.order)):
        chunks[managed.chunk].append(sharded_param(managed, optimizer.tp.size, optimizer.trains))
    return tuple(map(tuple, chunks))


def describe_grads(buffers: Sequence[LiveBuffer]) -> dict[str, str]:
    """Return the dtype of gradients for each parameter dtype."""
    return {dtype_name(b.param_dtype): dtype_name(b.grad_dtype) for b in buffers}


def sharded_param(managed: ManagedParam, tp_size: int, trained: frozenset[str]) -> ShardedParam:
    """Return a parameter of this rank as part of the whole model."""
    sharding = managed.sharding
    shape = list(managed.param.shape)
    if sharding.split is not None:
        shape[sharding.split.dim] *= tp_size
    return ShardedParam(
        name=managed.name,
        shape=tuple(shape),
        dtype=dtype_name(managed.param.dtype),
        split=sharding.split,
        vocab_rows=sharding.vocab_rows,
        vocabulary=sharding.vocab_rows is not None,
        stage=sharding.stage,
        layer=sharding.layer,
        tied_to=sharding.tied_to,
        trainable=managed.name in trained,
    )


def join_ranks(
    ranks: Mapping[tuple[int, int], RankDescription],
    dp_size: int,
    *,
    facts: ModelFacts | None = None,
) -> ShardedLayout:
    """Join the descriptions of all (tensor rank, pipeline rank) to the layout of the run.

    Raises:
        OptimizerError: tensor ranks of one stage describe different parameters.
    """
    tp_size = 1 + max(tp for tp, _ in ranks)
    pp_size = 1 + max(pp for _, pp in ranks)
    vpp = max(len(one.chunks) for one in ranks.values())
    _check_tensor_ranks(ranks)
    params: list[ShardedParam] = []
    chunks: dict[tuple[int, int], tuple[int, ...]] = {}
    for v in range(vpp):  # layers are numbered chunk by chunk over all stages
        for pp in range(pp_size):
            mine = ranks[0, pp].chunks[v] if v < len(ranks[0, pp].chunks) else ()
            chunks[pp, v] = tuple(range(len(params), len(params) + len(mine)))
            params += mine
    fills = {
        (pp, v, kind): _indices(params, chunks[pp, v], groups)
        for (tp, pp), one in sorted(ranks.items())
        for (v, kind), groups in one.fills.items()
        if tp == 0
    }
    first = ranks[0, 0]
    slots = _joined(ranks, lambda one: one.slots)
    kinds = dict.fromkeys(param.dtype for param in params if param.trainable)
    return ShardedLayout(
        kind=first.kind,
        topology=Topology(tp=tp_size, pp=pp_size, vpp=vpp, dp=dp_size),
        params=tuple(params),
        chunks=chunks,
        slots={kind: slots[kind] for kind in kinds},
        variant=VARIANT,
        busbw=first.busbw,
        cuts={
            (tp, pp, v, kind): cuts
            for (tp, pp), one in sorted(ranks.items())
            for (v, kind), cuts in one.cuts.items()
        },
        grad_dtypes=_joined(ranks, lambda one: one.grad_dtypes),
        facts=facts or ModelFacts(),
        fixed=_joined(ranks, lambda one: one.fixed),
        fills=fills,
    )


def _check_tensor_ranks(ranks: Mapping[tuple[int, int], RankDescription]) -> None:
    for (tp, pp), one in ranks.items():
        if one.chunks != ranks[0, pp].chunks:
            raise OptimizerError(
                f"tensor rank {tp} of stage {pp}: must have the parameters of tensor rank 0, got "
                f"{_first_difference(one, ranks[0, pp])}"
            )


T = TypeVar("T")


def _joined(
    ranks: Mapping[tuple[int, int], RankDescription],
    part: Callable[[RankDescription], Mapping[str, T]],
) -> dict[str, T]:
    """Join what each rank says by dtype."""
    return {kind: value for _, one in sorted(ranks.items()) for kind, value in part(one).items()}


def _indices(
    params: Sequence[ShardedParam], chunk: Sequence[int], groups: Sequence[Sequence[str]]
) -> tuple[tuple[int, ...], ...]:
    """Return groups of names as groups of indices of ``params``."""
    index = {params[i].name: i for i in chunk}
    return tuple(tuple(index[name] for name in group) for group in groups)


def zero1_slots(kinds: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the slots that ZeRO-1 keeps for parameters of each dtype."""
    return {
        kind: {
            WEIGHT: kind,
            **({} if kind == "float32" else {MASTER: "float32"}),
            **dict.fromkeys(MOMENTS, "float32"),
        }
        for kind in dict.fromkeys(kinds)
    }


def check_live(optimizer: StateOwner, layout: ShardedLayout) -> None:
    """Check that the live buffers are those that the layout's formula gives; a collective call.

    Raises:
        OptimizerError: on any rank they are not; raised on every rank.
    """
    mine = unlike_layout(optimizer, layout)
    for place, problem in exchange(mine, optimizer.dp, optimizer.tp, optimizer.pp).items():
        if problem:
            raise OptimizerError(
                f"rank (tp, dp, pp) {place}: {problem}",
                hint="set shared_embedding on the parameter of every stage that has a tied one",
            )


def unlike_layout(optimizer: StateOwner, layout: ShardedLayout) -> str:
    """Return how this rank's live buffers differ from the layout's formula; empty if they don't."""
    live = {(b.chunk, dtype_name(b.param_dtype)): b.layout for b in optimizer.buffers}
    for v in range(layout.topology.vpp):
        for kind, buffer in layout.buffers(optimizer.tp.rank, optimizer.pp.rank, v).items():
            mine = live.get((v, kind))
            if mine is None or (mine.starts, mine.bucket_stops) != (
                buffer.starts,
                buffer.bucket_stops,
            ):
                return (
                    f"buffer of {kind} in model chunk {v}: must lie as the layout's formula says, "
                    f"got other places or buckets"
                )
    return ""


def exchange(
    value: T, dp: Collectives, tp: Collectives, pp: Collectives
) -> dict[tuple[int, int, int], T]:
    """Bring a small plain value of every rank to every rank, by (tp, dp, pp) rank.

    Goes along one parallel dimension after the other, so it needs no group of all ranks.
    """
    rows: dict[tuple[int, int, int], T] = {(tp.rank, dp.rank, pp.rank): value}
    for group in (dp, tp, pp):
        if group.size > 1:
            rows = {
                place: found
                for part in group.all_gather_object(rows)
                if isinstance(part, dict)
                for place, found in part.items()
            }
    return rows


def dtype_name(kind: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(kind).removeprefix("torch.")


def _first_difference(a: RankDescription, b: RankDescription) -> str:
    for mine, theirs in zip(a.chunks, b.chunks, strict=False):
        for x, y in zip(mine, theirs, strict=False):
            if x != y:
                return f"{x.name} {x.shape} and {y.name} {y.shape}"
    return "another number of them"
