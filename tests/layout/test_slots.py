"""Slots that are parts of others: which, and what they must be."""

from __future__ import annotations

import re

import pytest

from ckpttools.errors import LayoutError
from ckpttools.layout.slots import check_slots, is_part, scale_of, whole_slots

HALF = {"weight": "bfloat16", "param_remainder": "int16", "exp_avg": "float32"}
SCALED = {
    "weight": "float16",
    "fp32_param": "float16",
    "fp32_param_scale": "float32",
    "exp_avg": "bfloat16",
    "exp_avg_scale": "float32",
}


def test_parts_are_known_by_what_they_belong_to() -> None:
    assert [slot for slot in SCALED if is_part(SCALED, slot)] == [
        "fp32_param_scale",
        "exp_avg_scale",
    ]
    assert [slot for slot in HALF if is_part(HALF, slot)] == ["param_remainder"]
    assert not is_part({"loss_scale": "float32"}, "loss_scale")
    assert scale_of(SCALED, "weight") is None
    assert scale_of({"exp_avg_scale": "float32"}, "exp_avg") is None


def test_whole_slots_are_those_that_the_parts_make() -> None:
    assert whole_slots(HALF) == {
        "weight": "bfloat16",
        "fp32_param": "float32",
        "exp_avg": "float32",
    }
    assert whole_slots(SCALED) == {
        "weight": "float16",
        "fp32_param": "float32",
        "exp_avg": "float32",
    }


@pytest.mark.parametrize(
    ("dtype", "slots", "parts", "message"),
    [
        ("bfloat16", HALF, False, "slots must hold whole values, got param_remainder"),
        ("float16", HALF, True, "slots must have the weight in float16"),
        (
            "bfloat16",
            {**HALF, "param_remainder": "int32"},
            True,
            "beside bfloat16 weights and without fp32_param, got int32",
        ),
        (
            "bfloat16",
            {**HALF, "fp32_param": "float32"},
            True,
            "param_remainder must be int16, beside bfloat16 weights and without fp32_param",
        ),
        (
            "float16",
            {**SCALED, "exp_avg": "float32"},
            True,
            "exp_avg with scales must be 16-bit and they float32, got float32 and float32",
        ),
        ("float16", {**SCALED, "": "float32"}, True, "slot '' must have a dtype, got 'float32'"),
    ],
)
def test_slots_that_contradict_each_other_are_refused(
    dtype: str, slots: dict[str, str], parts: bool, message: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        check_slots(dtype, slots, parts=parts)


def test_slots_that_fit_pass() -> None:
    check_slots("bfloat16", HALF, parts=True)
    check_slots("float16", SCALED, parts=True)
