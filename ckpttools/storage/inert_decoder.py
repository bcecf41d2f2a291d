"""Which tree does a JSON document of `ckpttools.storage.inert_encoder` describe?

Everything is checked, and nothing that the document names is imported, called or looked up. Work
is linear in its length: depth, payloads and keys have limits.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import FormatError
from ckpttools.storage.inert import MAX_DEPTH, UNSET, Inert, InertType
from ckpttools.storage.inert_encoder import MAX_PAYLOAD_BYTES
from ckpttools.storage.torchzip import StorageRef, TensorRef

MAX_KEY_PARTS = 64  # parts of a tuple used as a dict key


def decode(document: object, *, where: str) -> object:
    """Return the tree that a document describes.

    Raises:
        FormatError: it is not what :func:`encode` makes.
    """
    return _Decoder(where).value(document, 0)


class _Decoder:
    """One pass over a document; ``known`` are the finished objects by number."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.count = 0
        self.known: dict[int, object] = {}

    def refused(self, rule: str, got: object) -> FormatError:
        return FormatError(f"{self.where}: {rule}, got {got!r:.60}")

    def value(self, node: object, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self.refused(f"depth must be at most {MAX_DEPTH}", "more")
        if node is None or isinstance(node, (bool, str, int, float)):
            return node
        if isinstance(node, dict):
            if set(node) == {"float"}:
                return self.odd_float(node["float"])
            if set(node) == {"name"}:
                return self.name(node["name"])
            if set(node) == {"ref"}:
                return self.earlier(node["ref"])
        number = self.count
        self.count += 1
        result = self.tagged(node, depth + 1)
        self.known[number] = result
        return result

    def tagged(self, node: object, depth: int) -> object:
        if isinstance(node, list):
            return self.list_of(node, depth)
        if isinstance(node, dict):
            for tag, reader in _DECODERS.items():
                if tag in node:
                    return reader(self, node, depth)
        raise self.refused("a node must be plain or have a known tag", node)

    # Pieces of nodes.

    def keys(self, node: Mapping[str, object], needed: set[str], optional: set[str]) -> None:
        if not needed <= set(node) <= needed | optional:
            raise self.refused(f"a node must have {', '.join(sorted(needed))}", sorted(node))

    def list_of(self, node: object, depth: int) -> list[object]:
        if not isinstance(node, list):
            raise self.refused("must be a list", node)
        return [self.value(item, depth) for item in node]

    def pairs(self, node: object, depth: int) -> list[tuple[object, object]]:
        if not isinstance(node, list) or not all(isinstance(p, list) and len(p) == 2 for p in node):
            raise self.refused("must be a list of pairs", node)
        return [(self.value(k, depth), self.value(v, depth)) for k, v in node]

    def table(self, pairs: list[tuple[object, object]]) -> dict[object, object]:
        result: dict[object, object] = {}
        for key, value in pairs:
            self.check_key(key)
            if key in result:
                raise self.refused("a key must be there once", key)
            result[key] = value
        return result

    def check_key(self, key: object) -> None:
        """Refuse a key whose hash would fail or take more than a moment."""
        todo, room = [key], MAX_KEY_PARTS
        while todo:
            part, room = todo.pop(), room - 1
            if isinstance(part, tuple) and len(part) <= room:
                todo.extend(part)
            elif room < 0 or not (part is None or isinstance(part, _HASHED)):
                raise self.refused("a key must be a name, a number or a short tuple of them", part)

    def payload(self, text: object) -> bytes:
        try:
            if isinstance(text, str):
                return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
        raise self.refused("must be base64", text)

    def odd_float(self, text: object) -> float:
        try:
            bits = bytes.fromhex(text) if isinstance(text, str) else b""
        except ValueError:
            bits = b""
        if len(bits) != 8:
            raise self.refused("a float must have 16 hexadecimal digits", text)
        value: float = struct.unpack(">d", bits)[0]
        return value

    def name(self, node: object) -> InertType:
        match node:
            case [str(module), str(name)]:
                return InertType(module, name)
        raise self.refused("a name must be two texts", node)

    def earlier(self, number: object) -> object:
        if type(number) is not int or number not in self.known:
            raise self.refused("a ref must be of an object that stood earlier", number)
        return self.known[number]

    # Tags.

    def mapping(self, node: Mapping[str, object], depth: int) -> object:
        self.keys(node, {"map"}, set())
        inside = node["map"]
        if not isinstance(inside, dict):
            raise self.refused("a map must be an object", inside)
        return {str(key): self.value(item, depth) for key, item in inside.items()}

    def any_dict(self, node: Mapping[str, object], depth: int) -> object:
        self.keys(node, {"dict"}, set())
        return self.table(self.pairs(node["dict"], depth))

    def ordered(self, node: Mapping[str, object], depth: int) -> object:
        self.keys(node, {"ordered"}, {"attributes"})
        result = OrderedDict(self.table(self.pairs(node["ordered"], depth)))
        if "attributes" in node:
            attributes = self.value(node["attributes"], depth)
            if not isinstance(attributes, dict) or any(
                not isinstance(key, str) or hasattr(OrderedDict, key) for key in attributes
            ):
                raise self.refused(
                    "attributes must be names that hide no method", node["attributes"]
                )
            vars(result).update(attributes)
        return result

    def listed(self, node: Mapping[str, object], depth: int) -> object:
        ((tag, inside),) = node.items() if len(node) == 1 else (("", None),)
        made = _LISTED.get(tag)
        if made is None:
            raise self.refused("a node must have one tag", sorted(node))
        items = self.list_of(inside, depth)
        if tag != "tuple":
            for item in items:
                self.check_key(item)
        return made(items)

    def packed(self, node: Mapping[str, object], depth: int) -> object:
        del depth
        ((tag, inside),) = node.items() if len(node) == 1 else (("", None),)
        if tag not in ("bytes", "bytearray"):
            raise self.refused("a node must have one tag", sorted(node))
        data = self.payload(inside)
        return data if tag == "bytes" else bytearray(data)

    def call(self, node: Mapping[str, object], depth: int) -> object:
        self.keys(node, {"call", "args", "via"}, {"kwargs", "items", "appended", "state"})
        callee = self.value(node["call"], depth)
        if not isinstance(callee, (InertType, Inert)):
            raise self.refused("what is called must be a name", node["call"])
        args = tuple(self.list_of(node["args"], depth))
        kwargs = self.table(self.pairs(node.get("kwargs", []), depth))
        items = self.pairs(node.get("items", []), depth)
        appended = self.list_of(node.get("appended", []), depth)
        state = self.value(node["state"], depth) if "state" in node else UNSET
        return Inert(callee, args, self.via(node["via"]), kwargs, state, items, appended)

    def via(self, text: object) -> Literal["reduce", "newobj"]:
        if text == "reduce":
            return "reduce"
        if text == "newobj":
            return "newobj"
        raise self.refused("via must be reduce or newobj", text)

    def storage(self, node: Mapping[str, object], depth: int) -> object:
        del depth
        self.keys(node, {"storage", "dtype", "location", "untyped"}, set())
        data = self.payload(node["storage"])
        kind = BY_NAME.get(str(node["dtype"]))
        location, untyped = node["location"], node["untyped"]
        if kind is None or not isinstance(location, str) or not isinstance(untyped, bool):
            raise self.refused(
                "a storage must have a dtype, a location and be untyped or not", node
            )
        numel, rest = divmod(len(data), kind.itemsize)
        if rest or len(data) > MAX_PAYLOAD_BYTES:
            raise self.refused(f"a storage of {kind} must hold whole elements", len(data))
        return StorageRef(kind, numel, location, payload=data, untyped=untyped)

    def tensor(self, node: Mapping[str, object], depth: int) -> object:
        self.keys(node, set(_TENSOR), set())
        storage = self.value(node["tensor"], depth)
        hooks = self.value(node["hooks"], depth)
        parameter = self.value(node["parameter"], depth)
        shape, strides, offset = node["shape"], node["strides"], node["offset"]
        grad, cast = node["requires_grad"], node["cast"]
        match parameter:
            case None:
                made = None
            case (InertType() as kind, *rest):
                made = kind, tuple(rest)
            case _:
                raise self.refused(
                    "a parameter must be a name and its arguments", node["parameter"]
                )
        if (
            not isinstance(storage, StorageRef)
            or not isinstance(shape, list)
            or not isinstance(strides, list)
            or type(offset) is not int
            or not isinstance(grad, bool)
            or not (cast is None or cast in BY_NAME)
        ):
            raise self.refused(
                "a tensor must have a storage, offset, shape, strides and cast", node
            )
        view = tuple(shape), tuple(strides), grad, hooks
        return TensorRef(storage, offset, *view, BY_NAME[str(cast)] if cast else None, made)


_HASHED = (str, int, float, bytes, InertType, Inert)
_TENSOR = ("tensor", "offset", "shape", "strides", "requires_grad", "hooks", "cast", "parameter")
_LISTED: Mapping[str, Callable[[list[object]], object]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_DECODERS: Mapping[str, Callable[[_Decoder, Mapping[str, object], int], object]] = {
    "map": _Decoder.mapping,
    "dict": _Decoder.any_dict,
    "ordered": _Decoder.ordered,
    "tuple": _Decoder.listed,
    "set": _Decoder.listed,
    "frozenset": _Decoder.listed,
    "bytes": _Decoder.packed,
    "bytearray": _Decoder.packed,
    "call": _Decoder.call,
    "storage": _Decoder.storage,
    "tensor": _Decoder.tensor,
}
