"""Which boxes of a fused tensor does a tensor-parallel rank hold?

A fused dimension is a concatenation of sub-blocks (gate then up; query, key, value). Each
sub-block is cut evenly over the ranks, and a rank's tensor is its parts of them, concatenated:

    global   g0 g1 g2 g3 | u0 u1 u2 u3      weights (1, 1), 2 parts
    rank 0   g0 g1 | u0 u1                  rank 1   g2 g3 | u2 u3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.mesh import chunk_range


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Map a stretch of a rank's dimension to the same stretch of the global dimension."""

    local_offset: int
    """First index along the rank's dimension."""
    global_offset: int
    """First index along the global dimension."""
    length: int
    """Count of indices."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Divide a fused dimension into sub-blocks whose lengths are in these proportions.

    ``(1,)`` is a dimension that is not fused, ``(1, 1)`` is SwiGLU's gate and up. Raises
    LayoutError unless there is a weight and each is at least 1.

    >>> Blocks((4, 1, 1)).lengths(12)
    (8, 2, 2)
    >>> Blocks((1, 1)).pieces(8, parts=2, index=1)  # doctest: +NORMALIZE_WHITESPACE
    (BlockPiece(local_offset=0, global_offset=2, length=2),
     BlockPiece(local_offset=2, global_offset=6, length=2))
    """

    weights: tuple[int, ...]
    """Proportions of the sub-blocks, in the order in which they are concatenated."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise LayoutError(f"Blocks: there must be at least one weight, got {self.weights}")
        if min(self.weights) < 1:
            raise LayoutError(f"Blocks: weights must be >= 1, got {self.weights}")

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the length of each sub-block of a dimension; they add up to ``length``.

        Raises LayoutError unless the sum of the weights divides ``length``.
        """
        unit, rest = divmod(length, sum(self.weights))
        if rest or length < 0:
            raise LayoutError(
                f"Blocks{self.weights}: length must be a multiple of {sum(self.weights)}, "
                f"got {length}"
            )
        return tuple(weight * unit for weight in self.weights)

    def pieces(self, length: int, parts: int, index: int) -> tuple[BlockPiece, ...]:
        """Return what one rank of ``parts`` holds: one piece of each sub-block, in order.

        The pieces are side by side in the rank's dimension of ``length / parts`` indices, and
        those of all ranks cover the global dimension exactly once. Raises LayoutError unless
        each sub-block divides by ``parts`` and ``0 <= index < parts``.
        """
        found: list[BlockPiece] = []
        local_offset = block_offset = 0
        for block_length in self.lengths(length):
            start, count = chunk_range(block_length, parts, index)
            if block_length % parts:
                raise LayoutError(
                    f"Blocks{self.weights}: each sub-block of {length} must divide by {parts}, "
                    f"got {block_length}"
                )
            found.append(BlockPiece(local_offset, block_offset + start, count))
            local_offset += count
            block_offset += block_length
        return tuple(found)


def shard_boxes(
    shape: Sequence[int], dim: int, blocks: Blocks, parts: int, index: int
) -> tuple[tuple[Box, Box], ...]:
    """Return ``(local box, global box)`` pairs of the elements that one rank of ``parts`` holds.

    Both boxes of a pair have the same lengths. The local boxes tile the rank's tensor (of
    `local_shape`) in order; the global boxes of all ranks tile the tensor of ``shape``. Pieces
    that are neighbours in both are one pair, so there is always at least one pair, and
    ``parts == 1`` gives one, the whole. Raises LayoutError as `Blocks.pieces` does, and where
    there is no such dimension.

    >>> for local, whole in shard_boxes((3, 8), 1, Blocks((1, 1)), parts=2, index=1):
    ...     print(local, whole)
    [0:3, 0:2] [0:3, 2:4]
    [0:3, 2:4] [0:3, 6:8]
    """
    _check_dim("shard_boxes", shape, dim)
    pieces: list[BlockPiece] = []
    for piece in blocks.pieces(shape[dim], parts, index):
        last = pieces[-1] if pieces else None
        # Neighbours in the rank's tensor they always are.
        if last is not None and last.global_offset + last.length == piece.global_offset:
            pieces[-1] = BlockPiece(
                last.local_offset, last.global_offset, last.length + piece.length
            )
        else:
            pieces.append(piece)
    return tuple(
        (
            _slab(shape, dim, piece.local_offset, piece.length),
            _slab(shape, dim, piece.global_offset, piece.length),
        )
        for piece in pieces
    )


def local_shape(shape: Sequence[int], dim: int, parts: int) -> tuple[int, ...]:
    """Return the shape of each rank's tensor where a dimension is cut evenly over ``parts``.

    Raises LayoutError unless there is such a dimension and ``parts`` divides it.

    >>> local_shape((3, 8), 1, parts=2)
    (3, 4)
    """
    _check_dim("local_shape", shape, dim)
    if parts < 1 or shape[dim] % parts:
        raise LayoutError(
            f"local_shape: parts must divide dim {dim} of {tuple(shape)}, got {parts}"
        )
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _slab(shape: Sequence[int], dim: int, start: int, length: int) -> Box:
    offsets, lengths = [0] * len(shape), list(shape)
    offsets[dim], lengths[dim] = start, length
    return Box(tuple(offsets), tuple(lengths))


def _check_dim(where: str, shape: Sequence[int], dim: int) -> None:
    if not 0 <= dim < len(shape):
        raise LayoutError(f"{where}: dim must be in 0..{len(shape) - 1}, got {dim}")
