"""Rounding must be torch's, to the bit, for every value that is a number.

Oracle: torch 2.13.0 on a CPU. A NaN has no single law there: in bfloat16 a contiguous source gives
0xffff and a strided one 0x7fc0 (a GPU gives 0x7fff), so NaNs are compared as NaNs.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.codecs import Bits, cast_differs, round_float32
from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError

EDGES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
F32 = dtype("float32")


def by_torch(bits: Bits, to: str, *, strided: bool = False) -> Bits:
    """Cast with torch; a strided source takes its scalar code, a contiguous one its vector code."""
    source = torch.from_numpy(bits.view(np.float32).copy())
    if strided:
        source = torch.stack([source, source], dim=1)[:, 0]
        assert not source.is_contiguous()
    target = torch.empty(len(source), dtype=TORCH[to]).copy_(source)
    width = np.uint32 if to == "float32" else np.uint16
    return np.asarray(target.view(torch.uint8).numpy().view(width))


def upper_halves_with(lower: int) -> Bits:
    return (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(lower)


def is_nan(bits: Bits) -> np.ndarray:
    return np.asarray(np.isnan(bits.view(np.float32)))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("lower", EDGES)
def test_every_upper_half_rounds_to_bfloat16_as_in_torch(lower: int, strided: bool) -> None:
    bits = upper_halves_with(lower)
    nan = is_nan(bits)
    mine, theirs = (
        round_float32(bits, dtype("bfloat16")),
        by_torch(bits, "bfloat16", strided=strided),
    )
    assert (mine[~nan] == theirs[~nan]).all()
    if lower > 0x8000:  # cutting the lower half off would be another thing
        assert (mine != bits >> np.uint32(16))[~nan].all()
    assert nan.sum() >= 254
    assert set(mine[nan].tolist()) == {0x7FC0}
    assert set(theirs[nan].tolist()) == {0x7FC0 if strided else 0xFFFF}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("lower", [*EDGES, 0x1000, 0x1001, 0x2000, 0x3000, 0xEFFF])
def test_every_upper_half_rounds_to_float16_as_in_torch(lower: int, strided: bool) -> None:
    bits = upper_halves_with(lower)
    mine, theirs = round_float32(bits, dtype("float16")), by_torch(bits, "float16", strided=strided)
    nan = is_nan(bits)
    assert (mine[~nan] == theirs[~nan]).all()
    assert np.isnan(mine.view(np.float16)[nan]).all()
    if not strided:  # quiet, with sign and leading payload; torch's scalar code drops the payload
        assert (mine[nan] == theirs[nan]).all()


@pytest.mark.parametrize("to", ["bfloat16", "float16"])
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_number_rounds_as_in_torch(to: str, values: list[int]) -> None:
    bits = np.array(values, dtype=np.uint32)
    nan = is_nan(bits)
    assert (round_float32(bits, dtype(to))[~nan] == by_torch(bits, to)[~nan]).all()


def test_a_large_sample_rounds_to_float16_as_in_torch() -> None:
    exponents = np.random.default_rng(7).integers(0x2F000000, 0x48000000, 1 << 20, dtype=np.uint32)
    assert (round_float32(exponents, dtype("float16")) == by_torch(exponents, "float16")).all()


@pytest.mark.parametrize(
    ("value", "bfloat16", "float16"),
    [
        (0x3F808000, 0x3F80, 0x3C04),  # a tie goes to the even neighbour, downwards
        (0x3F818000, 0x3F82, 0x3C0C),  # and upwards
        (0x3F808001, 0x3F81, 0x3C04),
        (0x7F7FFFFF, 0x7F80, 0x7C00),  # the largest number becomes infinity
        (0xFF800000, 0xFF80, 0xFC00),  # minus infinity
        (0x80000000, 0x8000, 0x8000),  # minus zero
        (0x00008000, 0x0000, 0x0000),  # subnormal, a tie to zero
        (0x00008001, 0x0001, 0x0000),
        (0x33000000, 0x3300, 0x0000),  # 2**-25: half of float16's least, a tie to zero
        (0x33000001, 0x3300, 0x0001),
    ],
)
def test_edges_round_as_written_here(value: int, bfloat16: int, float16: int) -> None:
    bits = np.array([value], dtype=np.uint32)
    assert round_float32(bits, dtype("bfloat16")).tolist() == [bfloat16]
    assert round_float32(bits, dtype("float16")).tolist() == [float16]


def test_float32_stays_as_it_is() -> None:
    bits = upper_halves_with(1)
    assert round_float32(bits, F32) is bits


def test_the_source_is_not_written_to() -> None:
    bits = upper_halves_with(0x8001)
    kept = bits.copy()
    for to in ("bfloat16", "float16"):
        round_float32(bits, dtype(to))
    assert (bits == kept).all()


def test_the_shape_stays() -> None:
    bits = np.zeros((3, 0, 5), dtype=np.uint32)
    assert round_float32(bits, dtype("bfloat16")).shape == (3, 0, 5)
    assert round_float32(np.zeros((), np.uint32), dtype("float16")).shape == ()


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("strided", [False, True])
def test_what_torch_has_cast_never_differs_and_any_other_bit_does(to: str, strided: bool) -> None:
    bits = upper_halves_with(0x8001)
    stored = by_torch(bits, to, strided=strided)
    assert not cast_differs(stored, bits, dtype(to)).any()
    number = ~is_nan(bits)
    flipped = stored ^ stored.dtype.type(1)
    assert (cast_differs(flipped, bits, dtype(to)) == number)[number].all()


@pytest.mark.parametrize(
    ("stored", "master", "differs"),
    [
        (0x7FFF, 0x7FC00000, False),  # a GPU's NaN
        (0xFFFF, 0x7F800001, False),
        (0x7F81, 0xFFFFFFFF, False),
        (0x7F80, 0x7FC00000, True),  # infinity for a NaN
        (0x7FC0, 0x3F800000, True),  # a NaN for a number
        (0x7FC0, 0x7F800000, True),
        (0x8000, 0x00000000, True),  # minus zero for zero
    ],
)
def test_a_nan_equals_any_nan_and_nothing_else(stored: int, master: int, differs: bool) -> None:
    found = cast_differs(
        np.array([stored], np.uint16), np.array([master], np.uint32), dtype("bfloat16")
    )
    assert found.tolist() == [differs]


def test_a_dtype_without_a_rule_is_refused() -> None:
    message = "round: must be to one of float32, bfloat16, float16, got int32"
    with pytest.raises(LayoutError, match=re.escape(message)):
        round_float32(np.zeros(1, np.uint32), dtype("int32"))
