"""How is a plan carried out within a byte budget?

:func:`execute` walks the tensors tile by tile in the order of the source files; worker threads
each own one pair of buffers that they reuse, so memory is bounded by the budget whatever the
size. :func:`execute_reference` is the definition: one loop over the plan's copies. On every plan
both write the same bytes.

An executor knows no format. It returns the CRC-32 of every extent that it is asked for, folded
from the pieces as they were written, so a format can put checksums into its files.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpttools.errors import PlanError
from ckpttools.layout.box import Box
from ckpttools.manifest import Extent, TensorSpec
from ckpttools.plan import Plan, Strided, TensorPlan
from ckpttools.storage.crcfold import fold
from ckpttools.storage.local import FilePool
from ckpttools.tiles import Tile, carrier, cut_tiles, read_tile, write_tile

DEFAULT_BUDGET_BYTES = 1 << 30
MAX_TILE_BYTES = 4 << 20
"""Tiles above this gain nothing: a system call is long amortised and the cache is left."""

MIN_TILE_BYTES = 4 << 10

Job = TypeVar("Job")

OnTile = Callable[[TensorSpec, Box, Tile], None]

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
    """Every piece of payload that was written: file, offset, length, CRC-32 of it."""

    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)

    def record(self, file: int, offset: int, data: memoryview) -> None:
        """Note a write. Appending to a list is atomic, so threads may share a log."""
        self.pieces.append((file, offset, len(data), zlib.crc32(data)))

    def crc32(self, extents: Sequence[Extent]) -> list[int]:
        """Return the CRC-32 of each extent; bytes that nobody wrote are zero."""
        rows = np.array(sorted(self.pieces), dtype=np.int64).reshape(-1, 4)
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
    on_tile: OnTile | None = None,
    progress: Progress | None = None,
) -> WriteLog:
    """Carry out ``plan``. The destination's files exist, full-sized and zero.

    ``on_tile`` is shown every tile of every tensor once, by any thread.

    Raises:
        StorageError: a file can't be read or written.
    """
    log = WriteLog()
    src_paths = [f.path for f in plan.src.files]
    dst_paths = [f.path for f in plan.dst.files]
    with (
        FilePool(plan.src.root, src_paths) as src_pool,
        FilePool(plan.dst.root, dst_paths, writable=True) as dst_pool,
    ):

        def copy(job: tuple[TensorPlan, Box], buffers: Buffers) -> None:
            tensor, box = job
            itemsize = tensor.dst_spec.dtype.itemsize
            tile = buffers.tile(box, itemsize)
            if tensor.fresh_rows:
                tile[...] = 0
            read_tile(src_pool, tensor.src, box, tile, buffers.scratch)
            write_tile(dst_pool, tensor.dst, box, tile, buffers.scratch, log.record)
            if on_tile is not None:
                on_tile(tensor.dst_spec, box, tile)
            if progress is not None:
                progress(box.numel * itemsize)

        run_jobs(_jobs(plan, resources.tile_bytes), copy, resources)
    return log


def run_jobs(
    jobs: Iterable[Job], work: Callable[[Job, Buffers], None], resources: Resources
) -> None:
    """Do ``work`` for every job on the worker threads; the first error stops all and is raised."""
    buffers = Buffers(resources.tile_bytes)
    stop = threading.Event()
    lock = threading.Lock()
    queue = iter(jobs)

    def worker() -> None:
        try:
            while not stop.is_set():
                with lock:
                    batch = list(islice(queue, 4))
                if not batch:
                    return
                for job in batch:
                    work(job, buffers)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(resources.workers) as executor:
        futures = [executor.submit(worker) for _ in range(resources.workers)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()


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
    for op in plan.ops():
        for a, b in zip(op.srcs, op.dsts, strict=True):
            _elements(dst, b, op.box)[...] = _elements(src, a, op.box)
    for file, data in zip(plan.dst.files, dst, strict=True):
        Path(plan.dst.root, file.path).write_bytes(data.tobytes())


def _elements(files: Sequence[np.ndarray], where: Strided, box: Box) -> np.ndarray:
    """View the elements of a copy, one row of bytes each."""
    return np.lib.stride_tricks.as_strided(
        files[where.file][where.start_bytes :],
        shape=(*box.lengths, where.itemsize),
        strides=(*where.strides_bytes, 1),
    )
