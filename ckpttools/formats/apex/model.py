"""Where are the model's weights, which Apex's optimizer keeps apart from its state?

In a torch file (a state dict by name, plain or under ``state_dict``, ``model`` or ``module``) or
a safetensors file. A ``module.`` before every name is a wrapper's and no part of it. A torch file
also shows a weight's strides, so whether it was channels-last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, StorageError
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import Extent, Part, Region, part_bytes
from ckpttools.storage.safetensors_header import read_header
from ckpttools.storage.torchzip import TensorRef, TorchFile, read_torch_file

_NESTED = ("state_dict", "model", "module")
_WRAPPER = "module."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: where its first element is, in bytes, and its strides, in elements."""

    file: int
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether elements lie in row-major order without gaps."""
        return _same_order(self.shape, self.strides, row_major_strides(self.shape))

    @property
    def is_channels_last(self) -> bool:
        """Whether elements lie in the order N, H, W, C without gaps."""
        if len(self.shape) != 4:
            return False
        return _same_order(self.shape, self.strides, channels_last_strides(self.shape))

    def part(self, region: Region | None = None) -> Part:
        """Return where the elements of a region lie, or all of them.

        A flat range must be of a dense tensor.
        """
        if isinstance(region, FlatRange):
            start = self.offset + region.start * self.dtype.itemsize
            return Part(Extent(self.file, start, region.numel * self.dtype.itemsize), self.dtype)
        box = Box.whole(self.shape) if region is None else region
        first = sum(o * s for o, s in zip(box.offsets, self.strides, strict=True))
        start = self.offset + first * self.dtype.itemsize
        strides = None if self.is_dense and box.lengths == self.shape else self.strides
        bare = Part(Extent(self.file, start, 0), self.dtype, strides)
        return Part(Extent(self.file, start, part_bytes(box, bare)), self.dtype, strides)


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a 4-D tensor whose elements lie in the order N, H, W, C.

    >>> channels_last_strides((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def stored_tensor(torch_file: TorchFile, tensor: TensorRef, file: int) -> StoredTensor:
    """Return where a tensor of a torch file lies."""
    start, _ = torch_file.payload(tensor.storage)
    offset = start + tensor.offset * tensor.dtype.itemsize
    return StoredTensor(file, offset, tensor.dtype, tensor.shape, tensor.strides)


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of a file by name, in its order. ``shows_strides``: the file can tell them."""

    path: Path
    weights: Mapping[str, StoredTensor]
    shows_strides: bool

    def distinct(self, first: Iterable[str] = ()) -> dict[str, StoredTensor]:
        """Return the weights without further names of the same bytes, as tied weights have them.

        Of several names one of ``first`` is kept, else the one that stands first.
        """
        wanted = [name for name in first if name in self.weights]
        seen: dict[StoredTensor, str] = {}
        for name in (*wanted, *self.weights):
            seen.setdefault(self.weights[name], name)
        kept = {*seen.values(), *wanted, *(n for n, w in self.weights.items() if not w.numel)}
        return {name: weight for name, weight in self.weights.items() if name in kept}


def read_model(path: Path, file: int) -> Model:
    """Read where the weights are in a file, which the Manifest has as ``file``.

    Raises:
        FormatError: it is damaged, or has no weights by name.
        StorageError: it can't be read.
    """
    if is_torch_file(path):
        torch_file = read_torch_file(path)
        found = _tensors(torch_file.tree)
        weights = {name: stored_tensor(torch_file, ref, file) for name, ref in found.items()}
    else:
        weights = {
            t.key: StoredTensor(file, t.offset, t.dtype, t.shape, row_major_strides(t.shape))
            for t in read_header(path).tensors
        }
    if not weights:
        raise FormatError(f"{path}: must have the model's weights by name, got none")
    return Model(path, _unwrapped(weights), is_torch_file(path))


def is_torch_file(path: Path) -> bool:
    """Say whether a file of weights is a torch file; else it is a safetensors file."""
    try:
        with path.open("rb") as opened:
            return opened.read(4) == b"PK\3\4"
    except OSError as error:
        raise StorageError(f"{path}: can't read it: {error.strerror or error}") from error


def _tensors(tree: object) -> dict[str, TensorRef]:
    """Return the tensors by name of a state dict; what else it holds is left out."""
    if not isinstance(tree, dict):
        return {}
    found = {
        key: value
        for key, value in dict.items(tree)
        if isinstance(key, str) and isinstance(value, TensorRef)
    }
    inner = [tree[key] for key in _NESTED if isinstance(tree.get(key), dict)]
    return found or (_tensors(inner[0]) if len(inner) == 1 else {})


def _unwrapped(weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Take a wrapper's prefix off, which stands before every name or is none."""
    wrapped = all(name.startswith(_WRAPPER) for name in weights)
    return {name.removeprefix(_WRAPPER) if wrapped else name: w for name, w in weights.items()}


def _same_order(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, ...]
) -> bool:
    """Say whether strides put every element where the expected ones do."""
    if 0 in shape:
        return True
    rows = zip(shape, strides, expected, strict=True)
    return all(stride == wanted for size, stride, wanted in rows if size > 1)
