"""The buffer formula must be Megatron's own, and what it promises must hold for any parameters.

The live buffers of the fixtures (`layout.json`, taken from Megatron's objects) judge the numbers;
a simulation that marks elements one by one judges what follows from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any

import oracle_megatron as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.megatron import (
    VARIANTS,
    BufferLayout,
    BufferParam,
    Cuts,
    bucket_divisor,
    buffer_layout,
    cuts_from_starts,
    default_bucket_size,
)

CASES = oracle.cases()
ALIGNED = ("core-0.13", "core-0.12")  # what the fixtures' writers follow
UNALIGNED = ("core-0.7", "core-0.6", "core-0.5")
DP_SIZES = (1, 2, 3, 5, 7)
TIED = ("embedding.word_embeddings.weight", "output_layer.weight")


def live_params(case: oracle.Case, buffer: dict[str, Any]) -> list[BufferParam]:
    """Return the parameters of a live buffer in module order, which is the buffer's reversed."""
    shared = bool(case.model["tie_embeddings"]) and case.pp > 1
    return [
        BufferParam(p["name"], p["end"] - p["start"], shared and p["name"] in TIED)
        for p in reversed(buffer["params"])
    ]


def test_every_variant_is_tried_here() -> None:
    assert tuple(VARIANTS) == ALIGNED + UNALIGNED


# --- against live buffers -----------------------------------------------------------------------


def size_of(case: oracle.Case, rank: dict[str, Any], buffer: dict[str, Any]) -> int | None:
    """Return the bucket size of a live buffer: the first chunk of the first stage has one."""
    return case.bucket_size if (rank["pp"], buffer["model_chunk"]) == (0, 0) else None


@pytest.mark.parametrize("variant", ALIGNED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_gives_the_live_buffers_of_every_rank(case: oracle.Case, variant: str) -> None:
    ranks = case.layout()
    assert len(ranks) == case.tp * case.pp * case.dp
    for rank in ranks:
        for buffer in rank["buffers"]:
            params = live_params(case, buffer)
            cuts = Cuts(size_of(case, rank, buffer))
            layout = buffer_layout(params, dp=case.dp, cuts=cuts, variant=variant)
            assert list(layout.starts) == [p["start"] for p in reversed(buffer["params"])]
            buckets = [list(b) for b in zip(layout.bucket_starts, layout.bucket_stops, strict=True)]
            assert buckets == buffer["bucket_indices"]
            assert list(layout.bucket_unpadded) == buffer["bucket_numel_unpadded"]
            assert layout.numel == buffer["numel"]
            assert layout.numel_unpadded == buffer["numel_unpadded"]


@pytest.mark.parametrize("variant", UNALIGNED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_before_the_alignment_gives_no_run_its_live_buffers(
    case: oracle.Case, variant: str
) -> None:
    for rank in case.layout():
        for buffer in rank["buffers"]:
            cuts = Cuts(size_of(case, rank, buffer))
            layout = buffer_layout(
                live_params(case, buffer), dp=case.dp, cuts=cuts, variant=variant
            )
            assert list(layout.starts) != [p["start"] for p in reversed(buffer["params"])]
            assert layout.numel_unpadded < buffer["numel_unpadded"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_seen_in_live_starts_give_the_same_buffer_again(case: oracle.Case) -> None:
    for rank in case.layout():
        for buffer in rank["buffers"]:
            params = live_params(case, buffer)
            starts = [p["start"] for p in reversed(buffer["params"])]
            layout = buffer_layout(
                params, dp=case.dp, cuts=cuts_from_starts(params, starts, dp=case.dp)
            )
            assert list(layout.starts) == starts
            assert layout.numel == buffer["numel"]


def test_buckets_of_the_fixtures_are_several_so_that_the_formula_is_tried() -> None:
    counts = {str(c): len(c.layout()[0]["buffers"][0]["bucket_indices"]) for c in CASES}
    assert counts["gqa_tp1_pp1_dp2_bucket6000"] > 2
    assert counts["tied_tp1_pp1_dp2_bucket3000"] > 2
    assert counts["tied_tp1_pp2_dp2"] == 2  # the shared embedding has its own


# --- against a simulation -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What a variant does, in the words of its releases.

    A parameter starts at a multiple of ``alignment``, a bucket ends at one of the DP size and of
    ``end``; ``own`` says whether a shared embedding has a bucket of its own.
    """

    alignment: int = 1
    end: int = 1
    own: bool = True


RULES = {
    "core-0.13": Rule(alignment=64, end=128),
    "core-0.7": Rule(end=128),
    "core-0.6": Rule(),
    "core-0.5": Rule(own=False),
}  # core-0.12 is core-0.13 but for what stands before a shared embedding, see below


def simulate(
    params: list[BufferParam], dp: int, size: int | None, rule: Rule
) -> tuple[list[int], list[int], list[int]]:
    """Return starts, starts in the saved buffer, and bucket ends, by marking single elements.

    The live buffer is a list of marks: a parameter's index, None for a gap, "end" for padding at
    a bucket's end. The saved buffer is the same list without the latter.
    """
    marks: list[int | str | None] = []
    ends: list[int] = []
    bucket: list[int | str | None] = []

    def close() -> None:
        nonlocal bucket
        marks.extend(bucket)
        while len(marks) % dp or len(marks) % rule.end:
            marks.append("end")
        ends.append(len(marks))
        bucket = []

    in_bucket = 0
    empty_starts: dict[int, int] = {}
    for index in reversed(range(len(params))):
        param = params[index]
        while (len(marks) + len(bucket)) % rule.alignment:
            bucket.append(None)
        own = rule.own and param.shared_embedding
        if own and in_bucket:
            close()
            in_bucket = 0
        empty_starts[index] = len(marks) + len(bucket)
        bucket += [index] * param.numel
        in_bucket += 1
        if own or (size is not None and len(bucket) >= size):
            close()
            in_bucket = 0
    if in_bucket:
        close()
    saved = [mark for mark in marks if mark != "end"]
    starts, file_starts = [], []
    for index, param in enumerate(params):
        if param.numel:
            starts.append(marks.index(index))
            file_starts.append(saved.index(index))
        else:  # no element to look for: count what stands before it
            at = empty_starts[index]
            starts.append(at)
            file_starts.append(sum(mark != "end" for mark in marks[:at]))
    return starts, file_starts, ends


@st.composite
def models(draw: st.DrawFn, *, shared: bool = True) -> list[BufferParam]:
    """Draw parameters in module order; sizes around the alignments, empty and tiny ones too."""
    sizes = st.one_of(
        st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 384]), st.integers(0, 300)
    )
    numels = draw(st.lists(sizes, max_size=9))
    ends = {0, len(numels) - 1} if shared and draw(st.booleans()) else set()
    return [BufferParam(f"p{i}", n, shared_embedding=i in ends) for i, n in enumerate(numels)]


bucket_sizes = st.one_of(st.none(), st.integers(1, 700))


@pytest.mark.parametrize("variant", RULES)
@given(models(), st.sampled_from(DP_SIZES), bucket_sizes)
def test_the_formula_equals_a_simulation_that_marks_each_element(
    variant: str, params: list[BufferParam], dp: int, size: int | None
) -> None:
    layout = buffer_layout(params, dp=dp, cuts=Cuts(size), variant=variant)
    starts, file_starts, ends = simulate(params, dp, size, RULES[variant])
    assert list(layout.starts) == starts
    assert list(layout.file_starts) == file_starts
    assert list(layout.bucket_stops) == ends


@given(models(shared=False), st.sampled_from(DP_SIZES), bucket_sizes)
def test_without_a_shared_embedding_the_aligned_variants_are_one(
    params: list[BufferParam], dp: int, size: int | None
) -> None:
    new, old = (buffer_layout(params, dp=dp, cuts=Cuts(size), variant=v) for v in ALIGNED)
    assert new == old


@given(models(shared=False), st.sampled_from(DP_SIZES), bucket_sizes)
def test_without_a_shared_embedding_the_two_oldest_variants_are_one(
    params: list[BufferParam], dp: int, size: int | None
) -> None:
    a, b = (
        buffer_layout(params, dp=dp, cuts=Cuts(size), variant=v) for v in ("core-0.6", "core-0.5")
    )
    assert a == b


@pytest.mark.parametrize("variant", UNALIGNED)
@given(models(), st.sampled_from(DP_SIZES), bucket_sizes)
def test_without_the_alignment_the_saved_buffer_has_no_gap(
    variant: str, params: list[BufferParam], dp: int, size: int | None
) -> None:
    layout = buffer_layout(params, dp=dp, cuts=Cuts(size), variant=variant)
    assert layout.numel_unpadded == sum(param.numel for param in params)
    sizes = [param.numel for param in params]
    assert list(layout.file_starts) == [sum(sizes[i + 1 :]) for i in range(len(sizes))]


def check_promises(layout: BufferLayout, dp: int, *, divisor: int, alignment: int) -> None:
    spans = sorted(
        (start, start + param.numel)
        for param, start in zip(layout.params, layout.starts, strict=True)
    )
    for (_, stop), (start, _) in pairwise(spans):
        assert stop <= start
    assert all(start % alignment == 0 for start, _ in spans)
    assert list(layout.bucket_starts) == [0, *layout.bucket_stops][: len(layout.bucket_stops)]
    assert all(stop % divisor == 0 and stop % dp == 0 for stop in layout.bucket_stops)
    buckets = list(zip(layout.bucket_starts, layout.bucket_stops, strict=True))
    for start, stop in spans:
        assert any(low <= start and stop <= high for low, high in buckets)
    # the saved buffer: what each bucket holds, end to end
    paddings = [
        high - low - kept for (low, high), kept in zip(buckets, layout.bucket_unpadded, strict=True)
    ]
    assert all(0 <= padding < divisor for padding in paddings)
    for param, start, file_start in zip(
        layout.params, layout.starts, layout.file_starts, strict=True
    ):
        if param.numel:
            earlier = [p for (_, high), p in zip(buckets, paddings, strict=True) if high <= start]
            assert file_start == start - sum(earlier)
            assert file_start + param.numel <= layout.numel_unpadded


@pytest.mark.parametrize("variant", VARIANTS)
@given(models(), st.sampled_from(DP_SIZES), bucket_sizes, st.booleans())
def test_parameters_are_disjoint_aligned_and_inside_buckets_that_tile(
    variant: str, params: list[BufferParam], dp: int, size: int | None, busbw: bool
) -> None:
    try:
        layout = buffer_layout(params, dp=dp, cuts=Cuts(size), variant=variant, busbw=busbw)
    except LayoutError:
        assert variant == "core-0.12"
        assert any(param.shared_embedding for param in params)
        return
    rule = RULES["core-0.13" if variant == "core-0.12" else variant]
    # The padding for NCCL's bandwidth is younger than the bucket's alignment, and comes with it.
    wide = 65536 if busbw and rule.end == 128 else 1
    check_promises(layout, dp, divisor=lcm(dp, rule.end, wide), alignment=rule.alignment)


@given(models(), bucket_sizes)
def test_the_declared_length_is_the_same_for_every_dp_while_the_cuts_are(
    params: list[BufferParam], size: int | None
) -> None:
    # Cuts by size move with the padding, so they are kept by name here.
    starts = buffer_layout(params, dp=1, cuts=Cuts(size)).starts
    cuts = cuts_from_starts(params, starts, dp=1)
    layouts = [buffer_layout(params, dp=dp, cuts=cuts) for dp in DP_SIZES]
    assert len({layout.numel_unpadded for layout in layouts}) == 1
    assert len({layout.file_starts for layout in layouts}) == 1
    assert len({layout.bucket_unpadded for layout in layouts}) == 1


@pytest.mark.parametrize("variant", RULES)
@given(models(), st.sampled_from(DP_SIZES), bucket_sizes)
def test_cuts_that_show_in_the_starts_give_the_same_starts_again(
    variant: str, params: list[BufferParam], dp: int, size: int | None
) -> None:
    layout = buffer_layout(params, dp=dp, cuts=Cuts(size), variant=variant)
    cuts = cuts_from_starts(params, layout.starts, dp=dp, variant=variant)
    again = buffer_layout(params, dp=dp, cuts=cuts, variant=variant)
    assert again.starts == layout.starts
    assert again.numel == layout.numel
    assert cuts_from_starts(params, again.starts, dp=dp, variant=variant) == cuts


def test_a_cut_that_no_padding_shows_is_not_found_and_moves_the_saved_buffer_only() -> None:
    # 96 elements: the next start is 128 by the alignment and by the bucket's end alike.
    params = [BufferParam("b", 64), BufferParam("a", 96)]
    cut = buffer_layout(params, dp=1, cuts=Cuts(96))
    assert cuts_from_starts(params, cut.starts, dp=1) == Cuts()
    one = buffer_layout(params, dp=1, cuts=Cuts())
    assert one.starts == cut.starts == (128, 0)
    assert (cut.file_starts, cut.numel_unpadded) == ((96, 0), 160)
    assert (one.file_starts, one.numel_unpadded) == ((128, 0), 192)


def test_starts_that_are_no_cut_are_left_to_the_caller() -> None:
    params = [BufferParam("b", 64), BufferParam("a", 64)]
    assert cuts_from_starts(params, [64 + 7, 0], dp=1) == Cuts()


def test_from_core_0_7_on_a_bucket_ends_at_a_multiple_of_128_too() -> None:
    params = [BufferParam("b", 70), BufferParam("a", 130)]
    layouts = {v: buffer_layout(params, dp=3, cuts=Cuts(100), variant=v) for v in UNALIGNED}
    assert layouts["core-0.7"].bucket_stops == (384, 768)
    assert layouts["core-0.6"].bucket_stops == layouts["core-0.5"].bucket_stops == (132, 204)
    assert {layout.file_starts for layout in layouts.values()} == {(130, 0)}


# --- small and wrong ------------------------------------------------------------------------------


def test_nothing_makes_an_empty_buffer() -> None:
    layout = buffer_layout([], dp=7, cuts=Cuts(5))
    assert (layout.numel, layout.numel_unpadded, layout.bucket_starts) == (0, 0, ())


def test_parameters_without_elements_keep_their_place() -> None:
    params = [BufferParam("b", 0), BufferParam("a", 3), BufferParam("z", 0)]
    layout = buffer_layout(params, dp=5, cuts=Cuts())
    assert layout.starts == (64, 0, 0)
    assert (layout.numel, layout.numel_unpadded) == (640, 64)


def test_the_divisor_is_that_of_megatron() -> None:
    assert [bucket_divisor(dp) for dp in DP_SIZES] == [128, 128, 384, 640, 896]
    assert bucket_divisor(64) == 128
    assert bucket_divisor(256) == 256
    assert bucket_divisor(3, busbw=True) == 196608
    params = [BufferParam("a", 10)]
    assert buffer_layout(params, dp=2, cuts=Cuts(), busbw=True).numel == 65536


def test_the_default_bucket_size_grows_from_dp_41_on() -> None:
    assert [default_bucket_size(dp) for dp in (1, 40, 41)] == [40_000_000, 40_000_000, 41_000_000]


def test_cuts_say_what_they_are() -> None:
    texts = [str(Cuts()), str(Cuts(7)), str(Cuts(after=frozenset({"a", "b"})))]
    assert texts == ["one bucket", "bucket size 7", "2 cuts as in the source"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cuts(0), "bucket size: must be at least 1 element, got 0"),
        (lambda: BufferParam("a", -1), "a: must have at least 0 elements, got -1"),
        (lambda: buffer_layout([], dp=0, cuts=Cuts()), "dp: must be at least 1, got 0"),
        (
            lambda: buffer_layout([], dp=1, cuts=Cuts(), variant="core-0.11"),
            f"layout: must be one of {', '.join(ALIGNED + UNALIGNED)}, got 'core-0.11'",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()
