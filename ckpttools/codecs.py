"""Which elementwise rules turn stored values into others? Named, vectorised, exact to the bit.

Rounding to a narrower float is round-to-nearest, ties to even: what torch's ``copy_`` does and so
what every trainer's weights are of its fp32 masters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpttools.dtypes import DType
from ckpttools.errors import LayoutError

Bits = npt.NDArray[np.unsignedinteger]

ROUNDED = ("float32", "bfloat16", "float16")
"""Dtypes that :func:`round_float32` rounds to."""


def round_float32(bits: Bits, to: DType) -> Bits:
    """Round fp32 values, given and returned as their bits, to the dtype ``to``.

    NaNs become the quiet NaN with the same sign and leading payload bits as torch gives
    (bfloat16: 0x7fc0), infinities stay.

    Raises:
        LayoutError: no rule rounds to that dtype.
    """
    if to.name == "float32":
        return bits
    if to.name == "bfloat16":
        return _to_bfloat16(bits)
    if to.name == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return bits.view("<f4").astype("<f2").view("<u2")
    raise LayoutError(f"round: must be to one of {', '.join(ROUNDED)}, got {to}")


def _to_bfloat16(bits: Bits) -> Bits:
    """Round the upper half by the lower one: add half an ulp less one, plus the last kept bit."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype("<u2")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        halves[nan] = 0x7FC0
    return halves
