"""Which work is this, what of it is done, and is the source still what it was?

A job is identified by its source files (size and time of change), its plan and its headers. What
an earlier run of the same job has finished is read back before it counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ckpttools.errors import MismatchError, StorageError
from ckpttools.executor import Buffers, Progress, Resources, run_jobs
from ckpttools.formats import Draft
from ckpttools.manifest import File, Manifest
from ckpttools.plan import Plan
from ckpttools.storage.crc import crc32
from ckpttools.storage.journal import Done, Piece
from ckpttools.storage.local import FilePool, create_file
from ckpttools.version import VERSION

Stamps = tuple[tuple[str, int, int], ...]
"""Path, size and time of change (ns) of every file of a checkpoint."""


def job_of(stamps: Stamps, draft: Draft, plan: Plan, resources: Resources) -> str:
    """Return what identifies a piece of work: equal for the same source, plan and tiles.

    A source that has changed since (by size or time of change) makes other work of it.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    add(VERSION, resources.tile_bytes, os.path.realpath(plan.src.root))
    add(stamps)
    add(draft.manifest.format, [(f.path, f.size_bytes) for f in draft.manifest.files])
    for patch in draft.patches:
        add(patch.file, patch.offset)
        digest.update(patch.data)
    for tensor in plan.tensors:
        add(tensor.src_spec, tensor.dst_spec)
        add(tensor.src.codec, *map(str, tensor.src.dtypes))
        for side in (tensor.src, tensor.dst):
            for column in (side.offsets, side.lengths, side.file, side.start_bytes):
                digest.update(column.tobytes())
            digest.update(side.strides_bytes.tobytes())
    return digest.hexdigest()


def stamp_of(manifest: Manifest) -> Stamps:
    """Return path, size and time of change (ns) of every file.

    Raises:
        StorageError: one is gone.
    """
    stamps = []
    for file in manifest.files:
        place = Path(manifest.root, file.path)
        try:
            status = place.stat()
        except OSError as error:
            raise StorageError(f"{place}: must be there, got: {error.strerror}") from error
        stamps.append((file.path, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def check_unchanged(manifest: Manifest, stamps: Stamps) -> None:
    """Refuse a source that was written to since ``stamps`` were taken.

    Raises:
        MismatchError: a file has another size or time of change.
    """
    for before, now in zip(stamps, stamp_of(manifest), strict=True):
        if before != now:
            place = Path(manifest.root, before[0])
            raise MismatchError(f"{place}: must not change while it is read, got a change")


def is_whole(root: Path, file: File) -> bool:
    """Say whether a file of an earlier run has its full size."""
    place = root / file.path
    return place.is_file() and place.stat().st_size == file.size_bytes


def make_files(manifest: Manifest) -> None:
    """Create every file that isn't there in full size, and remove what is none of the Manifest's.

    Raises:
        StorageError: the system refuses.
    """
    root = Path(manifest.root)
    known = {root / file.path for file in manifest.files}
    for place in [place for place in root.rglob("*") if not place.is_dir()]:
        if place not in known:
            new_place(place)
    for file in manifest.files:
        if not is_whole(root, file):
            create_file(new_place(root / file.path), file.size_bytes)


def new_place(place: Path) -> Path:
    """Return the place of a file to be made: its directory is there, and the file is not.

    Raises:
        StorageError: the system refuses.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{place}: can't make place for it: {reason}") from error
    return place


def proven(
    manifest: Manifest, known: Sequence[Done], resources: Resources, progress: Progress | None
) -> list[Done]:
    """Return the finished tiles whose bytes are still those that were written.

    What can't be read back is not finished. ``progress`` is told of bytes as :func:`bytes_of`
    counts them.
    """
    good: list[Done] = []
    with FilePool(manifest.root, [f.path for f in manifest.files]) as pool:

        def read(done: Done, buffers: Buffers) -> None:
            if all(_is_there(manifest, pool, piece, buffers) for piece in done.pieces):
                good.append(done)
            if progress is not None:
                progress(bytes_of([done]))

        run_jobs(known, read, resources)
    return good


def bytes_of(known: Sequence[Done]) -> int:
    """Return the bytes of all pieces of finished tiles."""
    return sum(piece.length for done in known for piece in done.pieces)


def _is_there(manifest: Manifest, pool: FilePool, piece: Piece, buffers: Buffers) -> bool:
    """Say whether a piece lies where it was written, unchanged."""
    data = buffers.scratch[: piece.length]
    if piece.file >= len(manifest.files) or piece.length > len(data):
        return False
    try:
        pool.read_into(piece.file, piece.offset, data)
    except StorageError:
        return False
    return crc32(data) == piece.crc32


def staging_notes(reused: int, others: Sequence[str], *, resume: bool) -> tuple[str, ...]:
    """Say what of an earlier run was found beside the destination."""
    notes = []
    if reused:
        notes.append(f"resumed: {reused} tiles of an earlier run were still right")
    elif resume:
        notes.append("nothing to resume: no earlier run of this work left a finished tile")
    notes += [f"{name} beside the destination is of other work, left alone" for name in others]
    return tuple(notes)
