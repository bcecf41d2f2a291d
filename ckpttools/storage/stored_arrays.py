"""Where do the boxes of a stored array lie, whatever container holds it?"""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.dtypes import DType


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of an array: the file, the byte of its first element, strides in elements."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    path: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array by its key."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]
