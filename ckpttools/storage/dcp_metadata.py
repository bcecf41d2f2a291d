"""Which items does a ``torch.distributed.checkpoint`` directory hold, and in which files?

``.metadata`` is a pickle, read here as inert data. It maps each key to a tensor (dtype, shape and
the boxes it was saved in) or to an object, and each (key, offsets of a box) to a part of a
``.distcp`` file. The two maps are joined, and must fit: every box has its part and no part is of
nothing. `ckpttools.storage.dcp_items` looks into the parts, `ckpttools.storage.dcp_writer` writes
all of it. Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ckpttools.dtypes import BY_NAME, DType
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.storage import inert
from ckpttools.storage.inert import UNSET, Inert, InertType, qualified_name
from ckpttools.storage.local import read_small_file

METADATA_FILE = ".metadata"

KeyPath = tuple[str | int, ...]
Offsets = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DcpItem:
    """One stored item: ``length`` bytes from ``offset`` in the file ``path`` of the directory."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    item: DcpItem


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor by its key. Whether its chunks cover it is for the reader of a format to say."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a ``.metadata`` says.

    ``objects`` are the items that hold a pickled object each. ``paths`` say where a key stood in
    the nested state that was saved, by names and list indices; ``version`` is None before torch
    2.8.
    """

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpItem]
    paths: Mapping[str, KeyPath]
    version: str | None = None


def read_metadata(directory: Path, *, name: str = METADATA_FILE) -> DcpMetadata:
    """Read the metadata file of a directory.

    Raises:
        StorageError: it can't be read.
        FormatError: it is damaged, hostile or contradicts itself.
        UnsupportedError: items are stored under a transformation (compression, for example).
    """
    place = directory / name
    data = read_small_file(place, limit_bytes=inert.MAX_PICKLE_BYTES)
    return parse_metadata(data, where=str(place))


def parse_metadata(data: bytes, *, where: str) -> DcpMetadata:
    """Return what the bytes of a metadata file say; see :func:`read_metadata`."""

    def no_storage(identity: object) -> NoReturn:
        raise FormatError(f"must hold no persistent id, got {type(identity).__name__}")

    tree = inert.loads(data, where=where, persistent_load=no_storage)
    return _Reader(where).metadata(tree)


class _Reader:
    """One pass over the inert tree; ``where`` names the file in errors."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, rule: str, got: object) -> NoReturn:
        shown = repr(got) if isinstance(got, (str, int)) else type(got).__name__
        raise FormatError(f"{self.where}: {rule}, got {shown:.120}")

    def metadata(self, tree: object) -> DcpMetadata:
        state = self.state(tree, "Metadata")
        storage = self.storage(self.table(state, "storage_data"))
        tensors: dict[str, DcpTensor] = {}
        objects: dict[str, DcpItem] = {}
        for key, entry in self.table(state, "state_dict_metadata").items():
            if not isinstance(key, str):
                self.refuse("a key must be text", key)
            if qualified_name(entry).endswith(".BytesStorageMetadata"):
                objects[key] = self.item_of(storage, key, None)
            else:
                tensors[key] = self.tensor(key, entry, storage)
        if storage:
            key, offsets = next(iter(storage))
            self.refuse("each stored item must be of a chunk that is listed", f"{key} at {offsets}")
        version = state.get("version")
        return DcpMetadata(
            tensors,
            objects,
            self.paths(state.get("planner_data")),
            version if isinstance(version, str) else None,
        )

    def state(self, obj: object, name: str) -> Mapping[str, object]:
        """Return the attributes of an instance of torch's class ``name``."""
        made = qualified_name(obj)
        if (
            not isinstance(obj, Inert)
            or not made.startswith("torch.distributed.")
            or not made.endswith(f".{name}")
        ):
            self.refuse(f"must hold a {name}", made or obj)
        if obj.state is UNSET:
            return {}
        if not isinstance(obj.state, dict) or not all(isinstance(k, str) for k in obj.state):
            self.refuse(f"a {name} must have attributes by name", obj.state)
        return {str(key): value for key, value in obj.state.items()}

    def table(self, state: Mapping[str, object], key: str) -> Mapping[object, object]:
        value = state.get(key)
        if not isinstance(value, dict):
            self.refuse(f"{key} must be a dict", value)
        return value

    def storage(self, table: Mapping[object, object]) -> dict[tuple[str, Offsets | None], DcpItem]:
        found: dict[tuple[str, Offsets | None], DcpItem] = {}
        for index, info in table.items():
            attributes = self.state(index, "MetadataIndex")
            key, offset = attributes.get("fqn"), attributes.get("offset")
            if not isinstance(key, str):
                self.refuse("a stored item must have a key", key)
            at = None if offset is None else self.numbers(offset, f"{key}: offset")
            if (key, at) in found:
                self.refuse("an item must be stored once", f"{key} at {at} twice")
            found[key, at] = self.item(info, key)
        return found

    def item(self, info: object, key: str) -> DcpItem:
        attributes = self.state(info, "_StorageInfo")
        if attributes.get("transform_descriptors"):
            raise UnsupportedError(
                f"{self.where}: {key}: must be stored as it is, got a transformed item"
            )
        path, offset, length = (attributes.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or not is_plain_path(path):
            self.refuse(f"{key}: a file must be named by a plain relative path", path)
        for number in (offset, length):
            if type(number) is not int or number < 0:
                self.refuse(f"{key}: offset and length must be natural numbers", number)
        return DcpItem(path, int(str(offset)), int(str(length)))

    def item_of(
        self,
        storage: dict[tuple[str, Offsets | None], DcpItem],
        key: str,
        offsets: Offsets | None,
    ) -> DcpItem:
        """Take the item of a chunk; what is left in the end is of none."""
        item = storage.pop((key, offsets), None)
        if item is None:
            place = "" if offsets is None else f" chunk at {list(offsets)}"
            self.refuse(f"{key}:{place} must be stored somewhere", "no place of it")
        return item

    def tensor(
        self, key: str, entry: object, storage: dict[tuple[str, Offsets | None], DcpItem]
    ) -> DcpTensor:
        attributes = self.state(entry, "TensorStorageMetadata")
        shape = self.numbers(attributes.get("size"), f"{key}: size")
        listed = attributes.get("chunks")
        if not isinstance(listed, list):
            self.refuse(f"{key}: chunks must be a list", listed)
        chunks = []
        for chunk in listed:
            box = self.state(chunk, "ChunkStorageMetadata")
            offsets, lengths = (
                self.numbers(box.get(name), f"{key}: {name}") for name in ("offsets", "sizes")
            )
            if not len(offsets) == len(lengths) == len(shape) or any(
                o + n > size for o, n, size in zip(offsets, lengths, shape, strict=True)
            ):
                self.refuse(
                    f"{key}: a chunk must lie inside {list(shape)}",
                    f"{list(lengths)} at {list(offsets)}",
                )
            chunks.append(DcpChunk(offsets, lengths, self.item_of(storage, key, offsets)))
        return DcpTensor(key, self.dtype(attributes.get("properties"), key), shape, tuple(chunks))

    def dtype(self, properties: object, key: str) -> DType:
        """Return the dtype of TensorProperties, whose state is a tuple that it begins."""
        state = properties.state if isinstance(properties, Inert) else None
        if not qualified_name(properties).endswith(".TensorProperties"):
            self.refuse(f"{key}: must have properties", qualified_name(properties) or properties)
        kind = state[0] if isinstance(state, tuple) and state else None
        if isinstance(state, dict):
            kind = state.get("dtype")
        if not isinstance(kind, InertType) or kind.inert_module != "torch":
            self.refuse(f"{key}: dtype must be one of torch's", kind)
        if kind.inert_name not in BY_NAME:
            self.refuse(f"{key}: dtype must be one of {', '.join(BY_NAME)}", kind.inert_name)
        return BY_NAME[kind.inert_name]

    def numbers(self, value: object, what: str) -> tuple[int, ...]:
        """Return the numbers of a ``torch.Size``."""
        if qualified_name(value) == "torch.Size" and isinstance(value, Inert):
            value = value.args[0] if len(value.args) == 1 else value
        if not isinstance(value, (tuple, list)) or not all(
            type(n) is int and n >= 0 for n in value
        ):
            self.refuse(f"{what} must be natural numbers", value)
        return tuple(value)

    def paths(self, value: object) -> dict[str, KeyPath]:
        """Return where each key stood in the nested state; what isn't such a map is left out."""
        found: dict[str, KeyPath] = {}
        for key, path in value.items() if isinstance(value, dict) else ():
            if isinstance(key, str) and isinstance(path, tuple):
                found[key] = tuple(part for part in path if isinstance(part, (str, int)))
        return found


def is_plain_path(path: str) -> bool:
    """Say whether a relative path stays inside its directory.

    >>> is_plain_path("__0_0.distcp"), is_plain_path("../x"), is_plain_path("/x")
    (True, False, False)
    """
    parts = path.split("/")
    return not any(part in ("", ".", "..") or "\0" in part for part in parts)
