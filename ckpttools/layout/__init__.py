"""Which elements does a piece hold, and where in a buffer do they lie?

The algebra of layouts, in pure integers: a `Box` is a rectangle of a tensor's index space, a
`FlatRange` a slice of the row-major flattening of a box, `runs` the contiguous stretches that a
box makes in a buffer. `local_box` and `shard_boxes` say which boxes a rank holds, `check_cover`
proves that boxes tile a whole. Empty boxes, 0-d tensors and tensors with fewer elements than
ranks are ordinary values everywhere.
"""

from __future__ import annotations

from ckpttools.layout.blocks import BlockPiece, Blocks, local_shape, shard_boxes
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.cover import check_cover
from ckpttools.layout.flat import FlatRange, flat_range_of
from ckpttools.layout.mesh import Mesh, Placement, Replicate, Shard, chunk_range, local_box
from ckpttools.layout.runs import run_count, runs

__all__ = [
    "BlockPiece",
    "Blocks",
    "Box",
    "FlatRange",
    "Mesh",
    "Placement",
    "Replicate",
    "Shard",
    "check_cover",
    "chunk_range",
    "flat_range_of",
    "local_box",
    "local_shape",
    "row_major_strides",
    "run_count",
    "runs",
    "shard_boxes",
]
