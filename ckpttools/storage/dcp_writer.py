"""Which bytes would ``torch.distributed.checkpoint`` write around the elements of a state?

The place of every byte follows from names, dtypes and boxes alone, so a draft comes first:

1. each file is its items one after the other, objects first, each a torch archive of its own
   (`ckpttools.storage.torchzip_writer`) with a payload that comes later or, for objects, is there;
2. ``.metadata`` lists them, pickled as data around the names of torch's classes. It is written
   last: a directory without it is no checkpoint.

`DcpDraft.seal` gives the CRC-32 patches once the payloads are known. Payloads are row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError
from ckpttools.storage import inert
from ckpttools.storage.inert import Inert, InertType, new_global
from ckpttools.storage.torchzip import StorageRef, new_tensor
from ckpttools.storage.torchzip_writer import TorchDraft, lay_out_torch_file, seal

_ARCHIVE = "archive"  # torch.save's top folder where it writes to a stream
_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
_SHORT_BYTES = 64


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A box of a tensor that is to be stored; ``shape`` is the whole tensor's.

    ``payload`` are its bytes where they are known already; they then need no patch.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object that is to be stored: inert data, tensors in it with their payloads."""

    key: str
    tree: object


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item in its file: where its archive starts, its length, and the archive itself."""

    item: NewChunk | NewObject
    offset: int
    draft: TorchDraft

    @property
    def payload(self) -> int | None:
        """The byte of a chunk's first element in its file; None where none is still to come."""
        return self.offset + self.draft.storages[0][1] if self.draft.storages else None


@dataclass(frozen=True, slots=True)
class DcpFile:
    """A ``.distcp`` file that doesn't exist yet."""

    path: str
    size: int
    items: tuple[PlacedItem, ...]

    def pieces(self) -> list[tuple[int, bytes]]:
        """Return all bytes but the payloads, ascending, at offsets in the file."""
        return [(i.offset + at, data) for i in self.items for at, data in i.draft.pieces]

    def seal(self, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
        """Return the patches that complete the file: ``crcs`` are by the payload's offset."""
        patches: list[tuple[int, bytes]] = []
        for item in self.items:
            mine = {offset: crcs[item.offset + offset] for _, offset, _ in item.draft.storages}
            patches += [(item.offset + at, data) for at, data in seal(item.draft, mine)]
        return patches


@dataclass(frozen=True, slots=True)
class DcpDraft:
    """A directory that doesn't exist yet: its files, and the bytes of ``.metadata``."""

    files: tuple[DcpFile, ...]
    metadata: bytes

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the bytes that are known by now: file by number, offset, bytes."""
        for number, file in enumerate(self.files):
            for offset, data in file.pieces():
                yield number, offset, data

    def storages(self) -> Iterator[tuple[int, int, int]]:
        """Yield where payloads will be, as `DcpFile.seal` wants their CRCs: file, offset, bytes."""
        for number, file in enumerate(self.files):
            for item in file.items:
                for _, offset, length in item.draft.storages:
                    yield number, item.offset + offset, length


def lay_out_dcp(
    files: Mapping[str, Sequence[NewChunk | NewObject]],
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
    attributes: Mapping[str, object] | None = None,
) -> DcpDraft:
    """Lay out the files of a directory, given the items of each by path.

    ``paths`` say where keys stood in the nested state, in its order (default: each a name of its
    own at the top, in the order of the files); ``attributes`` are further ones of the metadata,
    such as a library adds to it.

    Raises:
        FormatError: a chunk is there twice or chunks of one tensor disagree on it.
    """
    drafts = lay_out_files(files)
    tree = _metadata_tree(drafts, paths or {}, attributes or {})
    return DcpDraft(drafts, inert.dumps(tree, persistent_id=lambda _: None))


def lay_out_files(files: Mapping[str, Sequence[NewChunk | NewObject]]) -> tuple[DcpFile, ...]:
    """Lay out files alone, as :func:`lay_out_dcp` does; each needs nothing of the others."""
    drafts: list[DcpFile] = []
    for path, items in files.items():
        offset = 0
        placed: list[PlacedItem] = []
        for item in sorted(items, key=lambda item: isinstance(item, NewChunk)):
            draft = _archive(item)
            placed.append(PlacedItem(item, offset, draft))
            offset += draft.size
        drafts.append(DcpFile(path, offset, tuple(placed)))
    return tuple(drafts)


def file_bytes(prefix: str, tree: object) -> bytes:
    """Return a whole torch file with top folder ``prefix`` whose payloads are all in ``tree``.

    Raises:
        FormatError: a payload is not there.
    """
    draft = lay_out_torch_file(prefix, tree)
    data = bytearray(draft.size)
    for offset, piece in (*draft.pieces, *seal(draft, {})):
        data[offset : offset + len(piece)] = piece
    return bytes(data)


def _archive(item: NewChunk | NewObject) -> TorchDraft:
    """Return the archive of an item."""
    if isinstance(item, NewObject):
        return lay_out_torch_file(_ARCHIVE, _checked(item))
    if item.payload is None or len(item.payload) <= _SHORT_BYTES:
        return _known_archive(item.dtype, item.lengths, item.payload)
    return _chunk_archive(item.dtype, item.lengths, item.payload)


def _chunk_archive(dtype: DType, lengths: tuple[int, ...], payload: bytes | None) -> TorchDraft:
    tensor = new_tensor(dtype, lengths)
    tensor.storage.payload = payload
    return lay_out_torch_file(_ARCHIVE, tensor)


_known_archive = lru_cache(maxsize=4096)(_chunk_archive)
"""The same few archives serve all layers of a model, and all its steps."""


def _checked(item: NewObject) -> object:
    """Return an object whose tensors have their bytes."""
    for part in inert.walk(item.tree, where=item.key):
        if isinstance(part, StorageRef) and part.payload is None and part.numel:
            raise FormatError(f"{item.key}: an object's tensors must have their bytes, got none")
    return item.tree


def _metadata_tree(
    files: Sequence[DcpFile],
    paths: Mapping[str, tuple[str | int, ...]],
    attributes: Mapping[str, object],
) -> Inert:
    """Return torch's ``Metadata`` of these files as inert data."""
    tensors: dict[str, tuple[NewChunk, list[object]]] = {}
    entries: dict[str, object] = {}
    storage: dict[object, object] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for file in files:
        for placed in file.items:
            item = placed.item
            if isinstance(item, NewObject):
                if item.key in entries:
                    raise FormatError(f"{item.key}: an item must be there once, got it twice")
                entries[item.key] = _instance(_METADATA, "BytesStorageMetadata", {})
                index: dict[str, object] = {"fqn": item.key, "index": None}
            else:
                index = {"fqn": item.key, "index": _add(tensors, seen, item)}
                index["offset"] = _size(item.offsets)
                if isinstance(entries.setdefault(item.key, item), Inert):
                    raise FormatError(f"{item.key}: an item must be there once, got it twice")
            info = {
                "relative_path": file.path,
                "offset": placed.offset,
                "length": placed.draft.size,
            }
            storage[_instance(_METADATA, "MetadataIndex", index)] = _instance(
                "torch.distributed.checkpoint.filesystem", "_StorageInfo", info
            )
    for key, (first, chunks) in tensors.items():
        entries[key] = _instance(
            _METADATA,
            "TensorStorageMetadata",
            {"properties": _properties(first), "size": _size(first.shape), "chunks": chunks},
        )
    order = {key: number for number, key in enumerate(paths)}
    entries = {k: entries[k] for k in sorted(entries, key=lambda k: order.get(k, len(order)))}
    state = {
        "state_dict_metadata": entries,
        "planner_data": {key: paths.get(key, (key,)) for key in entries},
        "storage_data": storage,
        "storage_meta": _instance(
            _METADATA,
            "StorageMeta",
            {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []},
        ),
        "version": _VERSION,
        **attributes,
    }
    return _instance(_METADATA, "Metadata", state)


def _add(
    tensors: dict[str, tuple[NewChunk, list[object]]],
    seen: set[tuple[str, tuple[int, ...]]],
    item: NewChunk,
) -> int:
    """List a chunk with its tensor and return its number there."""
    first, chunks = tensors.setdefault(item.key, (item, []))
    if (first.dtype, first.shape) != (item.dtype, item.shape) or (item.key, item.offsets) in seen:
        raise FormatError(
            f"{item.key}: chunks must be of one tensor, each at its own offsets, got "
            f"{item.dtype} {list(item.shape)} at {list(item.offsets)}"
        )
    seen.add((item.key, item.offsets))
    box = {"offsets": _size(item.offsets), "sizes": _size(item.lengths)}
    chunks.append(_instance(_METADATA, "ChunkStorageMetadata", box))
    return len(chunks) - 1


def _properties(chunk: NewChunk) -> Inert:
    """Return torch's TensorProperties: a strided tensor in memory's default order."""
    layout = Inert(new_global("torch.serialization", "_get_layout"), ("torch.strided",))
    order = Inert(new_global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    kind = new_global("torch", chunk.dtype.name)
    made = Inert(InertType(_METADATA, "TensorProperties"), via="newobj")
    made.state = (kind, layout, False, order, False)
    return made


def _size(numbers: tuple[int, ...]) -> Inert:
    return Inert(new_global("torch", "Size"), (numbers,))


def _instance(module: str, name: str, state: Mapping[str, object]) -> Inert:
    made = Inert(InertType(module, name), via="newobj")
    made.state = dict(state)
    return made
