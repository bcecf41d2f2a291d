"""Which arrays and objects does a directory hold? What the two kinds of directories have alike.

torch's own writer lists everything in ``.metadata``; its items are torch archives, or keys of one
safetensors container a file. The writer for Hugging Face has no list: each of its safetensors
files tells the offsets of what it holds, and a tensor is as large as they reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.layout.box import row_major_strides
from ckpttools.storage.dcp_items import StoredTensor, read_tensor
from ckpttools.storage.dcp_metadata import (
    METADATA_FILE,
    DcpChunk,
    DcpItem,
    DcpMetadata,
    DcpTensor,
    KeyPath,
    read_metadata,
)
from ckpttools.storage.safetensors_header import SafetensorsHeader, read_header
from ckpttools.storage.safetensors_header import StoredTensor as SafetensorsEntry
from ckpttools.storage.stored_arrays import StoredArray, StoredBox

SHARDING = "DCP_SHARDING_INFO"
_SHARD = re.compile(r"shard-([0-9]{5})-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_RANK_METADATA = "__0.metadata"
_NOT_OURS = ("metadata.json", "common.pt")
"""Files of megatron-core's and NeMo's directories, which have ``.metadata`` too."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a directory holds. ``ranks`` is how many have written; ``paths`` where keys stood."""

    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, DcpItem] = field(default_factory=dict)
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    ranks: int = 1


def looks_like_dcp(path: Path) -> bool:
    """Say by names alone whether a directory is one of torch's distributed checkpoints."""
    if not path.is_dir() or any((path / name).exists() for name in _NOT_OURS):
        return False
    if (path / METADATA_FILE).is_file() or (path / _RANK_METADATA).is_file():
        return True
    return has_shards(path) or has_shards(path / "sharded")


def has_shards(path: Path) -> bool:
    """Say whether a directory has files as the writer for Hugging Face names them."""
    return path.is_dir() and any(_SHARD.fullmatch(child.name) for child in path.iterdir())


def read_stored(path: Path) -> Stored:
    """Read the structure of a directory.

    Raises:
        FormatError: a file is missing, damaged or contradicts the others.
        UnsupportedError: it is of a kind that isn't read.
    """
    if (path / METADATA_FILE).is_file():
        return _from_metadata(path)
    if has_shards(path):
        return _from_shards(path)
    if has_shards(path / "sharded"):
        raise UnsupportedError(
            f"{path}: must be a directory of chunks, got whole tensors that were put together",
            hint="name its directory `sharded`",
        )
    if (path / _RANK_METADATA).is_file():
        raise UnsupportedError(
            f"{path}: must have one {METADATA_FILE} of all ranks, got one a rank, as "
            "use_collectives=False writes them"
        )
    raise FormatError(f"{path / METADATA_FILE}: a distributed checkpoint must have it, got none")


def has_containers(path: Path, metadata: DcpMetadata) -> bool:
    """Say whether tensors lie in safetensors containers, which have no checksums.

    Raises:
        FormatError: a file is missing or damaged.
    """
    names = {chunk.item.path for t in metadata.tensors.values() for chunk in t.chunks}
    return any(_container(path, name) for name in names)


def _from_metadata(path: Path) -> Stored:
    metadata = read_metadata(path)
    containers: dict[str, Mapping[str, SafetensorsEntry]] = {}
    arrays: dict[str, StoredArray] = {}
    files = {item.path for item in metadata.objects.values()}
    # Ranks write each tensor once and in turn; only the paths tell the order of the state.
    order = {key: number for number, key in enumerate(metadata.paths)}
    for key in sorted(metadata.tensors, key=lambda key: order.get(key, len(order))):
        tensor = metadata.tensors[key]
        boxes = []
        for chunk in tensor.chunks:
            files.add(chunk.item.path)
            place = _place(path, tensor, chunk, containers)
            boxes.append(
                StoredBox(chunk.offsets, chunk.lengths, place.path, place.offset, place.strides)
            )
        arrays[key] = StoredArray(key, tensor.dtype, tensor.shape, tuple(boxes))
    ranks = {name.split("_")[2] for name in files if re.match(r"__[0-9]+_", name)}
    objects = sorted(metadata.objects, key=lambda key: order.get(key, len(order)))
    listed = {key: metadata.objects[key] for key in objects}
    return Stored(arrays, listed, metadata.paths, max(1, len(ranks)))


def _place(
    path: Path,
    tensor: DcpTensor,
    chunk: DcpChunk,
    containers: dict[str, Mapping[str, SafetensorsEntry]],
) -> StoredTensor:
    """Find the elements of a chunk, in an archive of its own or in a safetensors container."""
    name = chunk.item.path
    if name not in containers:
        containers[name] = _container(path, name)
    if not containers[name]:
        return read_tensor(path, tensor, chunk)
    found = containers[name].get(tensor.key)
    if found is None or (found.dtype, found.shape) != (tensor.dtype, chunk.lengths):
        shown = "no such key" if found is None else f"{found.dtype} {list(found.shape)}"
        raise FormatError(
            f"{path / name}: {tensor.key}: must hold {tensor.dtype} {list(chunk.lengths)} as the "
            f"metadata says, got {shown}"
        )
    return StoredTensor(name, found.offset, found.dtype, row_major_strides(found.shape))


def _container(path: Path, name: str) -> dict[str, SafetensorsEntry]:
    """Return what a file holds if all of it is one safetensors container; else nothing."""
    place = path / name
    if not place.is_file():
        raise FormatError(f"{place}: must be there, as the metadata says, got none")
    with place.open("rb") as file:
        head = file.read(9)
    if head[:2] == b"PK" or head[8:] != b"{":
        return {}
    return {one.key: one for one in read_header(place).tensors}


# ---- directories of the writer for Hugging Face --------------------------------------------


def _from_shards(path: Path) -> Stored:
    """Read files that tell offsets of their own.

    The shape of the whole isn't stored: a missing last file can't be seen, but a hole can.
    """
    dtypes: dict[str, DType] = {}
    boxes: dict[str, dict[tuple[int, ...], StoredBox]] = {}
    ranks = set()
    for place in sorted(path.iterdir()):
        named = _SHARD.fullmatch(place.name)
        if named is None:
            continue
        ranks.add(named[1])
        for key, kind, box in _shard_boxes(place):
            if dtypes.setdefault(key, kind) != kind:
                raise FormatError(f"{place}: {key}: must be {dtypes[key]}, got {kind}")
            mine = boxes.setdefault(key, {})
            if mine and len(next(iter(mine))) != len(box.offsets):
                raise FormatError(f"{place}: {key}: must have as many dimensions as before")
            mine.setdefault(box.offsets, box)
    arrays = {}
    for key, found in boxes.items():
        ends = [tuple(map(sum, zip(b.offsets, b.lengths, strict=True))) for b in found.values()]
        shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
        arrays[key] = StoredArray(key, dtypes[key], shape, tuple(found.values()))
    return Stored(arrays, ranks=len(ranks))


def _shard_boxes(place: Path) -> Iterator[tuple[str, DType, StoredBox]]:
    header = read_header(place)
    offsets = _saved_offsets(header, place)
    for one in header.tensors:
        entry = offsets.get(one.key)
        saved = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if (
            not isinstance(saved, list)
            or len(saved) != len(one.shape)
            or not all(type(n) is int and n >= 0 for n in saved)
        ):
            raise FormatError(
                f"{place}: {one.key:.80}: must have {len(one.shape)} saved_offsets, got "
                f"{saved!r:.60}"
            )
        strides = row_major_strides(one.shape)
        yield (
            one.key,
            one.dtype,
            StoredBox(tuple(saved), one.shape, place.name, one.offset, strides),
        )


def _saved_offsets(header: SafetensorsHeader, place: Path) -> dict[str, object]:
    """Return what a file tells of the offsets of its keys."""
    metadata = json.loads(header.raw[8:]).get("__metadata__", {})
    try:
        told = json.loads(metadata.get(SHARDING, ""))
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise FormatError(f"{place}: {SHARDING} must be a JSON object, got {told!r:.40}")
    return told
