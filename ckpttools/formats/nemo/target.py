"""How does a model lie on the target's tensor and pipeline ranks? Shapes, cuts, stages.

A size that isn't named stays. Vocabularies are padded anew where the true number of rows and the
divisor are known. NeMo's stages and model chunks have the same number of layers each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats import Target
from ckpttools.layout.pipeline import Pipeline, Split, split_layers
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology

ChunkKey = tuple[int, int]
"""Pipeline stage and model chunk in it."""


def on_tensor_ranks(layout: ShardedLayout, target: Target, *, to: str) -> ShardedLayout:
    """Take a layout to the target's tensor ranks, all stages in one.

    Raises:
        UsageError: the model can't be cut so.
    """
    tp = layout.topology.tp if target.tp is None else target.tp
    chunk = tuple(i for i, param in enumerate(layout.params) if not param.tied_to)
    return _resized(layout, Topology(tp=_size("tp", tp)), {(0, 0): chunk}, to)


def on_ranks(layout: ShardedLayout, target: Target, *, to: str) -> ShardedLayout:
    """Take a layout to the target's tensor and pipeline ranks.

    Raises:
        UsageError: the model can't be cut or dealt so, or what must be known of it isn't.
    """
    old = layout.topology
    tp = old.tp if target.tp is None else target.tp
    pp = old.pp if target.pp is None else target.pp
    vpp = target.vpp if target.vpp is not None else (old.vpp if pp == old.pp else 1)
    if vpp > 1 and pp == 1:
        raise UsageError(f"--vpp: needs more than one pipeline stage, got {vpp}")
    topology = Topology(tp=_size("tp", tp), pp=_size("pp", pp), vpp=_size("vpp", vpp))
    if target.first_stage_layers is not None or target.last_stage_layers is not None:
        raise UsageError(
            f"--to {to}: NeMo's stages have the same number of layers, got uneven ones"
        )
    chunks: Mapping[ChunkKey, tuple[int, ...]] = layout.chunks
    if (pp, vpp) != (old.pp, old.vpp):
        chunks = _deal(layout, topology, to)
    return _resized(layout, topology, chunks, to)


def check_sizes(target: Target, *, to: str) -> tuple[str, ...]:
    """Refuse sizes that NeMo's files can't have; return remarks on those that they don't show.

    Raises:
        UsageError: buckets are named.
    """
    if target.bucket_size is not None:
        raise UsageError(f"--to {to}: files have no buckets, got a size for them")
    if target.dp is not None or target.world is not None:
        return ("data-parallel ranks leave no trace in the files",)
    return ()


def _size(name: str, size: int) -> int:
    if size < 1:
        raise UsageError(f"--{name}: must be at least 1, got {size}")
    return size


def _resized(
    layout: ShardedLayout,
    topology: Topology,
    chunks: Mapping[ChunkKey, tuple[int, ...]],
    to: str,
) -> ShardedLayout:
    heads, tp = layout.facts.heads, topology.tp
    if heads is not None and heads % tp:
        raise UsageError(f"--tp: must divide the {heads} attention heads, got {tp}")
    params = layout.params
    if tp != layout.topology.tp:
        params = tuple(_resize(param, layout, tp) for param in params)
    try:
        return replace(
            layout, kind="zero1", topology=topology, params=params, chunks=chunks, cuts={}
        )
    except LayoutError as error:
        raise UsageError(f"--to {to}: {error}") from error


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


def _deal(layout: ShardedLayout, topology: Topology, to: str) -> dict[ChunkKey, tuple[int, ...]]:
    """Return the parameters of each model chunk on new stages."""
    where = f"--to {to} --pp {topology.pp} --vpp {topology.vpp}"
    unknown = next((param.name for param in layout.params if param.stage is None), None)
    if unknown is not None:
        raise UsageError(f"{where}: {unknown}: its stage must be known, got a source without it")
    layers = {param.layer for param in layout.params if param.layer is not None}
    try:
        stages = split_layers(len(layers), topology.pp, topology.vpp, Split())
    except LayoutError as error:
        raise UsageError(f"{where}: {error}") from error
    return {
        key: tuple(
            i
            for i, param in enumerate(layout.params)
            if _is_there(param, stages, key) and (topology.pp > 1 or not param.tied_to)
        )
        for key in stages.chunks()
    }


def _is_there(param: ShardedParam, stages: Pipeline, key: ChunkKey) -> bool:
    """Say whether a model chunk has a parameter."""
    p, v = key
    if param.layer is not None:
        first = stages.first_layer(p, v)
        return first <= param.layer < first + stages.counts[p][v]
    return stages.is_first(p, v) if param.stage == "first" else stages.is_last(p, v)
