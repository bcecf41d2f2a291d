"""Are two directories of torch files the same, and where do they differ?

Two directories are the same *as files* if they have the same files, and each torch file holds
the same keys in the same order, the same types, dtypes and shapes, and every tensor the same
bytes. Nothing here imports ckpttools. Classes of packages that are not installed are replaced by
stand-ins on reading, which is fine for trusted fixtures only.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

# --- reading torch files ----------------------------------------------------------------


class StandIn:
    """An instance of a class that cannot be imported: keeps what the pickle gave it."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn) or type(self) is not type(other):
            return NotImplemented
        return (self.args, self.state) == (other.args, other.state)

    def __hash__(self) -> int:
        return hash((type(self), self.args))

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}{self.args!r}"


_STAND_INS: dict[tuple[str, str], type[StandIn]] = {}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".", maxsplit=1)[0] != "megatron":
            return super().find_class(module, name)
        if (module, name) not in _STAND_INS:
            _STAND_INS[module, name] = type(name, (StandIn,), {"__module__": module})
        return _STAND_INS[module, name]


_PICKLE_MODULE = types.SimpleNamespace(
    __name__="oracle_pickle", Unpickler=_Unpickler, load=pickle.load, loads=pickle.loads
)


def read(path: Path) -> Any:
    """Load a trusted torch file; ``megatron`` classes become stand-ins."""
    return torch.load(path, map_location="cpu", pickle_module=_PICKLE_MODULE, weights_only=False)


# --- comparing tensors -------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: NaN equals itself, and -0.0 is not 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)


def tensor_differences(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Name what differs between two dictionaries of tensors, bit for bit."""
    found = [f"{key}: only in the first" for key in a if key not in b]
    found += [f"{key}: only in the second" for key in b if key not in a]
    for key in a:
        if key in b:
            found += _tensors(a[key], b[key], key)
    return found


# --- comparing directories as files -----------------------------------------------------


def compare_files(
    a: Path,
    b: Path,
    *,
    ignore_args: Collection[str] = (),
    ignore_keys: Collection[str] = (),
) -> list[str]:
    """Describe each difference between two checkpoint directories; none is an empty list.

    Files must be the same by relative path. ``.pt`` files are compared as objects: types, keys
    and their order, dtypes, shapes and bytes of tensors and arrays, bits of numbers; ``args``
    but for the names in ``ignore_args``; top-level keys in ``ignore_keys`` must be there in both
    but may differ. Other files must be equal byte for byte. Where a tensor lies in its storage,
    and which tensors share one, is not compared.
    """
    names = [
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        for root in (a, b)
    ]
    found = [f"{name}: only in the first" for name in sorted(names[0] - names[1])]
    found += [f"{name}: only in the second" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        if name.endswith(".pt"):
            first, second = (
                _masked(read(root / name), ignore_args, ignore_keys) for root in (a, b)
            )
            found += [f"{name}: {line}" for line in compare_objects(first, second)]
        elif (a / name).read_bytes() != (b / name).read_bytes():
            found.append(f"{name}: bytes differ")
    return found


def _masked(content: Any, ignore_args: Collection[str], ignore_keys: Collection[str]) -> Any:
    """Replace what may differ by None, keeping the keys and their order."""
    if not isinstance(content, dict):
        return content
    masked = {key: None if key in ignore_keys else value for key, value in content.items()}
    if isinstance(masked.get("args"), argparse.Namespace):
        names = vars(masked["args"])
        kept = {name: None if name in ignore_args else value for name, value in names.items()}
        masked["args"] = argparse.Namespace(**kept)
    return masked


def compare_objects(a: Any, b: Any, where: str = "") -> list[str]:
    """Describe each difference between two unpickled objects, by the path to it."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        return _mappings(a, b, where)
    if isinstance(a, argparse.Namespace):
        return _mappings(vars(a), vars(b), where)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b, strict=True))
        return [line for i, (x, y) in pairs for line in compare_objects(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor):
        return _tensors(a, b, where)
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        return [] if same else [f"{where}: arrays differ"]
    if isinstance(a, io.BytesIO):
        return [] if a.getvalue() == b.getvalue() else [f"{where}: bytes differ"]
    if isinstance(a, float):
        return [] if struct.pack("<d", a) == struct.pack("<d", b) else [f"{where}: {a!r} and {b!r}"]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def _mappings(a: Mapping[Any, Any], b: Mapping[Any, Any], where: str) -> list[str]:
    found = [f"{where}.{key}: only in the first" for key in a if key not in b]
    found += [f"{where}.{key}: only in the second" for key in b if key not in a]
    if not found and list(a) != list(b):
        place, pair = next((i, p) for i, p in enumerate(zip(a, b, strict=True)) if p[0] != p[1])
        found.append(f"{where}: key order: number {place} is {pair[0]!r} and {pair[1]!r}")
    for key in a:
        if key in b:
            found += compare_objects(a[key], b[key], f"{where}.{key}")
    return found


def _tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> list[str]:
    if a.dtype != b.dtype:
        return [f"{where}: dtype {a.dtype} and {b.dtype}"]
    if a.shape != b.shape:
        return [f"{where}: shape {tuple(a.shape)} and {tuple(b.shape)}"]
    if _bytes(a) == _bytes(b):
        return []
    unequal = (_octets(a) != _octets(b)).view(a.numel(), -1).any(1)
    first = int(unequal.to(torch.uint8).argmax())
    values = f"{a.reshape(-1)[first].item()!r} and {b.reshape(-1)[first].item()!r}"
    count = f"{int(unequal.sum())} of {a.numel()} elements differ"
    return [f"{where}: {count}, the first at flat index {first}: {values}"]


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return _octets(tensor).numpy().tobytes()
