"""How do elements come off files and onto them, a bounded tile at a time?

A *tile* is a box of a tensor that is one run of its row-major order: a slab of leading rows, or,
where one row is over the bound, a piece of a row. A dense chunk of the tensor meets a tile in one
run of its own bytes too, so a tile is read and written by one system call per chunk that it
meets, each byte once, however the two sides are cut. What remains is a copy inside memory, and
only where a chunk is narrower than the tile.

A chunk under a codec is read part by part into the scratch, and its elements are made there: as
many at a time as there is room for, so a tile never needs more memory than its own and the
scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from ckpttools.codecs import decode
from ckpttools.errors import PlanError
from ckpttools.layout.box import Box
from ckpttools.manifest import IDENTITY
from ckpttools.plan import Pieces
from ckpttools.storage.local import FilePool

Tile = npt.NDArray[np.unsignedinteger]
OnWrite = Callable[[int, int, memoryview], None]
"""Told of each write: file, offset in bytes, the bytes."""

_CARRIERS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
SPAN_FACTOR = 4.0
"""A strided region is read as one span where that costs at most this many times its bytes.

So many bytes more come out of the page cache for less than the system calls of their runs.
"""


def carrier(itemsize: int) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned dtype that carries elements of ``itemsize`` bytes bit for bit."""
    return _CARRIERS[itemsize]


def cut_tiles(box: Box, itemsize: int, tile_bytes: int) -> Iterator[Box]:
    """Cut ``box`` into tiles of at most ``tile_bytes`` (at least one element each), in order.

    The tiles cover the box exactly once, and each is one run of its row-major order.

    >>> [str(tile) for tile in cut_tiles(Box.whole((3, 4)), itemsize=4, tile_bytes=32)]
    ['[0:2, 0:4]', '[2:3, 0:4]']
    """
    if not box.numel:
        return
    limit = max(1, tile_bytes // itemsize)
    if box.numel <= limit:
        yield box
        return
    dim = next(d for d, n in enumerate(box.lengths) if n > 1)
    inner = prod(box.lengths[dim + 1 :])
    step = max(1, limit // inner)
    for start in range(0, box.lengths[dim], step):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += start
        lengths[dim] = min(step, box.lengths[dim] - start)
        tile = Box(tuple(offsets), tuple(lengths))
        if tile.numel > limit:
            yield from cut_tiles(tile, itemsize, tile_bytes)
        else:
            yield tile


def read_tile(
    pool: FilePool,
    pieces: Pieces,
    box: Box,
    out: Tile,
    scratch: memoryview,
    span_factor: float = SPAN_FACTOR,
) -> None:
    """Fill ``out`` (shape of ``box``) with the elements that ``pieces`` hold of ``box``.

    Elements of ``box`` that no piece holds are left as they are. ``scratch`` is at least as long
    as ``out``. At most ``span_factor`` times the bytes of the elements are read.
    """
    if pieces.codec != IDENTITY:
        _read_decoded(pool, pieces, box, out, scratch, span_factor)
        return
    for file, start, strides, place in _regions(pieces, box):
        _read_region(pool, file, start, strides, _view(out, place), scratch, span_factor)


def write_tile(
    pool: FilePool, pieces: Pieces, box: Box, tile: Tile, scratch: memoryview, on_write: OnWrite
) -> None:
    """Write the elements of ``tile`` (which is ``box``) to every piece that holds some of them.

    Raises:
        PlanError: the pieces are not written as elements are, but under a codec.
    """
    if pieces.codec != IDENTITY:
        raise PlanError(f"codec: what is written must be {IDENTITY}, got {pieces.codec}")
    for file, start, strides, place in _regions(pieces, box):
        _write_region(pool, file, start, strides, _view(tile, place), scratch, on_write)


_Region = tuple[int, int, tuple[int, ...], tuple[slice, ...]]


def _regions(pieces: Pieces, box: Box, part: int = 0) -> Iterator[_Region]:
    """Yield what each piece shares with ``box``: file, first byte, strides, place in the tile."""
    rows = _rows(pieces, part)
    if len(rows) > _FEW:
        rows = [rows[i] for i in pieces.overlapping(box).tolist()]
    begin, end = box.offsets, box.stops
    for file, start, strides, offsets, stops in rows:
        low, high = tuple(map(max, offsets, begin)), tuple(map(min, stops, end))
        if all(map(int.__lt__, low, high)):
            for a, b, stride in zip(low, offsets, strides, strict=True):
                start += (a - b) * stride  # noqa: PLW2901  # the same start, moved to ``low``
            place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))
            yield file, start, strides, place


_FEW = 16
"""So many pieces are looked through one by one faster than numpy is called."""

_Row = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=32)
def _rows(pieces: Pieces, part: int) -> list[_Row]:
    """Return file, first byte, strides, offsets and stops of a part of each piece, as numbers.

    The tiles of a tensor follow each other, so a few tensors' rows are all that is ever in use.
    """
    if not len(pieces):  # then there are no columns of parts either
        return []
    return [
        (file, start, tuple(strides), tuple(offsets), tuple(stops))
        for file, start, strides, offsets, stops in zip(
            pieces.file[:, part].tolist(),
            pieces.start_bytes[:, part].tolist(),
            pieces.strides_bytes[:, part].tolist(),
            pieces.offsets.tolist(),
            (pieces.offsets + pieces.lengths).tolist(),
            strict=True,
        )
    ]


_LEAST_SCRATCH = 1 << 10
"""Bytes in which the parts of any one element have room."""

_Source = tuple[int, int, Sequence[int]]
"""One part of a region: file, first byte, strides."""


def _read_decoded(
    pool: FilePool,
    pieces: Pieces,
    box: Box,
    out: Tile,
    scratch: memoryview,
    span_factor: float,
) -> None:
    """Fill ``out`` from pieces under a codec."""
    if len(scratch) < _LEAST_SCRATCH:
        scratch = memoryview(bytearray(_LEAST_SCRATCH))
    parts = [_regions(pieces, box, part) for part in range(len(pieces.dtypes))]
    for regions in zip(*parts, strict=True):
        sources = [(file, start, strides) for file, start, strides, _ in regions]
        _decode_region(pool, pieces, sources, _view(out, regions[0][3]), scratch, span_factor)


def _decode_region(
    pool: FilePool,
    pieces: Pieces,
    sources: Sequence[_Source],
    out: Tile,
    scratch: memoryview,
    span_factor: float,
) -> None:
    """Read the parts of a region side by side into the scratch and decode them, or its halves.

    A part that is no run in its file needs as much scratch again. What doesn't move along a
    dimension (a scale) is read once.
    """
    if not out.size:
        return
    views, need, runs = [], 0, True
    for (_, _, strides), itemsize in zip(sources, pieces.itemsizes, strict=True):
        shape = tuple(n if step else 1 for n, step in zip(out.shape, strides, strict=True))
        runs = runs and _is_run(strides, shape, itemsize)
        start = -(-need // _ALIGNMENT) * _ALIGNMENT
        views.append((shape, start))
        need = start + prod(shape) * itemsize
    if need > (len(scratch) if runs else len(scratch) // 2) and out.size > 1:
        dim = _cut_dim(out.shape)
        half = out.shape[dim] // 2
        moved = [(file, start + half * steps[dim], steps) for file, start, steps in sources]
        first, second = _halves(out, dim, half)
        _decode_region(pool, pieces, sources, first, scratch, span_factor)
        _decode_region(pool, pieces, moved, second, scratch, span_factor)
        return
    values = []
    for (file, start, strides), (shape, at), dtype in zip(
        sources, views, pieces.dtypes, strict=True
    ):
        value = np.ndarray(shape, carrier(dtype.itemsize), scratch, offset=at)
        _read_region(pool, file, start, strides, value, scratch[need:], span_factor)
        values.append(value)
    decode(pieces.codec, pieces.dtypes, values, out)


_ALIGNMENT = 8


def _view(tile: Tile, place: tuple[slice, ...]) -> Tile:
    """Return a part of a tile as a view; numpy would make a number of a 0-d one."""
    return tile[place] if place else tile


def _is_run(strides: Sequence[int], shape: Sequence[int], itemsize: int) -> bool:
    """Say whether an array of these strides is one run of bytes."""
    expected = itemsize
    for stride, length in zip(reversed(strides), reversed(shape), strict=True):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _bytes_of(array: Tile) -> memoryview:
    """View a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data


def _read_region(
    pool: FilePool,
    file: int,
    start: int,
    strides: Sequence[int],
    out: Tile,
    scratch: memoryview,
    span_factor: float,
) -> None:
    """Read a strided region of a file into ``out``: in one run, as a span, by runs or halves."""
    if not out.size:
        return
    if _is_run(strides, out.shape, out.itemsize):
        if out.flags.c_contiguous:
            pool.read_into(file, start, _bytes_of(out))
        else:
            buffer = scratch[: out.nbytes]
            pool.read_into(file, start, buffer)
            out[...] = np.ndarray(out.shape, out.dtype, buffer)
        return
    span = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True)) + out.itemsize
    if min(strides) >= 0 and span <= min(len(scratch), span_factor * out.nbytes):
        pool.read_into(file, start, scratch[:span])
        out[...] = np.ndarray(
            out.shape, dtype=out.dtype, buffer=scratch[:span], strides=tuple(strides)
        )
        return
    dim = _cut_dim(out.shape)
    rows = out[(0,) * dim]
    if _is_run(strides[dim + 1 :], rows.shape[1:], out.itemsize) and rows[:1].flags.c_contiguous:
        for i in range(len(rows)):
            pool.read_into(file, start + i * strides[dim], _bytes_of(rows[i : i + 1]))
        return
    dim = max((d for d, n in enumerate(out.shape) if n > 1), key=lambda d: abs(strides[d]))
    half = out.shape[dim] // 2
    first, second = _halves(out, dim, half)
    _read_region(pool, file, start, strides, first, scratch, span_factor)
    moved = start + half * strides[dim]
    _read_region(pool, file, moved, strides, second, scratch, span_factor)


def _write_region(
    pool: FilePool,
    file: int,
    start: int,
    strides: Sequence[int],
    tile: Tile,
    scratch: memoryview,
    on_write: OnWrite,
) -> None:
    """Write ``tile`` to a strided region of a file, in as few runs as there are."""
    if not tile.size:
        return
    if _is_run(strides, tile.shape, tile.itemsize):
        if not tile.flags.c_contiguous:
            packed = np.frombuffer(scratch[: tile.nbytes], dtype=tile.dtype).reshape(tile.shape)
            packed[...] = tile
            tile = packed
        data = _bytes_of(tile)
        pool.write_at(file, start, data)
        on_write(file, start, data)
        return
    if any(s < 0 for s in strides):
        raise PlanError(f"{pool.path(file)}: strides must not be negative, got {list(strides)}")
    dim = _cut_dim(tile.shape)
    half = tile.shape[dim] // 2
    first, second = _halves(tile, dim, half)
    _write_region(pool, file, start, strides, first, scratch, on_write)
    shifted = start + half * strides[dim]
    _write_region(pool, file, shifted, strides, second, scratch, on_write)


def _cut_dim(shape: Sequence[int]) -> int:
    """Return the outermost dimension that can be halved."""
    return next(d for d, n in enumerate(shape) if n > 1)


def _halves(array: Tile, dim: int, half: int) -> tuple[Tile, Tile]:
    """Cut an array in two views along ``dim``."""
    before = (slice(None),) * dim
    return array[(*before, slice(0, half))], array[(*before, slice(half, None))]
