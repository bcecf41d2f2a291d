"""Which arrays does a distributed NeMo directory hold, and where are their elements?

``metadata.json`` names the container: ``torch_dist`` is a ``torch.distributed.checkpoint``,
``zarr`` has one zarr v2 array a key (`ckpttools.formats.nemo.zarr_arrays`). Both give the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.nemo.zarr_arrays import ArrayChunk, read_arrays, read_shard_objects
from ckpttools.storage.dcp_items import read_object, read_tensor
from ckpttools.storage.dcp_metadata import METADATA_FILE, read_metadata
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json
from ckpttools.storage.stored_arrays import StoredArray, StoredBox

BACKENDS = ("torch_dist", "zarr")
BACKEND_FILE = "metadata.json"
COMMON_FILE = "common.pt"
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """Everything in the directory but ``common.pt``; ``objects`` are inert, by key."""

    backend: str
    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, object] = field(default_factory=dict)


def read_backend(path: Path) -> str:
    """Return the container that ``metadata.json`` names.

    Raises:
        FormatError: it is missing or not what it must be.
        UnsupportedError: it names another container.
    """
    place = path / BACKEND_FILE
    if not place.is_file():
        raise FormatError(f"{place}: a distributed checkpoint must have it, got none")
    document = parse_json(read_small_file(place, limit_bytes=_MAX_JSON_BYTES), str(place))
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    if not isinstance(backend, str):
        raise FormatError(f"{place}: must name the sharded_backend, got {backend!r:.40}")
    if backend not in BACKENDS:
        raise UnsupportedError(
            f"{place}: sharded_backend must be one of {', '.join(BACKENDS)}, got {backend!r:.40}"
        )
    return backend


def read_stored(path: Path) -> Stored:
    """Read the structure of a directory.

    Raises:
        FormatError: a file is missing, damaged or contradicts the others.
    """
    backend = read_backend(path)
    if backend == "zarr":
        arrays = {
            array.key: StoredArray(
                array.key, array.dtype, array.shape, tuple(map(_zarr_box, array.chunks))
            )
            for array in read_arrays(path)
        }
        return Stored(backend, arrays, read_shard_objects(path))
    if not (path / METADATA_FILE).is_file():
        raise FormatError(f"{path / METADATA_FILE}: must be there, got none")
    metadata = read_metadata(path)
    found: dict[str, StoredArray] = {}
    for key, tensor in metadata.tensors.items():
        boxes = []
        for chunk in tensor.chunks:
            place = read_tensor(path, tensor, chunk)
            boxes.append(
                StoredBox(chunk.offsets, chunk.lengths, place.path, place.offset, place.strides)
            )
        found[key] = StoredArray(key, tensor.dtype, tensor.shape, tuple(boxes))
    objects = {key: read_object(path, key, item) for key, item in metadata.objects.items()}
    return Stored(backend, found, objects)


def _zarr_box(chunk: ArrayChunk) -> StoredBox:
    return StoredBox(chunk.offsets, chunk.lengths, chunk.path, 0, chunk.strides)


def looks_distributed(path: Path) -> bool:
    """Say by names, and by what ``common.pt`` mentions, whether a directory is NeMo's.

    Megatron-LM's distributed checkpoints have the same file names.
    """
    if not path.is_dir() or not (path / BACKEND_FILE).is_file():
        return False
    common = path / COMMON_FILE
    if not common.is_file():
        return True
    with common.open("rb") as file:
        head = file.read(_MAX_JSON_BYTES)
    return b"pytorch-lightning_version" in head or b"optimizer_states" in head
