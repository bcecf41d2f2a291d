"""Which files hold a checkpoint as one zarr v3 group? Places of chunks; names of arrays.

::

    zarr.json                         attributes: what state.json says in the safetensors form
    model/<name>/zarr.json            one array a weight; c/<i>/<j> its chunks
    optimizer/<name>/<slot>/…         one array a slot

Chunks are whole rows, uncompressed and little-endian, and every one is written, also if it is
all zero. Rows are chosen so that they divide where that is possible; else the last chunk's file
is filled up with zeros. bfloat16 and float8 are stored as uint16 and uint8 with the attribute
``ckpttools_dtype``. Source: the zarr v3 core specification; zarr-python 3.1 has no such dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from ckpttools.errors import UsageError
from ckpttools.layout.box import Box
from ckpttools.manifest import WEIGHT, TensorSpec

CHUNK_BYTES = 64 << 20
"""Chunks are about this large: a reader holds one whole chunk in memory."""

ROOT = "zarr.json"
DTYPE_ATTRIBUTE = "ckpttools_dtype"
_CARRIERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array: its path in the group, and how many leading rows a chunk has."""

    spec: TensorSpec
    path: str
    rows: int

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a chunk, which zarr wants to be at least 1 everywhere."""
        return (self.rows, *(max(1, n) for n in self.spec.shape[1:])) if self.spec.shape else ()

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk's file."""
        return prod(self.chunk_shape) * self.spec.dtype.itemsize

    @property
    def zarr_dtype(self) -> str:
        """Zarr's name of the stored dtype."""
        return _CARRIERS.get(self.spec.dtype.name, self.spec.dtype.name)

    def chunks(self) -> Iterator[tuple[str, Box]]:
        """Yield the path of each chunk's file and the elements in it; an empty array has none."""
        shape = self.spec.shape
        if not shape:
            yield f"{self.path}/c", Box((), ())
            return
        if not prod(shape):
            return
        rest = "/0" * (len(shape) - 1)
        for i in range(ceil(shape[0] / self.rows)):
            start = i * self.rows
            offsets = (start, *(0 for _ in shape[1:]))
            lengths = (min(self.rows, shape[0] - start), *shape[1:])
            yield f"{self.path}/c/{i}{rest}", Box(offsets, lengths)


def array_layout(spec: TensorSpec) -> ArrayLayout:
    """Choose path and chunks of a tensor.

    Raises:
        UsageError: its name can't be a path in a group.
    """
    pieces = ["model", spec.name] if spec.slot == WEIGHT else ["optimizer", spec.name, spec.slot]
    for piece in pieces:
        odd = "/" in piece or "\0" in piece or piece.startswith((".", "__"))
        if odd or piece in ("", ROOT):
            raise UsageError(f"{spec}: a zarr path must be plain names, got {piece!r}")
    return ArrayLayout(spec, "/".join(pieces), chunk_rows(spec))


def chunk_rows(spec: TensorSpec) -> int:
    """Return the rows of a chunk: a divisor of all rows if one is near the size wanted.

    >>> from ckpttools.dtypes import dtype
    >>> chunk_rows(TensorSpec("a", "weight", dtype("float32"), (32000, 8192)))
    2000
    """
    if not spec.shape or not spec.numel:
        return 1
    rows = spec.shape[0]
    most = max(1, min(rows, CHUNK_BYTES // max(1, spec.size_bytes // rows)))
    for candidate in range(most, most // 2, -1):
        if rows % candidate == 0:
            return candidate
    return most
