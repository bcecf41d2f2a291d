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

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpttools.errors import FormatError, LayoutError
from ckpttools.formats import Candidate, Reading, ReadOptions
from ckpttools.formats.megatron.arguments import RANK_KEYS, check_same_run, read_run
from ckpttools.formats.megatron.carry import without_groups
from ckpttools.formats.megatron.chunks import buffer_param, build_manifest, saved_buffers
from ckpttools.formats.megatron.directory import (
    OPTIMIZER_FILE,
    IterationDirectory,
    check_grid,
    find_iteration,
)
from ckpttools.formats.megatron.fit import BufferFit
from ckpttools.formats.megatron.join import Joined, join
from ckpttools.formats.megatron.names import to_global
from ckpttools.formats.megatron.ranks import RankFiles, is_model_key, read_rank
from ckpttools.formats.megatron.state import (
    BufferId,
    Buffers,
    MegatronState,
    RankId,
)
from ckpttools.formats.megatron.trees import same
from ckpttools.layout.megatron import VARIANTS, BufferLayout, Cuts
from ckpttools.manifest import MASTER
from ckpttools.storage.inert import new_global


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
    notes = [*_check_ranks(ranks), *_experimental(ranks), *_check_optimizer_files(ranks, options)]
    joined = join(ranks, run, options)
    candidates, refused = _candidates(iteration, ranks, joined, options)
    return Reading(candidates, refused, tuple(notes))


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
        scalers = [without_groups(f.tree.get("optimizer")) for f in (files, first)]
        if not same(scalers[0], scalers[1]):
            raise FormatError(
                f"{files.where}: optimizer must be the same in all rank files but for its groups, "
                f"got {scalers[0]!r:.80} and {scalers[1]!r:.80}"
            )
        for key in sorted(first.settings.keys() | files.settings.keys()):
            if key in RANK_KEYS or same(files.settings.get(key), first.settings.get(key)):
                continue
            notes.append(
                f"args.{key} differs between rank files "
                f"({first.settings.get(key)!r:.40} and {files.settings.get(key)!r:.40})"
            )
    return list(dict.fromkeys(notes))


def _experimental(ranks: Mapping[RankId, RankFiles]) -> list[str]:
    """Return a remark for each version of the optimizer file that no real file has confirmed."""
    saved = {b.version for files in ranks.values() for one in files.optimizers for b in one.buffers}
    text = f"{OPTIMIZER_FILE} is of version %s: read by its description, experimental"
    return [text % version for version in sorted(saved - {"v2"})]


def _check_optimizer_files(ranks: Mapping[RankId, RankFiles], options: ReadOptions) -> list[str]:
    """Optimizer state is there for all ranks, or for none and on purpose; return a remark on it."""
    missing = [f for f in ranks.values() if f.optimizer_file is None]
    bare = [f for f in ranks.values() if not f.has_groups]
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
    if any(f.has_groups for f in ranks.values()) and "optimizer" not in options.accept_loss:
        raise FormatError(
            f"{place}: must be there, as the parameter groups in {missing[0].where} say, got no "
            f"optimizer state at all",
            hint="give --accept-loss optimizer to go on with the weights alone",
        )
    return ["weights only: the checkpoint has no optimizer state"]


def _candidates(
    iteration: IterationDirectory,
    ranks: Mapping[RankId, RankFiles],
    joined: Joined,
    options: ReadOptions,
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Try every layout variant; join those that agree on every offset."""
    names = [options.layout] if options.layout else list(VARIANTS)
    found: list[tuple[list[str], Buffers, str]] = []
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
            if all(_same_places(known[key][1], buffers[key][1]) for key in buffers):
                layouts.append(name)
                break
        else:
            found.append(([name], buffers, cuts_from))
    candidates = []
    for layouts, buffers, cuts_from in found:
        state = _state(iteration, ranks, joined, options, tuple(layouts), buffers, cuts_from)
        candidates.append(Candidate(tuple(layouts), build_manifest(iteration, ranks, state)))
    return tuple(candidates), tuple(refused)


def _state(
    iteration: IterationDirectory,
    ranks: Mapping[RankId, RankFiles],
    joined: Joined,
    options: ReadOptions,
    layouts: tuple[str, ...],
    buffers: Buffers,
    cuts_from: str,
) -> MegatronState:
    """Put together what a writer needs."""
    saved = [b for f in ranks.values() for o in f.optimizers for b in o.buffers]
    return MegatronState(
        iteration_name=iteration.name,
        layouts=layouts,
        version=saved[0].version if saved else "v2",
        run=joined.run,
        pipeline=joined.pipeline,
        rules=joined.rules,
        chunks=joined.chunks,
        entries=joined.entries,
        modules=joined.modules,
        trees={rank: _without_model(files.tree) for rank, files in ranks.items()},
        args={rank: files.args for rank, files in ranks.items()},
        groups=joined.groups,
        buffer_keys=_buffer_keys(ranks, joined),
        slots=tuple(MASTER if s == "param" else s for s in saved[0].tensors) if saved else (),
        buffers=buffers,
        cuts_from=cuts_from,
        extra_states=_extra_states(ranks, joined),
        accept_loss=options.accept_loss,
        optimizer_location=saved[0].tensors["param"][0].storage.location if saved else "cpu",
    )


def _extra_states(
    ranks: Mapping[RankId, RankFiles], joined: Joined
) -> dict[tuple[int, str], object]:
    """Return the extra state of every module on every tensor rank, by its global name."""
    found: dict[tuple[int, str], object] = {}
    for (t, p), files in ranks.items():
        for v in range(joined.pipeline.vpp):
            for name, value in files.extra_states(v).items():
                place = to_global(name, joined.pipeline, p, v, where=files.where)
                if not same(found.setdefault((t, place), value), value):
                    raise FormatError(
                        f"{files.where}: {name} must be the same in all stages, got another value"
                    )
    return found


def _without_model(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a rank file's dict with one None in place of all model chunks."""
    return {
        "model" if is_model_key(key) else key: None if is_model_key(key) else value
        for key, value in tree.items()
    }


def _buffer_keys(ranks: Mapping[RankId, RankFiles], joined: Joined) -> dict[str, object]:
    """Return the key under which each parameter dtype's buffers are saved, as v2 has it."""
    keys: dict[str, object] = {}
    for files in ranks.values():
        if files.optimizer_file is None:
            continue
        for (_, kind), buffer in saved_buffers(files, joined.run, joined.chunks).items():
            single = not isinstance(buffer.key, tuple)  # v0, v1a and v1b: the gradient's dtype
            keys[kind] = (new_global("torch", kind), buffer.key) if single else buffer.key
    return keys


def _same_places(a: BufferLayout, b: BufferLayout) -> bool:
    """Say whether two layouts put every parameter at the same place of the saved buffer."""
    return a.file_starts == b.file_starts and a.bucket_unpadded == b.bucket_unpadded


def _lay_out_buffers(
    ranks: Mapping[RankId, RankFiles], joined: Joined, variant: str
) -> tuple[Buffers, str]:
    """Lay out every buffer of every rank under one variant, checked against the files."""
    buffers: dict[BufferId, tuple[Cuts, BufferLayout]] = {}
    sources: list[str] = []
    for (t, p), files in ranks.items():
        saved = (
            saved_buffers(files, joined.run, joined.chunks)
            if files.optimizer_file is not None
            else {}
        )
        for v in range(joined.pipeline.vpp):
            infos = joined.chunks[p, v]
            named = list(zip(infos, files.params(v).values(), strict=True))
            for kind in dict.fromkeys(info.dtype for info in infos):
                params = [buffer_param(i, joined.run) for i in infos if i.dtype == kind]
                tensors = [tensor for info, tensor in named if info.dtype == kind]
                shown = saved.get((v, kind))
                fit = BufferFit(files, joined.run, variant, v, params, tensors, shown)
                cuts, layout, source = fit.find()
                buffers[t, p, v, kind] = cuts, layout
                sources.append(source)
    return buffers, ", ".join(dict.fromkeys(sources))
