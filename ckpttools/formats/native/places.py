"""Which tensors do the files of all ranks hold, and which bytes are which elements?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.dtypes import DType, dtype
from ckpttools.formats.native.files import Entry, RankFile
from ckpttools.layout.box import Box
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_pieces import ParamSlice, WholeRegion, whole_regions
from ckpttools.layout.slots import (
    MASTER,
    REMAINDER_SLOT,
    WEIGHT,
    is_part,
    scale_of,
    whole_slots,
)
from ckpttools.manifest import (
    IDENTITY,
    REMAINDER,
    SCALED,
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
    boxes_of,
    part_bytes,
)
from ckpttools.storage.digest_table import Digests

Key = tuple[str, str]


def build_manifest(
    layout: ShardedLayout,
    files: Sequence[RankFile],
    root: str,
    objects: Mapping[str, object],
    *,
    with_aliases: bool,
) -> Manifest:
    """Build the Manifest of all ranks' files.

    The master of a float32 parameter is its weight, stored once: ``with_aliases`` says whether it
    is listed too, with chunks on the same bytes. What is stored in parts is listed as the values
    that the parts make.

    Raises:
        LayoutError: a promise of a Manifest does not hold.
    """
    tensors = tensors_of(layout, with_aliases=with_aliases)
    chunks = chunks_of(layout, files, tensors, with_aliases=with_aliases)
    listed = tuple(File(file.path, file.size_bytes) for file in files)
    return Manifest(layout.kind, root, listed, tensors, chunks, objects)


def tensors_of(layout: ShardedLayout, *, with_aliases: bool) -> tuple[TensorSpec, ...]:
    """Return every tensor: by parameter in module order, the weight first."""
    return tuple(_tensors(layout, with_aliases=with_aliases))


def chunks_of(
    layout: ShardedLayout,
    files: Sequence[RankFile],
    tensors: Sequence[TensorSpec],
    *,
    with_aliases: bool,
) -> tuple[Chunk, ...]:
    """Return what lies in some files, all those of each rank that is among them.

    ``tensors`` are all that :func:`tensors_of` gives.
    """
    index = {spec.key: i for i, spec in enumerate(tensors)}
    stored = [
        Stored(number, file.rank, entry)
        for number, file in enumerate(files)
        for entry in file.entries
    ]
    by_key = {(one.rank, one.entry.key): one for one in stored}
    known: dict[tuple[int, ParamSlice], tuple[WholeRegion, ...]] = {}
    chunks: list[Chunk] = []
    for one in stored:
        tp = layout.topology.place_of(one.rank).tp
        for slot, codec, parts in _values(layout, one, by_key, with_aliases=with_aliases):
            for param, region, places in _regions(layout, codec, parts, tp, known):
                tensor = index[layout.params[param].canonical, slot]
                replica = layout.replica_of(param, tp)
                chunks.append(Chunk(tensor, region, places, codec, replica))
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class Stored:
    """A key of a file: the number of the file, the rank that it is of, the key."""

    file: int
    rank: int
    entry: Entry


_Values = tuple[str, str, tuple[Stored, ...]]
"""A slot, the codec that makes its values, and what it makes them of."""


def _values(
    layout: ShardedLayout,
    one: Stored,
    by_key: Mapping[tuple[int, str], Stored],
    *,
    with_aliases: bool,
) -> Iterator[_Values]:
    """Yield the slots whose values a key holds, alone or as the first of several parts."""
    piece, slot = one.entry.piece, one.entry.slot
    if piece is None:
        yield slot, IDENTITY, (one,)
        return
    slots = layout.slots[piece.dtype]
    fused = layout.kind == "zero2"
    if fused and is_part(slots, slot):
        return

    def beside(other: str) -> Stored:
        return by_key[one.rank, one.entry.key.removesuffix(slot) + other]

    scale = scale_of(slots, slot) if fused else None
    yield (slot, IDENTITY, (one,)) if scale is None else (slot, SCALED, (one, beside(scale)))
    if slot != WEIGHT:
        return
    if with_aliases and layout.master_is_weight(piece.dtype):
        yield MASTER, IDENTITY, (one,)
    if fused and REMAINDER_SLOT in slots:
        yield MASTER, REMAINDER, (one, beside(REMAINDER_SLOT))


def aliases_of(layout: ShardedLayout) -> tuple[Key, ...]:
    """Return the masters that are stored as weights."""
    return tuple(
        (param.name, MASTER)
        for param in layout.params
        if not param.tied_to and param.trainable and layout.master_is_weight(param.dtype)
    )


def aliased_digests(layout: ShardedLayout, digests: Digests) -> Digests:
    """Return digests with those of the masters that are stored as weights."""
    masters = aliases_of(layout)
    return {**digests, **{(name, slot): digests[name, WEIGHT] for name, slot in masters}}


def _tensors(layout: ShardedLayout, *, with_aliases: bool) -> Iterator[TensorSpec]:
    for param in layout.params:
        if param.tied_to:
            continue
        kinds: dict[str, DType] = {WEIGHT: dtype(param.dtype)}
        if param.trainable:
            if with_aliases and layout.master_is_weight(param.dtype):
                kinds[MASTER] = dtype(param.dtype)
            slots = layout.slots[param.dtype]
            whole = whole_slots(slots) if layout.kind == "zero2" else slots
            kinds |= {slot: dtype(kind) for slot, kind in whole.items()}
        rows = param.shape[0] if param.shape else 0
        true = rows if param.vocab_rows is None else param.vocab_rows
        shape = (true, *param.shape[1:]) if param.shape else ()
        for slot, kind in kinds.items():
            yield TensorSpec(param.name, slot, kind, shape, rows - true)


def _regions(
    layout: ShardedLayout,
    codec: str,
    parts: Sequence[Stored],
    tp: int,
    known: dict[tuple[int, ParamSlice], tuple[WholeRegion, ...]],
) -> Iterator[tuple[int, Region, tuple[Part, ...]]]:
    """Yield what lies in the bytes of some keys: parameter, region of the whole tensor, bytes.

    ``known`` keeps the regions of slices, which all slots of a piece have alike.
    """
    first = parts[0].entry
    cuts: Sequence[ParamSlice] = ()
    if first.piece is not None:
        cuts = first.piece.slices
    elif first.frozen is not None:
        cuts = (ParamSlice(first.frozen, 0, first.numel, 0),)
    for number, cut in enumerate(cuts):
        if (tp, cut) not in known:
            known[tp, cut] = whole_regions(
                layout.params[cut.param],
                tp=tp,
                tp_size=layout.topology.tp,
                start=cut.start,
                stop=cut.stop,
            )
        for found in known[tp, cut]:
            if codec != SCALED:
                places = [_part(one, cut.at, found) for one in parts]
                yield cut.param, found.region, tuple(places)
                continue
            at = found.at
            for box in boxes_of(found.region):  # a scale stands for all of a box
                values = _part(parts[0], cut.at, WholeRegion(box, at, found.strides))
                yield cut.param, box, (values, _scale(parts[1], number, box))
                at += box.numel


def _part(one: Stored, at: int, found: WholeRegion) -> Part:
    """Return the bytes of a region."""
    offset = one.entry.offset + (at + found.at) * one.entry.dtype.itemsize
    bare = Part(Extent(one.file, offset, 0), one.entry.dtype, found.strides)
    length = part_bytes(found.region, bare)
    return Part(Extent(one.file, offset, length), one.entry.dtype, found.strides)


def _scale(one: Stored, number: int, box: Box) -> Part:
    """Return the bytes of the one number that all elements of a box share."""
    size = one.entry.dtype.itemsize
    extent = Extent(one.file, one.entry.offset + number * size, size)
    return Part(extent, one.entry.dtype, (0,) * box.ndim)
