"""How is a plan carried out within a byte budget?

:func:`execute` walks the tensors tile by tile in the order of the source files; worker threads
each own one pair of buffers that they reuse, so memory is bounded by the budget whatever the
size. :func:`execute_reference` is the definition: one loop over the plan's copies. On every plan
both write the same bytes.

An executor knows no format. It returns the CRC-32 of every extent that it is asked for, folded
from the pieces as they were written, so a format can put checksums into its files.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, Self, TypeVar

import numpy as np

from ckpttools.dtypes import DType
from ckpttools.errors import PlanError
from ckpttools.layout.box import Box
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    WIDEN,
    Extent,
    TensorSpec,
)
from ckpttools.plan import Plan, Strided, TensorPlan
from ckpttools.storage.crc import crc32
from ckpttools.storage.crcfold import fold
from ckpttools.storage.journal import Done, Journal, Piece
from ckpttools.storage.local import FilePool
from ckpttools.tiles import Tile, carrier, cut_tiles, read_tile, write_tile

DEFAULT_BUDGET_BYTES = 1 << 30
MAX_TILE_BYTES = 1 << 20
"""Tiles above this gain nothing: a system call is long amortised and the cache is left."""

MIN_TILE_BYTES = 4 << 10

WRITEBACK_BYTES = 8 << 20
"""The disk is told of so many bytes of a file at once."""

Job = TypeVar("Job")


class TileDigest(Protocol):
    """Takes the content of tiles, from any thread and in any order."""

    def add(self, spec: TensorSpec, box: Box, tile: Tile) -> int:
        """Take a tile and return the number that stands for it."""

    def add_known(self, spec: TensorSpec, box: Box, crc: int) -> None:
        """Take a tile by that number."""


Progress = Callable[[int], None]
"""Told how many more payload bytes are done."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job may use: bytes of buffers in all, and threads."""

    budget_bytes: int = DEFAULT_BUDGET_BYTES
    workers: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PlanError(f"workers: must be at least 1, got {self.workers}")
        if self.budget_bytes < self.workers * 3 * MIN_TILE_BYTES:
            raise PlanError(
                f"memory: must be at least {self.workers * 3 * MIN_TILE_BYTES} bytes for "
                f"{self.workers} workers, got {self.budget_bytes}"
            )

    @property
    def tile_bytes(self) -> int:
        """The size of one buffer; a worker has three (two tiles and a scratch)."""
        return min(MAX_TILE_BYTES, self.budget_bytes // (3 * self.workers))

    @property
    def buffer_bytes(self) -> int:
        """All buffers together."""
        return 3 * self.workers * self.tile_bytes


class Buffers(threading.local):
    """The reused buffers of one worker thread."""

    def __init__(self, tile_bytes: int) -> None:
        self.first = np.empty(tile_bytes, dtype=np.uint8)
        self.second = np.empty(tile_bytes, dtype=np.uint8)
        self.scratch = np.empty(tile_bytes, dtype=np.uint8).data

    def tile(self, box: Box, itemsize: int, *, second: bool = False) -> Tile:
        """Return a buffer shaped as ``box``; its contents are whatever was there."""
        buffer = self.second if second else self.first
        flat = buffer[: box.numel * itemsize].view(carrier(itemsize))
        return flat.reshape(box.lengths)


@dataclass(slots=True)
class WriteLog:
    """Every piece of payload that was written: file, offset, length, CRC-32 of it.

    A terabyte has millions of pieces, so each is kept as four numbers in one array.
    """

    _numbers: array[int] = field(default_factory=lambda: array("q"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Note pieces, from any thread."""
        with self._lock:
            for piece in pieces:
                self._numbers.extend((piece.file, piece.offset, piece.length, piece.crc32))

    def crc32(self, extents: Sequence[Extent]) -> list[int]:
        """Return the CRC-32 of each extent; bytes that nobody wrote are zero."""
        rows = np.array(self._numbers, dtype=np.int64).reshape(-1, 4)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        result = []
        for extent in extents:
            stop = extent.offset + extent.length
            low = np.searchsorted(rows[:, 0], extent.file, "left")
            high = np.searchsorted(rows[:, 0], extent.file, "right")
            mine = rows[low:high]
            first, last = np.searchsorted(mine[:, 1], [extent.offset, stop])
            mine = mine[first:last]
            result.append(
                fold(
                    mine[:, 1] - extent.offset,
                    mine[:, 2],
                    mine[:, 3].astype(np.uint32),
                    total_bytes=extent.length,
                    polynomial="crc32",
                )
            )
        return result


def execute(
    plan: Plan,
    *,
    resources: Resources,
    digest: TileDigest | None = None,
    journal: Journal | None = None,
    finished: Mapping[int, Done] | None = None,
    progress: Progress | None = None,
) -> WriteLog:
    """Carry out ``plan``. The destination's files exist, full-sized and zero.

    ``digest`` is shown every tile of every tensor once, by any thread. Each finished tile is
    noted in ``journal``; those in ``finished``, by number, are not written again.

    Raises:
        StorageError: a file can't be read or written.
    """
    log, known = WriteLog(), finished or {}
    src_paths = [f.path for f in plan.src.files]
    dst_paths = [f.path for f in plan.dst.files]
    with (
        FilePool(plan.src.root, src_paths) as src_pool,
        FilePool(plan.dst.root, dst_paths, writable=True) as dst_pool,
        _Writeback(dst_pool) as writeback,
    ):

        def copy(job: tuple[int, tuple[TensorPlan, Box]], buffers: Buffers) -> None:
            number, (tensor, box) = job
            spec = tensor.dst_spec
            done = known.get(number)
            if done is None or (digest is not None and done.crc32c is None):
                pieces: list[Piece] = []

                def wrote(file: int, offset: int, data: memoryview) -> None:
                    pieces.append(Piece(file, offset, len(data), crc32(data)))
                    writeback.add(file, offset, len(data))

                tile = buffers.tile(box, spec.dtype.itemsize)
                if tensor.fresh_rows:
                    tile[...] = 0
                read_tile(src_pool, tensor.src, box, tile, buffers.scratch)
                write_tile(dst_pool, tensor.dst, box, tile, buffers.scratch, wrote)
                crc = digest.add(spec, box, tile) if digest is not None else None
                done = Done(number, tuple(pieces), crc)
                if journal is not None:
                    journal.add(done)
            elif digest is not None and done.crc32c is not None:
                digest.add_known(spec, box, done.crc32c)
            log.add(done.pieces)
            if progress is not None:
                progress(box.numel * spec.dtype.itemsize)

        run_jobs(enumerate(_jobs(plan, resources.tile_bytes)), copy, resources)
    return log


class _Writeback:
    """Sets the disk to work on what is written, in a thread of its own, while more is written.

    Publishing waits until the disk has everything, so it had better begin soon. What is not begun
    at the end is left to that wait, and so are errors.
    """

    def __init__(self, pool: FilePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._spans: dict[int, tuple[int, int, int]] = {}  # file -> first, stop, bytes between
        self._queue: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._queue.put(None)
        self._thread.join()

    def add(self, file: int, offset: int, length: int) -> None:
        """Note a write."""
        with self._lock:
            first, stop, size = self._spans.pop(file, (offset, offset, 0))
            span = min(first, offset), max(stop, offset + length), size + length
            if span[2] < WRITEBACK_BYTES:
                self._spans[file] = span
                return
        self._queue.put((file, span[0], span[1] - span[0]))

    def _work(self) -> None:
        while (extent := self._queue.get()) is not None and not self._done.is_set():
            self._pool.start_writeback(*extent)


def run_jobs(
    jobs: Iterable[Job], work: Callable[[Job, Buffers], None], resources: Resources
) -> None:
    """Do ``work`` for every job on the worker threads; the first error stops all and is raised."""
    _keep_freed_memory()
    buffers = Buffers(resources.tile_bytes)
    stop = threading.Event()
    lock = threading.Lock()
    queue = iter(jobs)

    def worker() -> None:
        while not stop.is_set():
            with lock:
                batch = list(islice(queue, 4))
            if not batch:
                return
            for job in batch:
                work(job, buffers)

    with ThreadPoolExecutor(resources.workers) as executor:
        futures = [executor.submit(worker) for _ in range(resources.workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()


def _keep_freed_memory() -> None:
    """Let the C library keep what numpy's temporaries free, up to a few MiB a thread.

    glibc gives pieces above 128 KiB back to the system at once, and the fresh pages that it gets
    for the next one cost more than the arithmetic on them. It raises that bound to the largest
    piece that it has seen freed, so one that is never touched does it.
    """
    np.empty(4 * MAX_TILE_BYTES, dtype=np.uint8)


def _jobs(plan: Plan, tile_bytes: int) -> Iterator[tuple[TensorPlan, Box]]:
    """Yield the tiles of all tensors, in the order in which the source files hold them."""
    for tensor in sorted(plan.tensors, key=_source_position):
        spec = tensor.dst_spec
        for box in cut_tiles(Box.whole(spec.stored_shape), spec.dtype.itemsize, tile_bytes):
            yield tensor, box


def _source_position(tensor: TensorPlan) -> tuple[int, int]:
    if not len(tensor.src):
        return 0, 0
    return int(tensor.src.file[0, 0]), int(tensor.src.start_bytes[0, 0])


def execute_reference(plan: Plan) -> None:
    """Carry out ``plan`` in one loop, the slow and obvious way; whole files are in memory."""
    src = [np.fromfile(Path(plan.src.root, f.path), np.uint8) for f in plan.src.files]
    dst = [np.fromfile(Path(plan.dst.root, f.path), np.uint8) for f in plan.dst.files]
    for tensor in plan.tensors:
        for op in tensor.ops():
            parts = [_elements(src, a, op.box) for a in op.srcs]
            result = _elements(dst, op.dsts[0], op.box)
            if op.codec == IDENTITY:
                result[...] = parts[0]
                continue
            for index in np.ndindex(*op.box.lengths):
                values = [int.from_bytes(bytes(part[index]), "little") for part in parts]
                bits = _decoded(op.codec, tensor.src.dtypes[0], *values)
                result[index] = list(bits.to_bytes(op.dsts[0].itemsize, "little"))
    for file, data in zip(plan.dst.files, dst, strict=True):
        Path(plan.dst.root, file.path).write_bytes(data.tobytes())


def _elements(files: Sequence[np.ndarray], where: Strided, box: Box) -> np.ndarray:
    """View the elements of a copy, one row of bytes each."""
    return np.lib.stride_tricks.as_strided(
        files[where.file][where.start_bytes :],
        shape=(*box.lengths, where.itemsize),
        strides=(*where.strides_bytes, 1),
    )


def _decoded(codec: str, kind: DType, first: int, second: int = 0) -> int:
    """Make the bits of one element from those of its parts, as each codec is defined."""
    if codec in {REMAINDER, REMAINDER_NEAREST_EVEN}:
        below_zero = second >= 0x8000
        whole = (first - below_zero) % 0x10000 << 16 | second
        return whole if codec == REMAINDER else _nearest_even(whole)
    if codec == HALF_AWAY:
        return (first + 0x8000) % 0x1_0000_0000 >> 16
    if codec == NEAREST_EVEN:
        return _nearest_even(first)
    wide = first << 16 if kind.name == "bfloat16" else _float16_as_float32(first)
    return wide if codec == WIDEN else _product(wide, second)


def _nearest_even(bits: int) -> int:
    if bits % 0x8000_0000 > 0x7F80_0000:
        return 0x7FC0
    kept, cut = divmod(bits, 0x10000)
    return kept + (cut > 0x8000 or (cut == 0x8000 and kept % 2 == 1))


def _float16_as_float32(bits: int) -> int:
    sign, magnitude = divmod(bits, 0x8000)
    if magnitude > 0x7C00:  # a NaN, made quiet
        return sign << 31 | 0x7FC0_0000 | magnitude % 0x400 << 13
    (value,) = struct.unpack("<e", bits.to_bytes(2, "little"))
    return int.from_bytes(struct.pack("<f", value), "little")


def _product(a: int, b: int) -> int:
    """Multiply two float32: in double precision that is exact, so it is rounded once."""
    x, y = struct.unpack("<2f", a.to_bytes(4, "little") + b.to_bytes(4, "little"))
    product = x * y
    if math.isnan(product):
        return 0x7FC0_0000
    try:
        return int.from_bytes(struct.pack("<f", product), "little")
    except OverflowError:  # struct's word for what rounds to infinity
        return 0xFF80_0000 if product < 0 else 0x7F80_0000
