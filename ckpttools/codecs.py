"""Which elementwise rules turn stored values into others? Named, vectorised, exact to the bit.

Rounding to a narrower float is round-to-nearest, ties to even: what torch's ``copy_`` does and so
what every trainer's weights are of its fp32 masters. Which bits a NaN gets is another matter: for
bfloat16, torch 2.13 gives 0x7fc0 or 0xffff on a CPU (strided or contiguous source) and 0x7fff on
a GPU, whatever the sign and payload. So a stored NaN is compared as a NaN, never by its bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpttools.dtypes import BY_NAME, DType
from ckpttools.errors import LayoutError

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


def cast_differs(stored: Bits, masters: Bits, to: DType) -> npt.NDArray[np.bool_]:
    """Say for each element whether ``stored`` is not the fp32 value of ``masters`` in dtype ``to``.

    All are bits. Equal bits are equal, and so is any NaN stored for a NaN.

    Raises:
        LayoutError: no rule rounds to that dtype.
    """
    flat_stored, flat_masters = stored.reshape(-1), masters.reshape(-1)
    differs = np.empty(stored.size, dtype=np.bool_)
    for start in range(0, stored.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        differs[block] = _block_differs(flat_stored[block], flat_masters[block], to)
    return differs.reshape(stored.shape)


_BLOCK = 1 << 16
"""Elements at a time: temporaries of this size stay in a core's cache, and in the allocator's."""


def _block_differs(stored: Bits, masters: Bits, to: DType) -> npt.NDArray[np.bool_]:
    differs: npt.NDArray[np.bool_] = stored != round_float32(masters, to)
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
