"""Which tensors does a torch.save file hold, and where are their bytes? Without torch.

A torch file is a zip archive (`ckpttools.storage.torchzip_records`) with a pickle ``data.pkl``,
read as inert data (`ckpttools.storage.inert`), and a record ``data/<key>`` for each storage. In
the tree a storage is a `StorageRef` and a tensor a `TensorRef`, a strided view of one; views of
one storage share it by identity. No payload is read and nothing of the file runs.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpttools.dtypes import BY_NAME, BY_TORCH_STORAGE, DType
from ckpttools.errors import FormatError
from ckpttools.storage import inert
from ckpttools.storage.inert import InertType, Rebuilt, new_global
from ckpttools.storage.torchzip_records import (
    Directory,
    Record,
    Window,
    open_window,
    read_directory,
)

_V2 = new_global("torch._utils", "_rebuild_tensor_v2")
_V3 = new_global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = new_global("torch._utils", "_rebuild_parameter")
_PARAMETER_STATE = new_global("torch._utils", "_rebuild_parameter_with_state")
_UNTYPED = new_global("torch.storage", "UntypedStorage")
_MAX_SMALL_BYTES = 1 << 20  # a CUDA generator's state has 16 bytes, a CPU one's 5056


@dataclass(eq=False, slots=True)
class StorageRef:
    """A flat run of elements, the unit torch stores. Compared by identity: views share one.

    ``key`` names the record it was read from (None: not read from a file). ``payload`` is its
    bytes, where `load_small_payloads` or a writer has put them. torch stores some dtypes
    (float8, uint16) as untyped bytes: then ``untyped`` is set, ``dtype`` is uint8, and each
    view says which dtype it has.
    """

    dtype: DType
    numel: int
    location: str = "cpu"
    key: str | None = None
    payload: bytes | None = field(default=None, repr=False)
    untyped: bool = False

    @property
    def length_bytes(self) -> int:
        """Bytes of the payload."""
        return self.numel * self.dtype.itemsize

    @property
    def torch_class(self) -> InertType:
        """The class that torch names in the storage's persistent id."""
        return _UNTYPED if self.untyped else new_global("torch", self.dtype.torch_storage)


@dataclass(frozen=True, eq=False, slots=True)
class TensorRef(Rebuilt):
    """A strided view of a storage; ``offset`` and ``strides`` count elements of ``dtype``.

    ``cast`` is the dtype where it isn't the storage's. ``parameter`` is set for an
    ``nn.Parameter``: how it is made of a plain tensor, and the arguments after that tensor.

    Raises:
        FormatError: the view reaches outside its storage.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    hooks: object = field(default_factory=OrderedDict)
    cast: DType | None = None
    parameter: tuple[InertType, tuple[object, ...]] | None = None

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.strides)
        if len(self.shape) != len(self.strides) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise FormatError(
                "a tensor must have natural numbers as offset, sizes and strides, got "
                f"{len(self.shape)} sizes and {len(self.strides)} strides"
            )
        last = self.offset + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        room = self.storage.length_bytes // self.dtype.itemsize
        if self.numel and last >= room:
            raise FormatError(f"a view must lie inside its {room} elements, got index {last}")

    @property
    def dtype(self) -> DType:
        """The dtype of the elements."""
        return self.cast or self.storage.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def reduce(self) -> tuple[InertType, tuple[object, ...]]:
        """Return the call that makes this tensor in torch."""
        if self.parameter is not None:
            callee, rest = self.parameter
            return callee, (self._plain(), *rest)
        args = (
            self.storage,
            self.offset,
            self.shape,
            self.strides,
            self.requires_grad,
            self.hooks,
        )
        if self.cast is None:
            return _V2, args
        return _V3, (*args, new_global("torch", self.cast.name))

    def parts(self) -> tuple[object, ...]:
        """Return the storage and what hangs on the tensor, not the plain tensor of a parameter."""
        rest = self.parameter[1] if self.parameter is not None else ()
        return (self.storage, self.hooks, *rest)

    def _plain(self) -> TensorRef:
        return TensorRef(
            self.storage,
            self.offset,
            self.shape,
            self.strides,
            self.requires_grad,
            self.hooks,
            self.cast,
        )


def new_tensor(dtype: DType, shape: tuple[int, ...], *, location: str = "cpu") -> TensorRef:
    """Return a dense tensor with a storage of its own, for a file to be written."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    # torch's strides of an empty tensor count an empty dimension as 1.
    if 0 in shape:
        strides = tuple(
            math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape))
        )
    numel = math.prod(shape)
    if dtype.name in BY_NAME and dtype.torch_storage == _UNTYPED.inert_name:
        storage = StorageRef(BY_NAME["uint8"], numel * dtype.itemsize, location, untyped=True)
        return TensorRef(storage, 0, shape, strides, cast=dtype)
    return TensorRef(StorageRef(dtype, numel, location), 0, shape, strides)


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of one torch.save file. ``prefix`` is the archive's top folder.

    ``records`` are by name without that folder (``data.pkl``, ``data/0``), ``storages`` by key.
    """

    path: Path
    prefix: str
    tree: object
    records: dict[str, Record]
    storages: dict[str, StorageRef]

    def payload(self, storage: StorageRef) -> tuple[int, int]:
        """Return the ``(offset, length)`` in bytes of a storage of this file."""
        if storage.key is None or self.storages.get(storage.key) is not storage:
            raise FormatError(f"{self.path}: storage must be of this file, got {storage!r}")
        record = self.records[f"data/{storage.key}"]
        return record.offset, record.length

    def extent(self, tensor: TensorRef) -> tuple[int, int]:
        """Return the ``(offset, length)`` in bytes of a dense tensor of this file."""
        if not tensor.is_dense:
            raise FormatError(
                f"{self.path}: tensor must be dense to be one extent, got shape {tensor.shape} "
                f"with strides {tensor.strides}"
            )
        start, _ = self.payload(tensor.storage)
        itemsize = tensor.dtype.itemsize
        return start + tensor.offset * itemsize, tensor.numel * itemsize


def read_torch_file(path: Path, *, window: tuple[int, int] | None = None) -> TorchFile:
    """Read what a torch.save file holds, or the one in the ``(offset, length)`` part of a file.

    Offsets in the result count from the start of the file in either case.

    Raises:
        FormatError: the file is damaged, hostile, TorchScript, of torch before 1.6, big-endian,
            or holds a storage that `ckpttools.dtypes` has no dtype for.
        StorageError: the system refuses to read it.
    """
    with open_window(path, window) as opened:
        directory = read_directory(opened)
        _check_kind(opened, directory)
        data = _read_record(opened, directory.records["data.pkl"])
        loader = _Storages(opened.where, directory.records)
        rebuild = {
            _V2: _rebuild_v2,
            _V3: _rebuild_v3,
            _PARAMETER: lambda args: _rebuild_parameter(_PARAMETER, args, 3),
            _PARAMETER_STATE: lambda args: _rebuild_parameter(_PARAMETER_STATE, args, 4),
        }
        tree = inert.loads(
            data,
            where=f"{opened.where}: data.pkl",
            persistent_load=loader.load,
            rebuild=rebuild,
        )
    return TorchFile(path, directory.prefix, tree, directory.records, loader.storages)


def tensors(tree: object) -> Iterator[TensorRef]:
    """Yield every tensor in a tree once, in the order of first mention."""
    return (obj for obj in inert.walk(tree) if isinstance(obj, TensorRef))


def load_small_payloads(
    torch_file: TorchFile, tree: object, *, limit_bytes: int = _MAX_SMALL_BYTES
) -> None:
    """Read the bytes of every storage mentioned in ``tree`` (a part of the file's own).

    Each is checked against its CRC-32. They fill ``StorageRef.payload``, so that the part can be
    written into another file.

    Raises:
        FormatError: a storage is longer than ``limit_bytes``, or its bytes are damaged.
    """
    found = [obj for obj in inert.walk(tree) if isinstance(obj, StorageRef)]
    with open_window(torch_file.path) as opened:
        for storage in found:
            _, length = torch_file.payload(storage)
            if length > limit_bytes:
                opened.refuse(
                    f"storage {storage.key} must have at most {limit_bytes} bytes", length
                )
            storage.payload = _read_record(opened, torch_file.records[f"data/{storage.key}"])


def _read_record(window: Window, record: Record) -> bytes:
    """Return a record's payload, checked."""
    if record.length > inert.MAX_PICKLE_BYTES:
        window.refuse(
            f"{record.name}: must have at most {inert.MAX_PICKLE_BYTES} bytes", record.length
        )
    data = window.read(record.offset - window.start, record.length)
    if (crc32 := zlib.crc32(data)) != record.crc32:
        window.refuse(f"{record.name}: CRC-32 must be {record.crc32:#010x}", f"{crc32:#010x}")
    return data


def _check_kind(window: Window, directory: Directory) -> None:
    """Refuse an archive that is no little-endian torch.save file."""
    records = directory.records
    if "constants.pkl" in records:
        window.refuse("must be a torch.save file", "a TorchScript archive (constants.pkl)")
    if "data.pkl" not in records:
        window.refuse("must have a record data.pkl", sorted(records)[:3])
    order = records.get("byteorder")
    if order is not None and _read_record(window, order) != b"little":
        window.refuse("byteorder must be little", _read_record(window, order)[:16])


class _Storages:
    """The storages that a pickle has mentioned, each checked against its record."""

    def __init__(self, where: str, records: dict[str, Record]) -> None:
        self.where = where
        self.records = records
        self.storages: dict[str, StorageRef] = {}

    def load(self, identity: object) -> StorageRef:
        match identity:
            case ("storage", InertType() as kind, str(key), str(location), int(numel)) if (
                numel is not True and numel is not False
            ):
                pass
            case _:
                raise FormatError("a persistent id must be a storage's, got another")
        storage = self.storages.get(key)
        if storage is None:
            storage = self._new(kind, key, location, numel)
            self.storages[key] = storage
        elif (storage.torch_class, storage.location, storage.numel) != (kind, location, numel):
            raise FormatError(
                f"storage {key!r} must always have the same class, place and size, got "
                f"{storage.torch_class} of {storage.numel} and {str(kind)!r} of {numel}"
            )
        return storage

    def _new(self, kind: InertType, key: str, location: str, numel: int) -> StorageRef:
        untyped = kind == _UNTYPED
        if not untyped and (
            kind.inert_module != "torch" or kind.inert_name not in BY_TORCH_STORAGE
        ):
            known = ", ".join(BY_TORCH_STORAGE)
            raise FormatError(f"a storage's class must be one of {known}, got {str(kind)!r}")
        dtype = BY_NAME["uint8"] if untyped else BY_TORCH_STORAGE[kind.inert_name]
        record = self.records.get(f"data/{key}")
        if record is None:
            raise FormatError(f"storage {key!r} must have a record data/{key}, got none")
        if numel * dtype.itemsize != record.length:
            raise FormatError(
                f"storage {key!r} of {numel} {dtype} must have {numel * dtype.itemsize} bytes, "
                f"got {record.length}"
            )
        return StorageRef(dtype, numel, location, key, untyped=untyped)


def _rebuild_v2(args: tuple[object, ...]) -> TensorRef:
    return _tensor(args[:6], args[6:], None)


def _rebuild_v3(args: tuple[object, ...]) -> TensorRef:
    kind = args[6] if len(args) > 6 else None
    if (
        not isinstance(kind, InertType)
        or kind.inert_module != "torch"
        or kind.inert_name not in BY_NAME
    ):
        raise FormatError(
            f"a tensor's dtype must be one of {', '.join(BY_NAME)}, got {str(kind)!r}"
        )
    return _tensor(args[:6], args[7:], BY_NAME[kind.inert_name])


def _tensor(args: tuple[object, ...], rest: tuple[object, ...], cast: DType | None) -> TensorRef:
    match args:
        case (
            StorageRef() as storage,
            int(offset),
            tuple(shape),
            tuple(strides),
            bool(grad),
            hooks,
        ):
            pass
        case _:
            raise FormatError(
                "a tensor must be made of a storage, offset, sizes, strides, requires_grad and "
                f"hooks, got {', '.join(type(arg).__name__ for arg in args) or 'nothing'}"
            )
    if rest:
        # Bits such as "conj" and "neg": the stored bytes are then not the tensor's values.
        raise FormatError("a tensor must have no lazy conjugate or negative, got one")
    return TensorRef(storage, offset, shape, strides, grad, hooks, cast)


def _rebuild_parameter(kind: InertType, args: tuple[object, ...], count: int) -> TensorRef:
    if len(args) != count or not isinstance(args[0], TensorRef) or args[0].parameter is not None:
        raise FormatError(
            f"a parameter must be made of a tensor and {count - 1} arguments, got "
            f"{', '.join(type(arg).__name__ for arg in args) or 'nothing'}"
        )
    data = args[0]
    return TensorRef(
        data.storage,
        data.offset,
        data.shape,
        data.strides,
        data.requires_grad,
        data.hooks,
        data.cast,
        (kind, args[1:]),
    )
