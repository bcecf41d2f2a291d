"""Are two inert objects of two rank files the same? Structural equality, tensors by payload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, InertType, qualified_name
from ckpttools.storage.torchzip import TensorRef

T = TypeVar("T")


def comparable(tree: object) -> object:
    """Return a plain value that is equal for equal trees, and hashable nowhere needed.

    Floats compare by value and type, dicts in order, tensors by dtype, shape and bytes.
    """
    if isinstance(tree, dict):
        return ("dict", [(comparable(k), comparable(v)) for k, v in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, [comparable(value) for value in tree])
    if isinstance(tree, (set, frozenset)):
        return (type(tree).__name__, sorted(repr(comparable(value)) for value in tree))
    if isinstance(tree, TensorRef):
        return ("tensor", str(tree.dtype), tree.shape, tree.strides, tree.storage.payload)
    if isinstance(tree, Inert):
        made = [comparable(a) for a in tree.args]
        done = [comparable(x) for x in (tree.state, tree.items, tree.appended, tree.kwargs)]
        return ("inert", qualified_name(tree), tree.via, made, done)
    if isinstance(tree, InertType):
        return ("name", str(tree))
    return (type(tree).__name__, repr(tree))


def same(a: object, b: object) -> bool:
    """Say whether two trees are equal in structure and values."""
    return comparable(a) == comparable(b)


def entry(tree: Mapping[str, object], key: str, kind: type[T], where: str) -> T:
    """Return ``tree[key]``, which must be of type ``kind``.

    Raises:
        FormatError: it is missing or something else.
    """
    value = tree.get(key)
    if not isinstance(value, kind):
        raise FormatError(
            f"{where}: {key!r} must be a {kind.__name__}, got "
            f"{'none' if value is None else type(value).__name__}"
        )
    return value
