"""What is the layout of a source on another topology? Sizes, layers on stages, slots, cuts.

A source that says how its tensors are cut has a ``sharded_layout`` among its objects, whatever
its format; any other is taken as one tensor rank and one pipeline stage. A size that is not named
stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats import Target
from ckpttools.layout import pipeline
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.megatron import Cuts
from ckpttools.layout.pipeline import Pipeline, split_layers
from ckpttools.layout.sharded import (
    ChunkKey,
    CutsKey,
    Kind,
    ShardedLayout,
    ShardedParam,
    Topology,
)
from ckpttools.layout.slots import MASTER, WEIGHT
from ckpttools.manifest import Manifest

DEFAULT_CAP_BYTES = 100 << 20
"""Bytes of gradients in a bucket of a zero2 layout, unless something else is known."""


def source_layout(source: Manifest, kind: Kind) -> ShardedLayout:
    """Return the layout of a source, with the slots that it has.

    Raises:
        UsageError: it lacks a weight, or parameters of one dtype have different slots.
    """
    known = source.objects.get("sharded_layout")
    params = known.params if isinstance(known, ShardedLayout) else _plain_params(source)
    slots = _slots(source, params)
    if not isinstance(known, ShardedLayout):
        chunks = {(0, 0): tuple(range(len(params)))}
        fixed = default_buckets(slots, {}) if kind == "zero2" else {}
        return ShardedLayout(kind, Topology(), params, chunks, slots, fixed=fixed)
    if kind == "zero1":
        cuts = {key: cut for key, cut in known.cuts.items() if key[3] in slots}
        return replace(known, kind=kind, slots=slots, cuts=cuts, fixed={}, fills={})
    fixed = {
        dtype: known.fixed.get(dtype, rule)
        for dtype, rule in default_buckets(slots, known.grad_dtypes).items()
    }
    return replace(known, kind=kind, slots=slots, cuts={}, busbw=False, fixed=fixed)


def default_buckets(
    dtypes: Iterable[str], grad_dtypes: Mapping[str, str]
) -> dict[str, FixedBuckets]:
    """Return the size of buckets that Apex has where none is named: 100 MiB of gradients."""
    return {
        kind: FixedBuckets.of_bytes(DEFAULT_CAP_BYTES, dtype(grad_dtypes.get(kind, kind)).itemsize)
        for kind in dtypes
    }


def retarget(layout: ShardedLayout, target: Target, *, kind: str) -> ShardedLayout:
    """Take a layout to another topology.

    Stages keep their layers where neither their number nor that of their chunks changes and no
    split is named. Buckets stay where tensor ranks and stages do; else there is one, or those of
    the size that is named, in the first chunk of the first stage as Megatron has them. Buckets of
    one size (``zero2``) keep that size, and the order in which they are filled where stages stay.

    Raises:
        UsageError: the model can't be cut so, or what the source doesn't tell must be known.
    """
    topology = _topology(layout, target)
    facts, old = layout.facts, layout.topology
    if facts.heads is not None and facts.heads % topology.tp:
        raise UsageError(f"--tp: must divide the {facts.heads} attention heads, got {topology.tp}")
    if topology.tp != old.tp and facts.heads is None and _uncut(layout):
        raise UsageError(
            f"--tp: must be {old.tp}, since the source doesn't tell how its tensors are cut, got "
            f"{topology.tp}"
        )
    chunks, split = dict(layout.chunks), facts.pipeline
    named = target.first_stage_layers is not None or target.last_stage_layers is not None
    stages_stay = (topology.pp, topology.vpp) == (old.pp, old.vpp) and not named
    if not stages_stay:
        split = pipeline.Split(
            first=target.first_stage_layers,
            last=target.last_stage_layers,
            embedding=facts.pipeline.embedding and not named,
            loss=facts.pipeline.loss and not named,
        )
        chunks = _deal(layout, topology, split)
    params = tuple(_resize(param, layout, topology.tp) for param in layout.params)
    stays = stages_stay and topology.tp == old.tp
    fused = layout.kind == "zero2"
    try:
        return replace(
            layout,
            topology=topology,
            params=params,
            chunks=chunks,
            cuts={} if fused else _cuts(layout, target, topology, chunks, stays=stays),
            fixed=_fixed(layout, target) if fused else {},
            fills=layout.fills if stages_stay else {},
            facts=replace(facts, pipeline=split),
        )
    except LayoutError as error:
        raise UsageError(f"--to {kind}: {error}") from error


def _fixed(layout: ShardedLayout, target: Target) -> dict[str, FixedBuckets]:
    """Return the size of buckets: as named, else as in the source."""
    if target.bucket_size is None:
        return dict(layout.fixed)
    if target.bucket_size == "none":
        raise UsageError("--bucket-size: must be a number of elements for zero2, got none")
    size = target.bucket_size
    return {kind: replace(rule, cap_numel=size) for kind, rule in layout.fixed.items()}


def _plain_params(source: Manifest) -> tuple[ShardedParam, ...]:
    """Return the parameters of a source that tells of its tensors' names and shapes alone.

    Where there is optimizer state, a weight without any is frozen.
    """
    slots: dict[str, set[str]] = {}
    for spec in source.tensors:
        slots.setdefault(spec.name, set()).add(spec.slot)
    trained = any(len(mine) > 1 for mine in slots.values())
    return tuple(
        ShardedParam(
            spec.name,
            spec.stored_shape,
            spec.dtype.name,
            vocab_rows=spec.shape[0] if spec.padding_rows else None,
            vocabulary=bool(spec.padding_rows),
            trainable=len(slots[spec.name]) > 1 or not trained,
        )
        for spec in source.tensors
        if spec.slot == WEIGHT
    )


def _slots(source: Manifest, params: tuple[ShardedParam, ...]) -> dict[str, Mapping[str, str]]:
    """Return the slots of each dtype's parameters, which must have the same ones."""
    mine: dict[str, dict[str, str]] = {}
    for spec in source.tensors:
        mine.setdefault(spec.name, {})[spec.slot] = spec.dtype.name
    known = {param.name for param in params}
    if unknown := sorted(set(mine) - known):
        raise UsageError(f"{unknown[0]}: must have its weight, got other slots alone")
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for param in params:
        slots = mine.get(param.canonical, {})
        if slots.get(WEIGHT) != param.dtype:
            raise UsageError(
                f"{param.canonical}: must have its weight, got {', '.join(slots) or 'none'}",
                hint="take whole ones, or write --to safetensors, which holds any part",
            )
        if not param.trainable:
            continue
        first, expected = found.setdefault(param.dtype, (param.canonical, slots))
        if slots != expected:
            raise UsageError(
                f"{param.canonical}: must have the slots of {first}, {', '.join(expected)}, got "
                f"{', '.join(slots)}",
                hint="take whole ones, or write --to safetensors, which holds any part",
            )
    return {kind: _stored(kind, slots) for kind, (_, slots) in found.items()}


def _stored(dtype: str, slots: Mapping[str, str]) -> dict[str, str]:
    """Return the slots without a master that the weight stands for."""
    if dtype != "float32" or MASTER not in slots:
        return dict(slots)
    stored = {slot: kind for slot, kind in slots.items() if slot != MASTER}
    if slots[MASTER] != "float32" or len(stored) == 1:
        raise UsageError(
            "fp32_param: the master of a float32 parameter must be float32 and stand beside other "
            f"optimizer state, got {slots[MASTER]} and {', '.join(stored)}",
            hint=f"it equals the weight: leave it out with --exclude '*:{MASTER}'",
        )
    return stored


def _topology(layout: ShardedLayout, target: Target) -> Topology:
    """Return the sizes: those that are named, the source's for the rest."""
    old = layout.topology
    tp = old.tp if target.tp is None else target.tp
    pp = old.pp if target.pp is None else target.pp
    vpp = target.vpp if target.vpp is not None else (old.vpp if pp == old.pp else 1)
    dp = old.dp if target.dp is None else target.dp
    for name, size in (("tp", tp), ("pp", pp), ("vpp", vpp), ("dp", dp)):
        if size < 1:
            raise UsageError(f"--{name}: must be at least 1, got {size}")
    if target.world is not None:
        dp, rest = divmod(target.world, tp * pp)
        if rest or not dp or target.dp not in (None, dp):
            raise UsageError(f"--world: must be TP {tp} x PP {pp} x DP, got {target.world}")
    if vpp > 1 and pp == 1:
        raise UsageError(f"--vpp: needs more than one pipeline stage, got {vpp}")
    return Topology(tp=tp, pp=pp, vpp=vpp, dp=dp)


def _uncut(layout: ShardedLayout) -> bool:
    """Say whether nothing is known of how tensors are cut: all on one rank, none with a split."""
    return layout.topology.tp == 1 and all(param.split is None for param in layout.params)


def _deal(
    layout: ShardedLayout, topology: Topology, split: pipeline.Split
) -> dict[ChunkKey, tuple[int, ...]]:
    """Return the parameters of each model chunk on new stages."""
    unknown = next((param.name for param in layout.params if param.stage is None), None)
    if unknown is not None:
        raise UsageError(
            f"--pp {topology.pp} --vpp {topology.vpp}: {unknown}: its pipeline stage must be "
            f"known, got a source that doesn't tell it"
        )
    layers = {param.layer for param in layout.params if param.layer is not None}
    if layers != set(range(len(layers))):
        raise UsageError(f"--pp: layers must be numbered from 0 on, got {sorted(layers)[:8]} …")
    try:
        stages = split_layers(len(layers), topology.pp, topology.vpp, split)
    except LayoutError as error:
        raise UsageError(f"--pp {topology.pp} --vpp {topology.vpp}: {error}") from error
    chunks: dict[ChunkKey, tuple[int, ...]] = {}
    for p, v in stages.chunks():
        first = stages.first_layer(p, v)
        mine = range(first, first + stages.counts[p][v])
        chunks[p, v] = tuple(
            i
            for i, param in enumerate(layout.params)
            if _is_there(param, stages, p, v, mine) and (topology.pp > 1 or not param.tied_to)
        )
    return chunks


def _is_there(param: ShardedParam, stages: Pipeline, p: int, v: int, layers: range) -> bool:
    """Say whether a chunk with these layers has a parameter."""
    if param.layer is not None:
        return param.layer in layers
    return stages.is_first(p, v) if param.stage == "first" else stages.is_last(p, v)


def _resize(param: ShardedParam, layout: ShardedLayout, tp: int) -> ShardedParam:
    """Pad a vocabulary by the family's rule, and check that the target can cut the shape."""
    if param.vocab_rows is not None and layout.facts.vocab_divisor is not None:
        rows = layout.facts.padded_rows(param.vocab_rows, tp)
        param = replace(param, shape=(rows, *param.shape[1:]))
    try:
        param.boxes(tp, 0)
    except LayoutError as error:
        hint = "give the true number of rows with --vocab-size" if param.vocabulary else ""
        raise UsageError(f"--tp {tp}: {param.name}: {error}", hint=hint) from error
    return param


def _cuts(
    layout: ShardedLayout,
    target: Target,
    topology: Topology,
    chunks: Mapping[ChunkKey, tuple[int, ...]],
    *,
    stays: bool,
) -> dict[CutsKey, Cuts]:
    """Return where buckets close: as named, else as in the source, else nowhere."""
    if target.bucket_size is None:
        return dict(layout.cuts) if stays else {}
    if target.bucket_size == "none":
        return {}
    kinds = dict.fromkeys(
        layout.params[i].dtype for i in chunks[0, 0] if layout.params[i].trainable
    )
    cuts = Cuts(target.bucket_size)
    return {(tp, 0, 0, kind): cuts for tp in range(topology.tp) for kind in kinds}
