"""Which files does a rank write, and what lies where in them? A pure function of the layout.

A rank has one safetensors file (several where its header would be too long to read) with a key
for each slot of each of its flat pieces, ``<chunk>-<dtype>.<bucket>.<slot>``, and the frozen
weights that fall to it, ``frozen.<name>``. Wide elements come first, so that every key is
aligned; the data starts at a multiple of 4096 bytes. So a training rank makes its own file alone,
and a reader knows what every file must hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.dtypes import DType, dtype
from ckpttools.layout.sharded import Place, ShardedLayout
from ckpttools.layout.sharded_pieces import FlatPiece, flat_pieces
from ckpttools.layout.slots import WEIGHT, is_scale
from ckpttools.storage.safetensors_header import build_header

ALIGNMENT = 4096
"""The data of every file starts at a multiple of so many bytes: a page, for direct I/O."""

MAX_HEADER_BYTES = 50_000_000
"""A rank's keys go to a further file before a header is longer; readers refuse 100 MB."""

_ENTRY_BYTES = 120
"""What an entry of a header takes beside its key, at most."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a rank's file; ``offset`` counts bytes from the start of the file.

    It is a slot of a flat piece, or the frozen weight of the parameter with index ``frozen``.
    """

    key: str
    slot: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0
    piece: FlatPiece | None = None
    frozen: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a rank: its name, the bytes of its header, and its keys in order."""

    path: str
    rank: int
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each key starts, in bytes from the start of the file."""
        return {entry.key: entry.offset for entry in self.entries}

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(entry.length for entry in self.entries)


def rank_files(
    layout: ShardedLayout, rank: int, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[RankFile, ...]:
    """Return the files of one rank.

    Raises:
        LayoutError: there is no such rank.
    """
    volumes: list[list[Entry]] = [[]]
    room = max_header_bytes
    for entry in _entries(layout, rank):
        need = len(entry.key.encode()) * 2 + _ENTRY_BYTES  # JSON escapes at most every byte
        if need > room and volumes[-1]:
            volumes.append([])
            room = max_header_bytes
        volumes[-1].append(entry)
        room -= need
    stem = f"rank-{rank:05d}"
    names = (
        [f"{stem}.safetensors"]
        if len(volumes) == 1
        else [f"{stem}-{i + 1:05d}.safetensors" for i in range(len(volumes))]
    )
    return tuple(
        _file(name, layout, rank, volume) for name, volume in zip(names, volumes, strict=True)
    )


def _file(path: str, layout: ShardedLayout, rank: int, entries: Sequence[Entry]) -> RankFile:
    metadata = {
        "format": "ckpttools-sharded",
        "kind": layout.kind,
        "rank": str(rank),
        "world_size": str(layout.topology.world_size),
    }
    header, offsets = build_header(
        [(entry.key, entry.dtype, entry.shape) for entry in entries], metadata, alignment=ALIGNMENT
    )
    placed = [
        Entry(e.key, e.slot, e.dtype, e.shape, offsets[e.key], e.piece, e.frozen) for e in entries
    ]
    return RankFile(path, rank, header, tuple(placed))


def _entries(layout: ShardedLayout, rank: int) -> list[Entry]:
    """Return the keys of a rank in their order, without places."""
    place = layout.topology.place_of(rank)
    entries = [
        Entry(
            f"{piece.vpp}-{piece.dtype}.{piece.bucket}.{slot}",
            slot,
            dtype(layout.slots[piece.dtype][slot]),
            _shape(layout, piece, slot),
            piece=piece,
        )
        for piece in flat_pieces(layout, rank)
        for slot in layout.stored_slots(piece.dtype)
    ]
    for index in _frozen(layout, place):
        param = layout.params[index]
        shape = param.local_shape(layout.topology.tp)
        key = f"frozen.{param.name}"
        entries.append(Entry(key, WEIGHT, dtype(param.dtype), shape, frozen=index))
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def _shape(layout: ShardedLayout, piece: FlatPiece, slot: str) -> tuple[int]:
    """Return the shape of a slot: a value for each element, or a scale for each slice."""
    scales = layout.kind == "zero2" and is_scale(layout.slots[piece.dtype], slot)
    return (len(piece.slices) if scales else piece.numel,)


def _frozen(layout: ShardedLayout, place: Place) -> list[int]:
    """Return the frozen parameters that a rank writes.

    Each tensor rank's own part is written once, by the data-parallel ranks in turn; of one that
    all tensor ranks hold alike, rank 0's. A tied copy is not written.
    """
    mine = [
        index
        for vpp in range(layout.topology.vpp)
        for index in layout.chunks[place.pp, vpp]
        if not layout.params[index].trainable and not layout.params[index].tied_to
    ]
    return [
        index
        for number, index in enumerate(mine)
        if number % layout.topology.dp == place.dp
        and (place.tp == 0 or layout.params[index].split is not None)
    ]
