"""How does a Megatron run come back from a native checkpoint that carries one?

What the native checkpoint says of itself is newer and wins: topology, stages, buckets, iteration,
scheduler, gradient scaler, step and the settings of the parameter groups. The rest is as it was
carried (:mod:`ckpttools.formats.megatron.document`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import FormatError, LayoutError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.megatron import carry
from ckpttools.formats.megatron.arguments import Run, read_run, settings_of
from ckpttools.formats.megatron.document import VERSION
from ckpttools.formats.megatron.groups import Groups, Settings
from ckpttools.formats.megatron.state import (
    OUTPUT_WEIGHT,
    BufferId,
    ChunkId,
    MegatronState,
    ParamInfo,
)
from ckpttools.formats.megatron.trees import as_tree, entry
from ckpttools.layout.megatron import BufferLayout, Cuts
from ckpttools.layout.pipeline import Pipeline, split_layers
from ckpttools.layout.rules import Rules, rules_of_table
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.storage.inert import Inert
from ckpttools.storage.inert_decoder import decode

WHERE = "carried: megatron"


def restore(
    document: object, layout: ShardedLayout, objects: Mapping[str, object]
) -> MegatronState:
    """Return the state of a Megatron run that has the layout of a native checkpoint.

    Raises:
        FormatError: the document is not one that `CarriedState` makes.
        UsageError: the checkpoint holds what a Megatron run can't.
    """
    carried = _Document.of(document)
    args = entry(carried.tree, "args", Inert, WHERE)
    run, pipeline = _run(carried, layout, settings_of(args, WHERE))
    chunks = _chunks(carried, layout, run)
    groups = _groups(carried, run, chunks, objects)
    ranks = [(t, p) for p in range(run.pp) for t in range(run.tp)]
    state = MegatronState(
        iteration_name=_iteration_name(carried, objects),
        layouts=carried.layouts,
        version="v2",
        run=run,
        pipeline=pipeline,
        rules=carried.rules,
        chunks=chunks,
        entries=carried.entries,
        modules=carried.modules,
        trees=dict.fromkeys(ranks, _tree(carried.tree, objects)),
        args=dict.fromkeys(ranks, args),
        groups=groups,
        buffer_keys=carried.buffer_keys,
        slots=carried.slots,
        buffers=_buffers(layout.as_zero1(), run),
        cuts_from="the native form",
        optimizer_location=carried.optimizer_location,
        extra_states={
            (t, name): value for t in range(run.tp) for name, value in carried.extra_states.items()
        },
        accept_loss=frozenset(),
    )
    return replace(state, trees={rank: _with_groups(state, rank[1]) for rank in ranks})


def stale_arguments(state: MegatronState, before: object) -> tuple[str, ...]:
    """Return a remark on each argument that counts iterations, where there were some since.

    ``before`` is the document that the state was restored from.
    """
    old = _Document.of(before).tree.get("iteration")
    new = state.trees[0, 0].get("iteration")
    settings = settings_of(state.args[0, 0], WHERE)
    return tuple(
        f"args.{key} is that of iteration {old}, got iteration {new}: {settings[key]!r:.40}"
        for key in _COUNTERS
        if old != new and key in settings
    )


_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Arguments that Megatron's training loop counts up, which only it knows."""


@dataclass(frozen=True, slots=True)
class _Document:
    """A carried document, checked."""

    iteration_name: str
    layouts: tuple[str, ...]
    vocab_size: int | None
    stages: Pipeline
    rules: Rules
    params: Mapping[str, tuple[str, bool]]
    entries: tuple[str, ...]
    modules: Mapping[str, object] | None
    tree: Mapping[str, object]
    listing: tuple[Settings, ...] | None
    by_key: bool
    marked_by_key: bool
    buffer_keys: Mapping[str, object]
    slots: tuple[str, ...]
    optimizer_location: str
    extra_states: Mapping[str, object]

    @classmethod
    def of(cls, document: object) -> _Document:
        """Check a document.

        Raises:
            FormatError: it is not what it must be.
        """
        table = as_tree(document, WHERE)
        if table.get("version") != VERSION:
            raise FormatError(
                f"{WHERE}: version must be {VERSION}, got {table.get('version')!r:.40}"
            )
        groups = table.get("groups")
        marks = {} if groups is None else as_tree(groups, f"{WHERE}: groups")
        modules = _decoded(table, "modules")
        vocab_size = table.get("vocab_size")
        if not (vocab_size is None or (type(vocab_size) is int and vocab_size > 0)):
            raise FormatError(f"{WHERE}: vocab_size must be a size, got {vocab_size!r:.40}")
        return cls(
            iteration_name=entry(table, "iteration_name", str, WHERE),
            layouts=_texts(table, "layouts"),
            vocab_size=vocab_size,
            stages=_stages(table),
            rules=rules_of_table(as_tree(table.get("rules"), WHERE), where=f"{WHERE}: rules"),
            params=_params(table),
            entries=_texts(table, "entries"),
            modules=None if modules is None else as_tree(modules, f"{WHERE}: modules"),
            tree=as_tree(_decoded(table, "tree"), f"{WHERE}: tree"),
            listing=None if groups is None else _listing(marks),
            by_key=marks.get("by_key") is True,
            marked_by_key=marks.get("marked_by_key") is True,
            buffer_keys=as_tree(_decoded(table, "buffer_keys"), f"{WHERE}: buffer_keys"),
            slots=_texts(table, "slots"),
            optimizer_location=entry(table, "optimizer_location", str, WHERE),
            extra_states=as_tree(_decoded(table, "extra_states"), f"{WHERE}: extra_states"),
        )


def _decoded(table: Mapping[str, object], key: str) -> object:
    return decode(table.get(key), where=f"{WHERE}: {key}")


def _texts(table: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = entry(table, key, list, WHERE)
    if not all(isinstance(text, str) for text in value):
        raise FormatError(f"{WHERE}: {key} must be texts, got {value!r:.60}")
    return tuple(value)


def _stages(table: Mapping[str, object]) -> Pipeline:
    """Return how many layers the chunks of the Megatron run had."""
    value = entry(table, "stages", list, WHERE)
    if not all(isinstance(s, list) and all(type(n) is int for n in s) for s in value) or not value:
        raise FormatError(f"{WHERE}: stages must be lists of layers, got {value!r:.60}")
    try:
        return Pipeline(tuple(map(tuple, value)))
    except LayoutError as error:
        raise FormatError(f"{WHERE}: stages: {error}") from error


def _params(table: Mapping[str, object]) -> dict[str, tuple[str, bool]]:
    """Return where each weight lay, and whether it required a gradient."""
    params: dict[str, tuple[str, bool]] = {}
    for name, value in as_tree(table.get("params"), f"{WHERE}: params").items():
        match value:
            case [str(location), bool(grad)]:
                params[name] = location, grad
            case _:
                raise FormatError(f"{WHERE}: params: {name}: must be a place and a flag")
    return params


def _listing(groups: Mapping[str, object]) -> tuple[Settings, ...]:
    value = _decoded(groups, "listing")
    if not isinstance(value, list):
        raise FormatError(f"{WHERE}: groups: listing must be a list, got {value!r:.60}")
    return tuple(as_tree(group, f"{WHERE}: groups") for group in value)


def _run(
    carried: _Document, layout: ShardedLayout, settings: Mapping[str, object]
) -> tuple[Run, Pipeline]:
    """Return the run on the layout's topology, and how its layers lie on stages."""
    run = replace(read_run(settings, WHERE), vocab_size=carried.vocab_size)
    topology = layout.topology
    dp, rest = divmod(topology.dp * run.instances, run.cp)
    run = run.with_topology(
        tp=topology.tp, pp=topology.pp, vpp=topology.vpp, dp=run.dp if rest else dp
    )
    pipeline = layout.stages()
    if pipeline is None:
        raise UsageError("--to megatron: the stage of every parameter must be known, got none")
    if run.custom_split and pipeline == carried.stages:
        return run, pipeline
    split = layout.facts.pipeline
    try:
        formula = split_layers(run.num_layers, run.pp, run.vpp, split)
    except LayoutError as error:
        raise UsageError(f"--to megatron: {error}") from error
    if formula != pipeline:
        raise UsageError(
            f"--to megatron: layers must be split as {formula.counts} by Megatron's formula, got "
            f"{pipeline.counts}"
        )
    return replace(run, split=split, custom_split=False), pipeline


def _chunks(
    carried: _Document, layout: ShardedLayout, run: Run
) -> dict[ChunkId, tuple[ParamInfo, ...]]:
    """Return the parameters of each model chunk, which must be those of the Megatron run."""
    infos: dict[int, ParamInfo] = {}
    for i, param in enumerate(layout.params):
        rule = carried.rules.find(param.name, run.facts)
        place = carried.params.get(param.name) or carried.params.get(param.canonical)
        if place is None or (param.name not in carried.entries and param.name != OUTPUT_WEIGHT):
            raise UsageError(
                f"--to megatron: {param.name}: must be a parameter of the Megatron run that the "
                f"checkpoint came from, got none"
            )
        if rule.split != param.split or rule.tied_to != param.tied_to:
            raise UsageError(f"--to megatron: {param.name}: must be cut as Megatron cuts it")
        infos[i] = ParamInfo(
            param.name, rule, param.shape, param.dtype, param.vocab_rows, place[0], place[1]
        )
    lost = set(carried.params) - {param.name for param in layout.params}
    if lost:
        raise UsageError(f"--to megatron: must have every parameter, got none of {min(lost)}")
    # Whoever trained since may list its parameters otherwise; Megatron goes by its own order.
    place_of = {name: at for at, name in enumerate(carried.entries)}
    return {
        key: tuple(
            sorted(
                (infos[i] for i in indices), key=lambda info: place_of.get(info.name, len(place_of))
            )
        )
        for key, indices in layout.chunks.items()
    }


def _groups(
    carried: _Document,
    run: Run,
    chunks: Mapping[ChunkId, Sequence[ParamInfo]],
    objects: Mapping[str, object],
) -> Groups | None:
    """Return the carried groups with the step and the settings of the checkpoint."""
    if carried.listing is None:
        return None
    step = _step(objects.get("step"))
    old = Groups(carried.listing, carried.by_key, carried.marked_by_key, None, False)
    old = replace(old, decay_qk_layernorm=run.decay_qk_layernorm)
    params = [i.group_param for chunk in chunks.values() for i in chunk if not i.rule.tied_to]
    newer = objects.get("param_groups")
    listing = [
        _newer_settings(settings, group, newer if isinstance(newer, tuple) else (), i)
        for i, (settings, group) in enumerate(
            zip(carried.listing, old.by_name(params), strict=True)
        )
    ]
    return replace(
        old, listing=tuple(_with_step(settings, step) for settings in listing), step=step
    )


def _newer_settings(
    settings: Settings, group: ParamGroup, newer: Sequence[object], index: int
) -> Settings:
    """Return a group's carried settings with those of the checkpoint's group in their place.

    The groups are matched by their members; where no rule tells those, by position.
    """
    known = [g for g in newer if isinstance(g, ParamGroup)]
    if group.members is None:
        found = known[index : index + 1]
    else:
        mine = set(group.members)
        found = [g for g in known if g.members is not None and mine & set(g.members)]
        if len(found) > 1 and any(dict(g.settings) != dict(found[0].settings) for g in found):
            raise UsageError(
                f"--to megatron: {min(mine)} and the others of its parameter group must have the "
                f"same settings, got {len(found)} groups of them"
            )
    if not found:
        return settings
    theirs = found[0].settings
    return {key: _as(theirs.get(key, value), value) for key, value in settings.items()}


def _as(value: object, like: object) -> object:
    """Return a value as the type that was there: JSON and other optimizers have no tuples."""
    return tuple(value) if isinstance(like, tuple) and isinstance(value, list) else value


def _step(value: object) -> int | float | None:
    """Return the one step of all parameters."""
    steps = set(value.values()) if isinstance(value, Mapping) else {value}
    if len(steps) > 1:
        raise UsageError(
            f"--to megatron: step must be the same for all parameters, got {len(steps)} steps"
        )
    step = next(iter(steps), None)
    if step is None or (isinstance(step, (int, float)) and not isinstance(step, bool)):
        return step
    raise FormatError(f"step: must be a number, got {step!r:.60}")


def _with_step(settings: Settings, step: int | float | None) -> Settings:
    """Return a group with the step, in the type that it had."""
    if step is None or "step" not in settings:
        return settings
    old = settings["step"]
    return {**settings, "step": type(old)(step) if isinstance(old, (int, float)) else step}


def _iteration_name(carried: _Document, objects: Mapping[str, object]) -> str:
    """Return the name of the iteration's directory."""
    number = objects.get("iteration")
    if number is None or number == carried.tree.get("iteration"):
        return carried.iteration_name
    if type(number) is not int or number < 0:
        raise FormatError(f"iteration: must be a natural number, got {number!r:.60}")
    return f"iter_{number:07d}"


def _tree(tree: Mapping[str, object], objects: Mapping[str, object]) -> dict[str, object]:
    """Return a rank file's dict with the newer entries of the checkpoint."""
    newer = {
        key: objects[key]
        for key in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")
        if objects.get(key) is not None and key in tree
    }
    result = {**tree, **newer}
    scaler = objects.get("grad_scaler")
    if scaler is not None and carry.OPTIMIZER in tree:
        result[carry.OPTIMIZER] = _with_scaler(tree[carry.OPTIMIZER], scaler)
    return result


def _with_scaler(optimizer: object, scaler: object) -> object:
    """Return the optimizer's entry with another state of the gradient scaler."""
    if isinstance(optimizer, list):
        return [_with_scaler(one, scaler) for one in optimizer]
    if isinstance(optimizer, Mapping) and "grad_scaler" in optimizer:
        return {key: scaler if key == "grad_scaler" else v for key, v in optimizer.items()}
    return optimizer


def _with_groups(state: MegatronState, p: int) -> Mapping[str, object]:
    """Return the dict of a stage's files: one may list other groups than another."""
    tree = state.trees[0, p]
    if carry.OPTIMIZER not in tree:
        return tree
    chunks = [state.chunks[p, v] for v in range(state.run.vpp)]
    entry = carry.optimizer(tree[carry.OPTIMIZER], state, state.run, chunks, same_chunks=False)
    return {**tree, carry.OPTIMIZER: entry}


def _buffers(layout: ShardedLayout, run: Run) -> dict[BufferId, tuple[Cuts, BufferLayout]]:
    """Return the cuts and the geometry of every buffer."""
    return {
        (t, p, v, kind): (layout.cuts.get((t, p, v, kind), Cuts()), buffer)
        for p, v in layout.chunks
        for t in range(run.tp)
        for kind, buffer in layout.buffers(t, p, v).items()
    }
