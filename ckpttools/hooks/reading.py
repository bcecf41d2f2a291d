"""How do boxes of a checkpoint's tensors come into fresh memory? A tile at a time, once each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckpttools.hooks.placements import HeldBox
from ckpttools.manifest import Manifest
from ckpttools.plan import Pieces, pieces
from ckpttools.storage.local import FilePool
from ckpttools.tiles import carrier, cut_tiles, read_tile

SCRATCH_BYTES = 16 << 20

MOST_READ = 1.1
"""What a rank reads at most, in units of what it takes.

All ranks of a run read at once, perhaps over a network: what lies between is read along only where
that is little, and there are as many system calls as runs otherwise.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Boxes of the tensor with index ``tensor``, and memory of their local shape for them.

    ``fresh`` is dense, on the host, and has the dtype of the tensor.
    """

    tensor: int
    boxes: tuple[HeldBox, ...]
    fresh: Tensor


def read_wanted(manifest: Manifest, wanted: Iterable[Want]) -> int:
    """Fill the memory of every want; return how many bytes were read.

    Raises:
        StorageError: a file can't be read.
    """
    chunks = manifest.by_tensor()
    columns: dict[int, Pieces] = {}
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    with FilePool(manifest.root, [file.path for file in manifest.files]) as pool:
        for want in wanted:
            i = want.tensor
            if i not in columns:
                primaries = [chunk for chunk in chunks[i] if chunk.replica_id == 0]
                columns[i] = pieces(primaries, ndim=len(manifest.tensors[i].shape))
            _read(pool, columns[i], want, scratch)
        return pool.read_bytes


def _read(pool: FilePool, columns: Pieces, want: Want, scratch: memoryview) -> None:
    memory = elements(want.fresh)
    for held in want.boxes:
        stops = map(int.__add__, held.local_offsets, held.box.lengths)
        place = tuple(map(slice, held.local_offsets, stops))
        view = memory[place] if place else memory
        for tile in cut_tiles(held.box, memory.itemsize, SCRATCH_BYTES):
            part = tile.relative_to(held.box).slices
            read_tile(pool, columns, tile, view[part] if part else view, scratch, MOST_READ)


def elements(dense: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    """View a dense tensor on the host as numbers that carry the bits of its elements."""
    flat = dense.reshape(-1).view(torch.uint8).numpy().view(carrier(dense.element_size()))
    return flat.reshape(tuple(dense.shape))
