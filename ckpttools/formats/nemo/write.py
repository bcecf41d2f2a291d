"""Which files hold a source as NeMo's distributed form, byte for byte?

1. The source is taken as NeMo must find it (`ckpttools.formats.nemo.source`).
2. Each tensor rank has a ``.distcp`` file with its boxes: a chunk a layer, key and sub-block, as
   megatron-core cuts them. Tensors that a factory stores (of several sub-blocks) have their master
   under ``param``, all others under ``fp32_param``.
3. ``.metadata``, ``common.pt`` and ``metadata.json`` are written last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import UsageError
from ckpttools.formats import Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.nemo.names import split_layer
from ckpttools.formats.nemo.places import ManifestBuilder, dense_strides
from ckpttools.formats.nemo.source import NemoSource, take
from ckpttools.formats.nemo.state import EXTRA_STATE
from ckpttools.formats.nemo.stored import BACKEND_FILE, COMMON_FILE
from ckpttools.formats.nemo.target import check_sizes, on_tensor_ranks
from ckpttools.layout.box import Box
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import MASTER, WEIGHT, Extent, Manifest, TensorSpec
from ckpttools.storage.dcp_metadata import METADATA_FILE
from ckpttools.storage.dcp_writer import (
    DcpDraft,
    NewChunk,
    NewObject,
    file_bytes,
    lay_out_dcp,
)

_TO = "nemo"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out_distributed(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out a ``torch_dist`` directory of ``source``.

    Raises:
        UsageError: the target contradicts the model, or NeMo's files can't hold the source.
    """
    notes = check_sizes(target, to=_TO)
    taken = take(source, target, to=_TO, fused=True)
    layout = _target_layout(taken, target)
    pieces = list(_pieces(taken, layout))
    files: dict[str, list[NewChunk | NewObject]] = {
        f"__{t}_0.distcp": [] for t in range(layout.topology.tp)
    }
    for piece in pieces:
        files[f"__{piece.tp}_0.distcp"].append(piece.chunk)
    files["__0_0.distcp"] += _objects(taken)
    keys: dict[str, dict[str, object]] = {piece.chunk.key: {} for piece in pieces}
    draft = lay_out_dcp(files, attributes={"mcore_data": keys})
    manifest = _manifest(taken, pieces, layout, draft, root)
    return Draft(
        manifest=manifest,
        patches=tuple(Patch(*piece) for piece in draft.pieces()),
        seals=tuple(Extent(*storage) for storage in draft.storages()),
        finish=_finisher(draft, taken),
        carried=taken.carried,
        lost=taken.lost,
        plan=(f"chunks: as tensor ranks of TP {layout.topology.tp} cut them",),
        notes=(*taken.notes, *notes),
        left_out=taken.left_out,
        source=None if taken.view is source else taken.view,
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored chunk, and the box of which tensor it is."""

    tp: int
    name: str
    slot: str
    region: Box
    chunk: NewChunk


def _target_layout(taken: NemoSource, target: Target) -> ShardedLayout:
    """Return the layout on the target's tensor ranks."""
    if taken.layout is not None:
        return on_tensor_ranks(taken.layout, target, to=_TO)
    if target.tp not in (None, 1):
        raise UsageError(
            f"--tp: must be 1, since no rule tells how the tensors are cut, got {target.tp}"
        )
    weights = [spec for spec in taken.view.tensors if spec.slot == WEIGHT]
    params = tuple(ShardedParam(s.name, s.shape, s.dtype.name) for s in weights)
    slots = {param.dtype: {WEIGHT: param.dtype} for param in params}
    return ShardedLayout("zero1", Topology(), params, {(0, 0): tuple(range(len(params)))}, slots)


def _pieces(taken: NemoSource, layout: ShardedLayout) -> Iterator[_Piece]:
    """Yield every chunk of every rank: by rank, slot and parameter."""
    params = [layout.params[i] for i in layout.chunks[0, 0]]
    stacks = _stacks(params) if taken.state.stacked else {}
    for t in range(layout.topology.tp):
        for slot in (WEIGHT, *taken.slots):
            for param in params:
                if param.split is None and t:
                    continue  # only the first of equal copies is stored
                for region in _boxes(param, layout.topology.tp, t):
                    chunk = _chunk(taken, param, slot, region, stacks)
                    yield _Piece(t, param.name, slot, region, chunk)


def _boxes(param: ShardedParam, tp_size: int, tp: int) -> list[Box]:
    """Return the boxes of a rank: one for each sub-block, neighbours or not."""
    if param.split is None:
        return [Box.whole(param.shape)]
    dim = param.split.dim
    boxes = []
    for piece in param.split.blocks.pieces(param.shape[dim], tp_size, tp):
        offsets, lengths = [0] * len(param.shape), list(param.shape)
        offsets[dim], lengths[dim] = piece.global_offset, piece.length
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes


def _stacks(params: Sequence[ShardedParam]) -> dict[str, int]:
    """Return how many layers each stack of layers has that are all alike."""
    found: dict[str, dict[int, dict[str, tuple[object, ...]]]] = {}
    for param in params:
        layer = split_layer(param.name)
        if layer is not None:
            mine = found.setdefault(layer[0], {}).setdefault(layer[1], {})
            mine[layer[2]] = param.shape, param.dtype, param.split
    return {
        stack: len(layers)
        for stack, layers in found.items()
        if set(layers) == set(range(len(layers)))
        and all(layer == layers[0] for layer in layers.values())
    }


def _chunk(
    taken: NemoSource, param: ShardedParam, slot: str, region: Box, stacks: Mapping[str, int]
) -> NewChunk:
    """Return a region of a tensor as it is stored: in a stack, or by itself."""
    factory = param.split is not None and len(param.split.blocks.weights) > 1
    kind = "param" if slot == MASTER and factory else slot
    key, layer = taken.state.prefix + param.name, split_layer(param.name)
    shape, offsets, lengths = param.shape, region.offsets, region.lengths
    if layer is not None and layer[0] in stacks:
        key = f"{taken.state.prefix}{layer[0]}.{layer[2]}"
        shape = (stacks[layer[0]], *shape)
        offsets, lengths = (layer[1], *offsets), (1, *lengths)
    if slot != WEIGHT:
        key = f"optimizer.state.{kind}.{key}"
    dtype = taken.specs[param.name, slot].dtype
    return NewChunk(key, dtype, shape, offsets, lengths)


def _objects(taken: NemoSource) -> list[NewObject]:
    """Return the extra states of modules, as megatron-core keys them."""
    found = []
    layers: dict[str, int] = {}
    for name in taken.state.extra:
        if (layer := split_layer(name)) is not None:
            layers[layer[0]] = max(layers.get(layer[0], 0), layer[1] + 1)
    for name, value in taken.state.extra.items():
        layer = split_layer(name)
        if not name.endswith(EXTRA_STATE):
            key = name
        elif layer is None:
            key = f"{taken.state.prefix}{name}/shard_0_1"
        else:
            key = f"{taken.state.prefix}{layer[0]}.{layer[2]}/shard_{layer[1]}_{layers[layer[0]]}"
        found.append(NewObject(key, [value]))
    return found


def _manifest(
    taken: NemoSource,
    pieces: Sequence[_Piece],
    layout: ShardedLayout,
    draft: DcpDraft,
    root: str,
) -> Manifest:
    """Return the Manifest of the new files."""
    builder = ManifestBuilder()
    rows = {param.name: param.shape for param in layout.params}
    for spec in taken.view.tensors:
        padding = rows[spec.name][0] - spec.shape[0] if spec.shape else 0
        builder.add_tensor(TensorSpec(spec.name, spec.slot, spec.dtype, spec.shape, padding))
    places: dict[int, tuple[int, int]] = {}
    for file in draft.files:
        index = builder.add_file(file.path, file.size)
        for item in file.items:
            start = item.offset if item.payload is None else item.payload
            places[id(item.item)] = index, start
    for piece in pieces:
        index, start = places[id(piece.chunk)]
        builder.add_chunk(
            (piece.name, piece.slot),
            piece.region,
            index,
            start,
            dense_strides(piece.region.lengths),
        )
    topology = {"tp": layout.topology.tp, "pp": 1, "dp": 1}
    return builder.build("nemo", root, {"topology": topology})


def _finisher(draft: DcpDraft, taken: NemoSource) -> Callable[[Written], Finish]:
    """Return the function that writes the checksums and the small files."""

    def finish(written: Written) -> Finish:
        rest = iter(written.crcs)
        patches: list[Patch] = []
        for i, file in enumerate(draft.files):
            crcs = {
                item.offset + offset: next(rest)
                for item in file.items
                for _, offset, _ in item.draft.storages
            }
            patches += [Patch(i, offset, data) for offset, data in file.seal(crcs)]
        return Finish(
            patches=patches,
            new_files=[
                NewFile(METADATA_FILE, draft.metadata),
                NewFile(COMMON_FILE, file_bytes("common", dict(taken.state.tree))),
                NewFile(BACKEND_FILE, json.dumps(_BACKEND).encode()),
            ],
        )

    return finish
