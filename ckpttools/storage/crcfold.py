"""What is the CRC of a whole, given the CRCs of its pieces, written in any order by anyone?

A CRC is linear over GF(2) but for its all-ones start F and its final inversion. Running it over
one zero byte multiplies the 32-bit state by x^8 modulo the polynomial. So with t the bytes that
follow a piece of length L and checksum c,

    crc(whole) = F + F x^(8 total) + sum over pieces of ((c + F) x^(8 t) + F x^(8 (t + L)))

where + is xor and bytes in no piece are zero. The right side is a sum of terms (value, exponent),
evaluated one base-16 digit of the exponents at a time, lowest first: a value whose digit is d is
multiplied by x^(8 d 16^k), exponents lose the digit, and terms that now have the same exponent
are added. Terms melt together as the digits go, so the cost is a few passes over the pieces.
See Adler's crc32_combine in zlib, which does this for two pieces.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ckpttools.errors import LayoutError

Polynomial = Literal["crc32", "crc32c"]

_POLYNOMIALS = {"crc32": 0xEDB88320, "crc32c": 0x82F63B78}  # bit-reversed, as both CRCs run
_DIGIT_BITS = 4  # tables of 64 KiB a digit stay in the processor's cache
_BASE = 1 << _DIGIT_BITS
_ONES = np.uint32(0xFFFFFFFF)


def fold(
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    crcs: NDArray[np.uint32],
    *,
    total_bytes: int,
    polynomial: Polynomial,
) -> int:
    r"""Return the CRC of ``total_bytes`` bytes that consist of the given pieces and zeros.

    ``crcs[i]`` is the CRC of the ``lengths[i]`` bytes at ``offsets[i]``; any order, all arrays
    of the same length. Exact.

    >>> import zlib
    >>> crcs = np.array([zlib.crc32(b"ab"), zlib.crc32(b"c")], np.uint32)
    >>> hex(fold(np.array([3, 0]), np.array([2, 1]), crcs, total_bytes=6, polynomial="crc32"))
    '0x217c7465'
    >>> hex(zlib.crc32(b"c\0\0ab\0"))
    '0x217c7465'

    Raises:
        LayoutError: pieces overlap or reach outside the whole.
    """
    if not len(offsets) == len(lengths) == len(crcs):
        raise LayoutError(
            "crcfold: columns must have one length, got "
            f"{len(offsets)}, {len(lengths)} and {len(crcs)}"
        )
    filled = np.flatnonzero(lengths)  # an empty piece adds nothing, wherever it stands
    order = filled[np.argsort(offsets[filled], kind="stable")]
    starts = offsets[order].astype(np.int64)
    stops = starts + lengths[order]
    _check_disjoint(starts, stops, total_bytes)
    sums = crcs[order].astype(np.uint32)
    # Terms by falling exponent: the whole's, then each piece's two (F at its start, c + F at its
    # stop). This is ascending in the file, so no further sort is needed.
    exponents = np.empty(1 + 2 * len(starts), np.int64)
    values = np.full(1 + 2 * len(starts), _ONES, np.uint32)
    exponents[0] = total_bytes
    exponents[1::2] = total_bytes - starts
    exponents[2::2] = total_bytes - stops
    values[2::2] = sums ^ _ONES
    return int(_evaluate(values, exponents, polynomial) ^ _ONES)


def _check_disjoint(starts: NDArray[np.int64], stops: NDArray[np.int64], total_bytes: int) -> None:
    """Refuse sorted pieces that overlap, run backwards or leave the whole."""
    ends = np.concatenate(([0], stops))
    begins = np.concatenate((starts, [total_bytes]))
    bad = np.flatnonzero((begins < ends) | (np.concatenate(([0], stops - starts)) < 0))
    if len(bad):
        at = int(bad[0])
        raise LayoutError(
            f"crcfold: pieces must be disjoint parts of {total_bytes} bytes, got one that ends at "
            f"{ends[at]} before {begins[at]}"
        )


def _evaluate(
    values: NDArray[np.uint32], exponents: NDArray[np.int64], polynomial: Polynomial
) -> np.uint32:
    """Return the sum of value x^(8 exponent); exponents never rise."""
    digit = 0
    values, exponents = _merged(values, exponents)
    while len(values) > 1 or exponents[0]:
        values = _multiplied(values, exponents & (_BASE - 1), _tables(polynomial, digit))
        values, exponents = _merged(values, exponents >> _DIGIT_BITS)
        digit += 1
    return np.uint32(values[0])


def _merged(
    values: NDArray[np.uint32], exponents: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Add the terms that have one exponent."""
    first = np.flatnonzero(np.concatenate(([True], exponents[1:] != exponents[:-1])))
    if len(first) == len(values):
        return values, exponents
    return np.bitwise_xor.reduceat(values, first), exponents[first]


def _multiplied(
    values: NDArray[np.uint32], digits: NDArray[np.int64], tables: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Multiply each value by the power of x that its digit stands for in ``tables``."""
    as_bytes = values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)
    rows = digits << 8
    result: NDArray[np.uint32] = tables[0][rows + as_bytes[:, 0]]
    for place in range(1, 4):
        result ^= tables[place][rows + as_bytes[:, place]]
    return result


@cache
def _tables(polynomial: Polynomial, digit: int) -> NDArray[np.uint32]:
    """Return uint32[4, 16 * 256]: at [p, 256 d + b], byte b at place p times x^(8 d 16^digit)."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if digit:
        below = _tables(polynomial, digit - 1)
        once = _multiplied(bits, np.full(32, _BASE - 1), below)
        once = _multiplied(once, np.full(32, 1), below)
    else:
        once = bits
        for _ in range(8):
            carry = np.where(once & np.uint32(1), np.uint32(_POLYNOMIALS[polynomial]), 0)
            once = (once >> np.uint32(1)) ^ carry.astype(np.uint32)
    step = _byte_tables(once)
    tables = np.empty((4, _BASE, 256), np.uint32)
    images = bits
    for power in range(_BASE):
        tables[:, power] = _byte_tables(images)
        images = _multiplied(images, np.zeros(32, np.int64), step)
    return tables.reshape(4, -1)


def _byte_tables(images: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return uint32[4, 256]: the image of each byte value at each place, from that of each bit."""
    tables = np.zeros((4, 256), np.uint32)
    for place in range(4):
        for bit in range(8):
            image = images[8 * place + bit]
            tables[place, 1 << bit : 2 << bit] = tables[place, : 1 << bit] ^ image
    return tables
