"""Which files will hold a Megatron run on another topology, byte for byte?

1. The run's arguments are taken to the target; Megatron's own limits on it are checked.
2. The model's entries are dealt to stages and get local layer numbers; a tied output layer comes
   or goes with pipeline parallelism; vocabulary rows are padded by the target's rule.
3. Every rank's buffers are laid out by the source's variant; ``model`` becomes views of one
   storage per buffer, ``distrib_optim.pt`` flat tensors, both pickled around payloads that come
   later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats import Draft, Finish, Patch, Target, Written
from ckpttools.formats.megatron import carry
from ckpttools.formats.megatron.arguments import Run, rewrite
from ckpttools.formats.megatron.chunks import (
    ManifestBuilder,
    Place,
    buffer_param,
    describe,
    local_shape_of,
    rank_boxes,
)
from ckpttools.formats.megatron.directory import MODEL_FILE, OPTIMIZER_FILE, TRACKER, rank_name
from ckpttools.formats.megatron.names import to_local
from ckpttools.formats.megatron.state import Buffers, MegatronState, ParamInfo
from ckpttools.layout.box import row_major_strides
from ckpttools.layout.megatron import BufferLayout, Cuts, buffer_layout
from ckpttools.manifest import MASTER, WEIGHT, Extent, Manifest
from ckpttools.storage.torchzip import StorageRef, TensorRef
from ckpttools.storage.torchzip_writer import TorchDraft, lay_out_torch_file, seal

OUTPUT_WEIGHT = "output_layer.weight"
OUTPUT_EXTRA_STATE = "output_layer._extra_state"


def lay_out_checkpoint(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the files of ``source`` on ``target``.

    Raises:
        UsageError: the target contradicts the model, or the source lacks what Megatron needs.
    """
    state = source.objects.get("megatron")
    if not isinstance(state, MegatronState):
        raise UsageError(
            f"--to megatron: needs a source with Megatron's arguments, got format {source.format}"
        )
    writer = _Writer(source, state, _target_run(state, target), target)
    return writer.draft(root)


def _target_run(state: MegatronState, target: Target) -> Run:
    """Return the run on the target topology.

    Raises:
        UsageError: Megatron has no such topology, or the sizes contradict each other.
    """
    run = state.run
    tp = run.tp if target.tp is None else target.tp
    pp = run.pp if target.pp is None else target.pp
    dp = run.dp if target.dp is None else target.dp
    if target.world is not None:
        dp, rest = divmod(target.world, tp * pp * run.cp)
        if rest or not dp or target.dp not in (None, dp):
            raise UsageError(
                f"--world: must be TP {tp} x PP {pp} x CP {run.cp} x DP, got {target.world}"
            )
    return run.with_topology(tp=tp, pp=pp, dp=dp)


@dataclass(frozen=True, slots=True)
class _File:
    """A torch file of the draft, with the byte offsets of its open storages."""

    index: int
    draft: TorchDraft

    def offset(self, storage: StorageRef) -> int:
        return next(
            (offset for ref, offset, _ in self.draft.storages if ref is storage),
            self.draft.size,  # an empty storage has no payload; no chunk of it has a byte
        )


class _Writer:
    """One lay-out; the steps of the module docstring."""

    def __init__(self, source: Manifest, state: MegatronState, run: Run, target: Target) -> None:
        self.source, self.state, self.run = source, state, run
        self.same_model_parallel = (run.tp, run.pp) == (state.run.tp, state.run.pp)
        self.notes: list[str] = []
        self.entries = _target_entries(state, run)
        self.stages = self._deal()
        self.buffers = self._lay_out_buffers(target)
        self.padded = next(
            (info.shape[0] for stage in self.stages for info in stage if info.rule.vocabulary),
            None,
        )

    def draft(self, root: str) -> Draft:
        """Build every file and the Manifest of them."""
        builder = ManifestBuilder()
        patches: list[Patch] = []
        files: list[_File] = []
        for p in range(self.run.pp):
            for t in range(self.run.tp):
                files += self._rank(builder, t, p)
        for file in files:
            patches += [Patch(file.index, offset, data) for offset, data in file.draft.pieces]
        name = self.state.iteration_name
        number = "release" if name == "release" else str(int(name[5:]))
        tracker = builder.add_file(TRACKER, len(number))
        patches.append(Patch(tracker, 0, number.encode()))
        manifest = Manifest(
            format=self.source.format,
            root=root,
            files=tuple(builder.files),
            tensors=tuple(builder.tensors),
            chunks=tuple(builder.chunks),
            objects=describe(self._target_state()),
        )
        carried, lost = carry.report(self.state, self.run)
        return Draft(
            manifest=manifest,
            patches=tuple(patches),
            seals=tuple(
                Extent(file.index, offset, length)
                for file in files
                for _, offset, length in file.draft.storages
            ),
            finish=_finisher(files),
            carried=carried,
            lost=lost,
            notes=tuple(self.notes),
        )

    def _deal(self) -> tuple[tuple[ParamInfo, ...], ...]:
        """Return the parameters of each stage, with the target's shapes, in module order."""
        infos = {info.name: info for info in self.state.params}
        stages: list[tuple[ParamInfo, ...]] = []
        layers = self.run.num_layers // self.run.pp
        for p in range(self.run.pp):
            names = [
                name
                for name in self.entries
                if to_local(name, stage=p, stages=self.run.pp, layers=layers) is not None
                and (name in infos or name == OUTPUT_WEIGHT)
            ]
            stages.append(tuple(self._resize(self._info(infos, name)) for name in names))
        return tuple(stages)

    def _info(self, infos: Mapping[str, ParamInfo], name: str) -> ParamInfo:
        """Return a parameter; a tied output layer that the source lacks follows its embedding."""
        if name in infos:
            return infos[name]
        rule = self.state.rules.find(name, self.run.facts)
        return replace(infos[rule.tied_to], name=name, rule=rule)

    def _resize(self, info: ParamInfo) -> ParamInfo:
        """Pad a vocabulary by the target's rule, and check that the target can cut the shape."""
        if info.rule.vocabulary:
            rows = info.shape[0]
            if info.vocab_rows is not None:
                rows = self.run.padded_rows(info.vocab_rows, self.run.tp)
            elif rows % self.run.tp:
                raise UsageError(
                    f"{info.name}: its {rows} rows must divide over TP, got {self.run.tp}",
                    hint="give the true number of rows with --vocab-size",
                )
            info = replace(info, shape=(rows, *info.shape[1:]))
        try:
            rank_boxes(info, 0, self.run.tp)
        except LayoutError as error:
            raise UsageError(f"--tp {self.run.tp}: {info.name}: {error}") from error
        return info

    def _lay_out_buffers(self, target: Target) -> Buffers:
        """Lay out every buffer under the source's variants, which must agree here too."""
        names = self.state.layouts
        groups = self.state.groups
        if "core-0.13" in names and groups is not None and groups.marked_by_key:
            names = ("core-0.13",)  # only writers of core 0.14 and later mark their groups
        laid: dict[str, Buffers] = {}
        refused: dict[str, str] = {}
        for name in names:
            try:
                laid[name] = self._buffers_of(name, target)
            except LayoutError as error:
                refused[name] = str(error)
        first = next(iter(laid.values()), None)
        if first is None:
            raise UsageError(f"layout {names[0]}: {refused[names[0]]}")
        if refused or any(other != first for other in laid.values()):
            raise UsageError(
                f"layout: must follow from the source, got a source that fits "
                f"{' and '.join(names)}, which differ on this target",
                hint="name the layout of the Megatron version with --layout NAME",
            )
        return first

    def _buffers_of(self, variant: str, target: Target) -> Buffers:
        buffers: dict[tuple[int, int, str], tuple[Cuts, BufferLayout]] = {}
        for p, stage in enumerate(self.stages):
            for kind in dict.fromkeys(info.dtype for info in stage):
                params = [buffer_param(info, self.run) for info in stage if info.dtype == kind]
                for t in range(self.run.tp):
                    cuts = self._cuts(target, t, p, kind)
                    layout = buffer_layout(
                        params,
                        dp=self.run.buffer_ranks,
                        cuts=cuts,
                        variant=variant,
                        busbw=self.run.busbw,
                    )
                    buffers[t, p, kind] = cuts, layout
        return buffers

    def _cuts(self, target: Target, t: int, p: int, kind: str) -> Cuts:
        """Return where buckets close: as named, else as in the source, else nowhere.

        Megatron has buckets on the first stage only.
        """
        if target.bucket_size == "none":
            return Cuts()
        if target.bucket_size is not None:
            return Cuts(target.bucket_size if p == 0 else None)
        if self.same_model_parallel:
            return self.state.buffers[t, p, kind][0]
        return Cuts()

    def _rank(self, builder: ManifestBuilder, t: int, p: int) -> list[_File]:
        """Lay out the files of one rank and add their chunks."""
        directory = f"{self.state.iteration_name}/{rank_name(t, p, self.run.pp)}"
        storages = {
            kind: StorageRef(dtype(kind), layout.numel, location=self._location(p, kind))
            for (rank_t, rank_p, kind), (_, layout) in self.buffers.items()
            if (rank_t, rank_p) == (t, p)
        }
        tree = self._model_tree(storages, t, p)
        file = self._file(builder, f"{directory}/{MODEL_FILE}", tree)
        for info in self.stages[p]:
            tensor = self._weight(info, storages, t, p)
            offset = file.offset(tensor.storage) + tensor.offset * tensor.dtype.itemsize
            place = Place(file.index, offset, tensor.dtype, tensor.strides)
            builder.add(info, WEIGHT, place, tp=t, tp_size=self.run.tp)
        if not self.state.buffer_keys:
            return [file]
        return [file, self._optimizer(builder, directory, t, p)]

    def _optimizer(self, builder: ManifestBuilder, directory: str, t: int, p: int) -> _File:
        """Lay out ``distrib_optim.pt`` of one rank."""
        tree: dict[object, object] = {"buckets_coalesced": True}
        flats: list[tuple[str, str, StorageRef]] = []
        kinds = list(dict.fromkeys(info.dtype for info in self.stages[p]))
        for i, kind in enumerate(kinds):
            _, layout = self.buffers[t, p, kind]
            inner: dict[str, object] = {}
            for slot in self.state.slots:
                spec = self._slot_dtype(slot)
                storage = StorageRef(
                    dtype(spec), layout.numel_unpadded, location=self.state.optimizer_location
                )
                key = "param" if slot == MASTER else slot
                inner[key] = TensorRef(storage, 0, (layout.numel_unpadded,), (1,))
                flats.append((kind, slot, storage))
            inner["numel_unpadded"] = layout.numel_unpadded
            tree[i] = {self.state.buffer_keys[kind]: inner}
        file = self._file(builder, f"{directory}/{OPTIMIZER_FILE}", tree)
        infos = {info.name: info for info in self.stages[p]}
        for kind, slot, storage in flats:
            _, layout = self.buffers[t, p, kind]
            for param, start in zip(layout.params, layout.file_starts, strict=True):
                info = infos[param.name]
                strides = row_major_strides(local_shape_of(info, self.run.tp))
                offset = file.offset(storage) + start * storage.dtype.itemsize
                place = Place(file.index, offset, storage.dtype, strides)
                builder.add(info, slot, place, tp=t, tp_size=self.run.tp)
        return file

    def _slot_dtype(self, slot: str) -> str:
        return next(spec.dtype.name for spec in self.source.tensors if spec.slot == slot)

    def _location(self, p: int, kind: str) -> str:
        return next(info.location for info in self.stages[p] if info.dtype == kind)

    def _file(self, builder: ManifestBuilder, path: str, tree: object) -> _File:
        """Pickle a tree and add its file."""
        prefix = path.rsplit("/", 1)[-1].removesuffix(".pt")
        draft = lay_out_torch_file(prefix, tree)
        return _File(builder.add_file(path, draft.size), draft)

    def _weight(
        self, info: ParamInfo, storages: Mapping[str, StorageRef], t: int, p: int
    ) -> TensorRef:
        """Return a rank's weight as a view of its buffer."""
        _, layout = self.buffers[t, p, info.dtype]
        index = [param.name for param in layout.params].index(info.name)
        shape = local_shape_of(info, self.run.tp)
        return TensorRef(
            storages[info.dtype],
            layout.starts[index],
            shape,
            row_major_strides(shape),
            requires_grad=info.requires_grad,
        )

    def _model_tree(self, storages: Mapping[str, StorageRef], t: int, p: int) -> object:
        """Return the top-level dict of ``model_optim_rng.pt``."""
        layers = self.run.num_layers // self.run.pp
        infos = {info.name: info for info in self.stages[p]}
        model: OrderedDict[str, object] = OrderedDict()
        for name in self.entries:
            local = to_local(name, stage=p, stages=self.run.pp, layers=layers)
            if local is not None:
                info = infos.get(name)
                model[local] = self._weight(info, storages, t, p) if info else None
        if self.state.modules is not None:
            metadata: OrderedDict[str, object] = OrderedDict()
            for name, value in self.state.modules.items():
                local = to_local(name, stage=p, stages=self.run.pp, layers=layers)
                if local is not None:
                    metadata[local] = value
            vars(model)["_metadata"] = metadata
        rank = (t, p) if self.same_model_parallel else (0, 0)
        tree: dict[str, object] = {}
        for key, value in self.state.trees[rank].items():
            if key == "args":
                args = self.state.args[rank]
                tree[key] = rewrite(args, self.run, tp=t, pp=p, padded_vocab_size=self.padded)
            elif key == "model":
                tree[key] = model
            elif carry.survives(key, value, self.state, self.run):
                tree[key] = carry.rewrite(key, value, self.state, self.stages[p])
        return tree

    def _target_state(self) -> MegatronState:
        """Return the state that a reader of the new files would have."""
        return replace(
            self.state,
            run=self.run,
            stages=self.stages,
            entries=self.entries,
            buffers=self.buffers,
        )


def _target_entries(state: MegatronState, run: Run) -> tuple[str, ...]:
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


def _finisher(files: Sequence[_File]) -> Callable[[Written], Finish]:
    """Return the function that turns the payloads' CRC-32 into the last patches."""

    def finish(written: Written) -> Finish:
        patches: list[Patch] = []
        rest = iter(written.crcs)
        for file in files:
            mine = {offset: next(rest) for _, offset, _ in file.draft.storages}
            patches += [Patch(file.index, at, data) for at, data in seal(file.draft, mine)]
        return Finish(patches)

    return finish
