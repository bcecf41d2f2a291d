"""How do the files of all ranks join to one Manifest? Names, shapes, numbers, chunks.

1. Every rank's file is Lightning's dict; local layer numbers become global ones.
2. The rules of the model's family say how tensor ranks cut a parameter, so shapes over all ranks
   follow; every rank must agree. A single file needs no rules.
3. The optimizer's tensors are numbered; each numbering that fits is a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, LayoutError, RuleError, UsageError
from ckpttools.formats import Candidate, ParamGroup, Reading, ReadOptions
from ckpttools.formats.nemo.grouping import DEFAULT_RULE, RULES, Member
from ckpttools.formats.nemo.legacy_files import RankFiles, RankId, find_ranks
from ckpttools.formats.nemo.legacy_ranks import RankState, read_rank
from ckpttools.formats.nemo.model import ChunkKey, Weight, build_layout
from ckpttools.formats.nemo.names import split_layer
from ckpttools.formats.nemo.numbering import Numbering, RankMembers, find_numberings
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER
from ckpttools.formats.nemo.places import ManifestBuilder, logical_shapes
from ckpttools.formats.nemo.settings import setting, whole_number
from ckpttools.formats.nemo.state import NemoState, describe, notes_of, portable
from ckpttools.layout.pipeline import Pipeline
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import WEIGHT, Manifest, TensorSpec
from ckpttools.storage.torchzip import TensorRef

_SAME = ("epoch", "global_step", "lr_schedulers")
_SLOTS = ("fp32_param", "exp_avg", "exp_avg_sq")


def read_legacy(path: Path, options: ReadOptions) -> Reading:
    """Read the files of all ranks.

    Raises:
        FormatError: a file is missing, damaged or contradicts the others.
        UnsupportedError: the optimizer isn't Apex's in format 2.
    """
    if options.layout not in (None, *RULES):
        raise UsageError(f"--layout: must be one of {', '.join(RULES)}, got {options.layout!r}")
    files = find_ranks(path)
    ranks = {rank: read_rank(files, file) for rank, file in files.files.items()}
    notes = _check_ranks(files, ranks)
    joined = _Joined(files, ranks, options)
    notes += joined.notes
    first = ranks[0, 0]
    optimizer = first.optimizer
    if optimizer is None or not optimizer.tensors:
        if optimizer is not None and "optimizer" not in options.accept_loss:
            raise FormatError(
                f"{first.where}: {OPTIMIZER} must hold tensors, got its settings alone",
                hint="give --accept-loss optimizer to go on with the weights alone",
            )
        manifest = joined.manifest(None)
        return Reading(
            (Candidate((DEFAULT_RULE,), manifest),),
            notes=(*notes, "weights only: the checkpoint has no optimizer state"),
        )
    numberings, refused = find_numberings(
        joined.members(), rule=options.layout, names_path=options.names_path
    )
    candidates = tuple(Candidate(n.rules, joined.manifest(n)) for n in numberings)
    state = joined.state(None)
    return Reading(candidates, tuple(refused), (*notes, *notes_of(state, optimizer, options)))


def _check_ranks(files: RankFiles, ranks: Mapping[RankId, RankState]) -> list[str]:
    """Check that what must be common to all files is; return remarks on the rest."""
    notes: list[str] = []
    first = ranks[0, 0]
    config = setting(first.rest, "hyper_parameters", "cfg")
    told = 0
    for name, size in (("tensor", files.tp), ("pipeline", files.pp)):
        stated = whole_number(config, f"{name}_model_parallel_size")
        told += stated is not None
        if stated not in (None, size):
            raise FormatError(
                f"{first.where}: must be of {name}_model_parallel_size {stated} as its "
                f"configuration says, got the files of {size}"
            )
    if told < 2 and len(ranks) > 1:
        notes.append(f"TP {files.tp} x PP {files.pp} follows from the directories alone")
    mine, _ = portable(first.rest)
    for rank in ranks.values():
        if len(rank.models) != len(first.models) or (rank.optimizer is None) != (
            first.optimizer is None
        ):
            raise FormatError(
                f"{rank.where}: must have as many model chunks and optimizers as {first.where}"
            )
        if rank.optimizer and first.optimizer and rank.optimizer.step != first.optimizer.step:
            raise FormatError(
                f"{rank.where}: step must be that of {first.where}, {first.optimizer.step}, got "
                f"{rank.optimizer.step}"
            )
        theirs, _ = portable(rank.rest)
        for key in sorted((mine.keys() | theirs.keys()) - {OPTIMIZER}):
            if mine.get(key) == theirs.get(key):
                continue
            if key in _SAME:
                raise FormatError(f"{rank.where}: {key} must be that of {first.where}, got another")
            notes.append(
                f"{key} differs between the files of ranks; that of rank (0, 0) is carried"
            )
    return list(dict.fromkeys(notes))


class _Joined:
    """The model over all ranks."""

    def __init__(
        self, files: RankFiles, ranks: Mapping[RankId, RankState], options: ReadOptions
    ) -> None:
        self.files, self.ranks, self.options = files, ranks, options
        self.vpp = len(ranks[0, 0].models)
        counts = [[ranks[0, p].layers(v) for v in range(self.vpp)] for p in range(files.pp)]
        self.pipeline = Pipeline(tuple(tuple(stage) for stage in counts))
        self.notes: list[str] = []
        self.layout, self.known = self._layout()
        self.index = {param.name: i for i, param in enumerate(self.layout.params)}
        self.extra = self._extra_states()

    def names(self, p: int, v: int, local: Sequence[str]) -> list[str]:
        """Return the global names of a model chunk's entries."""
        first = self.pipeline.first_layer(p, v)
        found = []
        for name in local:
            layer = split_layer(name)
            found.append(name if layer is None else f"{layer[0]}.{layer[1] + first}.{layer[2]}")
        return found

    def chunk(self, t: int, p: int, v: int) -> dict[str, TensorRef]:
        """Return the weights of a rank's model chunk by global name."""
        model = self.ranks[t, p].models[v]
        return dict(zip(self.names(p, v, list(model)), model.values(), strict=True))

    def _layout(self) -> tuple[ShardedLayout, bool]:
        """Return the layout, and whether it may be told of: a single file may have none."""
        chunks: dict[ChunkKey, list[Weight]] = {}
        for p, v in self.pipeline.in_layer_order():
            mine = [self._weights(t, p, v) for t in range(self.files.tp)]
            for t, weights in enumerate(mine):
                if weights != mine[0]:
                    odd = next((a for a, b in zip(weights, mine[0], strict=False) if a != b), None)
                    raise FormatError(
                        f"{self.ranks[t, p].where}: every tensor rank must have the same names, "
                        f"shapes and dtypes, got {odd or 'another number of them'}"
                    )
            chunks[p, v] = mine[0]
        first = self.ranks[0, 0]
        slots = self._slots()
        try:
            layout = build_layout(
                chunks,
                tp=self.files.tp,
                pp=self.files.pp,
                vpp=self.vpp,
                config=setting(first.rest, "hyper_parameters", "cfg"),
                options=self.options,
                slots=slots,
            )
        except RuleError as error:
            if len(self.ranks) > 1 or self.options.rules_path or self.options.vocab_size:
                raise
            self.notes.append(f"tensors can't be cut, only taken whole: {error}")
            params = tuple(ShardedParam(w.name, w.shape, w.dtype) for w in chunks[0, 0])
            kinds: dict[str, dict[str, str]] = {p.dtype: {WEIGHT: p.dtype} for p in params}
            places = {(0, 0): tuple(range(len(params)))}
            return ShardedLayout("zero1", Topology(), params, places, kinds), False
        return layout, True

    def _weights(self, t: int, p: int, v: int) -> list[Weight]:
        return [Weight(n, ref.shape, ref.dtype.name) for n, ref in self.chunk(t, p, v).items()]

    def _slots(self) -> dict[str, str]:
        """Return the optimizer's slots with their dtypes, which all parameters have alike."""
        found: dict[str, str] | None = None
        for rank in self.ranks.values():
            for number, tensors in (rank.optimizer.tensors if rank.optimizer else {}).items():
                mine = {slot: ref.dtype.name for slot, ref in tensors.items()}
                if found is not None and mine != found:
                    raise FormatError(
                        f"{rank.where}: parameter {number} must have the tensors of the first, "
                        f"{', '.join(found)}, got {', '.join(mine)}"
                    )
                found = mine
        ordered = [s for s in (*_SLOTS, *(found or {})) if s in (found or {})]
        return {slot: (found or {})[slot] for slot in dict.fromkeys(ordered)}

    def members(self) -> dict[RankId, RankMembers]:
        """Return each rank's optimizer with its parameters in module order."""
        found: dict[RankId, RankMembers] = {}
        for (t, p), rank in self.ranks.items():
            members = tuple(
                Member(name, ref.shape)
                for v in range(self.vpp)
                for name, ref in self.chunk(t, p, v).items()
            )
            if rank.optimizer is not None:
                found[t, p] = RankMembers(rank.where, rank.optimizer, members)
        return found

    def manifest(self, numbering: Numbering | None) -> Manifest:
        """Return the Manifest under one numbering; without one, of the weights alone."""
        builder = ManifestBuilder(self.files.root)
        slots = self._slots() if numbering is not None else {}
        kinds = {
            n: r.dtype for p, v in self.pipeline.chunks() for n, r in self.chunk(0, p, v).items()
        }
        for param in self.layout.params:
            if param.tied_to:
                continue
            shape, padding = logical_shapes(self.layout, param.name, param.shape)
            for slot, kind in {WEIGHT: kinds[param.name].name, **slots}.items():
                spec = TensorSpec(param.name, slot, dtype(kind), shape, padding)
                builder.add_tensor(spec)
        for rank in sorted(self.ranks, key=lambda rank: (rank[1], rank[0])):
            self._add_rank(builder, rank, numbering)
        optimizer = self.ranks[0, 0].optimizer if numbering is not None else None
        groups = self._groups(numbering)
        layout = self.layout if self.known else None
        state = self.state(numbering)
        if optimizer is not None and numbering is not None:
            optimizer = replace(optimizer, groups=tuple(numbering.settings.values()))
        objects = describe(state, optimizer, layout, groups, self.options)
        try:
            return builder.build("nemo-legacy", str(self.files.root), objects)
        except LayoutError as error:
            raise FormatError(f"{self.files.root}: {error}") from error

    def _groups(self, numbering: Numbering | None) -> list[ParamGroup]:
        if numbering is None:
            return []
        tied = {param.name for param in self.layout.params if param.tied_to}
        return [
            ParamGroup(group, tuple(n for n in numbering.members[role] if n not in tied))
            for role, group in numbering.settings.items()
        ]

    def _add_rank(
        self, builder: ManifestBuilder, rank: RankId, numbering: Numbering | None
    ) -> None:
        """Add the chunks of one rank's file."""
        t, p = rank
        state = self.ranks[rank]
        file = builder.file(state.path)
        weights = {n: r for v in range(self.vpp) for n, r in self.chunk(t, p, v).items()}
        found = [(name, WEIGHT, ref) for name, ref in weights.items()]
        if numbering is not None and state.optimizer is not None:
            for number, name in numbering.names[rank].items():
                tensors = state.optimizer.tensors[number]
                found += [(name, slot, ref) for slot, ref in tensors.items()]
        for name, slot, ref in found:
            index = self.index[name]
            param = self.layout.params[index]
            start, _ = state.file.payload(ref.storage)
            for local, whole in param.boxes(self.files.tp, t):
                shift = sum(o * s for o, s in zip(local.offsets, ref.strides, strict=True))
                builder.add_chunk(
                    (param.canonical, slot),
                    whole,
                    file,
                    start + (ref.offset + shift) * ref.dtype.itemsize,
                    ref.strides,
                    replica=self.layout.replica_of(index, t),
                )

    def state(self, numbering: Numbering | None) -> NemoState:
        """Return what a writer needs beside the tensors."""
        first = self.ranks[0, 0]
        tree = dict(first.rest)
        grouping = DEFAULT_RULE
        if numbering is not None and first.optimizer is not None:
            grouping = next((rule for rule in numbering.rules if rule in RULES), DEFAULT_RULE)
            groups = tuple(numbering.settings.values())
            tree[OPTIMIZER] = replace(first.optimizer, groups=groups).template()
        return NemoState(
            tree=tree,
            prefix=first.prefix if self.vpp == 1 else "model.",
            grouping=grouping,
            extra=self.extra,
            file_name=self.files.name,
        )

    def _extra_states(self) -> dict[str, object]:
        """Return the extra states of modules, which must be the same on every tensor rank."""
        found: dict[str, object] = {}
        for (t, p), rank in self.ranks.items():
            for v, extra in enumerate(rank.extra):
                names = self.names(p, v, list(extra))
                for name, value in zip(names, extra.values(), strict=True):
                    if t == 0:
                        found[name] = value
                    elif portable({name: value}) != portable({name: found.get(name)}):
                        if "extra_state" not in self.options.accept_loss:
                            raise FormatError(
                                f"{rank.where}: {name}: must be the same on every tensor rank, "
                                f"got another",
                                hint="give --accept-loss extra_state to leave it out",
                            )
                        found[name] = None
        return found
