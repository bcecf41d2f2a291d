"""Which tensors of a checkpoint are wanted? Patterns over names and slots.

A pattern is a shell pattern (``*``, ``?``, ``[…]``) for a tensor's name, for its slot, or for
``name:slot``. With ``include`` patterns only what matches one is taken; ``exclude`` then takes
away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ckpttools.errors import UsageError
from ckpttools.manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns of tensors to take and to leave out. The empty selection takes all."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def takes(self, spec: TensorSpec) -> bool:
        """Say whether a tensor is wanted."""
        wanted = not self.include or any(matches(p, spec) for p in self.include)
        return wanted and not any(matches(p, spec) for p in self.exclude)


def matches(pattern: str, spec: TensorSpec) -> bool:
    """Say whether a pattern fits a tensor's name, its slot, or ``name:slot``."""
    names = (spec.name, spec.slot, f"{spec.name}:{spec.slot}")
    return any(fnmatchcase(name, pattern) for name in names)


def select(manifest: Manifest, selection: Selection) -> tuple[Manifest, tuple[TensorSpec, ...]]:
    """Return the Manifest of the wanted tensors, and the tensors that are left out.

    Raises:
        UsageError: a pattern fits nothing, or nothing is left.
    """
    for pattern in (*selection.include, *selection.exclude):
        if not any(matches(pattern, spec) for spec in manifest.tensors):
            raise UsageError(
                f"{pattern}: must match a tensor's name or slot, got none that does",
                hint=f"slots are {', '.join(manifest.slots())}; `ckpttools inspect -v` lists names",
            )
    kept = [i for i, spec in enumerate(manifest.tensors) if selection.takes(spec)]
    if not kept:
        raise UsageError("selection: must leave a tensor, got none")
    place = {old: new for new, old in enumerate(kept)}
    chunks = [replace(c, tensor=place[c.tensor]) for c in manifest.chunks if c.tensor in place]
    subset = replace(
        manifest,
        tensors=tuple(manifest.tensors[i] for i in kept),
        chunks=tuple(chunks),
    )
    left_out: Sequence[TensorSpec] = [
        spec for i, spec in enumerate(manifest.tensors) if i not in place
    ]
    return subset, tuple(left_out)
