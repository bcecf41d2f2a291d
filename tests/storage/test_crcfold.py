"""The CRC folded from pieces is the CRC of the whole, whatever the pieces and their order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.storage.crcfold import Polynomial, fold

ORACLES: dict[Polynomial, Callable[[bytes], int]] = {
    "crc32": zlib.crc32,
    "crc32c": google_crc32c.value,
}


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@st.composite
def cut_wholes(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return a byte string and disjoint pieces of it in any order; the rest of it is zero."""
    pieces, whole = [], b""
    for data, gap in draw(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 5)))):
        pieces.append((len(whole), data))
        whole += data + bytes(gap)
    return whole, draw(st.permutations(pieces))


@pytest.mark.parametrize("polynomial", ORACLES)
@given(cut=cut_wholes())
def test_folded_crc_is_the_crc_of_the_whole(
    polynomial: Polynomial, cut: tuple[bytes, list[tuple[int, bytes]]]
) -> None:
    whole, pieces = cut
    oracle = ORACLES[polynomial]
    folded = fold(
        column([at for at, _ in pieces]),
        column([len(data) for _, data in pieces]),
        np.array([oracle(data) for _, data in pieces], np.uint32),
        total_bytes=len(whole),
        polynomial=polynomial,
    )
    assert folded == oracle(whole)


@pytest.mark.parametrize("polynomial", ORACLES)
@pytest.mark.parametrize("total", [0, 1, 15, 16, 17, 255, 256, 257, 4095, 65536, 1 << 20])
def test_no_pieces_give_the_crc_of_zeros(polynomial: Polynomial, total: int) -> None:
    none = column([])
    folded = fold(none, none, none.astype(np.uint32), total_bytes=total, polynomial=polynomial)
    assert folded == ORACLES[polynomial](bytes(total))


def test_order_of_bytes_matters() -> None:
    crcs = np.array([zlib.crc32(b"one"), zlib.crc32(b"two")], np.uint32)
    lengths = column([3, 3])
    right = fold(column([0, 3]), lengths, crcs, total_bytes=6, polynomial="crc32")
    swapped = fold(column([3, 0]), lengths, crcs, total_bytes=6, polynomial="crc32")
    assert right == zlib.crc32(b"onetwo") != swapped
    assert swapped == zlib.crc32(b"twoone")


def test_terabytes_of_zeros_take_no_longer() -> None:
    # zlib's combination rule as the oracle: doubling a run of zeros 40 times.
    total, folded = 1, zlib.crc32(b"\0")
    for _ in range(40):
        pair = np.array([folded, folded], np.uint32)
        folded = fold(
            column([0, total]),
            column([total, total]),
            pair,
            total_bytes=2 * total,
            polynomial="crc32",
        )
        total *= 2
    none = column([])
    direct = fold(none, none, none.astype(np.uint32), total_bytes=total, polynomial="crc32")
    assert folded == direct


@pytest.mark.parametrize(
    ("offsets", "lengths", "total"),
    [([0, 2], [3, 3], 9), ([0], [10], 9), ([-1], [3], 9), ([4], [-2], 9), ([10], [1], 9)],
)
def test_pieces_that_overlap_or_leave_the_whole_are_refused(
    offsets: list[int], lengths: list[int], total: int
) -> None:
    crcs = np.zeros(len(offsets), np.uint32)
    with pytest.raises(LayoutError, match="crcfold: pieces must be disjoint parts of 9 bytes, got"):
        fold(column(offsets), column(lengths), crcs, total_bytes=total, polynomial="crc32")


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(LayoutError, match="crcfold: columns must have one length, got 1, 2 and 0"):
        fold(column([0]), column([1, 1]), column([]), total_bytes=2, polynomial="crc32")


def test_a_hundred_thousand_pieces_fold_in_a_moment() -> None:
    count = 100_000
    order = np.random.default_rng(7).permutation(count)
    payload = b"\x5a" * 7
    lengths, crcs = np.full(count, 7), np.full(count, zlib.crc32(payload), np.uint32)
    started = time.perf_counter()
    folded = fold(order * 7, lengths, crcs, total_bytes=7 * count, polynomial="crc32")
    assert time.perf_counter() - started < 2  # 0.05 s when the machine is idle
    assert folded == zlib.crc32(payload * count)
