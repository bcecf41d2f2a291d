"""What do a rank's files add to the digests of its tensors? Taken while they are written.

1. Which chunks lie in the files follows from the layout, as a reader finds them.
2. Elements that are stored as they are pass by in blocks, in the order of the file: each block
   gives a piece of a run, or some of the runs of a box that is narrower than its tensor.
3. Values that are stored in parts are decoded in tiles, as a reader decodes them, once the blocks
   of their file are through. So is what has gaps in its file.

Rows of padding and copies (``replica_id`` above 0) are no content.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.digests import box_share, extended_crc32c, joined_digest
from ckpttools.executor import MAX_TILE_BYTES, Buffers
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange, flat_range_of
from ckpttools.manifest import IDENTITY, Chunk, TensorSpec, boxes_of
from ckpttools.plan import pieces
from ckpttools.storage.crcfold import Share, shares_of
from ckpttools.storage.local import FilePool
from ckpttools.tiles import cut_tiles, read_tile

Key = tuple[str, str]
Held = tuple[TensorSpec, Chunk]
"""A chunk and its tensor; its bytes lie in the files of a rank, by their number in its plan."""

Contents = Callable[[], Sequence[Held]]
"""Gives what a rank's files hold; called where they are written, for it takes time."""

_GRID_BYTES = 4 << 20
"""How much of a narrow box is summed at once: enough to pay for the arithmetic on the sums."""

ReadInto = Callable[[int, int, memoryview], None]
"""Fills a buffer with the bytes of a planned file, by its number, from an offset on."""


class MemoryPool(FilePool):
    """Files that are in memory, and needn't be on disk."""

    def __init__(self, read: ReadInto) -> None:
        super().__init__("", ())
        self._read = read

    def read_into(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset``."""
        self._read(file, offset, buffer)


@dataclass(frozen=True, slots=True)
class _Dense:
    """Elements that lie one after the other from byte ``start`` of the file.

    ``run`` is the byte of the tensor at which they lie, if they lie one after the other there too.
    """

    spec: TensorSpec
    start: int
    flat: FlatRange
    run: int | None

    @property
    def stop(self) -> int:
        """The byte behind them."""
        return self.start + self.flat.numel * self.spec.dtype.itemsize


class FileContent:
    """What one file of a rank adds; :meth:`add` is called with each of its bytes once, in order.

    ``held`` is what lies in all files of the rank, ``pool`` reads those.
    """

    def __init__(self, number: int, held: Sequence[Held], pool: FilePool) -> None:
        mine = [(s, c) for s, c in held if c.parts[0].extent.file == number and not c.replica_id]
        self._dense = sorted(
            (dense for spec, chunk in mine if (dense := _dense_of(spec, chunk)) is not None),
            key=lambda dense: dense.start,
        )
        self._rest = [(spec, chunk) for spec, chunk in mine if not _is_dense(chunk)]
        self._pool = pool
        self._runs: list[tuple[int, int, int, int]] = []  # offset, length, CRC, of how many bytes
        self._keys: list[Key] = []  # whose they are
        self._shares: dict[Key, Share] = {}
        self._starts = [dense.start for dense in self._dense]
        self._crc = 0

    def add(self, offset: int, block: memoryview) -> None:
        """Take the bytes from ``offset`` on; a block holds whole elements."""
        end = offset + len(block)
        for at in range(max(0, bisect_right(self._starts, offset) - 1), len(self._dense)):
            dense = self._dense[at]
            if dense.start >= end:
                break
            low, high = max(dense.start, offset), min(dense.stop, end)
            if low < high:
                self._add(dense, low, block[low - offset : high - offset])

    def rest(self) -> Iterator[None]:
        """Take what the blocks didn't give; yields where its caller may rest."""
        buffers = Buffers(MAX_TILE_BYTES)
        for spec, chunk in self._rest:
            whole, side = Box.whole(spec.shape), pieces([chunk], ndim=len(spec.shape))
            for box in boxes_of(chunk.region):
                inside = box & whole
                for tile in (
                    cut_tiles(inside, spec.dtype.itemsize, MAX_TILE_BYTES) if inside else ()
                ):
                    values = buffers.tile(tile, spec.dtype.itemsize)
                    read_tile(self._pool, side, tile, values, buffers.scratch)
                    self._share(spec, tile, values.reshape(-1).view("u1").data)
                    yield

    def shares(self) -> Mapping[Key, Share]:
        """Return what the file adds to each tensor's digest, once all of it was taken."""
        offsets, lengths, crcs, totals = zip(*self._runs, strict=True) if self._runs else ((),) * 4
        found = shares_of(offsets, lengths, crcs, totals, polynomial="crc32c")
        for key, share in zip(self._keys, found, strict=True):
            self._shares[key] = self._shares.get(key, Share()) + share
        self._runs.clear()
        self._keys.clear()
        return self._shares

    def _add(self, dense: _Dense, low: int, data: memoryview) -> None:
        """Take bytes of elements, from byte ``low`` of the file on."""
        spec, itemsize = dense.spec, dense.spec.dtype.itemsize
        if dense.run is not None:
            self._crc = extended_crc32c(self._crc if low > dense.start else 0, data)
            if low + len(data) == dense.stop:
                length = dense.stop - dense.start
                self._runs.append((dense.run, length, self._crc, spec.size_bytes))
                self._keys.append(spec.key)
            return
        first = dense.flat.start + (low - dense.start) // itemsize
        part = FlatRange(first, first + len(data) // itemsize, dense.flat.within)
        done = 0
        for box in part.boxes():
            for tile in cut_tiles(box, itemsize, _GRID_BYTES):
                size = tile.numel * itemsize
                self._share(spec, tile, data[done : done + size])
                done += size

    def _share(self, spec: TensorSpec, box: Box, data: memoryview) -> None:
        share = box_share(spec, box, data)
        self._shares[spec.key] = self._shares.get(spec.key, Share()) + share


def _is_dense(chunk: Chunk) -> bool:
    """Say whether a chunk's elements are stored as they are, without gaps."""
    return chunk.codec == IDENTITY and chunk.parts[0].strides is None


def _dense_of(spec: TensorSpec, chunk: Chunk) -> _Dense | None:
    """Return the logical elements of a dense chunk; None where there are none."""
    if not _is_dense(chunk):
        return None
    region = chunk.region
    flat = FlatRange(0, region.numel, region) if isinstance(region, Box) else region
    whole = Box.whole(spec.shape)
    inside = flat.within & whole
    if inside is None:
        return None
    # Padding is the last rows, so what is inside comes first in row-major order too.
    start, stop = min(flat.start, inside.numel), min(flat.stop, inside.numel)
    if start == stop:
        return None
    run = flat_range_of(inside, whole)
    itemsize = spec.dtype.itemsize
    at = None if run is None else (run.start + start) * itemsize
    return _Dense(spec, chunk.parts[0].extent.offset, FlatRange(start, stop, inside), at)


def joined_digests(
    stated: Sequence[StatedFile], specs: Sequence[TensorSpec]
) -> dict[Key, int] | None:
    """Return the digest of each tensor from what all ranks' files add; None if one took nothing.

    Raises:
        LayoutError: the files don't hold each byte of a tensor once.
    """
    found: dict[Key, Share] = {}
    for file in stated:
        if file.shares is None:
            return None
        for key, share in file.shares.items():
            found[key] = found.get(key, Share()) + share
    return {spec.key: joined_digest(spec, [found.get(spec.key, Share())]) for spec in specs}
