"""Which box of a tensor does a rank hold?

Ranks form a grid, the `Mesh`; a tensor has one placement for each of its dimensions. Following
the mesh dimensions in order, `Shard(dim)` cuts what is left of that tensor dimension by
torch.chunk's rule and keeps the piece at the rank's coordinate, `Replicate` keeps all. This is
what torch's DTensor does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut the tensor along one of its dimensions over the ranks of a mesh dimension."""

    dim: int
    """The tensor dimension, counted from 0."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise LayoutError(f"Shard: dim must be >= 0, got {self.dim}")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Give each rank of a mesh dimension the same elements."""


Placement: TypeAlias = Shard | Replicate


@dataclass(frozen=True, slots=True)
class Mesh:
    """Arrange ranks in a named grid, row-major: the last name varies fastest.

    Raises LayoutError unless the names differ and each has a size of at least 1. A mesh without
    dimensions has one rank.

    >>> mesh = Mesh(("dp", "tp"), (3, 2))
    >>> mesh.coordinates(4)
    {'dp': 2, 'tp': 0}
    >>> mesh.rank({"tp": 0, "dp": 2})
    4
    """

    names: tuple[str, ...]
    """Name of each mesh dimension."""
    shape: tuple[int, ...]
    """Count of ranks along each mesh dimension."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shape):
            raise LayoutError(
                f"Mesh: each name must have one size, got {self.names} and {self.shape}"
            )
        if len(set(self.names)) != len(self.names):
            raise LayoutError(f"Mesh: names must differ, got {self.names}")
        if min(self.shape, default=1) < 1:
            raise LayoutError(f"Mesh: sizes must be >= 1, got {self.shape}")

    @property
    def size(self) -> int:
        """Count of ranks."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each mesh dimension, in the order of the names.

        Raises LayoutError unless ``0 <= rank < size``.
        """
        if not 0 <= rank < self.size:
            raise LayoutError(f"Mesh: rank must be in 0..{self.size - 1}, got {rank}")
        places: list[int] = []
        for length in reversed(self.shape):
            rank, place = divmod(rank, length)
            places.append(place)
        return dict(zip(self.names, reversed(places), strict=True))

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates, the inverse of `coordinates`.

        Raises LayoutError unless there is one coordinate for each name, inside the mesh.
        """
        if coordinates.keys() != set(self.names):
            raise LayoutError(f"Mesh: coordinates must name {self.names}, got {tuple(coordinates)}")
        rank = 0
        for name, length in zip(self.names, self.shape, strict=True):
            place = coordinates[name]
            if not 0 <= place < length:
                raise LayoutError(
                    f"Mesh: coordinate {name} must be in 0..{length - 1}, got {place}"
                )
            rank = rank * length + place
        return rank


def chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return ``(offset, length)`` of one part of a dimension cut by torch.chunk's rule.

    All parts have ``ceil(length / parts)`` indices, but trailing ones are short or empty; an
    empty part lies at the end. (torch.chunk leaves empty parts out.) Raises LayoutError unless
    ``length >= 0``, ``parts >= 1`` and ``0 <= index < parts``.

    >>> [chunk_range(5, 4, index) for index in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    if length < 0:
        raise LayoutError(f"chunk_range: length must be >= 0, got {length}")
    if parts < 1:
        raise LayoutError(f"chunk_range: parts must be >= 1, got {parts}")
    if not 0 <= index < parts:
        raise LayoutError(f"chunk_range: index must be in 0..{parts - 1}, got {index}")
    size = -(-length // parts)
    offset = min(index * size, length)
    return offset, min(size, length - offset)


def local_box(
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    coordinates: Mapping[str, int],
) -> Box:
    """Return the box of a tensor that the rank at these coordinates holds.

    ``placements`` has one entry for each mesh dimension. Several may cut the same tensor
    dimension: each cuts the piece that the one before left. The box is empty where there are
    fewer indices than ranks. Raises LayoutError where placements and mesh, a `Shard` and the
    shape, or coordinates and mesh don't fit.

    >>> mesh = Mesh(("dp", "tp"), (2, 3))
    >>> print(local_box((7, 4), mesh, (Shard(0), Shard(0)), {"dp": 1, "tp": 0}))
    [4:5, 0:4]
    """
    mesh.rank(coordinates)
    if len(placements) != len(mesh.names):
        raise LayoutError(
            f"local_box: each of {mesh.names} must have one placement, got {tuple(placements)}"
        )
    offsets, lengths = [0] * len(shape), list(shape)
    for name, parts, placement in zip(mesh.names, mesh.shape, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        if dim >= len(shape):
            raise LayoutError(f"local_box: {placement} must be a dim of {tuple(shape)}, got {dim}")
        start, lengths[dim] = chunk_range(lengths[dim], parts, coordinates[name])
        offsets[dim] += start
    return Box(tuple(offsets), tuple(lengths))
