"""What does ``distrib_optim.pt`` hold? Every version of it, as flat tensors per buffer.

=====  ==========  ==========================================================================
v2     2024-04 on  top key ``buckets_coalesced``; per buffer ``{(param, grad dtype): {name: one
                   flat tensor, numel_unpadded}}``, padding at bucket ends taken out
v1c    2024-02     as v1b, with (param dtype, grad dtype) as the key
v1b    2023-09     as v1a, with a top key ``bucket_sizes`` or ``per_bucket_numel``
v1a    2023-09     a *list* of tensors per name, one a bucket, each padded
v0     2023-05     one tensor per name, padded; the key is the gradient's dtype
=====  ==========  ==========================================================================

Versions before v2 are experimental: they are read by their description, since no file that
Megatron wrote is at hand. Source: megatron/core/optimizer/distrib_optimizer.py and its history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.megatron.trees import as_tree
from ckpttools.storage.inert import InertType
from ckpttools.storage.torchzip import TensorRef, TorchFile

Version = Literal["v0", "v1", "v2"]
_BUCKET_KEYS = frozenset({"bucket_sizes", "per_bucket_numel", "per_bucket_numel_unpadded"})


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """One buffer as saved.

    ``tensors`` maps each name to its flat tensors: one, or one a bucket (v1). ``param_dtype`` is
    None where the version doesn't tell it. ``numel_unpadded`` is what v2 declares.
    """

    version: Version
    key: object
    param_dtype: str | None
    numel_unpadded: int | None
    tensors: Mapping[str, tuple[TensorRef, ...]]

    @property
    def bucket_numels(self) -> tuple[int, ...]:
        """Elements of each stored piece."""
        return tuple(tensor.numel for tensor in self.tensors["param"])


def read_optimizers(file: TorchFile) -> tuple[tuple[SavedBuffer, ...], ...]:
    """Return the buffers of each chained optimizer in a ``distrib_optim.pt``.

    Raises:
        FormatError: it isn't what its version must be.
        UnsupportedError: it is of no known version.
    """
    where = str(file.path)
    if isinstance(file.tree, list):
        if any(state is None for state in file.tree):
            raise UnsupportedError(
                f"{where}: every optimizer must be saved here, got an empty one (expert "
                f"parallelism is not supported)"
            )
        return tuple(_buffers(s, f"{where}: optimizer {i}") for i, s in enumerate(file.tree))
    return (_buffers(file.tree, where),)


def _buffers(tree: object, where: str) -> tuple[SavedBuffer, ...]:
    """Read one optimizer's buffers, in the order of their numbers."""
    if not isinstance(tree, dict):
        raise FormatError(f"{where}: must be a dict of buffers, got {type(tree).__name__}")
    names = {key for key in tree if isinstance(key, str)}
    coalesced = names == {"buckets_coalesced"} and tree["buckets_coalesced"] is True
    if not coalesced and not names <= _BUCKET_KEYS:
        raise UnsupportedError(f"{where}: must be of a known version, got keys {sorted(names)}")
    indices = [key for key in tree if not isinstance(key, str)]
    if not indices or indices != list(range(len(indices))):
        raise FormatError(f"{where}: buffers must be numbered from 0, got {indices}")
    read = _buffer_v2 if coalesced else _buffer_before_v2
    buffers = tuple(read(tree[i], f"{where}: buffer {i}") for i in indices)
    _check_disjoint(buffers, where)
    return buffers


def _check_disjoint(buffers: Sequence[SavedBuffer], where: str) -> None:
    """Refuse flat tensors that share elements: one slot's values would pass for another's."""
    taken = sorted(
        (id(tensor.storage), tensor.offset, tensor.offset + tensor.numel, name)
        for buffer in buffers
        for name, tensors in buffer.tensors.items()
        for tensor in tensors
        if tensor.numel
    )
    for (storage, _, stop, first), (other, start, _, second) in pairwise(taken):
        if storage == other and start < stop:
            raise FormatError(
                f"{where}: {second} must have elements of its own, got some of {first}'s"
            )


def _buffer_v2(value: object, where: str) -> SavedBuffer:
    """Read {(param dtype, grad dtype): {name: flat tensor, numel_unpadded}}."""
    key, tree = _single(value, where)
    numel = tree.get("numel_unpadded")
    if type(numel) is not int or numel < 0:
        raise FormatError(f"{where}: numel_unpadded must be a size, got {numel!r}")
    dtypes = _dtypes(key)
    if dtypes is None or len(dtypes) != 2:
        raise FormatError(f"{where}: the key must be (param dtype, grad dtype), got {key!r}")
    tensors = {k: (_flat(t, where, k),) for k, t in tree.items() if k != "numel_unpadded"}
    for name, (tensor,) in tensors.items():
        if tensor.numel != numel:
            raise FormatError(
                f"{where}: {name} must be a flat tensor of numel_unpadded = {numel}, got "
                f"{tensor.shape}"
            )
    return _checked(SavedBuffer("v2", key, dtypes[0], numel, tensors), where)


def _buffer_before_v2(value: object, where: str) -> SavedBuffer:
    """Read {dtype or (param, grad dtype): {name: tensor, or list of one tensor a bucket}}."""
    key, tree = _single(value, where)
    dtypes = _dtypes(key)
    if dtypes is None:
        raise FormatError(f"{where}: the key must be a dtype or a pair of them, got {key!r}")
    listed = {isinstance(tensor, list) for tensor in tree.values()}
    if len(listed) != 1:
        raise FormatError(f"{where}: tensors must all be lists by bucket or none, got {list(tree)}")
    tensors = {
        name: tuple(_flat(t, where, name) for t in (value if isinstance(value, list) else [value]))
        for name, value in tree.items()
    }
    version: Version = "v1" if listed == {True} else "v0"
    param_dtype = dtypes[0] if len(dtypes) == 2 else None
    return _checked(SavedBuffer(version, key, param_dtype, None, tensors), where)


def _single(value: object, where: str) -> tuple[object, dict[str, object]]:
    """Return the one dtype key of a buffer, and what is under it."""
    if not isinstance(value, dict) or len(value) != 1:
        raise FormatError(f"{where}: must have one dtype key, got {value!r:.80}")
    ((key, inner),) = value.items()
    return key, as_tree(inner, where)


def _dtypes(key: object) -> tuple[str, ...] | None:
    """Return the names of the dtypes in a buffer's key."""
    parts: Sequence[object] = key if isinstance(key, tuple) else (key,)
    names = [p.inert_name for p in parts if isinstance(p, InertType) and p.inert_module == "torch"]
    return tuple(names) if len(names) == len(parts) and len(names) in (1, 2) else None


def _flat(tensor: object, where: str, name: str) -> TensorRef:
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not tensor.is_dense:
        shape = tensor.shape if isinstance(tensor, TensorRef) else type(tensor).__name__
        raise FormatError(f"{where}: {name} must be a flat tensor, got {shape}")
    return tensor


def _checked(buffer: SavedBuffer, where: str) -> SavedBuffer:
    """Check that there is a master, and that all tensors are cut alike."""
    if "param" not in buffer.tensors:
        raise FormatError(f"{where}: must have a tensor 'param', got {sorted(buffer.tensors)}")
    for name, tensors in buffer.tensors.items():
        if tuple(t.numel for t in tensors) != buffer.bucket_numels:
            raise FormatError(
                f"{where}: {name} must have pieces of {buffer.bucket_numels} elements as 'param' "
                f"has, got {tuple(t.numel for t in tensors)}"
            )
    return buffer
