"""What does a pickle say, when nothing that it names may run or be imported?

A pickle is a program for a small stack machine. This module has its own machine, which knows
the opcodes of protocols 2 to 5 and no others, and for which every name and call is data (see
`ckpttools.storage.inert_tree`): no import, no attribute look-up and no call is ever made on the
file's behalf, except of the functions that the caller of `loads` hands in.

Work is linear in the file's length: dict keys are plain and small (a key made of tuples that
share each other would take exponential time to hash), integers are short, opcodes and depth
have limits.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, TypeVar

from ckpttools.errors import FormatError
from ckpttools.storage.inert_tree import ORDERED_DICT, UNSET, Inert, InertType, Rebuilt, walk

MAX_PICKLE_BYTES = 256 << 20  # names and shapes of 100 000 tensors take 40 MB
MAX_OPCODES = 8_000_000  # 40 a tensor; each makes at most one object of about 100 bytes
MAX_KEY_PARTS = 64  # parts of a tuple used as a dict key, each mention counted

Rebuild = Callable[[tuple[object, ...]], object]
_Given = TypeVar("_Given")


def loads(
    data: bytes,
    *,
    where: str,
    persistent_load: Callable[[object], object],
    rebuild: Mapping[InertType, Rebuild] | None = None,
) -> object:
    """Return the object that the pickle ``data`` describes; nothing of it runs.

    ``persistent_load`` is called with each persistent id (plain data) and returns the object to
    put in its place; ``rebuild`` maps a callee to a function of its arguments, called instead of
    making an `Inert`. Both may raise FormatError.

    Raises:
        FormatError: the pickle is damaged, uses an opcode outside protocols 2 to 5 (extension
            codes and text opcodes included), or is beyond a limit of this module.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise FormatError(
            f"{where}: pickle must have at most {MAX_PICKLE_BYTES} bytes, got {len(data)}"
        )
    machine = _Machine(data, where, persistent_load, rebuild or {})
    try:
        tree = machine.run()
    except IndexError:
        machine.refuse("stack must hold what the opcode takes", "an empty one")
    except UnicodeDecodeError as error:
        machine.refuse("text must be UTF-8", _shown(error.object[error.start : error.start + 8]))
    for _ in walk(tree, where=where):
        pass  # the walk checks the depth
    return tree


def _shown(value: object) -> str:
    """Return a short text for a value of a file; a nested one is never rendered."""
    plain = value is None or isinstance(value, (str, int, float, bytes, InertType, Inert))
    text = repr(value) if plain else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


class _Machine:
    """The stack machine. `_STEPS` maps an opcode to the method that does it."""

    def __init__(
        self,
        data: bytes,
        where: str,
        persistent_load: Callable[[object], object],
        rebuild: Mapping[InertType, Rebuild],
    ) -> None:
        self.data = data
        self.where = where
        self.persistent_load = persistent_load
        self.rebuild = rebuild
        self.position = 0
        self.stack: list[object] = []
        self.outer: list[list[object]] = []  # the stacks below each open MARK
        self.memo: dict[int, object] = {}
        self.names: dict[tuple[str, str], InertType] = {}

    def refuse(self, rule: str, got: str) -> NoReturn:
        raise FormatError(f"{self.where}: pickle byte {self.position}: {rule}, got {got}")

    def run(self) -> object:
        if self.data[:1] != b"\x80" or self.data[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
            self.refuse("must start as protocol 2, 3, 4 or 5", _shown(self.data[:2]))
        self.position = 2
        data, size, count = self.data, len(self.data), 0
        while True:
            if self.position >= size:
                self.refuse("must end with a STOP opcode", "the end of the data")
            opcode = data[self.position]
            if opcode == 0x2E:  # STOP
                break
            step = _STEPS.get(opcode)
            if step is None:
                self.refuse("opcode must be one that torch.save writes", _shown(bytes([opcode])))
            count += 1
            if count > MAX_OPCODES:
                self.refuse(f"must have at most {MAX_OPCODES} opcodes", "more")
            self.position += 1
            step(self)
        if self.outer or len(self.stack) != 1:
            self.refuse("must leave one object", f"{len(self.stack)} and {len(self.outer)} marks")
        if self.position + 1 != size:
            self.refuse("must end at its STOP opcode", f"{size - self.position - 1} more bytes")
        return self.stack[0]

    # Arguments that stand in the pickle itself.

    def take(self, count: int) -> bytes:
        start = self.position
        if count > len(self.data) - start:
            self.refuse(f"must hold {count} more bytes", str(len(self.data) - start))
        self.position = start + count
        return self.data[start : start + count]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            self.refuse("a name must end with a newline", "none")
        text = self.take(end - self.position).decode()
        self.position += 1
        return text

    def text(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    # Arguments that stand on the stack.

    def to_mark(self) -> list[object]:
        if not self.outer:
            self.refuse("stack must hold a MARK", "none")
        taken, self.stack = self.stack, self.outer.pop()
        return taken

    def check_key(self, key: object) -> None:
        """Refuse a key whose hash would run code, fail or take more than a moment."""
        todo, room = [key], MAX_KEY_PARTS
        while todo:
            part, room = todo.pop(), room - 1
            if isinstance(part, tuple) and len(part) <= room:
                todo.extend(part)
            elif room < 0 or not (part is None or isinstance(part, _HASHED)):
                self.refuse("a key must be a name, a number or a short tuple of them", _shown(part))

    # Steps with a body; the one-liners stand in `_STEPS`.

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.to_mark()

    def frame(self) -> None:
        length = self.number(8)
        if length > len(self.data) - self.position:
            self.refuse(f"a frame must hold {length} bytes", str(len(self.data) - self.position))

    def get(self, width: int) -> None:
        index = self.number(width)
        if index not in self.memo:
            self.refuse("must have stored what it fetches", f"index {index}")
        self.stack.append(self.memo[index])

    def name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            self.refuse(
                "a name must be two texts", _shown(module if isinstance(name, str) else name)
            )
        known = self.names.setdefault((module, name), InertType(module, name))
        self.stack.append(known)

    def call(self, via: Literal["reduce", "newobj"], kwargs: object = None) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            self.refuse("arguments must be a tuple", _shown(args))
        if not isinstance(callee, (InertType, Inert)):
            self.refuse("what is called must be a name", _shown(callee))
        if via == "reduce" and not args and callee == ORDERED_DICT:
            self.stack.append(OrderedDict())
        elif via == "reduce" and isinstance(callee, InertType) and callee in self.rebuild:
            self.stack.append(self.foreign(self.rebuild[callee], args))
        elif isinstance(kwargs, dict):
            self.stack.append(Inert(callee, args, via, kwargs))
        else:
            self.stack.append(Inert(callee, args, via))

    def foreign(self, function: Callable[[_Given], object], given: _Given) -> object:
        """Call a function of the caller's; what it refuses is told with the place."""
        try:
            return function(given)
        except FormatError as error:
            raise FormatError(f"{self.where}: pickle byte {self.position}: {error}") from None

    def call_with_keywords(self) -> None:
        kwargs = self.stack.pop()
        if type(kwargs) is not dict:
            self.refuse("keyword arguments must be a dict", _shown(kwargs))
        self.call("newobj", kwargs)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert) and target.state is UNSET:
            target.state = state
        elif type(target) is OrderedDict and type(state) is dict and not vars(target):
            # A name that hides a method would make an ordinary look-up of the dict fail.
            if bad := [k for k in state if not isinstance(k, str) or hasattr(OrderedDict, k)]:
                self.refuse("an OrderedDict's attribute must not hide a method", _shown(bad[0]))
            vars(target).update(state)
        else:
            self.refuse("state must be set once, on an object that has one", _shown(target))

    def set_items(self, flat: list[object]) -> None:
        target = self.stack[-1]
        if len(flat) % 2:
            self.refuse("keys and values must pair up", f"{len(flat)} objects")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        if isinstance(target, Inert):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            for key, value in pairs:
                self.check_key(key)
                target[key] = value
        else:
            self.refuse("items must be set on a dict", _shown(target))

    def append(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (list, Inert)):
            self.refuse("values must be appended to a list", _shown(target))
        (target if isinstance(target, list) else target.appended).extend(values)

    def add(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, set):
            self.refuse("values must be added to a set", _shown(target))
        target.update(self.hashed(values))

    def hashed(self, values: list[object]) -> list[object]:
        for value in values:
            self.check_key(value)
        return values

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]


_HASHED = (str, int, float, bytes, InertType, Inert, Rebuilt)


def _push(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _number(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(width))


def _signed(machine: _Machine, width: int) -> None:
    machine.stack.append(int.from_bytes(machine.take(width), "little", signed=True))


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(width)))


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.text(width)


def _get(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.get(width)


def _put(width: int) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        machine.memo[machine.number(width)] = machine.stack[-1]

    return put


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.tuple_of(count)


def _pop_mark(machine: _Machine) -> None:
    machine.to_mark()


def _long_tuple(machine: _Machine) -> None:
    taken = tuple(machine.to_mark())  # first: it changes which stack is the machine's
    machine.stack.append(taken)


def _frozenset(machine: _Machine) -> None:
    taken = frozenset(machine.hashed(machine.to_mark()))
    machine.stack.append(taken)


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _stack_name(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _persistent(machine: _Machine) -> None:
    identity = machine.stack.pop()
    machine.stack.append(machine.foreign(machine.persistent_load, identity))


# Missing on purpose: extension codes (they name classes of the reading process), text and
# protocol 0 opcodes, DUP, INST, OBJ, LONG4 (a huge integer cannot even be printed), and
# out-of-band buffers. No pickler of protocol 2 and above writes them for a checkpoint.
_STEPS: Mapping[int, Callable[[_Machine], None]] = {
    0x28: _Machine.mark,
    0x30: _Machine.pop,
    0x31: _pop_mark,
    0x29: _push(()),
    0x4E: _push(None),
    0x88: _push(True),
    0x89: _push(False),
    0x5D: lambda m: m.stack.append([]),
    0x7D: lambda m: m.stack.append({}),
    0x8F: lambda m: m.stack.append(set()),
    0x4B: _number(1),
    0x4D: _number(2),
    0x4A: lambda m: _signed(m, 4),
    0x8A: lambda m: _signed(m, m.number(1)),
    0x47: _float,
    0x58: _text(4),
    0x8C: _text(1),
    0x8D: _text(8),
    0x42: _bytes(4),
    0x43: _bytes(1),
    0x8E: _bytes(8),
    0x96: lambda m: m.stack.append(bytearray(m.take(m.number(8)))),
    0x68: _get(1),
    0x6A: _get(4),
    0x71: _put(1),
    0x72: _put(4),
    0x94: _memoize,
    0x95: _Machine.frame,
    0x63: lambda m: m.name(m.line(), m.line()),
    0x93: _stack_name,
    0x52: lambda m: m.call("reduce"),
    0x81: lambda m: m.call("newobj"),
    0x92: _Machine.call_with_keywords,
    0x62: _Machine.build,
    0x51: _persistent,
    0x73: _set_item,
    0x75: lambda m: m.set_items(m.to_mark()),
    0x61: lambda m: m.append([m.stack.pop()]),
    0x65: lambda m: m.append(m.to_mark()),
    0x90: lambda m: m.add(m.to_mark()),
    0x91: _frozenset,
    0x74: _long_tuple,
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
}
