"""Which bytes would torch's pickler write for a tree of inert objects?

`dumps` makes the choices of CPython's C pickler in protocol 2, the one torch.save uses: which
opcode holds a number, what enters the memo and in which order, how items are batched. An object
mentioned twice is written once. So ``dumps(loads(data)) == data`` for what torch wrote, and a
new tree comes out as torch would write it. (CPython's pure Python pickler batches otherwise.)
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from ckpttools.errors import FormatError
from ckpttools.storage.inert_tree import (
    MAX_DEPTH,
    ORDERED_DICT,
    UNSET,
    Inert,
    InertType,
    Rebuilt,
)

_BATCH = 1000  # items between a MARK and its SETITEMS or APPENDS
_ENCODE = InertType("_codecs", "encode")
_BYTES = InertType("__builtin__", "bytes")
_BYTEARRAY = InertType("__builtin__", "bytearray")
_SET = InertType("__builtin__", "set")
_FROZENSET = InertType("__builtin__", "frozenset")


def dumps(
    tree: object,
    *,
    persistent_id: Callable[[object], object | None],
    where: str = "tree",
) -> bytes:
    """Return ``tree`` as a pickle of protocol 2.

    ``persistent_id`` is asked for each object that is no plain, inert or rebuilt one; it returns
    the plain id to write in its place, or None to refuse it.

    Raises:
        FormatError: the tree holds something that cannot be written, or is nested too deep.
    """
    emitter = _Emitter(persistent_id, where)
    emitter.out += b"\x80\x02"
    emitter.save(tree)
    emitter.out += b"."
    return bytes(emitter.out)


class _Emitter:
    """The pickle so far, and the memo: id of an object → its index and the object.

    The memo keeps its objects alive, since an id may be reused once its owner is gone. Names are
    memoized by value: torch has one object for each.
    """

    def __init__(self, persistent_id: Callable[[object], object | None], where: str) -> None:
        self.persistent_id = persistent_id
        self.where = where
        self.out = bytearray()
        self.memo: dict[int, tuple[int, object]] = {}
        self.names: dict[InertType, int] = {}
        self.depth = 0

    def save(self, obj: object) -> None:
        if obj is None:
            self.out += b"N"
        elif isinstance(obj, InertType):
            self.save_name(obj)
        elif (known := self.memo.get(id(obj))) is not None:
            self.get(known[0])
        elif (writer := _WRITERS.get(type(obj))) is not None:
            self.depth += 1
            if self.depth > 2 * MAX_DEPTH:  # ids and calls of a tree at MAX_DEPTH fit in
                raise FormatError(f"{self.where}: depth must be at most {MAX_DEPTH}, got more")
            writer(self, obj)
            self.depth -= 1
        elif isinstance(obj, Rebuilt):
            callee, args = obj.reduce()
            self.save_call(obj, callee, args)
        else:
            self.save_persistent(obj)

    # The memo.

    def put(self, obj: object) -> None:
        index = len(self.memo) + len(self.names)
        if isinstance(obj, InertType):
            self.names[obj] = index
        else:
            self.memo[id(obj)] = (index, obj)
        self.out += (
            struct.pack("<cB", b"q", index) if index < 256 else struct.pack("<cI", b"r", index)
        )

    def get(self, index: int) -> None:
        self.out += (
            struct.pack("<cB", b"h", index) if index < 256 else struct.pack("<cI", b"j", index)
        )

    # Leaves.

    def save_bool(self, obj: bool) -> None:
        self.out += b"\x88" if obj else b"\x89"

    def save_int(self, obj: int) -> None:
        if 0 <= obj < 1 << 8:
            self.out += struct.pack("<cB", b"K", obj)
        elif 0 <= obj < 1 << 16:
            self.out += struct.pack("<cH", b"M", obj)
        elif -(1 << 31) <= obj < 1 << 31:
            self.out += struct.pack("<ci", b"J", obj)
        else:
            # The fewest bytes of two's complement: -(2**n) needs no more bits than 2**n - 1.
            length = (obj if obj >= 0 else ~obj).bit_length() // 8 + 1
            if length > 255:
                raise FormatError(
                    f"{self.where}: an integer must have at most 255 bytes, got {length}"
                )
            self.out += struct.pack("<cB", b"\x8a", length) + obj.to_bytes(
                length, "little", signed=True
            )

    def save_float(self, obj: float) -> None:
        self.out += struct.pack(">cd", b"G", obj)

    def save_str(self, obj: str) -> None:
        encoded = obj.encode("utf-8", "surrogatepass")
        if len(encoded) >= 1 << 32:
            raise FormatError(f"{self.where}: a text must be under 4 GiB, got {len(encoded)} bytes")
        self.out += struct.pack("<cI", b"X", len(encoded)) + encoded
        self.put(obj)

    def save_bytes(self, obj: bytes) -> None:
        # Protocol 2 has no bytes: they go as text in which each character is one byte.
        if obj:
            self.save_call(obj, _ENCODE, (obj.decode("latin1"), "latin1"))
        else:
            self.save_call(obj, _BYTES, ())

    def save_bytearray(self, obj: bytearray) -> None:
        self.save_call(obj, _BYTEARRAY, (bytes(obj),) if obj else ())

    def save_name(self, obj: InertType) -> None:
        if obj in self.names:
            self.get(self.names[obj])
            return
        line = f"{obj.inert_module}\n{obj.inert_name}\n"
        if line.count("\n") != 2:
            raise FormatError(f"{self.where}: a name must have no newline, got {str(obj)!r}")
        self.out += b"c" + line.encode()
        self.put(obj)

    # Containers.

    def save_tuple(self, obj: tuple[object, ...]) -> None:
        if not obj:
            self.out += b")"
            return
        short = len(obj) <= 3
        if not short:
            self.out += b"("
        for part in obj:
            self.save(part)
        if id(obj) in self.memo:  # a part leads back to the tuple, which is written by now
            self.out += b"0" * len(obj) if short else b"1"
            self.get(self.memo[id(obj)][0])
            return
        self.out += (b"\x85", b"\x86", b"\x87")[len(obj) - 1] if short else b"t"
        self.put(obj)

    def save_list(self, obj: list[object]) -> None:
        self.out += b"]"
        self.put(obj)
        if len(obj) == 1:
            self.save_batches(iter(obj), 1)
            return
        for start in range(0, len(obj), _BATCH):
            self.save_batch(obj[start : start + _BATCH], b"e")

    def save_dict(self, obj: dict[object, object]) -> None:
        self.out += b"}"
        self.put(obj)
        flat = [part for pair in obj.items() for part in pair]
        if len(flat) <= 2:
            self.save_batches(iter(flat), 2)
            return
        # The C pickler looks for more only after a full batch, and then writes an empty one.
        for start in range(0, len(flat) + (len(flat) % (2 * _BATCH) == 0), 2 * _BATCH):
            self.save_batch(flat[start : start + 2 * _BATCH], b"u")

    def save_batch(self, flat: Sequence[object], opcode: bytes) -> None:
        self.out += b"("
        for part in flat:
            self.save(part)
        self.out += opcode

    def save_batches(self, flat: Iterator[object], width: int) -> None:
        """Write items of ``width`` objects from an iterator, as pickle does for subclasses."""
        single, many = (b"a", b"e") if width == 1 else (b"s", b"u")
        while batch := list(islice(flat, width * _BATCH)):
            if len(batch) > width:
                self.save_batch(batch, many)
            else:
                for part in batch:
                    self.save(part)
                self.out += single
            if len(batch) < width * _BATCH:
                return

    def save_ordered_dict(self, obj: OrderedDict[object, object]) -> None:
        self.save_call(obj, ORDERED_DICT, ())
        self.save_batches((part for pair in dict.items(obj) for part in pair), 2)
        if vars(obj):
            self.save(vars(obj))
            self.out += b"b"

    def save_set(self, obj: set[object]) -> None:
        self.save_call(obj, _SET, (list(obj),))

    def save_frozenset(self, obj: frozenset[object]) -> None:
        self.save_call(obj, _FROZENSET, (list(obj),))

    # Calls and references.

    def save_call(
        self,
        obj: object,
        callee: InertType | Inert,
        args: tuple[object, ...],
        opcode: bytes = b"R",
    ) -> None:
        self.save(callee)
        self.save(args)
        self.out += opcode
        if id(obj) in self.memo:  # an argument leads back to the object
            self.out += b"0"
            self.get(self.memo[id(obj)][0])
        else:
            self.put(obj)

    def save_inert(self, obj: Inert) -> None:
        if obj.kwargs:
            raise FormatError(
                f"{self.where}: protocol 2 must have no keyword arguments, got {obj!r} with some"
            )
        self.save_call(obj, obj.callee, obj.args, b"R" if obj.via == "reduce" else b"\x81")
        self.save_batches(iter(obj.appended), 1)
        self.save_batches((part for pair in obj.items for part in pair), 2)
        if obj.state is not UNSET:
            self.save(obj.state)
            self.out += b"b"

    def save_persistent(self, obj: object) -> None:
        identity = self.persistent_id(obj)
        if identity is None:
            raise FormatError(
                f"{self.where}: must hold only plain and inert objects, got {type(obj).__name__}"
            )
        self.save(identity)
        self.out += b"Q"


_WRITERS: dict[type, Callable[..., None]] = {
    bool: _Emitter.save_bool,
    int: _Emitter.save_int,
    float: _Emitter.save_float,
    str: _Emitter.save_str,
    bytes: _Emitter.save_bytes,
    bytearray: _Emitter.save_bytearray,
    tuple: _Emitter.save_tuple,
    list: _Emitter.save_list,
    dict: _Emitter.save_dict,
    OrderedDict: _Emitter.save_ordered_dict,
    set: _Emitter.save_set,
    frozenset: _Emitter.save_frozenset,
    Inert: _Emitter.save_inert,
}
