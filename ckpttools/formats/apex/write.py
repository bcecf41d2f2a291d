"""Which files will hold a source for Apex, byte for byte? A directory of three.

::

    optimizer.pt     what ``DistributedFusedAdam.state_dict()`` gives: whole tensors by number
    model.pt         the weights by name, which Apex leaves to the model's own checkpoint
    ckpttools.json   names by number, and what Apex has no place for

Parameters are numbered in the order of the groups' members. Both torch files are laid out around
payloads that come later, with the opcodes and records of torch's own writer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import Carried, Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.apex.directory import MODEL_FILES, OPTIMIZER_FILE
from ckpttools.formats.apex.one_rank import layout_of, padded
from ckpttools.formats.apex.settings import Settings, settings_of
from ckpttools.formats.apex.sidecar import ENTRIES, SIDECAR, sidecar_document
from ckpttools.formats.apex.view import view_of
from ckpttools.formats.apex.whole import SLOTS
from ckpttools.layout.box import Box
from ckpttools.manifest import WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.torchzip import TensorRef, new_tensor
from ckpttools.storage.torchzip_writer import TorchDraft, lay_out_torch_file, seal


def lay_out_checkpoint(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the files of ``source``.

    Raises:
        UsageError: Apex's file can't hold it, or a size was named that whole tensors have not.
    """
    notes = _check_target(target)
    settings = settings_of(source)
    view, more = view_of(source, settings.names, target.masters)
    layout = layout_of(source)
    params = {} if layout is None else {param.name: param for param in layout.params}
    specs = {spec.key: padded(spec, params) for spec in view.tensors}
    weights = [spec for spec in specs.values() if spec.slot == WEIGHT]
    files = [_optimizer(settings, specs)]
    if weights:
        files.append(_model(weights))
    objects, carried, lost = _kept(source, settings)
    sidecar = sidecar_document(
        settings.names,
        {spec.name: spec.padding_rows for spec in specs.values() if spec.padding_rows},
        layout,
        objects,
        documents := _documents(source),
    )
    return Draft(
        manifest=_manifest(files, root),
        patches=tuple(
            Patch(i, offset, data)
            for i, file in enumerate(files)
            for offset, data in file.draft.pieces
        ),
        seals=tuple(
            Extent(i, offset, length)
            for i, file in enumerate(files)
            for _, offset, length in file.draft.storages
        ),
        finish=_finisher(files, sidecar),
        carried=(*carried, *(f"what `--to {name}` needs" for name in documents)),
        lost=(*lost, *settings.lost, *_left_behind(source, documents)),
        plan=("one file of whole tensors by number, the same for every number of ranks",),
        notes=(*notes, *more, *settings.notes, _mode_note(settings)),
        source=None if view is source else view,
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A torch file of the draft with its tensors, in the order in which the pickle has them."""

    path: str
    draft: TorchDraft
    tensors: tuple[tuple[TensorSpec, TensorRef], ...]

    def offset(self, number: int) -> int:
        """Return where the payload of a tensor starts; an empty one has a place too."""
        name = f"data/{number}"
        return next(record.offset for record in self.draft.records if record.name == name)


def _check_target(target: Target) -> tuple[str, ...]:
    """Check that whole tensors are asked for; return remarks."""
    for name, size in (("tp", target.tp), ("pp", target.pp), ("vpp", target.vpp)):
        if size not in (None, 1):
            raise UsageError(
                f"--{name}: must be 1, since Apex's file has whole tensors, got {size}"
            )
    for name, value in (
        ("first-stage-layers", target.first_stage_layers),
        ("last-stage-layers", target.last_stage_layers),
        ("bucket-size", target.bucket_size),
    ):
        if value is not None:
            raise UsageError(f"--{name}: must not be given for whole tensors, got {value}")
    if target.dp is None and target.world is None:
        return ()
    return ("dp: the files are the same for any number of data-parallel ranks",)


def _optimizer(settings: Settings, specs: Mapping[tuple[str, str], TensorSpec]) -> _File:
    """Lay out Apex's own file: keys and their order are those of its ``state_dict``."""
    state: dict[object, object] = {"step": settings.step}
    tensors: list[tuple[TensorSpec, TensorRef]] = []
    for number, name in enumerate(settings.names):
        slots: dict[str, TensorRef] = {}
        for key, slot in SLOTS.items():
            spec = specs[name, slot]
            slots[key] = _tensor(spec)
            tensors.append((spec, slots[key]))
        state[number] = slots
    groups: list[dict[str, object]] = []
    first = 0
    for group in settings.groups:
        members = len(group.members or ())
        groups.append({**group.settings, "params": list(range(first, first + members))})
        first += members
    tree = {"state": state, "param_groups": groups, "format": 2}
    return _file(OPTIMIZER_FILE, tree, tensors)


def _model(weights: Sequence[TensorSpec]) -> _File:
    """Lay out the weights, as a plain state dict."""
    tensors = [(spec, _tensor(spec)) for spec in weights]
    return _file(MODEL_FILES[0], {spec.name: tensor for spec, tensor in tensors}, tensors)


def _tensor(spec: TensorSpec) -> TensorRef:
    """Return a tensor with a shape of its own: a pickle tells a shared object from an equal one."""
    return new_tensor(spec.dtype, (*spec.stored_shape,))


def _file(path: str, tree: object, tensors: Sequence[tuple[TensorSpec, TensorRef]]) -> _File:
    return _File(path, lay_out_torch_file(path.removesuffix(".pt"), tree), tuple(tensors))


def _manifest(files: Sequence[_File], root: str) -> Manifest:
    """Return the Manifest of the files."""
    specs: list[TensorSpec] = []
    chunks: list[Chunk] = []
    for index, file in enumerate(files):
        for number, (spec, tensor) in enumerate(file.tensors):
            extent = Extent(index, file.offset(number), tensor.numel * spec.dtype.itemsize)
            part = Part(extent, spec.dtype)
            chunks.append(Chunk(len(specs), Box.whole(spec.stored_shape), (part,)))
            specs.append(spec)
    listed = tuple(File(file.path, file.draft.size) for file in files)
    return Manifest("apex", root, listed, tuple(specs), tuple(chunks))


def _kept(
    source: Manifest, settings: Settings
) -> tuple[dict[str, object], tuple[str, ...], tuple[str, ...]]:
    """Return the objects that the sidecar keeps; a line for each of them, and for each lost."""
    kept: dict[str, object] = {}
    lines = ["optimizer: parameter groups with their settings and members, step"]
    lost: list[str] = []
    known = dict(source.objects)
    if settings.adam_w_mode is not None:
        known["adam_w_mode"] = settings.adam_w_mode
    for key in ENTRIES:
        if known.get(key) is None:
            continue
        try:
            encode(known[key], where=key)
        except FormatError as error:
            lost.append(str(error))
            continue
        kept[key] = known[key]
        lines.append(key)
    return kept, tuple(lines), tuple(lost)


def _documents(source: Manifest) -> dict[str, object]:
    """Return what other formats must know to be written again."""
    carried = source.objects.get("carried")
    if not isinstance(carried, Mapping):
        return {}
    return {str(k): v.to_document() for k, v in carried.items() if isinstance(v, Carried)}


def _left_behind(source: Manifest, documents: Mapping[str, object]) -> list[str]:
    """Return a line for each thing that belongs to the source's ranks or that nothing reads."""
    lost = []
    for key, reason in (
        ("per_rank", "it belongs to the source's ranks"),
        ("unconverted", "Apex has no place for it"),
    ):
        names = source.objects.get(key)
        if isinstance(names, tuple) and not (key == "unconverted" and documents):
            lost += [f"{name}: {reason}" for name in names]
    return lost


def _mode_note(settings: Settings) -> str:
    if settings.adam_w_mode is None:
        return "adam_w_mode: unknown; build the optimizer as the run had it, no file tells it"
    return f"adam_w_mode: build the optimizer with adam_w_mode={settings.adam_w_mode}"


def _finisher(files: Sequence[_File], sidecar: bytes) -> Callable[[Written], Finish]:
    """Return the function that turns the payloads' CRC-32 into the last patches."""

    def finish(written: Written) -> Finish:
        patches: list[Patch] = []
        rest = iter(written.crcs)
        for index, file in enumerate(files):
            mine = {offset: next(rest) for _, offset, _ in file.draft.storages}
            patches += [Patch(index, at, data) for at, data in seal(file.draft, mine)]
        return Finish(patches, [NewFile(SIDECAR, sidecar)])

    return finish
