"""How does a tree of inert objects travel as JSON? With a tag for whatever JSON has not.

None, truth values, integers, finite floats, texts and lists are themselves. Everything else is a
JSON object with one of the keys below, so nothing is ambiguous and every type comes back:

===============  ===============================================================================
``map``          a dict whose keys are texts, as an object
``dict``         any other dict, as [key, value] pairs
``ordered``      an ``OrderedDict``, as pairs; ``attributes`` beside it where it has some
``tuple``        and ``set``, ``frozenset``: a list
``bytes``        and ``bytearray``: base64
``float``        a float that is not finite: its 64 bits in hexadecimal
``name``         a name that a pickle mentions: [module, name]
``call``         a call that a pickle asks for: what is called; beside it args, via, kwargs …
``storage``      a torch storage with its payload in base64; ``tensor`` a view of one
``ref``          an object that stood earlier: the number of its tag, counted from 0
===============  ===============================================================================

`ckpttools.storage.inert_decoder` reads it: ``decode(encode(tree))`` is an equal tree, and what is
shared in it is still shared.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ckpttools.errors import FormatError
from ckpttools.storage.inert import MAX_DEPTH, UNSET, Inert, InertType
from ckpttools.storage.torchzip import StorageRef, TensorRef

MAX_PAYLOAD_BYTES = 1 << 20
MAX_INT_BYTES = 255


def encode(tree: object, *, where: str) -> object:
    """Return a tree as plain JSON data.

    Raises:
        FormatError: it holds something else than plain and inert data, a payload that was not
            loaded or is too long, or itself.
    """
    return _Encoder(where).value(tree, 0)


class _Encoder:
    """One pass over a tree; ``known`` numbers the tagged objects by identity, in order."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.known: dict[int, tuple[int, object]] = {}
        self.open: set[int] = set()

    def refused(self, rule: str, got: str) -> FormatError:
        return FormatError(f"{self.where}: {rule}, got {got}")

    def value(self, obj: object, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self.refused(f"depth must be at most {MAX_DEPTH}", "more")
        if obj is None or isinstance(obj, (bool, str)):
            return obj
        if type(obj) is int:
            if obj.bit_length() >= 8 * MAX_INT_BYTES:
                raise self.refused(
                    f"an integer must have at most {MAX_INT_BYTES} bytes", "a longer one"
                )
            return obj
        if type(obj) is float:
            return obj if math.isfinite(obj) else {"float": struct.pack(">d", obj).hex()}
        if isinstance(obj, InertType):
            return {"name": [obj.inert_module, obj.inert_name]}
        known = self.known.get(id(obj))
        if known is not None:
            if id(obj) in self.open:
                raise self.refused("objects must not contain themselves", "one that does")
            return {"ref": known[0]}
        self.known[id(obj)] = len(self.known), obj
        self.open.add(id(obj))
        result = self.tagged(obj, depth + 1)
        self.open.discard(id(obj))
        return result

    def tagged(self, obj: object, depth: int) -> object:
        writer = _ENCODERS.get(type(obj))
        if writer is None:
            raise self.refused("must hold only plain and inert objects", type(obj).__name__)
        return writer(self, obj, depth)

    def list_of(self, obj: Any, depth: int) -> list[object]:
        return [self.value(item, depth) for item in obj]

    def pairs(self, obj: Any, depth: int) -> list[object]:
        return [[self.value(k, depth), self.value(v, depth)] for k, v in obj]

    def mapping(self, obj: dict[object, object], depth: int) -> object:
        if all(type(key) is str for key in obj):
            return {"map": {str(key): self.value(item, depth) for key, item in obj.items()}}
        return {"dict": self.pairs(obj.items(), depth)}

    def ordered(self, obj: OrderedDict[object, object], depth: int) -> object:
        result: dict[str, object] = {"ordered": self.pairs(dict.items(obj), depth)}
        if vars(obj):
            result["attributes"] = self.value(dict(vars(obj)), depth)
        return result

    def call(self, obj: Inert, depth: int) -> object:
        result: dict[str, object] = {
            "call": self.value(obj.callee, depth),
            "args": self.list_of(obj.args, depth),
            "via": obj.via,
        }
        if obj.kwargs:
            result["kwargs"] = self.pairs(obj.kwargs.items(), depth)
        if obj.items:
            result["items"] = self.pairs(obj.items, depth)
        if obj.appended:
            result["appended"] = self.list_of(obj.appended, depth)
        if obj.state is not UNSET:
            result["state"] = self.value(obj.state, depth)
        return result

    def storage(self, obj: StorageRef, depth: int) -> object:
        del depth
        if obj.payload is None or len(obj.payload) != obj.length_bytes:
            raise self.refused("a storage must have its payload", "none")
        if obj.length_bytes > MAX_PAYLOAD_BYTES:
            raise self.refused(f"a storage must have at most {MAX_PAYLOAD_BYTES} bytes", "more")
        return {
            "storage": base64.b64encode(obj.payload).decode(),
            "dtype": obj.dtype.name,
            "location": obj.location,
            "untyped": obj.untyped,
        }

    def tensor(self, obj: TensorRef, depth: int) -> object:
        made = obj.parameter
        return {
            "tensor": self.value(obj.storage, depth),
            "offset": obj.offset,
            "shape": list(obj.shape),
            "strides": list(obj.strides),
            "requires_grad": obj.requires_grad,
            "hooks": self.value(obj.hooks, depth),
            "cast": obj.cast.name if obj.cast else None,
            "parameter": self.value((made[0], *made[1]), depth) if made else None,
        }


def _b64(name: str) -> Callable[[_Encoder, Any, int], object]:
    return lambda _encoder, obj, _depth: {name: base64.b64encode(obj).decode()}


def _listed(name: str) -> Callable[[_Encoder, Any, int], object]:
    return lambda encoder, obj, depth: {name: encoder.list_of(obj, depth)}


_ENCODERS: Mapping[type, Callable[[_Encoder, Any, int], object]] = {
    list: _Encoder.list_of,
    dict: _Encoder.mapping,
    OrderedDict: _Encoder.ordered,
    tuple: _listed("tuple"),
    set: _listed("set"),
    frozenset: _listed("frozenset"),
    bytes: _b64("bytes"),
    bytearray: _b64("bytearray"),
    Inert: _Encoder.call,
    StorageRef: _Encoder.storage,
    TensorRef: _Encoder.tensor,
}
