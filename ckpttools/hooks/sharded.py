"""How is a training run saved, each rank its own part? Written per rank, published once.

1. All ranks describe the run to each other; from then on each knows the place of its own bytes.
2. Rank 0 makes the staging directory; every rank writes and syncs its own files there.
3. Checksums come together, rank 0 writes ``manifest.json``, and one rename publishes the whole.

An error on any rank is raised on all, and nothing is published.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ckpttools.errors import system_errors
from ckpttools.formats.native.files import Entry, RankFile, rank_files
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, StatedFile, manifest_document
from ckpttools.formats.native.objects import carried_documents
from ckpttools.hooks.run_state import known_layout, run_objects
from ckpttools.hooks.together import rank_of, together
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import WEIGHT
from ckpttools.optimizer import DistributedOptimizer
from ckpttools.optimizer.describe import dtype_name
from ckpttools.storage.commit import Staging
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import FilePool, create_file, write_new_file
from ckpttools.storage.sealed_json import sha256

BLOCK_BYTES = 8 << 20
"""How much is written, and summed, at once."""


@system_errors()
def save_sharded(
    directory: str | Path,
    optimizer: DistributedOptimizer,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, masters, moments, steps and groups in the native sharded form.

    A collective call of all ranks, which must see one filesystem. ``scheduler`` is plain data.
    ``carry`` is ``Restored.objects`` of the checkpoint that the run began with, so that what only
    a foreign format needs is not lost. Returns the directory.

    Raises:
        CkptError: any rank could not write; raised on every rank, and nothing was published.
    """
    place = Path(directory).absolute()
    optimizer.finish_param_sync()
    layout = known_layout(optimizer.describe(), carry)
    objects = run_objects(optimizer, iteration=iteration, scheduler=scheduler, carry=carry)
    with staged(place, optimizer, overwrite=overwrite) as root:
        found = together(optimizer, lambda: _write_rank(root, layout, optimizer))
        files = [file for mine in found.values() for file in mine]

        def finish() -> bool:
            if rank_of(optimizer) == 0:
                carried = carried_documents(objects)
                data = manifest_document(layout, files, objects, carried)
                write_new_file(root / MANIFEST_FILE, data)
            return True

        together(optimizer, finish)
    return place


@contextmanager
def staged(place: Path, optimizer: DistributedOptimizer, *, overwrite: bool) -> Iterator[Path]:
    """Give all ranks one staging directory; it becomes ``place`` if the body ends well everywhere.

    Raises:
        CkptError: rank 0 can't make or publish it; raised on every rank.
    """
    mine: list[Staging] = []
    first = rank_of(optimizer) == 0

    def enter() -> str:
        if not first:
            return ""
        entered = Staging(place, overwrite=overwrite).__enter__()
        mine.append(entered)
        return str(entered.path)

    def publish() -> bool:
        if first:
            mine[0].publish()
        return True

    try:
        root = Path(together(optimizer, enter)[0])
        yield root
        together(optimizer, publish)
    finally:
        if mine:
            mine[0].__exit__(None, None, None)


def local_tensor(entry: Entry, layout: ShardedLayout, optimizer: DistributedOptimizer) -> Tensor:
    """Return the live tensor whose elements a key holds, 1-D."""
    if entry.frozen is not None:
        name = layout.params[entry.frozen].name
        managed = next(one for one in optimizer.managed if one.name == name)
        return managed.param.data.reshape(-1)
    piece = entry.piece
    for buffer in optimizer.buffers:
        if piece is not None and (buffer.chunk, dtype_name(buffer.param_dtype)) == (
            piece.vpp,
            piece.dtype,
        ):
            shard = optimizer.shard_of(buffer.buckets[piece.bucket])
            if entry.slot == WEIGHT:
                return shard.bucket.local_params
            return shard.slots()[entry.slot]
    raise KeyError(entry.key)


def _write_rank(
    root: Path, layout: ShardedLayout, optimizer: DistributedOptimizer
) -> list[StatedFile]:
    """Write and sync this rank's files; return what vouches for them."""
    return [
        _write_file(root, file, layout, optimizer)
        for file in rank_files(layout, rank_of(optimizer))
    ]


def _write_file(
    root: Path, file: RankFile, layout: ShardedLayout, optimizer: DistributedOptimizer
) -> StatedFile:
    """Write one file: its header, then each key's elements, summed as they pass."""
    create_file(root / file.path, file.size_bytes)
    crcs: dict[str, int] = {}
    with FilePool(str(root), [file.path], writable=True) as pool:
        pool.write_at(0, 0, file.header)
        for entry in file.entries:
            crc, at = 0, entry.offset
            for block in _blocks(local_tensor(entry, layout, optimizer)):
                crc = crc32(block, crc)
                pool.write_at(0, at, block)
                at += len(block)
            crcs[entry.key] = crc
    with (root / file.path).open("rb") as written:
        os.fsync(written.fileno())
    return StatedFile(file.path, sha256(file.header), crcs)


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D tensor on the host, a bounded piece at a time."""
    step = max(1, BLOCK_BYTES // tensor.element_size())
    for low in range(0, tensor.numel(), step):
        part = tensor.detach()[low : low + step].cpu().contiguous()
        yield part.view(torch.uint8).numpy().data
