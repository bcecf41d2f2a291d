"""Which bytes hold which elements? A Manifest from boxes of named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec

Key = tuple[str, str]
"""Name and slot of a tensor."""

TensorShape = tuple[tuple[int, ...], int]
"""A logical shape, and the rows of padding behind it."""


class ManifestBuilder:
    """Collects files, tensors and chunks; files are found on disk where ``root`` is given."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self.files: list[File] = []
        self.tensors: list[TensorSpec] = []
        self.chunks: list[Chunk] = []
        self._file_index: dict[str, int] = {}
        self._index: dict[Key, int] = {}

    def add_file(self, path: str, size_bytes: int) -> int:
        """Add a file that doesn't exist yet."""
        self._file_index[path] = len(self.files)
        self.files.append(File(path, size_bytes))
        return self._file_index[path]

    def file(self, path: str) -> int:
        """Return the index of a file, adding it with its size on disk at its first mention."""
        if path not in self._file_index:
            place = Path(path) if self.root is None else self.root / path
            self.add_file(path, place.stat().st_size)
        return self._file_index[path]

    def add_tensor(self, spec: TensorSpec) -> None:
        """Add a tensor, of which chunks may follow."""
        if spec.key in self._index:
            raise FormatError(f"{spec}: must be there once, got it twice")
        self._index[spec.key] = len(self.tensors)
        self.tensors.append(spec)

    def add_chunk(
        self,
        key: Key,
        region: Box,
        file: int,
        start_bytes: int,
        strides: tuple[int, ...],
        *,
        replica: int = 0,
    ) -> None:
        """Add a box of a tensor that lies in one file, from ``start_bytes`` on."""
        kind = self.tensors[self._index[key]].dtype
        part = _part(region, file, start_bytes, strides, kind)
        self.chunks.append(Chunk(self._index[key], region, (part,), replica_id=replica))

    def build(self, fmt: str, root: str, objects: Mapping[str, object]) -> Manifest:
        """Return the Manifest.

        Raises:
            LayoutError: a tensor isn't covered once, or bytes lie outside a file.
        """
        return Manifest(
            fmt, root, tuple(self.files), tuple(self.tensors), tuple(self.chunks), objects
        )


def logical_shapes(layout: ShardedLayout | None, name: str, shape: tuple[int, ...]) -> TensorShape:
    """Return logical shape and padding rows of a tensor that is stored with ``shape``."""
    for param in layout.params if layout is not None else ():
        if param.name == name and param.vocab_rows is not None:
            return (param.vocab_rows, *shape[1:]), shape[0] - param.vocab_rows
    return shape, 0


def is_dense(lengths: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether a box of these strides is one run of elements.

    >>> is_dense((1, 3, 2), (99, 2, 1)), is_dense((3, 2), (4, 1))
    (True, False)
    """
    expected = 1
    for n, s in zip(reversed(lengths), reversed(strides), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def _part(region: Box, file: int, start_bytes: int, strides: tuple[int, ...], kind: DType) -> Part:
    if not region.numel or is_dense(region.lengths, strides):
        return Part(Extent(file, start_bytes, region.numel * kind.itemsize), kind)
    span = sum((n - 1) * s for n, s in zip(region.lengths, strides, strict=True)) + 1
    return Part(Extent(file, start_bytes, span * kind.itemsize), kind, strides)


def dense_strides(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    return row_major_strides(lengths)
