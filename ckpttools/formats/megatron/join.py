"""How do the ranks' models join to one? Global names, one rule each, shapes over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, LayoutError
from ckpttools.formats import ReadOptions
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.groups import Groups, read_groups
from ckpttools.formats.megatron.names import count_layers, to_global
from ckpttools.formats.megatron.ranks import RankFiles, is_model_key
from ckpttools.formats.megatron.state import ChunkId, ParamInfo, RankId, optimizer_chunks
from ckpttools.layout.pipeline import Pipeline, split_layers
from ckpttools.layout.rules import Rules, builtin_rules, read_rules


@dataclass(frozen=True, slots=True)
class Joined:
    """The model over all ranks: parameters per model chunk and what is known of the run."""

    run: Run
    pipeline: Pipeline
    rules: Rules
    chunks: Mapping[ChunkId, tuple[ParamInfo, ...]]
    entries: tuple[str, ...]
    modules: Mapping[str, object] | None
    groups: Groups | None


def join(ranks: Mapping[RankId, RankFiles], run: Run, options: ReadOptions) -> Joined:
    """Give every parameter its global name, rule and shape; all tensor ranks must agree."""
    rules = read_rules(options.rules_path) if options.rules_path else builtin_rules("megatron-gpt")
    pipeline = _pipeline(ranks, run)
    chunks: dict[ChunkId, tuple[ParamInfo, ...]] = {}
    entries: list[str] = []
    modules: dict[str, object] = {}
    has_metadata = True
    for p, v in pipeline.in_layer_order():
        files = [ranks[t, p] for t in range(run.tp)]
        names = _common_names(files, v)
        where = files[0].where
        entries += [to_global(name, pipeline, p, v, where=where) for name in names]
        key = [key for key in files[0].tree if is_model_key(key)][v]
        metadata = getattr(files[0].tree[key], "_metadata", None)
        has_metadata = has_metadata and isinstance(metadata, dict)
        for name, value in (metadata or {}).items():
            modules[to_global(str(name), pipeline, p, v, where=where)] = value
        chunks[p, v] = _chunk_params(files, run, rules, pipeline, v)
    _check_layers(chunks, run, where=ranks[0, 0].where)
    return Joined(
        run=run,
        pipeline=pipeline,
        rules=rules,
        chunks=chunks,
        entries=tuple(dict.fromkeys(entries)),
        modules=modules if has_metadata else None,
        groups=_groups(ranks, run, chunks),
    )


def _pipeline(ranks: Mapping[RankId, RankFiles], run: Run) -> Pipeline:
    """Count the layers of each model chunk, and hold the counts against the arguments.

    Counts fix the numbering; where the arguments give a formula too, it must agree.
    """
    counts = []
    for p in range(run.pp):
        files = ranks[0, p]
        if len(files.models) != run.vpp:
            raise FormatError(
                f"{files.where}: must have {run.vpp} model chunks as the arguments say, got "
                f"{len(files.models)}"
            )
        counts.append(tuple(count_layers(model) for model in files.models))
    pipeline = Pipeline(tuple(counts))
    where = ranks[0, 0].where
    if pipeline.num_layers != run.num_layers:
        raise FormatError(
            f"{where}: all stages must have {run.num_layers} layers together, got {pipeline.counts}"
        )
    if not run.custom_split:
        try:
            formula = split_layers(run.num_layers, run.pp, run.vpp, run.split)
        except LayoutError as error:
            raise FormatError(f"{where}: {error}") from error
        if formula != pipeline:
            raise FormatError(
                f"{where}: layers must be split as {formula.counts} by the arguments, got "
                f"{pipeline.counts}"
            )
    return pipeline


def _common_names(files: Sequence[RankFiles], v: int) -> tuple[str, ...]:
    """Return the entries of a model chunk, which all tensor ranks must have alike."""
    names = tuple(files[0].models[v])
    for other in files[1:]:
        theirs = tuple(other.models[v])
        if theirs != names:
            odd = sorted(set(theirs) ^ set(names))[:1] or "another order"
            raise FormatError(
                f"{other.where}: model must have the same entries as tensor rank 0, got {odd}"
            )
    return names


def _check_layers(chunks: Mapping[ChunkId, Sequence[ParamInfo]], run: Run, *, where: str) -> None:
    """Check that every layer has the same parameters: one that lacks some lost them."""
    by_layer: dict[int, set[str]] = {layer: set() for layer in range(run.num_layers)}
    for info in (info for chunk in chunks.values() for info in chunk):
        pieces = info.name.split(".", 3)
        if info.rule.stage == "layer":
            by_layer[int(pieces[2])].add(pieces[3])
    for layer, names in by_layer.items():
        if names != by_layer[0]:
            odd = min(names ^ by_layer[0])
            raise FormatError(
                f"{where}: layers must have the same parameters, got {odd} only in layer "
                f"{layer if odd in names else 0} and not in layer {0 if odd in names else layer}"
            )


def _chunk_params(
    files: Sequence[RankFiles], run: Run, rules: Rules, pipeline: Pipeline, v: int
) -> tuple[ParamInfo, ...]:
    """Return the parameters of one model chunk in module order."""
    result = []
    for local, tensor in files[0].params(v).items():
        where = f"{files[0].where}: {local}"
        name = to_global(local, pipeline, files[0].pp, v, where=where)
        rule = rules.find(name, run.facts)
        for other in files:
            theirs = other.params(v)[local]
            if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
                raise FormatError(
                    f"{other.where}: {local} must be {tensor.dtype} {tensor.shape} as on tensor "
                    f"rank 0, got {theirs.dtype} {theirs.shape}"
                )
        shape = tensor.shape
        if rule.split is not None:
            if rule.split.dim >= len(shape):
                raise FormatError(f"{where}: must have dim {rule.split.dim}, got shape {shape}")
            shape = tuple(
                n * run.tp if d == rule.split.dim else n for d, n in enumerate(tensor.shape)
            )
        rows = _vocab_rows(shape, run, where) if rule.vocabulary else None
        location = tensor.storage.location
        kind = tensor.dtype.name
        result.append(ParamInfo(name, rule, shape, kind, rows, location, tensor.requires_grad))
    return tuple(result)


def _vocab_rows(shape: tuple[int, ...], run: Run, where: str) -> int | None:
    """Return the true rows of a vocabulary tensor; None where nothing tells them."""
    if run.vocab_size is None:
        return None
    legal = run.padded_rows(run.vocab_size, run.tp)
    if shape[0] != legal:
        raise FormatError(
            f"{where}: a vocabulary of {run.vocab_size} rows must be padded to {legal} (a "
            f"multiple of {run.vocab_divisor} x TP {run.tp}), got {shape[0]}",
            hint="give the true size with --vocab-size",
        )
    return run.vocab_size


def _groups(
    ranks: Mapping[RankId, RankFiles], run: Run, chunks: Mapping[ChunkId, Sequence[ParamInfo]]
) -> Groups | None:
    """Join the parameter groups of all optimizers of all ranks."""
    listed = []
    for files in sorted(ranks.values(), key=lambda f: (f.pp, f.tp)):
        if files.optimizer_file is None:
            continue
        for optimizer, owned in zip(files.optimizers, optimizer_chunks(run), strict=False):
            params = [info.group_param for v in owned for info in chunks[files.pp, v]]
            listed.append((files.where, optimizer.groups, params))
    if not listed:
        return None
    return read_groups(
        listed, arguments=ranks[0, 0].settings, decay_qk_layernorm=run.decay_qk_layernorm
    )
