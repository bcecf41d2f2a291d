"""What of a checkpoint is no tensor of the model or the optimizer, and how is it written again?

Names and whatever a script saved beside model and optimizer (its step, its data loader …) are kept
for a directory that the same script can load. What a script saved is of the step at which it was
read: a checkpoint of another step doesn't get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttools.errors import FormatError
from ckpttools.formats import Carried
from ckpttools.formats.dcp.keys import Naming, Path
from ckpttools.storage import inert
from ckpttools.storage.inert import Inert, InertType
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode

FORMAT = "dcp"
PLAIN_STEP = "object"
NUMBERS = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"})
"""Dtypes of which one element is a number, such as a step."""


@dataclass(frozen=True, slots=True)
class Other:
    """Something that a script saved: where it stood in the nested state, and inert data."""

    path: Path
    tree: object


@dataclass(frozen=True, slots=True)
class DcpState:
    """Names, and what is neither of the model nor of the optimizer.

    ``step`` is the optimizer's when the others were read: a number, one by name, or None.
    """

    naming: Naming = field(default_factory=Naming)
    others: Mapping[str, Other] = field(default_factory=dict)
    step: object = None

    def to_document(self) -> object:
        """Return this as plain JSON data."""
        naming = self.naming
        return {
            "model": naming.model,
            "optimizer": naming.optimizer,
            "flat": naming.flat,
            "step_dtype": naming.step,
            "step": encode(self.step, where="step"),
            "others": {
                key: [list(other.path), encode(other.tree, where=key)]
                for key, other in self.others.items()
            },
        }


def is_plain(tree: object) -> bool:
    """Say whether data mentions nothing that a program would look up or call to load it."""
    return not any(isinstance(part, (Inert, InertType)) for part in inert.walk(tree))


def state_of(objects: Mapping[str, object]) -> DcpState:
    """Return the state that a Manifest's objects have of a checkpoint of torch's; else a new one's.

    Raises:
        FormatError: another format carried something else than what it was given.
    """
    carried = objects.get("carried")
    found = carried.get(FORMAT) if isinstance(carried, Mapping) else None
    if isinstance(found, DcpState):
        return found
    if isinstance(found, Carried):
        return from_document(found.to_document(), where=f"carried {FORMAT}")
    return DcpState()


def from_document(document: object, *, where: str) -> DcpState:
    """Return what :meth:`DcpState.to_document` made.

    Raises:
        FormatError: it is something else.
    """
    match document:
        case {
            "model": str(model),
            "optimizer": str(optimizer),
            "flat": bool(flat),
            "step_dtype": str(kind),
            "step": step,
            "others": dict(others),
        } if kind in (PLAIN_STEP, *NUMBERS):
            pass
        case _:
            raise FormatError(f"{where}: must have names and others, got {document!r:.60}")
    found: dict[str, Other] = {}
    for key, entry in others.items():
        match entry:
            case [list(path), value] if all(type(part) in (str, int) for part in path):
                found[key] = Other(tuple(path), decode(value, where=f"{where}: {key:.80}"))
            case _:
                raise FormatError(f"{where}: {key:.80}: must be a path and a value")
    return DcpState(
        Naming(model, optimizer, flat, kind), found, decode(step, where=f"{where}: step")
    )
