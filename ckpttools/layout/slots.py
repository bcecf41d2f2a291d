"""Which tensors does an optimizer keep for a parameter, and which of them are parts of others?

A *slot* is one of a parameter's tensors. Most hold their values themselves; two kinds are parts:

* ``param_remainder`` is the low half of an fp32 master, whose high half is the bfloat16 weight;
* ``<slot>_scale`` is what the 16-bit values of ``<slot>`` are multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import LayoutError

WEIGHT = "weight"
MASTER = "fp32_param"
REMAINDER_SLOT = "param_remainder"
SCALE_SUFFIX = "_scale"

Slots = Mapping[str, str]
"""Slots of the parameters of one dtype, and the dtype of each."""


def scale_of(slots: Slots, slot: str) -> str | None:
    """Return the slot with the scales of another's values; None where it isn't scaled.

    >>> scale_of({"exp_avg": "float16", "exp_avg_scale": "float32"}, "exp_avg")
    'exp_avg_scale'
    """
    name = f"{slot}{SCALE_SUFFIX}"
    return name if slot in slots and name in slots else None


def is_scale(slots: Slots, slot: str) -> bool:
    """Say whether a slot holds the scales of another."""
    return slot.endswith(SCALE_SUFFIX) and slot.removesuffix(SCALE_SUFFIX) in slots


def is_part(slots: Slots, slot: str) -> bool:
    """Say whether a slot is a part of another one's values."""
    return slot == REMAINDER_SLOT or is_scale(slots, slot)


def whole_slots(slots: Slots) -> dict[str, str]:
    """Return the slots that the values make which are stored in parts.

    >>> whole_slots({"weight": "bfloat16", "param_remainder": "int16"})
    {'weight': 'bfloat16', 'fp32_param': 'float32'}
    """
    whole: dict[str, str] = {}
    for slot, kind in slots.items():
        if slot == REMAINDER_SLOT:
            whole[MASTER] = "float32"
        elif not is_scale(slots, slot):
            whole[slot] = "float32" if scale_of(slots, slot) else kind
    return whole


def check_slots(dtype: str, slots: Slots, *, parts: bool) -> None:
    """Check the slots of the parameters of one dtype; ``parts`` says whether any may be a part.

    Raises:
        LayoutError: they contradict each other.
    """
    for slot, kind in slots.items():
        if not slot or kind not in BY_NAME:
            raise LayoutError(f"layout: {dtype}: slot {slot!r} must have a dtype, got {kind!r}")
    if slots.get(WEIGHT) != dtype or (dtype == "float32" and MASTER in slots):
        raise LayoutError(
            f"layout: {dtype}: slots must have the weight in {dtype}, and no master where "
            f"that is float32, got {', '.join(slots) or 'none'}"
        )
    if not parts and (odd := [slot for slot in slots if is_part(slots, slot)]):
        raise LayoutError(f"layout: {dtype}: slots must hold whole values, got {odd[0]}")
    if REMAINDER_SLOT in slots and (
        (dtype, slots[REMAINDER_SLOT]) != ("bfloat16", "int16") or MASTER in slots
    ):
        raise LayoutError(
            f"layout: {dtype}: {REMAINDER_SLOT} must be int16, beside bfloat16 weights and without "
            f"{MASTER}, got {slots[REMAINDER_SLOT]}"
        )
    for slot, kind in slots.items():
        scale = scale_of(slots, slot)
        if scale and (kind not in ("float16", "bfloat16") or slots[scale] != "float32"):
            raise LayoutError(
                f"layout: {dtype}: {slot} with scales must be 16-bit and they float32, got {kind} "
                f"and {slots[scale]}"
            )
