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
from ckpttools.formats import Carried, Draft, Finish, Patch, Target, Written
from ckpttools.formats.megatron import carry
from ckpttools.formats.megatron.arguments import Run, rewrite
from ckpttools.formats.megatron.chunks import (
    ManifestBuilder,
    Place,
    buffer_param,
    describe,
    local_shape_of,
)
from ckpttools.formats.megatron.directory import MODEL_FILE, OPTIMIZER_FILE, TRACKER, rank_name
from ckpttools.formats.megatron.meaning import check_settings, seen_as_megatron
from ckpttools.formats.megatron.names import param_to_local, to_local
from ckpttools.formats.megatron.restore import restore, stale_arguments
from ckpttools.formats.megatron.state import (
    BufferId,
    Buffers,
    MegatronState,
    ParamInfo,
    optimizer_chunks,
)
from ckpttools.formats.megatron.target import deal, selected, target_entries, target_run
from ckpttools.layout.box import row_major_strides
from ckpttools.layout.megatron import BufferLayout, Cuts, buffer_layout
from ckpttools.layout.pipeline import Pipeline
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import MASTER, WEIGHT, Extent, Manifest
from ckpttools.storage.torchzip import StorageRef, TensorRef
from ckpttools.storage.torchzip_writer import TorchDraft, lay_out_torch_file, seal


def lay_out_checkpoint(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the files of ``source`` on ``target``.

    Raises:
        UsageError: the target contradicts the model, or the source lacks what Megatron needs.
    """
    told = check_settings(source.objects, target)
    state, notes = _state_of(source)
    view = seen_as_megatron(source)
    state = selected(view, state)
    run, pipeline = target_run(state, target)
    if own := len(view.tensors) - len(source.tensors):
        notes = (*notes, f"{MASTER}: {own} float32 weights of the source are their own masters")
    draft = _Writer(view, state, run, pipeline, target).draft(root)
    return replace(draft, notes=(*told, *notes), source=view if view is not source else None)


def _state_of(source: Manifest) -> tuple[MegatronState, tuple[str, ...]]:
    """Return the state of a Megatron run, the source's own or the one that it carries; remarks."""
    state = source.objects.get("megatron")
    if isinstance(state, MegatronState):
        return state, ()
    carried, layout = (source.objects.get(key) for key in ("carried", "sharded_layout"))
    mine = carried.get("megatron") if isinstance(carried, Mapping) else None
    if isinstance(mine, Carried) and isinstance(layout, ShardedLayout):
        document = mine.to_document()
        state = restore(document, layout, source.objects)
        return state, stale_arguments(state, document)
    raise UsageError(
        f"--to megatron: needs a source with Megatron's arguments, got format {source.format}"
        + (", which holds nothing of a Megatron run" if isinstance(layout, ShardedLayout) else "")
    )


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

    def __init__(
        self,
        source: Manifest,
        state: MegatronState,
        run: Run,
        pipeline: Pipeline,
        target: Target,
    ) -> None:
        self.source, self.state, self.run, self.pipeline = source, state, run, pipeline
        self.target = target
        self.same_ranks = (run.tp, run.pp) == (state.run.tp, state.run.pp)
        self.same_chunks = self.same_ranks and pipeline == state.pipeline
        if not self.same_ranks:
            carry.check_common(state)
        self.entries = target_entries(state, run)
        self.chunks = deal(state, run, pipeline, self.entries)
        self.params = {info.name for chunk in self.chunks.values() for info in chunk}
        self.buffers = self._lay_out_buffers(target)
        self.padded = next(
            (
                info.shape[0]
                for chunk in self.chunks.values()
                for info in chunk
                if info.rule.vocabulary
            ),
            None,
        )

    def _bucket_note(self) -> str:
        """Say which buckets the files are for, and why."""
        if self.target.bucket_size is not None:
            return f"buckets: {self.target.bucket_size} as asked"
        if self.same_chunks:
            return f"buckets: cut as in the source (from {self.state.cuts_from})"
        implied = self.state.run.bucket_size
        asked = f"; its arguments imply --bucket-size {implied}" if implied is not None else ""
        return f"buckets: one a buffer, since ranks or stages changed{asked}"

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
            format="megatron",
            root=root,
            files=tuple(builder.files),
            tensors=tuple(builder.tensors),
            chunks=tuple(builder.chunks),
            objects=describe(self._target_state(), builder.tensors),
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
            plan=(self._bucket_note(),),
        )

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
        buffers: dict[BufferId, tuple[Cuts, BufferLayout]] = {}
        for (p, v), chunk in self.chunks.items():
            for kind in dict.fromkeys(info.dtype for info in chunk):
                params = [buffer_param(info, self.run) for info in chunk if info.dtype == kind]
                for t in range(self.run.tp):
                    cuts = self._cuts(target, t, p, v, kind)
                    layout = buffer_layout(
                        params,
                        dp=self.run.buffer_ranks,
                        cuts=cuts,
                        variant=variant,
                        busbw=self.run.busbw,
                    )
                    buffers[t, p, v, kind] = cuts, layout
        return buffers

    def _cuts(self, target: Target, t: int, p: int, v: int, kind: str) -> Cuts:
        """Return where buckets close: as named, else as in the source, else nowhere.

        Megatron has buckets in the first chunk of the first stage only, and nowhere where the
        parameter gather overlaps with the step.
        """
        if target.bucket_size == "none":
            return Cuts()
        if target.bucket_size is not None:
            first = (p, v) == (0, 0) and not self.run.chained
            return Cuts(target.bucket_size if first else None)
        if self.same_chunks:
            return self.state.buffers[t, p, v, kind][0]
        return Cuts()

    def _rank(self, builder: ManifestBuilder, t: int, p: int) -> list[_File]:
        """Lay out the files of one rank and add their chunks."""
        directory = f"{self.state.iteration_name}/{rank_name(t, p, self.run.pp)}"
        storages = {
            (v, kind): StorageRef(dtype(kind), layout.numel, location=self._location(p, v, kind))
            for (rank_t, rank_p, v, kind), (_, layout) in self.buffers.items()
            if (rank_t, rank_p) == (t, p)
        }
        file = self._file(builder, f"{directory}/{MODEL_FILE}", self._model_tree(storages, t, p))
        for v in range(self.run.vpp):
            for info in self.chunks[p, v]:
                tensor = self._weight(info, storages, t, p, v)
                offset = file.offset(tensor.storage) + tensor.offset * tensor.dtype.itemsize
                place = Place(file.index, offset, tensor.dtype, tensor.strides)
                builder.add(info, WEIGHT, place, tp=t, tp_size=self.run.tp)
        if not self.state.buffer_keys:
            return [file]
        return [file, self._optimizer(builder, directory, t, p)]

    def _optimizer(self, builder: ManifestBuilder, directory: str, t: int, p: int) -> _File:
        """Lay out ``distrib_optim.pt`` of one rank."""
        flats: list[tuple[int, str, str, StorageRef]] = []
        trees: list[object] = []
        for owned in optimizer_chunks(self.run):
            tree: dict[object, object] = {"buckets_coalesced": True}
            trees.append(tree)
            for v in owned:
                for kind in dict.fromkeys(info.dtype for info in self.chunks[p, v]):
                    storages = self._flat_storages(t, p, v, kind)
                    flats += [(v, kind, slot, storage) for slot, storage in storages.items()]
                    tree[len(tree) - 1] = {self.state.buffer_keys[kind]: _flat_tree(storages)}
        whole = trees if len(trees) > 1 else trees[0]
        file = self._file(builder, f"{directory}/{OPTIMIZER_FILE}", whole)
        for v, kind, slot, storage in flats:
            infos = {info.name: info for info in self.chunks[p, v]}
            _, layout = self.buffers[t, p, v, kind]
            for param, start in zip(layout.params, layout.file_starts, strict=True):
                info = infos[param.name]
                strides = row_major_strides(local_shape_of(info, self.run.tp))
                offset = file.offset(storage) + start * storage.dtype.itemsize
                place = Place(file.index, offset, storage.dtype, strides)
                builder.add(info, slot, place, tp=t, tp_size=self.run.tp)
        return file

    def _flat_storages(self, t: int, p: int, v: int, kind: str) -> dict[str, StorageRef]:
        """Return a storage for each slot of one buffer."""
        _, layout = self.buffers[t, p, v, kind]
        dtypes = {spec.slot: spec.dtype for spec in self.source.tensors}
        place = self.state.optimizer_location
        return {
            slot: StorageRef(dtypes[slot], layout.numel_unpadded, location=place)
            for slot in self.state.slots
        }

    def _location(self, p: int, v: int, kind: str) -> str:
        return next(info.location for info in self.chunks[p, v] if info.dtype == kind)

    def _file(self, builder: ManifestBuilder, path: str, tree: object) -> _File:
        """Pickle a tree and add its file."""
        prefix = path.rsplit("/", 1)[-1].removesuffix(".pt")
        draft = lay_out_torch_file(prefix, tree)
        return _File(builder.add_file(path, draft.size), draft)

    def _weight(
        self,
        info: ParamInfo,
        storages: Mapping[tuple[int, str], StorageRef],
        t: int,
        p: int,
        v: int,
    ) -> TensorRef:
        """Return a rank's weight as a view of its buffer."""
        _, layout = self.buffers[t, p, v, info.dtype]
        index = [param.name for param in layout.params].index(info.name)
        shape = local_shape_of(info, self.run.tp)
        return TensorRef(
            storages[v, info.dtype],
            layout.starts[index],
            shape,
            row_major_strides(shape),
            requires_grad=info.requires_grad,
        )

    def _model(
        self, storages: Mapping[tuple[int, str], StorageRef], t: int, p: int, v: int
    ) -> OrderedDict[str, object]:
        """Return one model chunk's state dict."""
        infos = {info.name: info for info in self.chunks[p, v]}
        model: OrderedDict[str, object] = OrderedDict()
        for name in self.entries:
            info = infos.get(name)
            if info is not None:
                local = param_to_local(name, info.rule.stage, self.pipeline, p, v)
                model[local or name] = self._weight(info, storages, t, p, v)
            elif name not in self.params:
                local = to_local(name, self.pipeline, p, v)
                if local is not None:
                    model[local] = carry.extra_state(name, self.state, self.run, t)
        if self.state.modules is not None:
            metadata: OrderedDict[str, object] = OrderedDict()
            for name, value in self.state.modules.items():
                local = to_local(name, self.pipeline, p, v)
                if local is not None:
                    metadata[local] = value
            vars(model)["_metadata"] = metadata
        return model

    def _model_tree(
        self, storages: Mapping[tuple[int, str], StorageRef], t: int, p: int
    ) -> dict[str, object]:
        """Return the top-level dict of ``model_optim_rng.pt``."""
        rank = (t, p) if self.same_ranks else (0, 0)
        tree: dict[str, object] = {}
        for key, value in self.state.trees[rank].items():
            if key == "args":
                args = self.state.args[rank]
                tree[key] = rewrite(args, self.run, tp=t, pp=p, padded_vocab_size=self.padded)
            elif key == "model":
                for v in range(self.run.vpp):
                    name = "model" if self.run.vpp == 1 else f"model{v}"
                    tree[name] = self._model(storages, t, p, v)
            elif key == carry.OPTIMIZER and self.state.slots:
                chunks = [self.chunks[p, v] for v in range(self.run.vpp)]
                tree[key] = carry.optimizer(
                    value, self.state, self.run, chunks, same_chunks=self.same_chunks
                )
            elif carry.survives(key, value, self.state, self.run):
                tree[key] = value
        return tree

    def _target_state(self) -> MegatronState:
        """Return the state that a reader of the new files would have."""
        return replace(
            self.state,
            run=self.run,
            version="v2",
            pipeline=self.pipeline,
            chunks=self.chunks,
            entries=self.entries,
            buffers=self.buffers,
        )


def _flat_tree(storages: Mapping[str, StorageRef]) -> dict[str, object]:
    """Return one buffer's dict: a flat tensor for each slot, and their length."""
    tree: dict[str, object] = {}
    numel = 0
    for slot, storage in storages.items():
        numel = storage.numel
        tree["param" if slot == MASTER else slot] = TensorRef(storage, 0, (numel,), (1,))
    return {**tree, "numel_unpadded": numel}


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
