"""How does sharded state become whole tensors while a run goes on? Through DP rank zero, streamed.

1. The run describes itself as a Manifest of files that needn't exist, the target format lays its
   files out: every rank comes to the same draft.
2. A bucket at a time the state comes to data-parallel rank zero of each model part, in bounded
   pieces, and goes straight to its places in the draft's files.
3. Rank 0 reads the files back for checksums and digests, finishes them, and publishes all by one
   rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ckpttools.conversion import patch
from ckpttools.digests import digest_manifest
from ckpttools.errors import UsageError, system_errors
from ckpttools.executor import Resources
from ckpttools.formats import Draft, Target, Written, registry
from ckpttools.formats.native.files import rank_files
from ckpttools.formats.native.places import build_manifest
from ckpttools.formats.native.read import describe_layout
from ckpttools.hooks.regions import tiles_of
from ckpttools.hooks.run_state import known_layout, run_objects
from ckpttools.hooks.sharded import staged
from ckpttools.hooks.together import rank_of, together
from ckpttools.job import make_files, new_place
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import MASTER, WEIGHT, Manifest
from ckpttools.optimizer import Gathered, ShardedOptimizer, gather_to_zero
from ckpttools.optimizer.describe import sharded_param
from ckpttools.plan import Pieces, make_plan, pieces
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import FilePool, write_new_file
from ckpttools.tiles import write_tile

SCRATCH_BYTES = 32 << 20


@system_errors()
def save_gathered(
    directory: str | Path,
    optimizer: ShardedOptimizer,
    *,
    to: str = "safetensors",
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save whole tensors, or another format that is written here, from a running optimizer.

    A collective call of all ranks. No rank needs more than one bucket of memory beside what it
    has. ``to`` is ``safetensors``, ``zarr`` or ``megatron`` (for a run that began with a Megatron
    checkpoint, whose objects are given as ``carry``). ``extra`` are further objects of the
    checkpoint, equal on every rank. Returns the directory.

    Raises:
        UsageError: the format can't hold the run.
        CkptError: any rank could not write; raised on every rank, and nothing was published.
    """
    formats = registry()
    if to not in formats:
        raise UsageError(f"to: must be one of {', '.join(formats)}, got {to!r}")
    place = Path(directory).absolute()
    optimizer.finish_param_sync()
    layout = known_layout(optimizer.describe(), carry)
    objects = run_objects(optimizer, iteration=iteration, scheduler=scheduler, carry=carry)
    objects.update(extra or {})
    source = live_manifest(layout, objects)
    draft = formats[to].lay_out(source, Target(), "")
    if draft.source is not None:
        raise UsageError(
            f"to {to}: weights must be written as the run has them, got a format that rounds them "
            f"otherwise",
            hint="save with save_sharded, and convert the directory with `ckpttools reshard`",
        )
    make_plan(source, draft.manifest, left_out=draft.left_out)  # proves the cover
    with staged(place, optimizer, overwrite=overwrite) as root:
        draft = replace(draft, manifest=replace(draft.manifest, root=str(root)))
        together(optimizer, lambda: _begin(draft, optimizer))
        _write(draft, layout, optimizer)
        together(optimizer, lambda: _finish(draft, optimizer))
    return place


def live_manifest(layout: ShardedLayout, objects: Mapping[str, object]) -> Manifest:
    """Return the Manifest of the files that all ranks would write now."""
    ranks = range(layout.topology.world_size)
    files = [file for rank in ranks for file in rank_files(layout, rank)]
    told = {**objects, **describe_layout(layout)}
    return build_manifest(layout, files, "", told, with_aliases=True)


def _begin(draft: Draft, optimizer: ShardedOptimizer) -> bool:
    """Make the files in full size, with what is known of them."""
    if rank_of(optimizer) == 0:
        make_files(draft.manifest)
        patch(draft, draft.patches)
    return True


def _write(draft: Draft, layout: ShardedLayout, optimizer: ShardedOptimizer) -> None:
    """Bring the state to data-parallel rank zero and write it from there."""
    del layout
    paths = [file.path for file in draft.manifest.files]
    with FilePool(draft.manifest.root, paths, writable=True) as pool:
        writer = _Writer(pool, draft.manifest, optimizer)
        gather_to_zero(optimizer, writer.write)
        together(optimizer, writer.write_frozen)


class _Writer:
    """Writes gathered stretches of this rank's model part to their places in whole tensors."""

    def __init__(self, pool: FilePool, manifest: Manifest, optimizer: ShardedOptimizer) -> None:
        self.pool = pool
        self.optimizer = optimizer
        self.chunks = manifest.by_tensor()
        self.tensors = manifest.tensors
        self.index = manifest.index()
        self.columns: dict[int, Pieces] = {}
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))

    def write(self, got: Gathered) -> None:
        """Write one stretch: every parameter that has elements in it."""
        buffer = self.optimizer.buffers[got.buffer]
        low = buffer.layout.bucket_starts[got.bucket] + got.start
        high = low + got.data.numel()
        for slot, start in zip(buffer.slots, buffer.layout.starts, strict=True):
            first, last = max(low, start), min(high, start + slot.param.numel())
            if first < last:
                part = got.data[first - low : last - low]
                self._write(slot.name, got.slot, first - start, last - start, part)
                if got.slot == WEIGHT and buffer.param_dtype == torch.float32:
                    # The master of an fp32 parameter is its weight, whichever kind shards it.
                    self._write(slot.name, MASTER, first - start, last - start, part)

    def write_frozen(self) -> bool:
        """Write the parameters that are in no buffer; they are whole on every rank."""
        if self.optimizer.dp.rank == 0:
            for managed in self.optimizer.managed:
                if managed.name not in self.optimizer.trains:
                    flat = managed.param.data.reshape(-1).cpu()
                    self._write(managed.name, WEIGHT, 0, flat.numel(), flat)
        return True

    def _write(self, name: str, slot: str, start: int, stop: int, data: torch.Tensor) -> None:
        """Write elements ``start`` to ``stop`` of a flattened local tensor."""
        optimizer = self.optimizer
        managed = next(one for one in optimizer.managed if one.name == name)
        param = sharded_param(managed, optimizer.tp.size, optimizer.trains)
        key = param.canonical, slot
        if param.split is None and optimizer.tp.rank > 0:
            return  # an equal copy, which tensor rank 0 writes
        if param.tied_to or key not in self.index:
            return
        i = self.index[key]
        if i not in self.columns:
            self.columns[i] = pieces(self.chunks[i], ndim=len(self.tensors[i].shape))
        for tile, view in tiles_of(
            data.contiguous(),
            param,
            tp=optimizer.tp.rank,
            tp_size=optimizer.tp.size,
            start=start,
            stop=stop,
            tile_bytes=SCRATCH_BYTES,
        ):
            values = np.ascontiguousarray(view).reshape(tile.lengths)
            write_tile(self.pool, self.columns[i], tile, values, self.scratch, _ignore)


def _ignore(file: int, offset: int, data: memoryview) -> None:
    """Take note of nothing: several ranks write, so sums are taken when all is there."""


def _finish(draft: Draft, optimizer: ShardedOptimizer) -> bool:
    """Read the files back for their sums, and write what depends on them."""
    if rank_of(optimizer) != 0:
        return True
    root = Path(draft.manifest.root)
    sums = {}
    if draft.wants_digests:
        found = digest_manifest(draft.manifest, Resources())
        sums = {(one.name, one.slot): one.crc32c for one in found}
    finish = draft.finish(Written(_seals(draft), sums))
    patch(draft, finish.patches)
    for new in finish.new_files:
        write_new_file(new_place(root / new.path), new.data)
    return True


def _seals(draft: Draft) -> list[int]:
    """Return the CRC-32 of each extent that the format seals."""
    paths = [file.path for file in draft.manifest.files]
    block = bytearray(SCRATCH_BYTES)
    sums = []
    with FilePool(draft.manifest.root, paths) as pool:
        for extent in draft.seals:
            crc = 0
            for low in range(0, extent.length, len(block)):
                view = memoryview(block)[: min(len(block), extent.length - low)]
                pool.read_into(extent.file, extent.offset + low, view)
                crc = crc32(view, crc)
            sums.append(crc)
    return sums
