"""Which elementwise rules turn stored values into others? Named, vectorised, exact to the bit.

Rounding to a narrower float is round-to-nearest, ties to even: what torch's ``copy_`` does and so
what most trainers' weights are of their fp32 masters. Which bits a NaN gets is another matter: for
bfloat16, torch 2.13 gives 0x7fc0 or 0xffff on a CPU (strided or contiguous source) and 0x7fff on
a GPU, whatever the sign and payload. So a stored NaN is compared as a NaN, never by its bits.

Apex's ``DistributedFusedAdam`` with ``store_param_remainders`` keeps a master as a bfloat16 weight
and an int16 remainder: ``hi = (bits + 0x8000) >> 16``, ``lo = bits & 0xffff``, so that
``bits = (hi << 16) + lo`` with a signed ``lo``, all modulo 2**32. That rounds ties away from zero
and is one-to-one on all bits, those of NaN and infinity included: a NaN may have a number for its
high half.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpttools.dtypes import BY_NAME, DType
from ckpttools.errors import LayoutError
from ckpttools.manifest import (
    HALF_AWAY,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    SCALED,
    WIDEN,
)

Bits = npt.NDArray[np.unsignedinteger]

ROUNDED = ("float32", "bfloat16", "float16")
"""Dtypes that :func:`round_float32` rounds to."""


def round_float32(bits: Bits, to: DType) -> Bits:
    """Round fp32 values, given and returned as their bits, to the dtype ``to``.

    A NaN becomes 0x7fc0 in bfloat16; in float16 a quiet NaN with the sign and leading payload
    bits that it had. Infinities stay, and what is too large becomes one.

    Raises:
        LayoutError: no rule rounds to that dtype.
    """
    if to.name == "float32":
        return bits
    if to.name == "bfloat16":
        return _to_bfloat16(bits)
    if to.name == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            halves = bits.view("<f4").astype("<f2").view("<u2")
        return _with_quiet_nans(halves, bits)
    raise LayoutError(f"round: must be to one of {', '.join(ROUNDED)}, got {to}")


def round_half_away(bits: Bits) -> Bits:
    """Round fp32 values to bfloat16, ties away from zero: the high half of a split master."""
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype("<u2")


def split_half_away(bits: Bits) -> tuple[Bits, npt.NDArray[np.int16]]:
    """Split fp32 values into bfloat16 bits and remainders; :func:`join_remainder` undoes it."""
    return round_half_away(bits), bits.astype("<u2").view("<i2")


def join_remainder(hi: Bits, lo: npt.NDArray[np.int16]) -> Bits:
    """Return the bits of the fp32 values that bfloat16 bits and int16 remainders make."""
    bits = np.empty(hi.shape, dtype="<u4")
    _join(hi, lo, bits)
    return bits


ROUNDINGS = (NEAREST_EVEN, HALF_AWAY)
"""The rules by which a trainer may have rounded its weights."""


def cast_differs(
    stored: Bits, masters: Bits, to: DType, rule: str = NEAREST_EVEN
) -> npt.NDArray[np.bool_]:
    """Say for each element whether ``stored`` is not the fp32 value of ``masters`` in dtype ``to``.

    All are bits. Equal bits are equal, and so is any NaN stored for a NaN. ``rule`` is one of
    :data:`ROUNDINGS`; it concerns bfloat16 alone, since Apex splits no other weights.

    Raises:
        LayoutError: no rule rounds to that dtype.
    """
    flat_stored, flat_masters = stored.reshape(-1), masters.reshape(-1)
    differs = np.empty(stored.size, dtype=np.bool_)
    for start in range(0, stored.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        differs[block] = _block_differs(flat_stored[block], flat_masters[block], to, rule)
    return differs.reshape(stored.shape)


_BLOCK = 1 << 16
"""Elements at a time: temporaries of this size stay in a core's cache, and in the allocator's."""


def _block_differs(stored: Bits, masters: Bits, to: DType, rule: str) -> npt.NDArray[np.bool_]:
    away = rule == HALF_AWAY and to.name == "bfloat16"
    rounded = round_half_away(masters) if away else round_float32(masters, to)
    differs: npt.NDArray[np.bool_] = stored != rounded
    if differs.any():
        differs &= ~(_is_nan(stored, to) & _is_nan(masters, BY_NAME["float32"]))
    return differs


_INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def _is_nan(bits: Bits, dtype: DType) -> npt.NDArray[np.bool_]:
    """Say which elements are NaN: those whose magnitude, as bits, is above infinity's."""
    infinity = _INFINITY[dtype.name]
    magnitude = bits & bits.dtype.type((1 << 8 * dtype.itemsize - 1) - 1)
    above: npt.NDArray[np.bool_] = magnitude > infinity
    return above


def _with_quiet_nans(halves: Bits, bits: Bits) -> Bits:
    """Make NaNs as processors do: numpy keeps a signalling NaN signalling."""
    nan = _is_nan(bits, BY_NAME["float32"])
    if nan.any():
        high = bits[nan]
        sign, payload = high >> np.uint32(16) & 0x8000, high >> np.uint32(13) & 0x1FF
        halves[nan] = (sign | 0x7E00 | payload).astype("<u2")
    return halves


def _to_bfloat16(bits: Bits) -> Bits:
    """Round the upper half by the lower one: add half an ulp less one, plus the last kept bit."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype("<u2")
    nan = _is_nan(bits, BY_NAME["float32"])
    if nan.any():
        halves[nan] = 0x7FC0
    return halves


_SMALL_BLOCK = 1 << 14
"""Elements that are rounded at a time where temporaries add to a worker's buffers: 0.4 MiB."""


def decode(codec: str, dtypes: Sequence[DType], parts: Sequence[Bits], out: Bits) -> None:
    """Make elements of the values of their parts, by any codec but the identity.

    All are bits, and ``dtypes`` the parts' own; ``parts`` are contiguous, have the shape of ``out``
    or 1 in some dimensions, and may be overwritten. ``out`` may be a view with any strides. No
    memory of their size is taken, unless there is a NaN in a scaled or float16 part.

    A NaN of float16 becomes quiet and keeps its payload; one that a multiplication makes is
    0x7fc00000 on every processor.

    Raises:
        LayoutError: there is no such codec.
    """
    if not out.size:
        return
    if codec == REMAINDER:
        _join(parts[0], parts[1].view("<i2"), out)
    elif codec == WIDEN:
        _widen(parts[0], dtypes[0], out)
    elif codec == SCALED:
        _widen(parts[0], dtypes[0], out)
        _scale(out, parts[1])
    elif codec == HALF_AWAY:
        parts[0][...] += np.uint32(0x8000)
        parts[0][...] >>= np.uint32(16)
        out[...] = parts[0]
    elif codec == NEAREST_EVEN:
        flat = parts[0].reshape(-1)
        for start in range(0, flat.size, _SMALL_BLOCK):
            block = slice(start, start + _SMALL_BLOCK)
            flat[block] = _to_bfloat16(flat[block])
        out[...] = parts[0]
    elif codec == REMAINDER_NEAREST_EVEN:
        hi, lo = (part.reshape(-1) for part in parts)
        for start in range(0, hi.size, _SMALL_BLOCK):
            block = slice(start, start + _SMALL_BLOCK)
            hi[block] = _to_bfloat16(join_remainder(hi[block], lo[block].view("<i2")))
        out[...] = parts[0]
    else:
        raise LayoutError(f"codec: must be one that decodes, got {codec}")


def _join(hi: Bits, lo: npt.NDArray[np.int16], out: Bits) -> None:
    """Add signed remainders to high halves; what overflows is lost, as it must be."""
    out[...] = hi
    np.left_shift(out, np.uint32(16), out=out)
    signed = out.view("<i4")
    np.add(signed, lo, out=signed)


def _widen(part: Bits, dtype: DType, out: Bits) -> None:
    """Write the fp32 bits of 16-bit floats."""
    if dtype.name == "bfloat16":
        out[...] = part
        np.left_shift(out, np.uint32(16), out=out)
        return
    floats = out.view("<f4")
    with np.errstate(all="ignore"):
        floats[...] = part.view("<f2")
        if not np.isnan(floats.max()):
            return
    nan = np.isnan(floats)
    halves = np.broadcast_to(part, out.shape)[nan].astype(np.uint32)
    sign, payload = halves & np.uint32(0x8000), halves & np.uint32(0x3FF)
    out[nan] = sign << np.uint32(16) | np.uint32(0x7FC00000) | payload << np.uint32(13)


def _scale(out: Bits, scale: Bits) -> None:
    """Multiply fp32 values by one that is broadcast to them."""
    floats = out.view("<f4")
    with np.errstate(all="ignore"):
        np.multiply(floats, scale.view("<f4"), out=floats)
        if np.isnan(floats.max()):
            out[np.isnan(floats)] = 0x7FC00000
