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

Whoever has some of the pieces can add up their terms alone: a :class:`Share`, whose value no other
piece changes. :func:`join` adds the shares of all, and what belongs to the whole.

Pieces in a regular grid (the rows of a narrow box) need no exponents of their own: by Horner's
rule the first half of each pair of neighbours is multiplied by x^(8 stride) and added to the
second, until one is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
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


@dataclass(frozen=True, slots=True)
class Share:
    """What some pieces add to the CRC of the whole: their terms' sum, and how many bytes they are.

    ``a + b`` is the share of both, which must be of one whole and have no byte in common.
    """

    value: int = 0
    length_bytes: int = 0

    def __add__(self, other: Share) -> Share:
        """Return the share of the pieces of both."""
        return Share(self.value ^ other.value, self.length_bytes + other.length_bytes)


def join(shares: Iterable[Share], *, total_bytes: int, polynomial: Polynomial) -> int:
    r"""Return the CRC of a whole, of which the shares hold every byte once between them.

    >>> import zlib
    >>> shares = [
    ...     share
    ...     for at, b in ((3, b"de"), (0, b"abc"))
    ...     for share in shares_of([at], [len(b)], [zlib.crc32(b)], [5], polynomial="crc32")
    ... ]
    >>> join(shares, total_bytes=5, polynomial="crc32") == zlib.crc32(b"abcde")
    True

    Raises:
        LayoutError: they hold more bytes than the whole, or fewer.
    """
    all_of_it = sum(shares, Share())
    if all_of_it.length_bytes != total_bytes:
        raise LayoutError(
            f"crcfold: shares must be of {total_bytes} bytes, got {all_of_it.length_bytes}"
        )
    return _completed(all_of_it.value, total_bytes, polynomial)


def shares_of(
    offsets: Sequence[int],
    lengths: Sequence[int],
    crcs: Sequence[int],
    totals: Sequence[int],
    *,
    polynomial: Polynomial,
) -> list[Share]:
    """Return the share of each of some pieces, each in a whole of ``totals[i]`` bytes.

    The other columns are those of :func:`fold`. Wholes may differ, so that the pieces of many of
    them cost one pass. Pieces of one whole must be disjoint, which is not checked.

    Raises:
        LayoutError: a piece reaches outside its whole.
    """
    start, length, total = (np.asarray(c, np.int64) for c in (offsets, lengths, totals))
    after = total - start - length
    if min(start.min(initial=0), length.min(initial=0), after.min(initial=0)) < 0:
        raise LayoutError("crcfold: each piece must lie inside its whole, got one that doesn't")
    ones = np.full(len(start), _ONES)
    values = np.asarray(crcs, np.uint32) ^ ones ^ _shifted(ones, length, polynomial)
    values = _shifted(values, after, polynomial)
    return list(map(Share, values.tolist(), length.tolist()))


_RUN_BYTES = 128
"""Runs of fewer bytes are added up word by word, which costs less than a call for each of them."""


def grid_share(
    data: memoryview,
    *,
    lengths: Sequence[int],
    strides_bytes: Sequence[int],
    run_bytes: int,
    start_bytes: int,
    total_bytes: int,
    crcs: Callable[[memoryview, int], Sequence[int]],
    polynomial: Polynomial,
) -> Share:
    """Return the share of a grid of runs whose bytes are ``data``, one run after the other.

    There are as many runs as the product of ``lengths``; the first is at ``start_bytes`` of the
    whole, and the next along dimension *d* lies ``strides_bytes[d]`` further. ``crcs`` gives those
    of the polynomial for runs of so many bytes. They must be disjoint, which is not checked.

    Raises:
        LayoutError: the runs don't have the length of the data, or leave the whole.
    """
    count = prod(lengths)
    spans = zip(lengths, strides_bytes, strict=True)
    stop = start_bytes + sum((n - 1) * stride for n, stride in spans) + run_bytes
    if count * run_bytes != len(data) or min(strides_bytes, default=0) < 0 or stop > total_bytes:
        raise LayoutError(
            f"crcfold: {count} runs of {run_bytes} bytes up to byte {stop} must be {len(data)} "
            f"bytes in {total_bytes}, got others"
        )
    if not count or not run_bytes:
        return Share()
    after = total_bytes - stop
    shape, strides, after = tuple(lengths), tuple(strides_bytes), total_bytes - stop
    if run_bytes < _RUN_BYTES:
        values = _words(data, run_bytes)
        shape, strides = (*shape, values.shape[1]), (*strides, _WORD_BYTES)
        after += _WORD_BYTES  # a word's value stands at its start, a sum's behind its bytes
    else:
        values = np.array(crcs(data, run_bytes), np.uint32)
        values ^= _ONES ^ np.uint32(_start_term(run_bytes, polynomial))
    last = _horner(values.reshape(shape), strides, polynomial)
    return Share(int(_shifted(last, after, polynomial)[0]), len(data))


_WORD_BYTES = 4


def _words(data: memoryview, run_bytes: int) -> NDArray[np.uint32]:
    """Return runs as rows of words; zeros in front of a run change nothing."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, run_bytes)
    if missing := -run_bytes % _WORD_BYTES:
        rows = np.concatenate((np.zeros((len(rows), missing), np.uint8), rows), axis=1)
    return rows.view("<u4")


def _horner(
    values: NDArray[np.uint32], strides: Sequence[int], polynomial: Polynomial
) -> NDArray[np.uint32]:
    """Return the one value that at the last place of a grid stands for all of them."""
    for stride in strides:
        step = stride
        while len(values) > 1:
            if len(values) % 2:
                values = np.concatenate((np.zeros_like(values[:1]), values))
            values = _times(values[::2], _power_tables(polynomial, step)) ^ values[1::2]
            step *= 2
        values = values[0]
    return values.reshape(1)


def _times(values: NDArray[np.uint32], tables: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Multiply all values by the one that the tables of each byte and place are of."""
    as_bytes = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 4)
    result: NDArray[np.uint32] = tables[0][as_bytes[..., 0]]
    for place in range(1, 4):
        result ^= tables[place][as_bytes[..., place]]
    return result


@lru_cache(maxsize=256)  # a grid needs one for each power of two of rows, and has few widths
def _power_tables(polynomial: Polynomial, exponent: int) -> NDArray[np.uint32]:
    """Return uint32[4, 256]: the multiplication by x^(8 exponent), by place and byte."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    return _byte_tables(_shifted(bits, exponent, polynomial))


def _shifted(
    values: NDArray[np.uint32], exponents: int | NDArray[np.int64], polynomial: Polynomial
) -> NDArray[np.uint32]:
    """Multiply each value by x^(8 exponent), of its own or all of one."""
    left = np.broadcast_to(np.asarray(exponents, np.int64), values.shape)
    digit = 0
    while left.any():
        values = _multiplied(values, left & (_BASE - 1), _tables(polynomial, digit))
        left = left >> _DIGIT_BITS
        digit += 1
    return values


def _completed(value: int, total_bytes: int, polynomial: Polynomial) -> int:
    """Add the terms of the whole to those of its pieces."""
    return value ^ _start_term(total_bytes, polynomial) ^ int(_ONES)


@lru_cache(maxsize=1 << 12)  # a model has many tensors of few sizes
def _start_term(total_bytes: int, polynomial: Polynomial) -> int:
    """Return the term of the start of a whole: F x^(8 total)."""
    return int(_shifted(np.array([_ONES]), total_bytes, polynomial)[0])


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
