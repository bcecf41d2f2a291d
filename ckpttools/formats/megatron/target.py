"""What does a run look like on the target topology? Sizes, layers on stages, and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats import Target
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.chunks import rank_boxes
from ckpttools.formats.megatron.names import param_to_local
from ckpttools.formats.megatron.state import (
    OUTPUT_WEIGHT,
    ChunkId,
    MegatronState,
    ParamInfo,
    tied_output,
)
from ckpttools.layout.pipeline import Pipeline, Split, split_layers
from ckpttools.manifest import MASTER, WEIGHT, Manifest

OUTPUT_EXTRA_STATE = "output_layer._extra_state"


def selected(source: Manifest, state: MegatronState) -> MegatronState:
    """Return the state of what ``source`` still has: all of it, or the weights alone.

    Raises:
        UsageError: a weight is missing, or some of the optimizer's tensors.
    """
    names = {info.canonical for info in state.params}
    index = source.index()
    hint = "take whole ones, or write --to safetensors, which holds any part"
    weights = sorted(name for name in names if (name, WEIGHT) not in index)
    if weights:
        raise UsageError(
            f"--to megatron: must have every weight, got none of {weights[0]}", hint=hint
        )
    missing = [(n, s) for s in state.slots for n in names if (n, s) not in index]
    if not missing:
        return state
    if len(missing) < len(names) * len(state.slots):
        name, slot = min(missing)
        if {slot for _, slot in missing} == {MASTER}:
            hint = (
                "a run that trains 16-bit weights without float32 masters has none to give; "
                "`--include weight` takes the weights alone, for Megatron to make them anew"
            )
        raise UsageError(
            f"--to megatron: must have all of the optimizer's tensors or none, got none of {name} "
            f"({slot})",
            hint=hint,
        )
    return replace(state, slots=(), buffer_keys={}, groups=None)


def target_run(state: MegatronState, target: Target) -> tuple[Run, Pipeline]:
    """Return the run on the target topology, and how its layers lie on stages.

    Stages keep their layers where neither their number nor that of their chunks changes and no
    split is named; otherwise Megatron's own formula gives them, uneven first and last stages only
    where they are named.

    Raises:
        UsageError: Megatron has no such topology, or the sizes contradict each other.
    """
    run = state.run
    tp = run.tp if target.tp is None else target.tp
    pp = run.pp if target.pp is None else target.pp
    vpp = target.vpp if target.vpp is not None else (run.vpp if pp == run.pp else 1)
    dp = run.dp if target.dp is None else target.dp
    if target.world is not None:
        dp, rest = divmod(target.world, tp * pp * run.cp)
        if rest or not dp or target.dp not in (None, dp):
            raise UsageError(
                f"--world: must be TP {tp} x PP {pp} x CP {run.cp} x DP, got {target.world}"
            )
    run = run.with_topology(tp=tp, pp=pp, vpp=vpp, dp=dp)
    named = target.first_stage_layers is not None or target.last_stage_layers is not None
    if (pp, vpp) == (state.run.pp, state.run.vpp) and not named:
        return run, state.pipeline
    split = Split(
        first=target.first_stage_layers,
        last=target.last_stage_layers,
        embedding=run.split.embedding and not named,
        loss=run.split.loss and not named,
    )
    try:
        pipeline = split_layers(run.num_layers, pp, vpp, split)
    except LayoutError as error:
        raise UsageError(f"--pp {pp} --vpp {vpp}: {error}") from error
    return replace(run, split=split, custom_split=False), pipeline


def target_entries(state: MegatronState, run: Run) -> tuple[str, ...]:
    """Return the entries of ``model`` over all stages of the target.

    A tied output layer has a weight of its own, before its extra state, only where input and
    output lie on different stages.
    """
    if not run.tied:
        return state.entries
    entries = [name for name in state.entries if name != OUTPUT_WEIGHT]
    if run.pp > 1:
        known = OUTPUT_EXTRA_STATE in entries
        place = entries.index(OUTPUT_EXTRA_STATE) if known else len(entries)
        entries.insert(place, OUTPUT_WEIGHT)
    return tuple(entries)


def deal(
    state: MegatronState, run: Run, pipeline: Pipeline, entries: Sequence[str]
) -> dict[ChunkId, tuple[ParamInfo, ...]]:
    """Return the parameters of each model chunk, with the target's shapes, in module order."""
    infos = {info.name: info for info in state.params}
    params = [
        _info(state, run, infos, name) for name in entries if name in infos or name == OUTPUT_WEIGHT
    ]
    chunks: dict[ChunkId, tuple[ParamInfo, ...]] = {}
    for p, v in pipeline.chunks():
        chunks[p, v] = tuple(
            _resize(info, run)
            for info in params
            if param_to_local(info.name, info.rule.stage, pipeline, p, v) is not None
        )
    return chunks


def _info(state: MegatronState, run: Run, infos: Mapping[str, ParamInfo], name: str) -> ParamInfo:
    """Return a parameter; a tied output layer that the source lacks follows its embedding."""
    return infos[name] if name in infos else tied_output(state, run, infos)


def _resize(info: ParamInfo, run: Run) -> ParamInfo:
    """Pad a vocabulary by the target's rule, and check that the target can cut the shape."""
    if info.rule.vocabulary:
        rows = info.shape[0]
        if info.vocab_rows is not None:
            rows = run.padded_rows(info.vocab_rows, run.tp)
        elif rows % run.tp:
            raise UsageError(
                f"{info.name}: its {rows} rows must divide over TP, got {run.tp}",
                hint="give the true number of rows with --vocab-size",
            )
        info = replace(info, shape=(rows, *info.shape[1:]))
    try:
        rank_boxes(info, 0, run.tp)
    except LayoutError as error:
        raise UsageError(f"--tp {run.tp}: {info.name}: {error}") from error
    return info
