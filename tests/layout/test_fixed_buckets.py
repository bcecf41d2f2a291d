"""Buckets of one size, held against a walk that places one fragment at a time."""

from __future__ import annotations

import pytest
from fused_buckets import walk
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.fixed_buckets import FixedBuckets, fill_buckets
from ckpttools.layout.megatron import BufferParam
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[int]], FixedBuckets, int]:
    numels = draw(st.lists(st.integers(0, 97), max_size=7))
    order = draw(st.permutations(range(len(numels))))
    groups: list[list[int]] = []
    for index in order:
        if not groups or draw(st.booleans()):
            groups.append([])
        groups[-1].append(index)
    rule = FixedBuckets(draw(st.integers(1, 120)), draw(st.sampled_from([1, 4, 32, 64])))
    return numels, groups, rule, draw(st.sampled_from([1, 2, 3, 5]))


@given(cases())
def test_every_fragment_lies_where_a_walk_puts_it(
    case: tuple[list[int], list[list[int]], FixedBuckets, int],
) -> None:
    numels, groups, rule, dp = case
    params = [BufferParam(f"p{i}", n) for i, n in enumerate(numels)]
    layout = fill_buckets(params, groups, rule, dp=dp)
    number = 0
    for buckets in walk(numels, groups, rule.bucket_numel(dp), rule.alignment):
        for k, bucket in enumerate(buckets):
            low, high = layout.bucket_starts[number], layout.bucket_stops[number]
            for part in bucket.fragments:
                assert layout.starts[part.param] + part.start == low + part.at
                assert low + part.at + part.stop - part.start <= high
            last = k == len(buckets) - 1
            full = rule.bucket_numel(dp)
            assert high - low == full or (last and high - low < full)
            assert (high - low) % (dp * rule.alignment) == 0
            assert high - low - bucket.filled < dp * rule.alignment or not last
            number += 1
    assert number <= len(layout.bucket_starts)
    assert layout.bucket_starts == (0, *layout.bucket_stops[:-1])[: len(layout.bucket_starts)]


@pytest.mark.parametrize(
    ("cap", "itemsize", "dp", "shard"),
    [
        (600 * 4, 4, 1, 576),
        (600 * 4, 4, 2, 288),
        (600 * 4, 4, 4, 128),
        (600 * 2, 2, 2, 256),
        (1, 4, 3, 32),
        (100 * 2**20, 2, 8, 6553600),
    ],
)
def test_a_rank_s_share_is_that_of_apex(cap: int, itemsize: int, dp: int, shard: int) -> None:
    # The first four are those of Apex's own checkpoints in fixtures/apex.
    rule = FixedBuckets.of_bytes(cap, itemsize)
    assert rule.shard_numel(dp) == shard
    assert rule.bucket_numel(dp) == shard * dp


def test_a_group_begins_a_bucket_of_its_own() -> None:
    params = [BufferParam("a", 5), BufferParam("b", 70), BufferParam("c", 3)]
    rule = FixedBuckets(64, 32)
    alone = fill_buckets(params, [[2, 1, 0]], rule, dp=1)
    assert (alone.starts, alone.bucket_stops) == ((128, 32, 0), (64, 128, 160))
    apart = fill_buckets(params, [[2], [1, 0]], rule, dp=1)
    assert (apart.starts, apart.bucket_stops) == ((128, 32, 0), (32, 96, 160))


@pytest.mark.parametrize("groups", [[[0]], [[0, 1, 1]], [[0], [1], [0]], [[0, 2]]])
def test_a_fill_that_leaves_out_or_repeats_a_parameter_is_refused(groups: list[list[int]]) -> None:
    params = [BufferParam("a", 5), BufferParam("b", 70)]
    with pytest.raises(LayoutError, match="must be filled with each of 2 parameters once, got"):
        fill_buckets(params, groups, FixedBuckets(64, 32), dp=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedBuckets(0, 32), "buckets: cap_numel must be at least 1, got 0"),
        (lambda: FixedBuckets(64, True), "buckets: alignment must be at least 1, got True"),
        (lambda: FixedBuckets(64, 32).shard_numel(0), "dp: must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(make: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()  # type: ignore[operator]


def test_a_fused_layout_becomes_one_with_megatron_s_buckets() -> None:
    slots = {"bfloat16": {"weight": "bfloat16", "param_remainder": "int16", "m": "float32"}}
    params = (ShardedParam("w", (70,), "bfloat16"),)
    fixed = {"bfloat16": FixedBuckets(64, 32)}
    fused = ShardedLayout("zero2", Topology(), params, {(0, 0): (0,)}, slots, fixed=fixed)
    assert [b.bucket_stops for b in fused.buffers(0, 0, 0).values()] == [(64, 96)]
    plain = fused.as_zero1()
    assert [b.bucket_stops for b in plain.buffers(0, 0, 0).values()] == [(128,)]
    assert plain.slots == {
        "bfloat16": {"weight": "bfloat16", "fp32_param": "float32", "m": "float32"}
    }
    assert plain.as_zero1() is plain
