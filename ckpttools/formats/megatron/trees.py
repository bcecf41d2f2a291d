"""Are two inert objects of two rank files the same? Structural equality, tensors by payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeVar

from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, InertType, qualified_name
from ckpttools.storage.torchzip import TensorRef

T = TypeVar("T")

_SCALARS = (str, int, float, bool, type(None))


def fingerprint(tree: object, where: str = "tree") -> bytes:
    """Return a SHA-256 that is equal for equal trees.

    Numbers compare by value and type, dicts in order, tensors by dtype, place in their storage
    and the storage's bytes. Shared parts are visited once, so the cost is that of the file.

    Raises:
        FormatError: the tree contains itself.
    """
    return _fingerprint(tree, where, {})


def _fingerprint(tree: object, where: str, seen: dict[int, bytes | None]) -> bytes:
    """Return the fingerprint of a node; ``seen`` has those of finished nodes, None while open."""
    known = seen.get(id(tree), b"")
    if known:
        return known
    if known is None:
        raise FormatError(f"{where}: objects must not contain themselves, got one that does")
    seen[id(tree)] = None
    label, inside, is_set = _node(tree)
    digests = [_fingerprint(part, where, seen) for part in inside]
    if is_set:
        digests.sort()
    result = sha256(sha256(label).digest() + b"".join(digests)).digest()
    seen[id(tree)] = result
    return result


def _node(tree: object) -> tuple[bytes, Sequence[object], bool]:
    """Return what a node is apart from its parts, its parts, and whether their order is none.

    The parts belong to the tree: what is made here would be gone while its id is remembered.
    """
    if isinstance(tree, dict):
        return b"dict", [part for item in tree.items() for part in item], False
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__.encode(), tree, False
    if isinstance(tree, (set, frozenset)):
        return type(tree).__name__.encode(), list(tree), True
    if isinstance(tree, TensorRef):
        label = f"tensor {tree.dtype} {tree.offset} {tree.shape} {tree.strides}".encode()
        return label, [tree.storage.payload], False
    if isinstance(tree, Inert):
        label = f"inert {qualified_name(tree)} {tree.via} {len(tree.args)}".encode()
        return label, [*tree.args, tree.kwargs, tree.state, tree.items, tree.appended], False
    if isinstance(tree, bytes):
        return b"bytes " + tree, (), False
    if isinstance(tree, InertType):
        return f"name {tree}".encode("utf-8", "surrogatepass"), (), False
    return f"{type(tree).__name__} {tree!r}".encode("utf-8", "surrogatepass"), (), False


def same(a: object, b: object) -> bool:
    """Say whether two trees are equal in structure and values.

    Raises:
        FormatError: one of them contains itself.
    """
    if a is b:
        return True
    if isinstance(a, _SCALARS) and isinstance(b, _SCALARS):
        return type(a) is type(b) and repr(a) == repr(b)
    return fingerprint(a) == fingerprint(b)


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


def as_tree(tree: object, where: str) -> dict[str, object]:
    """Return a dict whose keys are names.

    Raises:
        FormatError: it is something else.
    """
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise FormatError(f"{where}: must hold a dict with names, got {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}
