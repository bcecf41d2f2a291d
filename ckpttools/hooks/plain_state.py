"""How do the states of schedulers, loaders and random generators become plain data, and back?

A checkpoint holds no pickle. What Python's and torch's own objects return from ``state_dict()`` is
turned into the trees that :mod:`ckpttools.storage.inert_encoder` writes: numbers, texts, lists,
dicts, and tensors and arrays with their bytes. Everything comes back as the type that it was; what
has no such form is refused by its path.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ckpttools.dtypes import BY_NAME, dtype
from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, is_global, new_global
from ckpttools.storage.torchzip import StorageRef, TensorRef

_COUNTER = ("collections", "Counter")
_ARRAY = ("numpy", "ndarray")
_DTYPE = "torch"


def to_plain(value: object, where: str) -> object:
    """Return a copy of ``value`` as inert data.

    Raises:
        FormatError: something in it has no such form; the message says where.
    """
    if value is None or isinstance(value, (bool, str, bytes, bytearray)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, (np.generic, int, float)):
        return _number(value, where)
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray):
        array = _tensor(torch.from_numpy(np.ascontiguousarray(value)), where)
        return Inert(new_global(*_ARRAY), (array, tuple(value.shape)))
    if isinstance(value, torch.dtype):
        return new_global(_DTYPE, str(value).removeprefix("torch."))
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [to_plain(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return _SEQUENCES.get(type(value), tuple)(parts)
    raise FormatError(f"{where}: must be plain data, got {type(value).__name__}")


_SEQUENCES: Mapping[type, Callable[[list[object]], object]] = {
    list: list,
    set: set,
    frozenset: frozenset,
}


def from_plain(value: object, where: str) -> object:
    """Return what :func:`to_plain` was given.

    Raises:
        FormatError: it is not what that function makes.
    """
    if isinstance(value, TensorRef):
        return _restored_tensor(value, where)
    if isinstance(value, Inert):
        return _restored_call(value, where)
    if isinstance(value, OrderedDict):
        return OrderedDict((k, from_plain(v, f"{where}.{k}")) for k, v in value.items())
    if isinstance(value, dict):
        return {k: from_plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(from_plain(part, where) for part in value)
    for kind in BY_NAME if not isinstance(value, (str, bytes)) else ():
        if is_global(value, _DTYPE, kind):
            return getattr(torch, kind)
    return value


def _number(value: object, where: str) -> object:
    """Return a number as Python's own; numpy's and those of enumerations are subclasses."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise FormatError(f"{where}: must be a real number, got {type(value).__name__}")


def _mapping(value: Mapping[object, object], where: str) -> object:
    pairs = [
        (to_plain(key, f"{where}: a key"), to_plain(part, f"{where}.{key}"))
        for key, part in value.items()
    ]
    if isinstance(value, Counter):
        return Inert(new_global(*_COUNTER), (dict(pairs),))
    return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)


def _tensor(value: Tensor, where: str) -> TensorRef:
    name = str(value.dtype).removeprefix("torch.")
    if name not in BY_NAME or value.layout != torch.strided:
        raise FormatError(f"{where}: must be a dense tensor of a known dtype, got {name}")
    flat = value.detach().cpu().contiguous().reshape(-1)
    payload = flat.view(torch.uint8).numpy().tobytes()
    shape = tuple(value.shape)
    storage = StorageRef(dtype(name), flat.numel(), payload=payload)
    return TensorRef(storage, 0, shape, _strides(shape), requires_grad=False)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def _restored_tensor(value: TensorRef, where: str) -> Tensor:
    storage = value.storage
    if storage.payload is None or value.offset or value.strides != _strides(value.shape):
        raise FormatError(f"{where}: must be a whole tensor with its bytes, got a view")
    kind: torch.dtype = getattr(torch, storage.dtype.name)
    if not storage.payload:
        return torch.zeros(value.shape, dtype=kind)
    return torch.frombuffer(bytearray(storage.payload), dtype=kind).reshape(value.shape)


def _count(value: object, where: str) -> int:
    if not isinstance(value, int):
        raise FormatError(f"{where}: a counter must hold whole numbers, got {value!r:.40}")
    return value


def _restored_call(value: Inert, where: str) -> object:
    first = value.args[0] if value.args else None
    if is_global(value.callee, *_COUNTER) and isinstance(first, dict):
        return Counter({key: _count(n, where) for key, n in first.items()})
    if is_global(value.callee, *_ARRAY) and isinstance(first, TensorRef):
        return _restored_tensor(first, where).numpy()
    raise FormatError(f"{where}: must be plain data, got {value!r:.60}")
