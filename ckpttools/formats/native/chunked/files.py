"""Which file does a rank write, and what lies where in it? Its chunks, a key each.

A rank has one safetensors file (several where its header would be too long to read). The key of a
chunk is ``<name>:<slot>``, with ``#1``, ``#2`` … behind it where a file has more of one tensor; its
elements are those of a box of the tensor in row-major order. Wide elements come first, so that
every key is aligned; the data starts at a multiple of 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError
from ckpttools.formats.native.files import ALIGNMENT, MAX_HEADER_BYTES
from ckpttools.layout.box import Box
from ckpttools.manifest import TensorSpec
from ckpttools.storage.safetensors_header import build_header

FORMAT = "ckpttools-chunks"

_ENTRY_BYTES = 120
_DIGITS = 20
"""What an entry of a header takes beside its key, and a number of its shape, at most."""


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """One key of a file: a box of the tensor with index ``tensor``, dense in row-major order.

    ``offset`` counts bytes from the start of the file. ``replica_id`` 0 is the copy that is read.
    """

    tensor: int
    box: Box
    key: str
    offset: int
    length: int
    replica_id: int = 0


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """One file of a rank: its name, the bytes of its header, and its keys in order."""

    path: str
    rank: int
    header: bytes
    chunks: tuple[ListedChunk, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(chunk.length for chunk in self.chunks)


def pack_files(
    tensors: Sequence[TensorSpec],
    ranks: Sequence[Sequence[tuple[int, Box]]],
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> tuple[ChunkFile, ...]:
    """Return the files of all ranks; ``ranks`` has the (tensor, box) that each of them writes.

    Raises:
        FormatError: a name is one that a header can't hold.
    """
    return tuple(
        file
        for rank, boxes in enumerate(ranks)
        for file in _rank_files(tensors, rank, len(ranks), boxes, max_header_bytes)
    )


def _rank_files(
    tensors: Sequence[TensorSpec],
    rank: int,
    world_size: int,
    boxes: Sequence[tuple[int, Box]],
    max_header_bytes: int,
) -> Iterator[ChunkFile]:
    """Yield the files of one rank, each as long as its header allows."""
    volumes: list[list[tuple[str, int, Box]]] = [[]]
    room = max_header_bytes
    for key, tensor, box in _keyed(tensors, boxes):
        need = len(_utf8(key)) * 2 + _ENTRY_BYTES + _DIGITS * box.ndim
        if need > room and volumes[-1]:
            volumes.append([])
            room = max_header_bytes
        volumes[-1].append((key, tensor, box))
        room -= need
    stem = f"rank-{rank:05d}"
    for number, volume in enumerate(volumes, 1):
        tail = f"-{number:05d}" if len(volumes) > 1 else ""
        yield _file(f"{stem}{tail}.safetensors", tensors, rank, world_size, volume)


def _keyed(
    tensors: Sequence[TensorSpec], boxes: Sequence[tuple[int, Box]]
) -> Iterator[tuple[str, int, Box]]:
    """Yield key, tensor and box of each chunk, wide elements first."""
    used: set[str] = set()
    for tensor, box in sorted(boxes, key=lambda item: -tensors[item[0]].dtype.itemsize):
        spec = tensors[tensor]
        key = stem = f"{spec.name}:{spec.slot}"
        count = 0
        while key in used:
            count += 1
            key = f"{stem}#{count}"
        used.add(key)
        yield key, tensor, box


def _file(
    path: str,
    tensors: Sequence[TensorSpec],
    rank: int,
    world_size: int,
    volume: Sequence[tuple[str, int, Box]],
) -> ChunkFile:
    metadata = {"format": FORMAT, "rank": str(rank), "world_size": str(world_size)}
    entries = [(key, tensors[tensor].dtype, box.lengths) for key, tensor, box in volume]
    header, offsets = build_header(entries, metadata, alignment=ALIGNMENT)
    chunks = tuple(
        ListedChunk(tensor, box, key, offsets[key], box.numel * tensors[tensor].dtype.itemsize)
        for key, tensor, box in volume
    )
    return ChunkFile(path, rank, header, chunks)


def _utf8(key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise FormatError(f"key: must be valid Unicode, got {key!r:.60}") from None
