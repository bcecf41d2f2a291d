"""What objects stand for the contents of a pickle, when nothing that it names may run?

A name (``torch.float32``) is an `InertType`, whatever it is. A call is an `Inert` that remembers
what was called with what; its state, items and appended values are kept beside it. dict, list,
tuple, set, str, bytes, numbers and ``collections.OrderedDict`` are themselves. What a reader has
rebuilt from a call (torch's tensors) is a `Rebuilt`, which can tell the call again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Final, Literal

from ckpttools.errors import FormatError

MAX_DEPTH = 100  # a reader that recurses over the tree stays within Python's own limit


class Unset(Enum):
    """The type of `UNSET`: None is a state that a file can hold, so absence needs its own."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class InertType:
    """A name that a pickle mentions (a class, function or constant), not looked up.

    Two mentions of one name are equal, so ``tree[new_global("torch", "float32")]`` works.
    """

    inert_module: str
    inert_name: str

    def __str__(self) -> str:
        return f"{self.inert_module}.{self.inert_name}"


@dataclass(eq=False, slots=True)
class Inert:
    """A call that a pickle asks for, not made: ``callee(*args)``, then what was done to it.

    ``via`` is the opcode: a REDUCE calls, a NEWOBJ makes an instance without ``__init__``.
    ``state`` is what BUILD would set (`UNSET` if it never came), ``items`` what SETITEMS would,
    ``appended`` what APPENDS would.
    """

    callee: InertType | Inert
    args: tuple[object, ...] = ()
    via: Literal["reduce", "newobj"] = "reduce"
    kwargs: dict[object, object] = field(default_factory=dict)
    state: object = UNSET
    items: list[tuple[object, object]] = field(default_factory=list)
    appended: list[object] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<inert {qualified_name(self)!r}>"


class Rebuilt(ABC):
    """An object that a caller's ``rebuild`` made of a call, and that can tell the call again."""

    __slots__ = ()

    @abstractmethod
    def reduce(self) -> tuple[InertType, tuple[object, ...]]:
        """Return what is called and with which arguments."""

    def parts(self) -> Iterable[object]:
        """Return the objects inside, for `walk`."""
        return self.reduce()[1]


ORDERED_DICT = InertType("collections", "OrderedDict")
_GETATTR = (InertType("__builtin__", "getattr"), InertType("builtins", "getattr"))


def new_global(module: str, name: str) -> InertType:
    """Return the inert form of a name, for a writer that must mention it."""
    return InertType(module, name)


def is_global(obj: object, module: str, name: str) -> bool:
    """Tell whether ``obj`` is the mention of ``module.name``."""
    return isinstance(obj, InertType) and (obj.inert_module, obj.inert_name) == (module, name)


def qualified_name(obj: object) -> str:
    """Return ``module.name`` of a name, or of what an `Inert` was made by; "" for other objects.

    A ``getattr(cls, "inner")`` used as a class, as protocol 2 writes nested classes, reads as
    ``module.cls.inner``.
    """
    suffix = ""
    while isinstance(obj, Inert):
        if obj.callee in _GETATTR and len(obj.args) == 2 and isinstance(obj.args[1], str):
            suffix = f".{obj.args[1]}{suffix}"
            obj = obj.args[0]
        else:
            obj = obj.callee
    return f"{obj}{suffix}" if isinstance(obj, InertType) else ""


def parts(obj: object) -> Iterable[object]:
    """Return the objects directly inside ``obj``; a leaf has none."""
    if isinstance(obj, dict):
        inside: Iterable[object] = chain.from_iterable(dict.items(obj))
        return chain(inside, vars(obj).values()) if type(obj) is OrderedDict else inside
    if isinstance(obj, (list, tuple, set, frozenset)):
        return obj
    if isinstance(obj, Inert):
        made = (obj.callee, *obj.args, obj.kwargs) if obj.kwargs else (obj.callee, *obj.args)
        return chain(made, obj.appended, chain.from_iterable(obj.items), (obj.state,))
    if isinstance(obj, Rebuilt):
        return obj.parts()
    return ()


def walk(tree: object, *, where: str = "tree") -> Iterator[object]:
    """Yield every object of ``tree`` once, parents first, shared ones and cycles included.

    Objects are told apart by identity. No recursion.

    Raises:
        FormatError: the tree is nested deeper than `MAX_DEPTH`.
    """
    seen = {id(tree): tree}  # holds the object too: an id may be reused once its owner is gone
    yield tree
    open_parts = [iter(parts(tree))]
    while open_parts:
        for obj in open_parts[-1]:
            if id(obj) in seen:
                continue
            seen[id(obj)] = obj
            yield obj
            if not isinstance(obj, (str, int, float, bytes, InertType)):
                open_parts.append(iter(parts(obj)))
                break
        else:
            open_parts.pop()
        if len(open_parts) > MAX_DEPTH:
            raise FormatError(f"{where}: depth must be at most {MAX_DEPTH}, got more")
