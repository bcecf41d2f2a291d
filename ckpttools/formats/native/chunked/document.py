"""What stands in the ``manifest.json`` of chunks? Every tensor, and every key as a box of one.

::

    format, format_version
    world_size  how many ranks have saved
    tensors     name, slot, dtype, shape, padding_rows of each
    files       path → rank, SHA-256 of its header, and of each key: tensor, box, CRC-32
    digests     CRC-32C of each tensor's content; not there where nobody took them
    layout      how other topologies cut the model, a ShardedLayout; null where nobody said
    objects     step, parameter groups, training state …
    carried     what other formats need to write the checkpoint again, by format
    sha256      of all of the above
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, LayoutError
from ckpttools.formats.native.chunked.files import FORMAT, ChunkFile
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.formats.native.objects import objects_document
from ckpttools.layout.box import Box
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.manifest import TensorSpec
from ckpttools.storage.digest_table import ENTRY as DIGESTS
from ckpttools.storage.digest_table import Digests, digest_entry, read_digests
from ckpttools.storage.sealed_json import SELF, check_known, check_seal, parse_json, serialize

FORMAT_VERSION = 1

_KEYS = {
    "format",
    "format_version",
    "world_size",
    "tensors",
    "files",
    "layout",
    "objects",
    "carried",
    SELF,
}
_TENSOR_KEYS = {"name", "slot", "dtype", "shape", "padding_rows"}
_FILE_KEYS = {"rank", "header_sha256", "keys"}
_CHUNK_KEYS = {"tensor", "offsets", "lengths", "replica_id", "crc32"}
_CRC = re.compile("[0-9a-f]{8}")
_SHA = re.compile("[0-9a-f]{64}")
_PATH = re.compile(r"rank-[0-9]{5,}(-[0-9]{5})?\.safetensors")


@dataclass(frozen=True, slots=True)
class StatedChunk:
    """A key as ``manifest.json`` tells of it."""

    tensor: int
    box: Box
    replica_id: int
    crc: int


@dataclass(frozen=True, slots=True)
class StatedChunks:
    """A file as ``manifest.json`` tells of it: what vouches for it, and its keys."""

    path: str
    rank: int
    header_sha256: str
    keys: Mapping[str, StatedChunk]


@dataclass(frozen=True, slots=True)
class ChunkDocument:
    """A ``manifest.json`` as read; ``objects`` and ``carried`` are still plain data."""

    world_size: int
    tensors: tuple[TensorSpec, ...]
    files: tuple[StatedChunks, ...]
    layout: ShardedLayout | None
    objects: Mapping[str, object]
    carried: Mapping[str, object]
    digests: Digests | None = None


def chunk_document(
    tensors: Sequence[TensorSpec],
    files: Sequence[ChunkFile],
    stated: Sequence[StatedFile],
    objects: Mapping[str, object],
    carried: Mapping[str, object],
    *,
    world_size: int,
    digests: Digests | None = None,
) -> bytes:
    """Return the bytes of ``manifest.json``; ``stated`` vouches for each of ``files``.

    A ``sharded_layout`` among the objects is kept, for what it says of the parameters.

    Raises:
        FormatError: an object holds something else than plain and inert data.
    """
    by_path = {one.path: one for one in stated}
    layout = objects.get("sharded_layout")
    return serialize(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "world_size": world_size,
            "tensors": [_tensor_document(spec) for spec in tensors],
            "files": {file.path: _file_document(file, by_path[file.path]) for file in files},
            **digest_entry(digests),
            "layout": to_document(layout) if isinstance(layout, ShardedLayout) else None,
            "objects": objects_document(objects),
            "carried": dict(carried),
        }
    )


def parse_document(data: bytes, *, where: str) -> ChunkDocument:
    """Parse and check the bytes of a ``manifest.json``.

    Raises:
        FormatError: a byte has changed, an entry is not what it must be, or the version is newer.
    """
    document = check_known(
        parse_json(data, where), name=FORMAT, version=FORMAT_VERSION, where=where
    )
    check_seal(document, data, where)
    _check_keys(document, _KEYS | (set(document) & {DIGESTS}), where)
    tensors = document["tensors"]
    if not isinstance(tensors, list):
        raise FormatError(f"{where}: tensors must be a list, got {tensors!r:.60}")
    specs = tuple(_tensor(one, f"{where}: tensors[{i}]") for i, one in enumerate(tensors))
    files = tuple(
        _stated_file(path, entry, specs, where) for path, entry in _table(document, "files", where)
    )
    world_size = document["world_size"]
    if type(world_size) is not int or not all(file.rank < world_size for file in files):
        raise FormatError(
            f"{where}: world_size must be more than every rank, got {world_size!r:.40}"
        )
    return ChunkDocument(
        world_size=world_size,
        tensors=specs,
        files=files,
        layout=_layout(document["layout"], where),
        objects=dict(_table(document, "objects", where)),
        carried=dict(_table(document, "carried", where)),
        digests=read_digests(document, where),
    )


def _layout(value: object, where: str) -> ShardedLayout | None:
    try:
        return None if value is None else from_document(value, where=f"{where}: layout")
    except LayoutError as error:
        raise FormatError(str(error)) from error


def _tensor_document(spec: TensorSpec) -> dict[str, object]:
    return {
        "name": spec.name,
        "slot": spec.slot,
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "padding_rows": spec.padding_rows,
    }


def _file_document(file: ChunkFile, stated: StatedFile) -> dict[str, object]:
    keys = {
        chunk.key: {
            "tensor": chunk.tensor,
            "offsets": list(chunk.box.offsets),
            "lengths": list(chunk.box.lengths),
            "replica_id": chunk.replica_id,
            "crc32": f"{stated.crcs[chunk.key]:08x}",
        }
        for chunk in file.chunks
    }
    return {"rank": file.rank, "header_sha256": stated.header_sha256, "keys": keys}


def _tensor(entry: object, where: str) -> TensorSpec:
    """Check the entry of a tensor."""
    fields = _check_keys(entry, _TENSOR_KEYS, where)
    name, slot, kind = fields["name"], fields["slot"], fields["dtype"]
    for key, value in (("name", name), ("slot", slot), ("dtype", kind)):
        if not isinstance(value, str):
            raise FormatError(f"{where}: {key} must be text, got {value!r:.60}")
    shape, padding = _naturals(fields, "shape", where), fields["padding_rows"]
    if type(padding) is not int:
        raise FormatError(f"{where}: padding_rows must be a number, got {padding!r:.60}")
    try:
        return TensorSpec(str(name), str(slot), dtype(str(kind)), shape, padding)
    except (FormatError, LayoutError) as error:
        raise FormatError(f"{where}: {error}") from error


def _stated_file(
    path: str, entry: object, tensors: Sequence[TensorSpec], where: str
) -> StatedChunks:
    """Check the entry of a file."""
    at = f"{where}: files: {path:.80}"
    if _PATH.fullmatch(path) is None:
        raise FormatError(f"{at}: must be named rank-NNNNN.safetensors, got another name")
    fields = _check_keys(entry, _FILE_KEYS, at)
    rank, sha = fields["rank"], fields["header_sha256"]
    if type(rank) is not int or rank < 0:
        raise FormatError(f"{at}: rank must be a natural number, got {rank!r:.40}")
    if not isinstance(sha, str) or _SHA.fullmatch(sha) is None:
        raise FormatError(f"{at}: header_sha256 must be 64 hexadecimal digits, got {sha!r:.80}")
    keys = {
        key: _stated_chunk(value, tensors, f"{at}: {key:.80}")
        for key, value in _table(fields, "keys", at)
    }
    return StatedChunks(path, rank, sha, keys)


def _stated_chunk(entry: object, tensors: Sequence[TensorSpec], where: str) -> StatedChunk:
    """Check the entry of a key."""
    fields = _check_keys(entry, _CHUNK_KEYS, where)
    tensor, replica, crc = fields["tensor"], fields["replica_id"], fields["crc32"]
    if type(tensor) is not int or not 0 <= tensor < len(tensors):
        raise FormatError(
            f"{where}: tensor must be one of {len(tensors)} in the list, got {tensor!r:.40}"
        )
    if type(replica) is not int or replica < 0:
        raise FormatError(f"{where}: replica_id must be a natural number, got {replica!r:.40}")
    if not isinstance(crc, str) or _CRC.fullmatch(crc) is None:
        raise FormatError(f"{where}: crc32 must be eight hexadecimal digits, got {crc!r:.40}")
    offsets, lengths = _naturals(fields, "offsets", where), _naturals(fields, "lengths", where)
    if len(offsets) != len(lengths):
        raise FormatError(
            f"{where}: offsets and lengths must be as many, got {len(offsets)} and {len(lengths)}"
        )
    return StatedChunk(tensor, Box(offsets, lengths), replica, int(crc, 16))


def _check_keys(entry: object, keys: set[str], where: str) -> dict[str, object]:
    if not isinstance(entry, dict) or set(entry) != keys:
        odd = sorted(set(entry) ^ keys) if isinstance(entry, dict) else type(entry).__name__
        raise FormatError(f"{where}: must have {', '.join(sorted(keys))}, got a difference: {odd}")
    return entry


def _table(document: Mapping[str, object], key: str, where: str) -> list[tuple[str, object]]:
    value = document[key]
    if not isinstance(value, dict):
        raise FormatError(f"{where}: {key} must be an object, got {value!r:.60}")
    return list(value.items())


def _naturals(fields: Mapping[str, object], key: str, where: str) -> tuple[int, ...]:
    value = fields[key]
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise FormatError(f"{where}: {key} must be natural numbers, got {value!r:.60}")
    return tuple(value)
