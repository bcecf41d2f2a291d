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

from ckpttools.codecs import (
    Bits,
    cast_differs,
    decode,
    join_remainder,
    round_float32,
    round_half_away,
    split_half_away,
)
from ckpttools.dtypes import dtype
from ckpttools.errors import LayoutError
from ckpttools.manifest import (
    HALF_AWAY,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    SCALED,
    WIDEN,
)

EDGES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
F32, F16, BF16 = (dtype(name) for name in ("float32", "float16", "bfloat16"))
EVERY_HALF = np.arange(1 << 16, dtype="<u2")
EDGE_HIGHS = (0, 1, 0x3F7F, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF)


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


# --- masters split in two -----------------------------------------------------------------


def by_the_kernel(bits: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Split as the fused kernel does: two 16-bit halves, and one more where the low is below 0."""
    halves = bits.view("<i2").reshape(-1, 2)
    lo, hi = halves[:, 0], halves[:, 1].astype(np.int64)
    return (hi + (lo < 0)) % 65536, lo


@pytest.mark.parametrize("high", EDGE_HIGHS)
def test_every_remainder_joins_to_the_bits_that_were_split(high: int) -> None:
    lo = np.arange(-(1 << 15), 1 << 15).astype("<i2")
    hi = np.full(1 << 16, high, "<u2")
    bits = join_remainder(hi, lo)
    below = (lo < 0).astype(np.int64)
    assert (bits == (hi - below) % 65536 * 65536 + lo.astype(np.int64) % 65536).all()
    again_hi, again_lo = split_half_away(bits)
    assert (again_hi == hi).all()
    assert (again_lo == lo).all()
    assert len(np.unique(bits)) == 1 << 16


@pytest.mark.parametrize("high", EDGE_HIGHS)
def test_every_master_of_an_edge_splits_as_the_kernel_splits_it(high: int) -> None:
    bits = np.uint32(high << 16) | np.arange(1 << 16, dtype="<u4")
    hi, lo = split_half_away(bits)
    their_hi, their_lo = by_the_kernel(bits)
    assert (hi == their_hi).all()
    assert (lo == their_lo).all()
    assert (hi == (bits.astype(np.int64) + 0x8000) % (1 << 32) // 65536).all()
    assert (join_remainder(hi, lo) == bits).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_master_is_split_and_joined_without_a_change(values: list[int]) -> None:
    bits = np.array(values, dtype="<u4")
    hi, lo = split_half_away(bits)
    assert (hi.dtype, lo.dtype) == (np.dtype("<u2"), np.dtype("<i2"))
    assert join_remainder(hi, lo).tolist() == values
    assert hi.tolist() == by_the_kernel(bits)[0].tolist()


@pytest.mark.parametrize("lower", EDGES)
def test_half_away_differs_from_nearest_even_in_ties_above_an_even_number_alone(
    lower: int,
) -> None:
    bits = upper_halves_with(lower)
    number = ~is_nan(bits)
    differs = round_half_away(bits) != round_float32(bits, BF16)
    even = (bits >> np.uint32(16)) % 2 == 0
    assert (differs == (even & (lower == 0x8000)))[number].all()
    finite = number & (bits % (1 << 31) < 0x7F7F8000)
    away = round_half_away(bits)[finite].astype(np.uint32) << np.uint32(16)
    if lower == 0x8000:  # what is rounded is larger than what was
        assert (np.abs(away.view("<f4")) > np.abs(bits[finite].view("<f4"))).all()


@pytest.mark.parametrize(
    ("value", "away", "even"),
    [
        (0x3F808000, 0x3F81, 0x3F80),
        (0x3F818000, 0x3F82, 0x3F82),
        (0xBF808000, 0xBF81, 0xBF80),
        (0x00008000, 0x0001, 0x0000),  # subnormal, a tie with zero
        (0x80008000, 0x8001, 0x8000),
        (0x7F7FFFFF, 0x7F80, 0x7F80),
        (0x7F800000, 0x7F80, 0x7F80),
        (0x7FFFFFFF, 0x8000, 0x7FC0),  # a NaN whose high half is minus zero
        (0xFFFFFFFF, 0x0000, 0x7FC0),
    ],
)
def test_the_two_roundings_of_edges_are_as_written_here(value: int, away: int, even: int) -> None:
    bits = np.array([value], dtype="<u4")
    assert round_half_away(bits).tolist() == [away]
    assert round_float32(bits, BF16).tolist() == [even]
    for rule, good, bad in ((HALF_AWAY, away, even), (NEAREST_EVEN, even, away)):
        stored = np.array([good, bad], "<u2")
        both = np.array([value, value], "<u4")
        odd = bad not in {good, 0x7FC0}  # any NaN may stand for a NaN
        assert cast_differs(stored, both, BF16, rule).tolist() == [False, odd]


def test_half_away_concerns_bfloat16_alone() -> None:
    bits = upper_halves_with(0x1000)  # ties of float16
    halves = round_float32(bits, F16)
    assert not cast_differs(halves, bits, F16, HALF_AWAY).any()
    assert not cast_differs(bits, bits, F32, HALF_AWAY).any()


# --- elements of parts --------------------------------------------------------------------


def decoded(codec: str, kinds: list[str], parts: list[np.ndarray], width: str) -> np.ndarray:
    """Decode copies into a view that is not contiguous, among elements that must stay."""
    room = np.full((3, *parts[0].shape, 2), 0xABCD, width)
    out = room[1, ..., 1]
    decode(codec, [dtype(kind) for kind in kinds], [part.copy() for part in parts], out)
    found = out.copy()
    out[...] = 0xABCD
    assert (room == 0xABCD).all()
    return found


def test_every_bfloat16_is_widened_to_the_float32_with_its_bits() -> None:
    found = decoded(WIDEN, ["bfloat16"], [EVERY_HALF], "<u4")
    assert (found == EVERY_HALF.astype(np.int64) * 65536).all()
    assert (round_half_away(found) == EVERY_HALF).all()


def test_every_float16_is_widened_as_in_torch_and_a_nan_keeps_its_payload_quietly() -> None:
    found = decoded(WIDEN, ["float16"], [EVERY_HALF], "<u4")
    theirs = torch.from_numpy(EVERY_HALF.view(np.float16).copy()).float().numpy()
    nan = np.isnan(theirs)
    assert nan.sum() == 2046
    assert (found == theirs.view("<u4"))[~nan].all()
    signs, payloads = EVERY_HALF[nan] // 0x8000, EVERY_HALF[nan] % 0x200
    quiet = signs.astype(np.int64) << 31 | 0x7FC00000 | payloads.astype(np.int64) << 13
    assert (found[nan] == quiet).all()
    assert (round_float32(found, F16)[~nan] == EVERY_HALF[~nan]).all()
    alone = decoded(WIDEN, ["float16"], [EVERY_HALF[~nan]], "<u4")
    assert (alone == theirs.view("<u4")[~nan]).all()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "scale",
    [0, 0x80000000, 0x3F800000, 0x3DCCCCCD, 0x00000001, 0x00400003, 0x33800001, 0x7F7FFFFF,
     0x7F800000, 0xC2F6E979, 0x7FC00000],
)  # fmt: skip
def test_every_scaled_half_is_one_float32_multiplication_as_in_torch(kind: str, scale: int) -> None:
    scales = np.array([scale], "<u4")
    found = decoded(SCALED, [kind, "float32"], [EVERY_HALF, scales], "<u4")
    values = torch.from_numpy(EVERY_HALF.view(np.int16).copy()).view(TORCH[kind])
    theirs = (values.float() * torch.from_numpy(scales.view(np.float32).copy())).numpy()
    nan = np.isnan(theirs)
    assert (found == theirs.view("<u4"))[~nan].all()
    assert set(found[nan].tolist()) == {0x7FC00000}
    assert (~nan).any() == (scale != 0x7FC00000)


@pytest.mark.parametrize("lower", EDGES)
def test_parts_are_rounded_as_whole_masters_are(lower: int) -> None:
    bits = upper_halves_with(lower)
    away, even = round_half_away(bits), round_float32(bits, BF16)
    hi, lo = split_half_away(bits)
    assert (decoded(HALF_AWAY, ["float32"], [bits], "<u2") == away).all()
    assert (decoded(NEAREST_EVEN, ["float32"], [bits], "<u2") == even).all()
    pair = [hi, lo.view("<u2")]
    assert (decoded(REMAINDER, ["bfloat16", "int16"], pair, "<u4") == bits).all()
    rounded = decoded(REMAINDER_NEAREST_EVEN, ["bfloat16", "int16"], pair, "<u2")
    assert (rounded == even).all()


def test_a_part_may_be_one_number_along_any_dimension() -> None:
    values = EVERY_HALF[0x3F80 : 0x3F80 + 35].reshape(5, 7)
    columns = np.linspace(0.3, 11.7, 7, dtype="<f4").reshape(1, 7)
    out = np.zeros((5, 7), "<u4")
    decode(SCALED, [BF16, F32], [values, columns.view("<u4")], out)
    floats = (values.astype("<u4") << np.uint32(16)).view("<f4")
    assert (out.view("<f4") == floats * columns).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1, 1)])
def test_scalars_and_empty_tensors_are_decoded(shape: tuple[int, ...]) -> None:
    for codec, kinds, width in (
        (REMAINDER, ["bfloat16", "int16"], "<u4"),
        (SCALED, ["float16", "float32"], "<u4"),
        (WIDEN, ["float16"], "<u4"),
        (HALF_AWAY, ["float32"], "<u2"),
        (NEAREST_EVEN, ["float32"], "<u2"),
        (REMAINDER_NEAREST_EVEN, ["bfloat16", "int16"], "<u2"),
    ):
        parts = [np.full(shape, 0xFFFF, f"<u{dtype(kind).itemsize}") for kind in kinds]
        out = np.full(shape, 0x55, width)
        decode(codec, [dtype(kind) for kind in kinds], parts, out)
        assert out.shape == shape
        assert (out != 0x55).all()


def test_an_unknown_codec_is_refused() -> None:
    one = np.zeros(1, "<u4")
    with pytest.raises(LayoutError, match="codec: must be one that decodes, got zip"):
        decode("zip", [F32], [one], one)
