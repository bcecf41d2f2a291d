"""How do the rank files join to one Manifest? Names, then shapes, then buffers, then chunks.

1. Every rank's files are read in structure; their arguments must describe one grid.
2. Local layer numbers become global ones; each parameter finds its one rule.
3. Shapes over all tensor ranks follow from the rules; every rank must agree.
4. For each layout variant the buffer formula is held against what the files declare: the length
   of the saved buffers, and where the weights of a stage are views of one storage, their places
   in it. Variants that give the same offsets are one candidate.
5. A candidate's Manifest has a chunk per parameter, rank, slot and sub-block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttools.errors import CkptError, FormatError, LayoutError
from ckpttools.formats import Candidate, Reading, ReadOptions
from ckpttools.formats.megatron.arguments import RANK_KEYS, Run, check_same_run, read_run
from ckpttools.formats.megatron.chunks import buffer_param, build_manifest
from ckpttools.formats.megatron.directory import (
    OPTIMIZER_FILE,
    IterationDirectory,
    check_grid,
    find_iteration,
)
from ckpttools.formats.megatron.groups import Groups, read_groups
from ckpttools.formats.megatron.names import to_global
from ckpttools.formats.megatron.ranks import RankFiles, read_rank
from ckpttools.formats.megatron.state import MegatronState, ParamInfo, RankId
from ckpttools.formats.megatron.trees import same
from ckpttools.layout.megatron import (
    VARIANTS,
    BufferLayout,
    BufferParam,
    Cuts,
    buffer_layout,
    cuts_from_starts,
)
from ckpttools.layout.rules import Rules, builtin_rules, read_rules
from ckpttools.manifest import MASTER
from ckpttools.storage.torchzip import TensorRef


def read_checkpoint(path: Path, options: ReadOptions) -> Reading:
    """Read a checkpoint directory, or one iteration of it.

    Raises:
        FormatError: the files are damaged, incomplete, or of a kind that is not supported.
    """
    iteration = find_iteration(path)
    first = min(iteration.ranks)
    if first != (0, 0):
        raise FormatError(f"{iteration.path}: must have the files of rank (0, 0), got none")
    ranks = {first: read_rank(iteration, *first)}
    run = read_run(ranks[first].settings, ranks[first].where)
    check_grid(iteration, run.tp, run.pp)
    for rank in iteration.ranks:
        if rank != first:
            ranks[rank] = read_rank(iteration, *rank)
    if options.vocab_size is not None:
        run = replace(run, vocab_size=options.vocab_size)
    notes = [*_check_ranks(ranks), *_check_optimizer_files(ranks, options)]
    joined = _join(ranks, run, options)
    candidates, refused = _candidates(iteration, ranks, joined, options)
    return Reading(candidates, refused, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Joined:
    """The model over all ranks: parameters per stage and what is known of the run."""

    run: Run
    rules: Rules
    stages: tuple[tuple[ParamInfo, ...], ...]
    entries: tuple[str, ...]
    modules: Mapping[str, object] | None
    groups: Groups | None


def _check_ranks(ranks: Mapping[RankId, RankFiles]) -> list[str]:
    """Check that what must be common to all rank files is; return remarks on the rest."""
    notes: list[str] = []
    first = ranks[0, 0]
    for files in ranks.values():
        check_same_run(files.settings, first.settings, files.where)
        for key in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far"):
            if not same(files.tree.get(key), first.tree.get(key)):
                raise FormatError(
                    f"{files.where}: {key} must be the same in all rank files, got "
                    f"{files.tree.get(key)!r:.80} and {first.tree.get(key)!r:.80}"
                )
        for key in sorted(first.settings.keys() | files.settings.keys()):
            if key in RANK_KEYS or same(files.settings.get(key), first.settings.get(key)):
                continue
            notes.append(
                f"args.{key} differs between rank files "
                f"({first.settings.get(key)!r:.40} and {files.settings.get(key)!r:.40})"
            )
    return list(dict.fromkeys(notes))


def _check_optimizer_files(ranks: Mapping[RankId, RankFiles], options: ReadOptions) -> list[str]:
    """Optimizer state is there for all ranks, or for none and on purpose; return a remark on it."""
    missing = [f for f in ranks.values() if f.optimizer_file is None]
    bare = [f for f in ranks.values() if not f.groups]
    if not missing and bare:
        raise FormatError(
            f"{bare[0].where}: must list parameter groups, as {OPTIMIZER_FILE} is there, got none"
        )
    if not missing:
        return []
    place = Path(missing[0].where).parent / OPTIMIZER_FILE
    if len(missing) < len(ranks):
        raise FormatError(
            f"{place}: every rank must have this file or none, got {len(missing)} of "
            f"{len(ranks)} ranks without"
        )
    if any(f.groups for f in ranks.values()) and "optimizer" not in options.accept_loss:
        raise FormatError(
            f"{place}: must be there, as the parameter groups in {missing[0].where} say, got no "
            f"optimizer state at all",
            hint="give --accept-loss optimizer to go on with the weights alone",
        )
    return ["weights only: the checkpoint has no optimizer state"]


def _join(ranks: Mapping[RankId, RankFiles], run: Run, options: ReadOptions) -> _Joined:
    """Give every parameter its global name, rule and shape; all tensor ranks must agree."""
    rules = read_rules(options.rules_path) if options.rules_path else builtin_rules("megatron-gpt")
    layers, rest = divmod(run.num_layers, run.pp)
    if rest:
        raise FormatError(
            f"{ranks[0, 0].where}: {run.num_layers} layers must divide over PP, got {run.pp}"
        )
    stages, entries, modules = [], [], {}
    has_metadata = True
    for p in range(run.pp):
        model_names = [tuple(ranks[t, p].model) for t in range(run.tp)]
        for t, names in enumerate(model_names):
            if names != model_names[0]:
                raise FormatError(
                    f"{ranks[t, p].where}: model must have the same entries as tensor rank 0, got "
                    f"{sorted(set(names) ^ set(model_names[0]))[:1] or 'another order'}"
                )
        where = ranks[0, p].where
        for name in model_names[0]:
            entries.append(to_global(name, stage=p, layers=layers, where=where))
        metadata = getattr(ranks[0, p].tree["model"], "_metadata", None)
        has_metadata = has_metadata and isinstance(metadata, dict)
        for name, value in (metadata or {}).items():
            modules[to_global(str(name), stage=p, layers=layers, where=where)] = value
        stages.append(_stage_params([ranks[t, p] for t in range(run.tp)], run, rules, layers))
    groups = _groups(ranks, run, stages)
    _check_layers(stages, run, where=ranks[0, 0].where)
    return _Joined(
        run=run,
        rules=rules,
        stages=tuple(stages),
        entries=tuple(dict.fromkeys(entries)),
        modules=modules if has_metadata else None,
        groups=groups,
    )


def _check_layers(stages: Sequence[Sequence[ParamInfo]], run: Run, *, where: str) -> None:
    """Every layer has the same parameters: a layer that lacks some was lost on the way."""
    by_layer: dict[int, set[str]] = {layer: set() for layer in range(run.num_layers)}
    for info in (info for stage in stages for info in stage):
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


def _stage_params(
    files: Sequence[RankFiles], run: Run, rules: Rules, layers: int
) -> tuple[ParamInfo, ...]:
    """Return the parameters of one stage in module order."""
    result = []
    for local, tensor in files[0].params().items():
        where = f"{files[0].where}: {local}"
        name = to_global(local, stage=files[0].pp, layers=layers, where=where)
        rule = rules.find(name, run.facts)
        for other in files:
            theirs = other.params()[local]
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
    ranks: Mapping[RankId, RankFiles], run: Run, stages: Sequence[Sequence[ParamInfo]]
) -> Groups | None:
    """Join the parameter groups of all ranks."""
    with_groups = [f for f in ranks.values() if f.buffers]
    if not with_groups:
        return None
    return read_groups(
        [
            (files.where, files.groups, [info.group_param for info in stages[files.pp]])
            for files in sorted(with_groups, key=lambda f: (f.pp, f.tp))
        ],
        arguments=ranks[0, 0].settings,
        decay_qk_layernorm=run.decay_qk_layernorm,
    )


def _candidates(
    iteration: IterationDirectory,
    ranks: Mapping[RankId, RankFiles],
    joined: _Joined,
    options: ReadOptions,
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Try every layout variant; join those that agree on every offset."""
    names = [options.layout] if options.layout else list(VARIANTS)
    found: list[tuple[list[str], dict[tuple[int, int, str], tuple[Cuts, BufferLayout]], str]] = []
    refused: list[str] = []
    for name in names:
        try:
            buffers, cuts_from = _lay_out_buffers(ranks, joined, name)
        except (LayoutError, FormatError) as error:
            if options.layout:
                raise
            refused.append(f"layout {name}: {error}")
            continue
        for layouts, known, _ in found:
            if all(known[key][1].file_starts == buffers[key][1].file_starts for key in buffers):
                layouts.append(name)
                break
        else:
            found.append(([name], buffers, cuts_from))
    candidates = []
    for layouts, buffers, cuts_from in found:
        state = _state(iteration, ranks, joined, tuple(layouts), buffers, cuts_from)
        candidates.append(Candidate(tuple(layouts), build_manifest(iteration, ranks, state)))
    return tuple(candidates), tuple(refused)


def _state(
    iteration: IterationDirectory,
    ranks: Mapping[RankId, RankFiles],
    joined: _Joined,
    layouts: tuple[str, ...],
    buffers: Mapping[tuple[int, int, str], tuple[Cuts, BufferLayout]],
    cuts_from: str,
) -> MegatronState:
    saved = ranks[0, 0].buffers
    return MegatronState(
        iteration_name=iteration.name,
        layouts=layouts,
        run=joined.run,
        rules=joined.rules,
        stages=joined.stages,
        entries=joined.entries,
        modules=joined.modules,
        trees={rank: {**files.tree, "model": None} for rank, files in ranks.items()},
        args={rank: files.args for rank, files in ranks.items()},
        groups=joined.groups,
        buffer_keys={b.param_dtype: b.key for f in ranks.values() for b in f.buffers},
        slots=tuple(MASTER if s == "param" else s for s in saved[0].tensors) if saved else (),
        buffers=buffers,
        cuts_from=cuts_from,
        optimizer_location=saved[0].tensors["param"].storage.location if saved else "cpu",
    )


def _lay_out_buffers(
    ranks: Mapping[RankId, RankFiles], joined: _Joined, variant: str
) -> tuple[dict[tuple[int, int, str], tuple[Cuts, BufferLayout]], str]:
    """Lay out every buffer of every rank under one variant, checked against the files."""
    buffers: dict[tuple[int, int, str], tuple[Cuts, BufferLayout]] = {}
    sources: list[str] = []
    for (t, p), files in ranks.items():
        infos = joined.stages[p]
        dtypes = list(dict.fromkeys(info.dtype for info in infos))
        if files.buffers and [b.param_dtype for b in files.buffers] != dtypes:
            raise FormatError(
                f"{files.optimizer_path}: buffers must be of {dtypes} in this order, as the "
                f"weights are, got {[b.param_dtype for b in files.buffers]}"
            )
        for i, name in enumerate(dtypes):
            params = [buffer_param(info, joined.run) for info in infos if info.dtype == name]
            tensors = [
                tensor
                for info, tensor in zip(infos, files.params().values(), strict=True)
                if info.dtype == name
            ]
            declared = files.buffers[i].numel_unpadded if files.buffers else None
            cuts, layout, source = _fit(params, tensors, declared, files, joined.run, variant)
            buffers[t, p, name] = cuts, layout
            sources.append(source)
    return buffers, ", ".join(dict.fromkeys(sources))


def _fit(
    params: Sequence[BufferParam],
    tensors: Sequence[TensorRef],
    declared: int | None,
    files: RankFiles,
    run: Run,
    variant: str,
) -> tuple[Cuts, BufferLayout, str]:
    """Find the bucket cuts of a buffer and check the formula against the file.

    Cuts come from the weights' places in their storage where those show, else from the
    arguments (buckets exist on the first stage only), else there are none.
    """
    implied = Cuts(run.bucket_size if files.pp == 0 else None)
    options: list[tuple[str, Cuts]] = [("args", implied)]
    if implied.size is not None:
        options.append(("none", Cuts()))
    starts = _live_starts(tensors)
    if starts is not None:
        seen = cuts_from_starts(params, starts, dp=run.buffer_ranks, busbw=run.busbw)
        options.insert(0, ("storage offsets", seen))
    error: CkptError | None = None
    for source, cuts in options:
        try:
            layout = buffer_layout(
                params, dp=run.buffer_ranks, cuts=cuts, variant=variant, busbw=run.busbw
            )
            _check_layout(layout, tensors, starts, declared, files)
        except (LayoutError, FormatError) as failure:
            error = error or failure
            continue
        return cuts, layout, source
    raise error or FormatError(f"{files.where}: must fit layout {variant}, got nothing that does")


def _live_starts(tensors: Sequence[TensorRef]) -> list[int] | None:
    """Return the weights' places in the storage that they all share; None if they don't."""
    if len({id(tensor.storage) for tensor in tensors}) != 1 or len(tensors) < 2:
        return None
    return [tensor.offset for tensor in tensors]


def _check_layout(
    layout: BufferLayout,
    tensors: Sequence[TensorRef],
    starts: Sequence[int] | None,
    declared: int | None,
    files: RankFiles,
) -> None:
    """Hold the formula's numbers against what the files show."""
    if starts is not None:
        for param, formula, start in zip(layout.params, layout.starts, starts, strict=True):
            if formula != start:
                raise FormatError(
                    f"{files.where}: {param.name} must start at element {formula} of its "
                    f"storage by the buffer formula, got {start}"
                )
        if tensors[0].storage.numel != layout.numel:
            raise FormatError(
                f"{files.where}: the weights' storage must have {layout.numel} elements by the "
                f"buffer formula, got {tensors[0].storage.numel}"
            )
    if declared is not None and declared != layout.numel_unpadded:
        raise FormatError(
            f"{Path(files.where).parent / OPTIMIZER_FILE}: numel_unpadded must be "
            f"{layout.numel_unpadded} by the buffer formula, got {declared}"
        )
