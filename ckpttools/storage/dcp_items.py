"""What does one stored item of a ``torch.distributed.checkpoint`` hold, and at which byte?

An item is a whole torch archive inside a larger file (`ckpttools.storage.torchzip` reads it in
place): a tensor's in a storage of its own, with any strides, or a pickled object. Nothing of a
tensor's payload is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.storage.dcp_metadata import DcpChunk, DcpItem, DcpMetadata, DcpTensor
from ckpttools.storage.torchzip import (
    TensorRef,
    TorchFile,
    load_small_payloads,
    read_torch_file,
)
from ckpttools.storage.torchzip_check import check_torch_file
from ckpttools.storage.torchzip_records import open_window

MAX_OBJECT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a chunk's elements lie: the byte of the first one in its file, strides in elements."""

    path: str
    offset: int
    dtype: DType
    strides: tuple[int, ...]


def read_tensor(directory: Path, tensor: DcpTensor, chunk: DcpChunk) -> StoredTensor:
    """Find the elements of a chunk.

    Raises:
        StorageError: its file can't be read.
        FormatError: the item is damaged, or not the tensor that the metadata lists.
        UnsupportedError: the file is a safetensors container.
    """
    file = _open(directory, chunk.item, tensor.key)
    tree = file.tree
    expected = f"{tensor.dtype} {list(chunk.lengths)}"
    if not isinstance(tree, TensorRef):
        raise FormatError(
            f"{_where(directory, chunk.item)}: {tensor.key}: must hold a tensor of {expected}, got "
            f"{type(tree).__name__}"
        )
    if (tree.dtype, tree.shape) != (tensor.dtype, chunk.lengths):
        raise FormatError(
            f"{_where(directory, chunk.item)}: {tensor.key}: must hold {expected} as the metadata "
            f"says, got {tree.dtype} {list(tree.shape)}"
        )
    start, _ = file.payload(tree.storage)
    offset = start + tree.offset * tree.dtype.itemsize
    return StoredTensor(chunk.item.path, offset, tree.dtype, tree.strides)


def read_object(directory: Path, key: str, item: DcpItem) -> object:
    """Return an object as inert data, with the payloads of what tensors it has.

    Raises:
        StorageError: its file can't be read.
        FormatError: the item is damaged.
        UnsupportedError: it holds a storage of more than :data:`MAX_OBJECT_BYTES`.
    """
    file = _open(directory, item, key)
    largest = max((storage.length_bytes for storage in file.storages.values()), default=0)
    if largest > MAX_OBJECT_BYTES:
        raise UnsupportedError(
            f"{_where(directory, item)}: {key}: an object's tensors must have at most "
            f"{MAX_OBJECT_BYTES} bytes, got {largest}"
        )
    load_small_payloads(file, file.tree, limit_bytes=MAX_OBJECT_BYTES)
    return file.tree


def check_items(directory: Path, metadata: DcpMetadata) -> list[tuple[str, str]]:
    """Check every byte of the files that a metadata file names: (path, what is wrong) each.

    Items must follow each other without a gap to the file's end, and each archive be as it was
    written.

    Raises:
        StorageError: the system refuses to read.
    """
    items: dict[str, list[tuple[DcpItem, str]]] = {}
    for key, item in metadata.objects.items():
        items.setdefault(item.path, []).append((item, key))
    for tensor in metadata.tensors.values():
        for chunk in tensor.chunks:
            items.setdefault(chunk.item.path, []).append((chunk.item, tensor.key))
    problems: list[tuple[str, str]] = []
    for path, stored in sorted(items.items()):
        place = directory / path
        if not place.is_file():
            problems.append((str(place), "must be there, as the metadata says, got none"))
            continue
        stored.sort(key=lambda pair: (pair[0].offset, pair[0].length))
        size = place.stat().st_size
        problems += [(str(place), text) for text in _gaps([item for item, _ in stored], size)]
        for item, key in stored:
            if item.offset + item.length <= size:
                found = check_torch_file(place, window=(item.offset, item.length))
                problems += [(str(place), f"{key}: {problem}") for problem in found]
    return problems


def _gaps(items: Sequence[DcpItem], size: int) -> list[str]:
    """Say where items overlap or leave bytes between them."""
    found, end = [], 0
    for item in items:
        if item.offset != end:
            found.append(f"an item must begin at byte {end}, got {item.offset}")
        end = item.offset + item.length
    if end != size:
        found.append(f"must have {end} bytes, got {size}")
    return found


def _where(directory: Path, item: DcpItem) -> str:
    return f"{directory / item.path} at {item.offset}"


def _open(directory: Path, item: DcpItem, key: str) -> TorchFile:
    """Read the archive of an item."""
    place = directory / item.path
    if not place.is_file():
        raise FormatError(f"{place}: must be there, since it holds {key}, got none")
    with open_window(place) as window:
        head = window.read(item.offset, 9) if item.offset + 9 <= window.length else b""
    if head[8:] == b"{" and head[:2] != b"PK":
        raise UnsupportedError(
            f"{place}: items must be torch archives, got a safetensors container"
        )
    return read_torch_file(place, window=(item.offset, item.length))
