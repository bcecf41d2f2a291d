"""Which elements in memory are which box of a whole tensor? Flat state, seen tile by tile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ckpttools.layout.box import Box
from ckpttools.layout.sharded import ShardedParam
from ckpttools.layout.sharded_pieces import whole_regions
from ckpttools.manifest import boxes_of
from ckpttools.tiles import Tile, carrier, cut_tiles


def tiles_of(
    flat: Tensor,
    param: ShardedParam,
    *,
    tp: int,
    tp_size: int,
    start: int,
    stop: int,
    tile_bytes: int,
) -> Iterator[tuple[Box, Tile]]:
    """Yield (tile of the whole tensor, its elements in ``flat`` as a view).

    ``flat`` is 1-D on the host: elements ``start`` to ``stop`` of the flattened local tensor of a
    parameter on tensor rank ``tp``. The tiles cover them exactly once.
    """
    itemsize = flat.element_size()
    memory = flat.view(torch.uint8).numpy().view(carrier(itemsize))
    for found in whole_regions(param, tp=tp, tp_size=tp_size, start=start, stop=stop):
        at = found.at
        for box in boxes_of(found.region):
            if found.strides is None:
                view = memory[at : at + box.numel].reshape(box.lengths)
                at += box.numel
            else:
                steps = tuple(stride * itemsize for stride in found.strides)
                view = np.lib.stride_tricks.as_strided(memory[at:], box.lengths, steps)
            for tile in cut_tiles(box, itemsize, tile_bytes):
                yield tile, _part(view, box, tile)


def _part(view: Tile, box: Box, tile: Box) -> Tile:
    """Return the part of ``view`` (which is ``box``) that is ``tile``."""
    place = tuple(
        slice(t - b, t - b + n)
        for t, b, n in zip(tile.offsets, box.offsets, tile.lengths, strict=True)
    )
    return view[place] if place else view
