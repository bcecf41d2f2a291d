"""Which boxes of which tensors does each rank of a sharded optimizer hold? Its flat pieces, cut up.

torch's container knows boxes only. A slice of a flattened tensor is at most ``2 * ndim - 1`` of
them, and each of these is a view of the flat state. Values that an optimizer keeps in parts
(remainders, scaled moments) are joined: there the tensors are copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ckpttools.dtypes import dtype
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_pieces import FlatPiece, WholeRegion, flat_pieces, whole_regions
from ckpttools.layout.slots import WEIGHT, whole_slots
from ckpttools.manifest import TensorSpec, boxes_of
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.optimizer.describe import dtype_name

Key = tuple[str, str]
Strided = tuple[Box, int, tuple[int, ...]]
"""A box, and where its first element lies in a flat tensor, with which strides."""


def sharded_specs(layout: ShardedLayout) -> tuple[TensorSpec, ...]:
    """Return every tensor of a run: by parameter in module order, the weight first.

    A float32 parameter's master is its weight, and not there apart.
    """
    specs = []
    for param in layout.params:
        if param.tied_to:
            continue
        kinds = {WEIGHT: param.dtype}
        if param.trainable:
            kinds |= whole_slots(layout.slots[param.dtype])
        rows = param.shape[0] if param.shape else 0
        true = rows if param.vocab_rows is None else param.vocab_rows
        shape = (true, *param.shape[1:]) if param.shape else ()
        specs += [
            TensorSpec(param.name, slot, dtype(kind), shape, rows - true)
            for slot, kind in kinds.items()
        ]
    return tuple(specs)


def rank_boxes(layout: ShardedLayout, rank: int) -> list[tuple[Key, Box]]:
    """Return the (name and slot, box) that a rank writes; over all ranks each element once."""
    found = [
        ((name, slot), box)
        for piece in flat_pieces(layout, rank)
        for name, (box, _, _) in _piece_boxes(layout, piece, rank)
        for slot in (WEIGHT, *_state_slots(layout, piece.dtype))
    ]
    frozen = ((name, box) for name, (box, _, _) in _frozen_boxes(layout, rank))
    return [*found, *(((name, WEIGHT), box) for name, box in frozen)]


def live_boxes(
    layout: ShardedLayout, rank: int, optimizer: ShardedOptimizer
) -> dict[tuple[Key, Box], Tensor]:
    """Return the live elements of each box that this rank writes."""
    live: dict[tuple[Key, Box], Tensor] = {}
    for piece in flat_pieces(layout, rank):
        flats = _flats(layout, piece, optimizer)
        for name, place in _piece_boxes(layout, piece, rank):
            for slot, flat in flats.items():
                live[(name, slot), place[0]] = _view(flat, place)
    params = {managed.name: managed.param for managed in optimizer.managed}
    for name, place in _frozen_boxes(layout, rank):
        live[(name, WEIGHT), place[0]] = _view(params[name].data.reshape(-1), place)
    return live


def _state_slots(layout: ShardedLayout, kind: str) -> Sequence[str]:
    return [slot for slot in whole_slots(layout.slots[kind]) if slot != WEIGHT]


def _flats(
    layout: ShardedLayout, piece: FlatPiece, optimizer: ShardedOptimizer
) -> Mapping[str, Tensor]:
    """Return the flat tensors of a piece by slot: whole values."""
    buffer = next(
        one
        for one in optimizer.buffers
        if (one.chunk, dtype_name(one.param_dtype)) == (piece.vpp, piece.dtype)
    )
    shard = optimizer.shard_of(buffer.buckets[piece.bucket])
    slots = _state_slots(layout, piece.dtype)
    return {WEIGHT: shard.bucket.local_params, **{slot: shard.logical(slot) for slot in slots}}


def _piece_boxes(
    layout: ShardedLayout, piece: FlatPiece, rank: int
) -> Iterator[tuple[str, Strided]]:
    """Yield name and boxes of what lies in a flat piece, but for copies of other tensor ranks."""
    tp = layout.topology.place_of(rank).tp
    for cut in piece.slices:
        param = layout.params[cut.param]
        if layout.replica_of(cut.param, tp):
            continue
        regions = whole_regions(
            param, tp=tp, tp_size=layout.topology.tp, start=cut.start, stop=cut.stop
        )
        for place in _boxes(regions, cut.at):
            yield param.canonical, place


def _frozen_boxes(layout: ShardedLayout, rank: int) -> Iterator[tuple[str, Strided]]:
    """Yield name and boxes of the frozen weights that fall to a rank: its stage's, in turn."""
    topology = layout.topology
    place = topology.place_of(rank)
    mine = [
        layout.params[index]
        for vpp in range(topology.vpp)
        for index in layout.chunks[place.pp, vpp]
        if not layout.params[index].trainable and not layout.params[index].tied_to
    ]
    for number, param in enumerate(mine):
        if number % topology.dp != place.dp or (place.tp and param.split is None):
            continue
        numel = Box.whole(param.local_shape(topology.tp)).numel
        regions = whole_regions(param, tp=place.tp, tp_size=topology.tp, start=0, stop=numel)
        for strided in _boxes(regions, 0):
            yield param.name, strided


def _boxes(regions: Sequence[WholeRegion], start: int) -> Iterator[Strided]:
    for found in regions:
        at = start + found.at
        for box in boxes_of(found.region):
            if found.strides is not None:
                yield box, at, found.strides
                continue
            yield box, at, row_major_strides(box.lengths)
            at += box.numel


def _view(flat: Tensor, place: Strided) -> Tensor:
    box, at, strides = place
    with torch.no_grad():
        return flat.detach().as_strided(box.lengths, strides, flat.storage_offset() + at)
