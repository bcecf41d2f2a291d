"""What is the content of a checkpoint, as a number that doesn't depend on its layout?

The digest of a tensor is the CRC-32C of its logical elements in row-major order, little-endian,
padding excluded, together with dtype, shape and byte count. That of a checkpoint is the SHA-256
over the sorted lines ``name slot dtype shape crc``.

Whoever holds a part of a tensor can take the part's share of its digest alone, and the shares of
all make the digest: a rank of a run so needs to tell the others one number for each tensor.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import google_crc32c
import numpy as np

from ckpttools.errors import LayoutError, MismatchError
from ckpttools.executor import Buffers, Progress, Resources, run_jobs
from ckpttools.formats import Finish, Written
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.flat import flat_range_of
from ckpttools.layout.runs import run_count
from ckpttools.manifest import Chunk, Manifest, TensorSpec
from ckpttools.plan import Pieces, Plan, pieces
from ckpttools.storage.crcfold import Share, fold, grid_share, join
from ckpttools.storage.local import FilePool
from ckpttools.tiles import Tile, cut_tiles, read_tile

_CALL_BYTES = 1 << 20
"""google-crc32c holds the interpreter's lock for a whole call: 1 MiB is an eighth of a ms."""


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The digest of one tensor."""

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    crc32c: int

    def line(self) -> str:
        """Return the line that the digest of a checkpoint is made of."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{json.dumps(self.name)} {self.slot} {self.dtype} {shape} {self.crc32c:08x}"


def checkpoint_digest(digests: Iterable[TensorDigest]) -> str:
    """Return the digest of a checkpoint of these tensors, as hexadecimal SHA-256."""
    lines = sorted(digest.line() for digest in digests)
    return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()


def crc32c(tile: Tile) -> int:
    """Return the CRC-32C of a contiguous tile's bytes."""
    return extended_crc32c(0, tile.reshape(-1).view(np.uint8).data)


def extended_crc32c(value: int, data: memoryview) -> int:
    """Return the CRC-32C of bytes that have the CRC-32C ``value`` and of ``data`` behind them."""
    for start in range(0, len(data), _CALL_BYTES):
        # bytes(): the library takes no other buffer.
        value = google_crc32c.extend(value, bytes(data[start : start + _CALL_BYTES]))
    return value


def box_share(spec: TensorSpec, box: Box, data: memoryview) -> Share:
    """Return what a box adds to a tensor's CRC-32C; ``data`` are its elements in row-major order.

    Raises:
        LayoutError: the box isn't one of logical elements, or has another size.
    """
    whole = Box.whole(spec.shape)
    runs = run_count(box, whole)
    itemsize = spec.dtype.itemsize
    strides = [stride * itemsize for stride in row_major_strides(spec.shape)]
    outer = 0 if runs < 2 else next(d for d in range(box.ndim) if prod(box.lengths[:d]) == runs)
    return grid_share(
        data,
        lengths=box.lengths[:outer],
        strides_bytes=strides[:outer],
        run_bytes=box.numel // max(1, runs) * itemsize,
        start_bytes=sum(o * s for o, s in zip(box.offsets, strides, strict=True)),
        total_bytes=spec.size_bytes,
        crcs=_run_crcs,
        polynomial="crc32c",
    )


def _run_crcs(data: memoryview, run_bytes: int) -> list[int]:
    """Return the CRC-32C of each run of so many bytes."""
    if run_bytes > _CALL_BYTES:
        starts = range(0, len(data), run_bytes)
        return [extended_crc32c(0, data[at : at + run_bytes]) for at in starts]
    copy, value = bytes(data), google_crc32c.value
    return [value(copy[at : at + run_bytes]) for at in range(0, len(copy), run_bytes)]


def joined_digest(spec: TensorSpec, shares: Iterable[Share]) -> int:
    """Return a tensor's CRC-32C from the shares of all who hold a part of it.

    Raises:
        LayoutError: together they don't hold each byte of it once.
    """
    try:
        return join(shares, total_bytes=spec.size_bytes, polynomial="crc32c")
    except LayoutError as error:
        raise LayoutError(f"{spec}: {error}") from error


class DigestLog:
    """Collects the CRC of tiles in any order, from any thread, and folds them by tensor."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, spec: TensorSpec, box: Box, tile: Tile) -> int:
        """Add a tile of the stored tensor; rows of padding in it are not counted.

        Returns the CRC-32C of what counts.
        """
        inside = box & Box.whole(spec.shape)
        crc = 0 if inside is None else crc32c(tile.reshape(-1)[: inside.numel])
        self.add_known(spec, box, crc)
        return crc

    def add_known(self, spec: TensorSpec, box: Box, crc: int) -> None:
        """Add a tile by the CRC-32C that :meth:`add` gave for it."""
        inside = box & Box.whole(spec.shape)
        if inside is None:
            return
        run = flat_range_of(inside, Box.whole(spec.shape))
        if run is None:  # cut_tiles gives nothing else
            raise AssertionError(f"{spec}: a tile must be one run, got {box}")
        itemsize = spec.dtype.itemsize
        with self._lock:
            rows = self._tiles.setdefault(spec.key, [])
            rows.append((run.start * itemsize, inside.numel * itemsize, crc))

    def result(self, specs: Iterable[TensorSpec]) -> tuple[TensorDigest, ...]:
        """Return the digest of each tensor."""
        return tuple(
            TensorDigest(s.name, s.slot, s.dtype.name, s.shape, self._fold(s)) for s in specs
        )

    def _fold(self, spec: TensorSpec) -> int:
        rows = np.array(self._tiles.get(spec.key, []), dtype=np.int64).reshape(-1, 3)
        return fold(
            rows[:, 0],
            rows[:, 1],
            rows[:, 2].astype(np.uint32),
            total_bytes=spec.size_bytes,
            polynomial="crc32c",
        )


def digest_manifest(
    manifest: Manifest, resources: Resources, progress: Progress | None = None
) -> tuple[TensorDigest, ...]:
    """Digest every tensor of a checkpoint, reading each logical byte once.

    Raises:
        StorageError: a file can't be read.
    """
    log = DigestLog()
    sides: list[tuple[TensorSpec, Pieces]] = [
        (spec, pieces([c for c in chunks if not c.replica_id], ndim=len(spec.shape)))
        for spec, chunks in zip(manifest.tensors, manifest.by_tensor(), strict=True)
    ]

    def jobs() -> Iterator[tuple[TensorSpec, Pieces, Box]]:
        for spec, side in sides:
            whole = Box.whole(spec.shape)
            for box in cut_tiles(whole, spec.dtype.itemsize, resources.tile_bytes):
                yield spec, side, box

    with FilePool(manifest.root, [f.path for f in manifest.files]) as pool:

        def work(job: tuple[TensorSpec, Pieces, Box], buffers: Buffers) -> None:
            spec, side, box = job
            tile = buffers.tile(box, spec.dtype.itemsize)
            read_tile(pool, side, box, tile, buffers.scratch)
            log.add(spec, box, tile)
            if progress is not None:
                progress(tile.nbytes)

        run_jobs(jobs(), work, resources)
    return log.result(manifest.tensors)


def differences(manifest: Manifest, resources: Resources) -> list[str]:
    """Return a line for each tensor whose digest isn't the one that its checkpoint states.

    Raises:
        StorageError: a file can't be read.
    """
    told = _told(manifest)
    return [
        f"{d.name} ({d.slot}): CRC-32C must be {told[d.name, d.slot]:08x}, got {d.crc32c:08x}"
        for d in digest_manifest(manifest, resources)
        if told.get((d.name, d.slot), d.crc32c) != d.crc32c
    ]


def stated(source: Manifest, plan: Plan) -> dict[tuple[str, str], int]:
    """Return the digests that a source states of what a plan copies as it is there.

    What the plan's view of the source rounds, widens or calls by another name is not among it.
    """
    told = _told(source)
    keys = [spec.key for spec in plan.dst.tensors if spec.key in told]
    if plan.src is source or not keys:
        return {key: told[key] for key in keys}
    known, seen = _stored(source), _stored(plan.src)
    return {key: told[key] for key in keys if key in known and known[key] == seen[key]}


def _stored(manifest: Manifest) -> dict[tuple[str, str], tuple[TensorSpec, list[Chunk]]]:
    """Return each tensor with where and how it is stored."""
    pairs = zip(manifest.tensors, manifest.by_tensor(), strict=True)
    return {spec.key: (spec, chunks) for spec, chunks in pairs}


def compared(
    finish: Callable[[Written], Finish], stated: Mapping[tuple[str, str], int], root: str
) -> Callable[[Written], Finish]:
    """Return a draft's last step, before which digests are held against those of the source.

    Where a draft wants none, there are none to compare.
    """

    def compare(written: Written) -> Finish:
        for (name, slot), crc in written.digests.items():
            expected = stated.get((name, slot), crc)
            if expected != crc:
                raise MismatchError(
                    f"{root}: {name} ({slot}): content must have the CRC-32C {expected:08x} that "
                    f"it had when it was saved, got {crc:08x}",
                    hint="the source is damaged, or was changed since",
                )
        return finish(written)

    return compare


def _told(manifest: Manifest) -> Mapping[tuple[str, str], int]:
    """Return the digests that a checkpoint states."""
    told = manifest.objects.get("digests")
    return told if isinstance(told, Mapping) else {}
