"""What is the content of a checkpoint, as a number that doesn't depend on its layout?

The digest of a tensor is the CRC-32C of its logical elements in row-major order, little-endian,
padding excluded, together with dtype, shape and byte count. That of a checkpoint is the SHA-256
over the sorted lines ``name slot dtype shape crc``.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np

from ckpttools.executor import Buffers, Progress, Resources, run_jobs
from ckpttools.layout.box import Box
from ckpttools.layout.flat import flat_range_of
from ckpttools.manifest import Manifest, TensorSpec
from ckpttools.plan import Pieces, pieces
from ckpttools.storage.crcfold import fold
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
    data = tile.reshape(-1).view(np.uint8).data
    value = 0
    for start in range(0, len(data), _CALL_BYTES):
        # bytes(): the library takes no other buffer.
        value = google_crc32c.extend(value, bytes(data[start : start + _CALL_BYTES]))
    return value


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
