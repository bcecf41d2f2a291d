"""Which files hold a source as NeMo's legacy form, byte for byte? One a tensor and pipeline rank.

Each is Lightning's dict around the rank's own part of every tensor, layers numbered from 0 in each
model chunk, and Apex's format 2 with the numbers that NeMo's groups give to the rank's parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import UsageError
from ckpttools.formats import Draft, Finish, Patch, Target, Written
from ckpttools.formats.nemo.configuration import with_sizes
from ckpttools.formats.nemo.grouping import Member, roles
from ckpttools.formats.nemo.legacy_files import SUFFIX, rank_directory
from ckpttools.formats.nemo.names import split_layer
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER, PARAM, Settings
from ckpttools.formats.nemo.places import ManifestBuilder
from ckpttools.formats.nemo.source import NemoSource, one_step, settings_by_role, take
from ckpttools.formats.nemo.state import MODEL
from ckpttools.formats.nemo.target import check_sizes, on_ranks
from ckpttools.layout.pipeline import Pipeline
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import MASTER, WEIGHT, Extent, Manifest, TensorSpec
from ckpttools.storage.torchzip import TensorRef, new_tensor
from ckpttools.storage.torchzip_writer import TorchDraft, lay_out_torch_file, seal

_TO = "nemo-legacy"


def lay_out_legacy(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out a file for each tensor and pipeline rank.

    Raises:
        UsageError: the target contradicts the model, or NeMo's files can't hold the source.
    """
    notes = check_sizes(target, to=_TO)
    taken = take(source, target, to=_TO, fused=False)
    writer = _Writer(taken, _target_layout(taken, target))
    files = [
        writer.rank_file(t, p)
        for p in range(writer.layout.topology.pp)
        for t in range(writer.layout.topology.tp)
    ]
    return Draft(
        manifest=writer.manifest(files, root),
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
        finish=_finisher([file.draft for file in files]),
        carried=taken.carried,
        lost=taken.lost,
        plan=(f"numbers: by the rule {taken.state.grouping}",) if taken.slots else (),
        notes=(*taken.notes, *notes),
        source=None if taken.view is source else taken.view,
    )


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The file of a rank: its tensors by index of the parameter and slot."""

    tp: int
    path: str
    draft: TorchDraft
    tensors: Mapping[tuple[int, str], TensorRef]


def _target_layout(taken: NemoSource, target: Target) -> ShardedLayout:
    """Return the layout on the target's ranks; a source without rules goes to one rank alone."""
    if taken.layout is not None:
        return on_ranks(taken.layout, target, to=_TO)
    if target.tp not in (None, 1) or target.pp not in (None, 1):
        raise UsageError(
            f"--to {_TO}: must be one rank, since no rule tells how the source's tensors are cut, "
            f"got TP {target.tp} and PP {target.pp}"
        )
    weights = [spec for spec in taken.view.tensors if spec.slot == WEIGHT]
    params = tuple(ShardedParam(s.name, s.shape, s.dtype.name) for s in weights)
    slots = {param.dtype: {WEIGHT: param.dtype} for param in params}
    return ShardedLayout("zero1", Topology(), params, {(0, 0): tuple(range(len(params)))}, slots)


class _Writer:
    """One lay-out."""

    def __init__(self, taken: NemoSource, layout: ShardedLayout) -> None:
        self.taken, self.layout = taken, layout
        self.stages = layout.stages() or Pipeline(((0,),))
        self.settings: dict[str, Settings] = {}
        self.step = 0
        if taken.slots:
            members = [self.member(i) for i, p in enumerate(layout.params) if not p.tied_to]
            groups = taken.view.objects.get("param_groups")
            self.settings = settings_by_role(groups, members, taken.state.grouping, _TO)
            self.step = one_step(taken.view.objects, _TO)

    def member(self, index: int) -> Member:
        """Return a parameter as the rules of groups see it."""
        param = self.layout.params[index]
        return Member(param.name, param.shape)

    def rank_file(self, t: int, p: int) -> _RankFile:
        """Lay out the file of a rank."""
        topology, state = self.layout.topology, self.taken.state
        tensors: dict[tuple[int, str], TensorRef] = {}
        models = [self.model(tensors, p, v) for v in range(topology.vpp)]
        tree: dict[str, object] = {}
        for key, value in with_sizes(state.tree, self.layout).items():
            if key == MODEL:
                tree[key] = models[0] if topology.vpp == 1 else OrderedDict()
            elif key == OPTIMIZER:
                tree[key] = [self.optimizer(tensors, p)]
            else:
                tree[key] = value
        if topology.vpp > 1:
            tree |= {f"model{v}": model for v, model in enumerate(models)}
        path = rank_directory(t, p, topology.tp, topology.pp) + state.file_name
        draft = lay_out_torch_file(state.file_name.removesuffix(SUFFIX), tree)
        return _RankFile(t, path, draft, tensors)

    def model(
        self, tensors: dict[tuple[int, str], TensorRef], p: int, v: int
    ) -> OrderedDict[str, object]:
        """Return the state dict of a model chunk, its tensors noted in ``tensors``."""
        topology = self.layout.topology
        prefix = self.taken.state.prefix if topology.vpp == 1 else ""
        model: OrderedDict[str, object] = OrderedDict()
        for index in self.layout.chunks[p, v]:
            param = self.layout.params[index]
            tensors[index, WEIGHT] = self.tensor(param, WEIGHT)
            model[prefix + self.local(param.name, p, v)] = tensors[index, WEIGHT]
        for name, value in self.taken.state.extra.items():
            if self.has_module(name, p, v):
                model[prefix + self.local(name, p, v)] = value
        return model

    def tensor(self, param: ShardedParam, slot: str) -> TensorRef:
        kind = self.taken.specs[param.canonical, slot].dtype
        return new_tensor(kind, param.local_shape(self.layout.topology.tp))

    def local(self, name: str, p: int, v: int) -> str:
        """Return the name of an entry in its model chunk."""
        layer = split_layer(name)
        if layer is None:
            return name
        return f"{layer[0]}.{layer[1] - self.stages.first_layer(p, v)}.{layer[2]}"

    def has_module(self, name: str, p: int, v: int) -> bool:
        """Say whether the module of an extra state is in a model chunk."""
        layer = split_layer(name)
        if layer is not None:
            first = self.stages.first_layer(p, v)
            return first <= layer[1] < first + self.stages.counts[p][v]
        if name.startswith("embedding."):
            return self.stages.is_first(p, v)
        return self.stages.is_last(p, v)

    def optimizer(self, tensors: dict[tuple[int, str], TensorRef], p: int) -> dict[str, object]:
        """Return Apex's format 2 of a rank; numbers run through its groups in order."""
        topology = self.layout.topology
        mine = [i for v in range(topology.vpp) for i in self.layout.chunks[p, v]]
        index = {self.layout.params[i].name: i for i in mine}
        state: dict[object, object] = {"step": self.step}
        groups: list[dict[str, object]] = []
        number = 0
        for role, members in roles(
            self.taken.state.grouping, [self.member(i) for i in mine]
        ).items():
            for member in members:
                place, entry = index[member.name], {}
                for slot in self.taken.slots:
                    tensor = self.tensor(self.layout.params[place], slot)
                    tensors[place, slot] = tensor
                    entry[PARAM if slot == MASTER else slot] = tensor
                state[number] = entry
                number += 1
            numbers = list(range(number - len(members), number))
            groups.append({**self.settings[role], "params": numbers})
        return {"state": state, "param_groups": groups, "format": 2}

    def manifest(self, files: Sequence[_RankFile], root: str) -> Manifest:
        """Return the Manifest of the new files."""
        builder, topology = ManifestBuilder(), self.layout.topology
        rows = {param.name: param.shape for param in self.layout.params}
        for spec in self.taken.view.tensors:
            padding = rows[spec.name][0] - spec.shape[0] if spec.shape else 0
            builder.add_tensor(TensorSpec(spec.name, spec.slot, spec.dtype, spec.shape, padding))
        for file in files:
            number = builder.add_file(file.path, file.draft.size)
            starts = {id(ref): offset for ref, offset, _ in file.draft.storages}
            for (index, slot), tensor in file.tensors.items():
                param = self.layout.params[index]
                start = starts.get(id(tensor.storage), 0)
                for local, whole in param.boxes(topology.tp, file.tp):
                    shift = sum(o * s for o, s in zip(local.offsets, tensor.strides, strict=True))
                    builder.add_chunk(
                        (param.canonical, slot),
                        whole,
                        number,
                        start + shift * tensor.dtype.itemsize,
                        tensor.strides,
                        replica=self.layout.replica_of(index, file.tp),
                    )
        sizes = {"tp": topology.tp, "pp": topology.pp, "dp": 1}
        if topology.vpp > 1:
            sizes["vpp"] = topology.vpp
        return builder.build(_TO, root, {"topology": sizes})


def _finisher(drafts: Sequence[TorchDraft]) -> Callable[[Written], Finish]:
    """Return the function that writes the checksums."""

    def finish(written: Written) -> Finish:
        rest = iter(written.crcs)
        patches: list[Patch] = []
        for i, draft in enumerate(drafts):
            crcs = {offset: next(rest) for _, offset, _ in draft.storages}
            patches += [Patch(i, offset, data) for offset, data in seal(draft, crcs)]
        return Finish(patches=patches)

    return finish
