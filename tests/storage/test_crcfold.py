"""The CRC folded from pieces is the CRC of the whole, whatever the pieces and their order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.storage.crcfold import Polynomial, Share, fold, grid_share, join, shares_of

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
@settings(deadline=None)  # tables are made at the first call
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


# ---- shares ----------------------------------------------------------------------------------


@pytest.mark.parametrize("polynomial", ORACLES)
@settings(deadline=None)  # tables are made at the first call
@given(data=st.binary(max_size=200), draw=st.data())
def test_shares_of_any_pieces_in_any_order_join_to_the_crc_of_the_whole(
    polynomial: Polynomial, data: bytes, draw: st.DataObject
) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=9)))
    spans = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    ranks = draw.draw(st.integers(1, 4))
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for span in spans:
        held[draw.draw(st.integers(0, ranks - 1))].append(span)
    oracle = ORACLES[polynomial]
    shares = [
        sum(
            shares_of(
                [a for a, _ in mine],
                [b - a for a, b in mine],
                [oracle(data[a:b]) for a, b in mine],
                [len(data)] * len(mine),
                polynomial=polynomial,
            ),
            Share(),
        )
        for mine in map(draw.draw, map(st.permutations, held))
    ]
    assert sum(one.length_bytes for one in shares) == len(data)
    joined = join(draw.draw(st.permutations(shares)), total_bytes=len(data), polynomial=polynomial)
    assert joined == oracle(data)


def test_pieces_of_many_wholes_have_each_its_own_share() -> None:
    wholes = [b"abc", b"", b"d" * 70_000, b"ab"]
    pieces = [(0, 1, 2), (0, 0, 1), (1, 0, 0), (2, 5, 69_990), (2, 0, 5), (3, 0, 2), (2, 69_995, 5)]
    shares = shares_of(
        [at for _, at, _ in pieces],
        [n for _, _, n in pieces],
        [google_crc32c.value(wholes[i][at : at + n]) for i, at, n in pieces],
        [len(wholes[i]) for i, _, _ in pieces],
        polynomial="crc32c",
    )
    for number, whole in enumerate(wholes):
        mine = [share for share, (i, _, _) in zip(shares, pieces, strict=True) if i == number]
        joined = join(mine, total_bytes=len(whole), polynomial="crc32c")
        assert joined == google_crc32c.value(whole)


def test_shares_that_are_not_of_each_byte_once_are_refused() -> None:
    (share,) = shares_of([1], [2], [7], [3], polynomial="crc32c")
    for shares, got in (([share], 2), ([share, share], 4), ([], 0)):
        with pytest.raises(LayoutError, match=f"shares must be of 3 bytes, got {got}"):
            join(shares, total_bytes=3, polynomial="crc32c")


@pytest.mark.parametrize(("offset", "length"), [(4, 2), (-1, 2), (2, -1)])
def test_a_piece_outside_its_whole_has_no_share(offset: int, length: int) -> None:
    with pytest.raises(LayoutError, match="each piece must lie inside its whole"):
        shares_of([0, offset], [1, length], [0, 0], [5, 5], polynomial="crc32c")


@pytest.mark.parametrize("polynomial", ORACLES)
@settings(deadline=None)  # tables are made at the first call
@given(
    rows=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    run=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 255, 256, 257, 300]),
    around=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_the_share_of_a_grid_is_that_of_its_runs(
    polynomial: Polynomial,
    rows: tuple[int, int],
    gaps: tuple[int, int],
    run: int,
    around: tuple[int, int],
    seed: int,
) -> None:
    oracle = ORACLES[polynomial]
    inner = run + gaps[0]
    outer = rows[1] * inner + gaps[1]
    starts = [around[0] + i * outer + j * inner for i in range(rows[0]) for j in range(rows[1])]
    total = starts[-1] + run + around[1]
    data = np.random.default_rng(seed).bytes(run * len(starts))
    grid = grid_share(
        memoryview(data),
        lengths=rows,
        strides_bytes=(outer, inner),
        run_bytes=run,
        start_bytes=around[0],
        total_bytes=total,
        crcs=lambda part, size: [
            oracle(bytes(part[at : at + size])) for at in range(0, len(part), size)
        ],
        polynomial=polynomial,
    )
    sums = [oracle(data[at : at + run]) for at in range(0, len(data), run)]
    columns = starts, [run] * len(starts), sums, [total] * len(starts)
    assert grid == sum(shares_of(*columns, polynomial=polynomial), Share())
    whole = bytearray(total)
    for i, start in enumerate(starts):
        whole[start : start + run] = data[i * run : (i + 1) * run]
    rest = Share(0, total - len(data))  # zeros add nothing but their number
    assert join([grid, rest], total_bytes=total, polynomial=polynomial) == oracle(bytes(whole))


def test_a_grid_that_leaves_the_whole_or_has_other_bytes_is_refused() -> None:
    def share(data: bytes, length: int) -> Share:
        return grid_share(
            memoryview(data),
            lengths=(length,),
            strides_bytes=(4,),
            run_bytes=2,
            start_bytes=1,
            total_bytes=7,
            crcs=lambda part, _: [zlib.crc32(part)],
            polynomial="crc32",
        )

    assert share(b"abcd", 2).length_bytes == 4
    for data, length in ((b"abc", 2), (b"abcdef", 3)):
        with pytest.raises(LayoutError, match="crcfold: . runs of 2 bytes up to byte"):
            share(data, length)
