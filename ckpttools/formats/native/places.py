"""Which tensors do the files of all ranks hold, and which bytes are which elements?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttools.dtypes import DType, dtype
from ckpttools.formats.native.files import Entry, RankFile
from ckpttools.layout.sharded import MASTER, WEIGHT, ShardedLayout
from ckpttools.layout.sharded_pieces import ParamSlice, WholeRegion, whole_regions
from ckpttools.manifest import (
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
    part_bytes,
)

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
    is listed too, with chunks on the same bytes.

    Raises:
        LayoutError: a promise of a Manifest does not hold.
    """
    tensors = tuple(_tensors(layout, with_aliases=with_aliases))
    index = {spec.key: i for i, spec in enumerate(tensors)}
    chunks: list[Chunk] = []
    for number, file in enumerate(files):
        tp = layout.topology.place_of(file.rank).tp
        known: dict[ParamSlice, tuple[WholeRegion, ...]] = {}
        for entry in file.entries:
            keys = [entry.slot]
            if with_aliases and entry.slot == WEIGHT and _has_alias(layout, entry):
                keys.append(MASTER)
            for param, region, part in _stored(layout, entry, number, tp, known):
                name, replica = layout.params[param].canonical, layout.replica_of(param, tp)
                for slot in keys:
                    tensor = index[name, slot]
                    chunks.append(Chunk(tensor, region, (part,), replica_id=replica))
    listed = tuple(File(file.path, file.size_bytes) for file in files)
    return Manifest(layout.kind, root, listed, tensors, tuple(chunks), objects)


def aliases_of(layout: ShardedLayout) -> tuple[Key, ...]:
    """Return the masters that are stored as weights."""
    return tuple(
        (param.name, MASTER)
        for param in layout.params
        if not param.tied_to and param.trainable and layout.master_is_weight(param.dtype)
    )


def _has_alias(layout: ShardedLayout, entry: Entry) -> bool:
    return entry.piece is not None and layout.master_is_weight(entry.piece.dtype)


def _tensors(layout: ShardedLayout, *, with_aliases: bool) -> Iterator[TensorSpec]:
    """Yield every tensor: by parameter in module order, the weight first."""
    for param in layout.params:
        if param.tied_to:
            continue
        kinds: dict[str, DType] = {WEIGHT: dtype(param.dtype)}
        if param.trainable:
            if with_aliases and layout.master_is_weight(param.dtype):
                kinds[MASTER] = dtype(param.dtype)
            kinds |= {slot: dtype(kind) for slot, kind in layout.slots[param.dtype].items()}
        rows = param.shape[0] if param.shape else 0
        true = rows if param.vocab_rows is None else param.vocab_rows
        shape = (true, *param.shape[1:]) if param.shape else ()
        for slot, kind in kinds.items():
            yield TensorSpec(param.name, slot, kind, shape, rows - true)


def _stored(
    layout: ShardedLayout,
    entry: Entry,
    file: int,
    tp: int,
    known: dict[ParamSlice, tuple[WholeRegion, ...]],
) -> Iterator[tuple[int, Region, Part]]:
    """Yield what lies in the bytes of one key: parameter, region of the whole tensor, bytes.

    ``known`` keeps the regions of slices, which all slots of a piece have alike.
    """
    cuts: Sequence[ParamSlice] = ()
    if entry.piece is not None:
        cuts = entry.piece.slices
    elif entry.frozen is not None:
        cuts = (ParamSlice(entry.frozen, 0, entry.numel, 0),)
    for cut in cuts:
        if cut not in known:
            known[cut] = whole_regions(
                layout.params[cut.param],
                tp=tp,
                tp_size=layout.topology.tp,
                start=cut.start,
                stop=cut.stop,
            )
        for found in known[cut]:
            yield cut.param, found.region, _part(entry, file, cut.at, found)


def _part(entry: Entry, file: int, at: int, found: WholeRegion) -> Part:
    """Return the bytes of a region."""
    offset = entry.offset + (at + found.at) * entry.dtype.itemsize
    bare = Part(Extent(file, offset, 0), entry.dtype, found.strides)
    length = part_bytes(found.region, bare)
    return Part(Extent(file, offset, length), entry.dtype, found.strides)
