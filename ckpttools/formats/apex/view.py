"""How must a source be seen so that Apex's file can hold it? Three slots, one dtype, whole rows.

Every parameter that is trained has ``param``, ``exp_avg`` and ``exp_avg_sq`` in the optimizer's
dtype. What a source has otherwise is seen through :mod:`ckpttools.derived`:

* a weight without a master is its own (widened where the moments are wider);
* where slots are float32 and 16-bit, the narrow ones are widened;
* beside remainders bfloat16 weights must be their masters rounded half away from zero, since
  Apex's loader takes 16 bits of the master from the weight that it finds; a run that stores
  masters has them rounded to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from ckpttools.derived import widened, with_half_away_weights, with_nearest_even_weights
from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError, UsageError
from ckpttools.formats.apex.whole import SLOTS
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    MASTER,
    REMAINDER,
    WEIGHT,
    WIDEN,
    Chunk,
    Manifest,
    TensorSpec,
)

_HALVES = frozenset({"bfloat16", "float16"})


def view_of(
    source: Manifest, names: Sequence[str], masters: Literal["stored", "remainders"] | None
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the source as Apex's file holds it, and notes.

    Raises:
        UsageError: parameters and state don't match, or ``masters`` must be told.
    """
    _check_members(source, names)
    view = _with_masters(source, frozenset(names))
    _check_slots(view, names)
    view = _of_one_dtype(view)
    return _with_rounded(view, masters)


def _check_members(source: Manifest, names: Sequence[str]) -> None:
    """Check that the groups' members are those that have state."""
    trained = {spec.name for spec in source.tensors if spec.slot != WEIGHT}
    if not trained:
        raise UsageError("--to apex: needs optimizer state, got weights alone")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--to apex: {twice}: must be in one parameter group, got it twice")
    if odd := sorted(trained ^ set(names)):
        got = "state without a group" if odd[0] in trained else "a group's member without state"
        raise UsageError(f"--to apex: {odd[0]}: must be in a group and have state, got {got}")


def _with_masters(source: Manifest, names: Collection[str]) -> Manifest:
    """Return a view in which every trained weight has a master, its own if it had none."""
    index, chunks = source.index(), source.by_tensor()
    tensors, made = list(source.tensors), list(source.chunks)
    for name in sorted(names):
        weight, moment = index.get((name, WEIGHT)), index.get((name, "exp_avg"))
        if (name, MASTER) in index or weight is None or moment is None:
            continue
        spec, kind = source.tensors[weight], source.tensors[moment].dtype
        same = spec.dtype == kind
        if not same and not (spec.dtype.name in _HALVES and kind.name == "float32"):
            raise UsageError(
                f"--to apex: {name}: must have a master of dtype {kind}, got a weight of "
                f"{spec.dtype}"
            )
        if not same and any(chunk.codec != IDENTITY for chunk in chunks[weight]):
            raise UsageError(f"--to apex: {name}: must have a master, got none")
        for chunk in chunks[weight]:
            codec = chunk.codec if same else WIDEN
            made.append(replace(chunk, tensor=len(tensors), codec=codec))
        tensors.append(replace(spec, slot=MASTER, dtype=kind))
    return replace(source, tensors=tuple(tensors), chunks=tuple(made))


def _check_slots(view: Manifest, names: Sequence[str]) -> None:
    """Check that every parameter has Apex's three slots and no other."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for spec in view.tensors:
        if spec.slot != WEIGHT:
            found[spec.name].add(spec.slot)
    for name, slots in found.items():
        if slots != set(SLOTS.values()):
            raise UsageError(
                f"--to apex: {name}: must have {', '.join(SLOTS.values())} and no other state, got "
                f"{', '.join(sorted(slots))}"
            )


def _of_one_dtype(view: Manifest) -> Manifest:
    """Widen 16-bit slots where there are float32 ones: Apex has one dtype for all."""
    state = [spec for spec in view.tensors if spec.slot != WEIGHT]
    kinds = {spec.dtype.name for spec in state}
    if len(kinds) == 1:
        return view
    if not kinds <= _HALVES | {"float32"}:
        raise UsageError(
            f"--to apex: optimizer state must be of one dtype, got {', '.join(sorted(kinds))}"
        )
    try:
        return widened(view, set(SLOTS.values()))
    except LayoutError as error:
        raise UsageError(f"--to apex: {error}") from error


def _with_rounded(
    view: Manifest, masters: Literal["stored", "remainders"] | None
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the weights as the run that will load them must find them."""
    found = list(_split_weights(view))
    if not found:
        note = "masters: no weight is a 16-bit one with a float32 master, so nothing is rounded"
        return view, (note,) if masters == "remainders" else ()
    kept = all(codec == REMAINDER for _, codec in found)
    if masters is None and not kept:
        raise UsageError(
            f"--to apex: {found[0][0].name}: how the run keeps masters of 16-bit weights must be "
            f"known, got none",
            hint="name it with --masters stored, or --masters remainders (store_param_remainders)",
        )
    if masters == "remainders" or masters is None:
        if odd := [spec for spec, _ in found if spec.dtype.name != "bfloat16"]:
            raise UsageError(
                f"--masters remainders: weights must be bfloat16, got {odd[0].name} in "
                f"{odd[0].dtype}"
            )
        note = (
            "masters: for a run with store_param_remainders; load the weights before the optimizer"
        )
        return _rounded(view, with_half_away_weights), (note,)
    rules = view.objects.get("weight_rounding", ())
    even = isinstance(rules, tuple) and HALF_AWAY not in rules and not kept
    return view if even else _rounded(view, with_nearest_even_weights), ()


def _rounded(view: Manifest, rule: Callable[[Manifest], Manifest]) -> Manifest:
    try:
        return rule(view)
    except LayoutError as error:
        raise UsageError(f"--to apex: {error}") from error


def _split_weights(view: Manifest) -> Iterator[tuple[TensorSpec, str]]:
    """Yield each 16-bit weight that has a float32 master, and the master's codec."""
    index, chunks = view.index(), view.by_tensor()
    wide = dtype("float32")
    for spec in view.tensors:
        master = index.get((spec.name, MASTER))
        if spec.slot == WEIGHT and spec.dtype.name in _HALVES and master is not None:
            first: list[Chunk] = chunks[master][:1]
            if view.tensors[master].dtype == wide:
                yield spec, first[0].codec if first else REMAINDER
