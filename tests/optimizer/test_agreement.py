"""Ranks that disagree, or of which one failed, all raise."""

from __future__ import annotations

import time

import pytest
import torch
from gloo_ranks import run_ranks

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.agreement import RemoteError, check_same, raise_together
from ckpttools.optimizer.collectives import SingleRank, collectives_for

CPU = torch.device("cpu")
Items = list[tuple[str, str]]
SAME: Items = [("first.weight", "(5, 7) bfloat16"), ("second.weight", "(3,) float32")]


def check(items_of_ranks: list[Items]) -> str | None:
    group = collectives_for(None, CPU)
    try:
        check_same(group, "parameters", items_of_ranks[group.rank])
    except OptimizerError as error:
        return str(error)
    return None


def test_equal_lists_pass_on_every_rank() -> None:
    assert run_ranks(check, 3, [SAME] * 3) == [None] * 3


@pytest.mark.parametrize("odd_one", [0, 1, 2])
def test_a_value_that_differs_is_named_with_both_values_on_every_rank(odd_one: int) -> None:
    other = [SAME[0], ("second.weight", "(4,) float32")]
    lists = [other if rank == odd_one else SAME for rank in range(3)]
    expected = (
        "parameters: second.weight must be the same on all ranks, "
        f"got {lists[0][1][1]} on rank 0 and {lists[odd_one or 1][1][1]} on rank {odd_one or 1}"
    )
    assert run_ranks(check, 3, lists) == [expected] * 3


def test_names_that_differ_in_order_are_named_on_every_rank() -> None:
    expected = (
        "parameters: all ranks must list the same names in the same order, "
        "got first.weight on rank 0 and second.weight on rank 1"
    )
    assert run_ranks(check, 2, [SAME, SAME[::-1]]) == [expected] * 2


@pytest.mark.parametrize(
    ("lists", "end"),
    [
        ([SAME, SAME[:1]], "on rank 0 and none on rank 1"),
        ([SAME[:1], SAME], "on rank 1 and none on rank 0"),
    ],
    ids=["first longer", "second longer"],
)
def test_a_name_that_one_rank_lacks_is_named_on_every_rank(lists: list[Items], end: str) -> None:
    rule = "parameters: all ranks must list the same names, got second.weight ((3,) float32) "
    assert run_ranks(check, 2, lists) == [rule + end] * 2


def test_text_moved_between_a_name_and_its_value_is_a_difference() -> None:
    first, second = run_ranks(check, 2, [[("ab", "c")], [("a", "bc")]])
    assert first == second
    assert first is not None
    assert "got ab on rank 0 and a on rank 1" in first


def fail_on(ranks: list[int]) -> tuple[str, str, float]:
    group = collectives_for(None, CPU)
    own = KeyError(f"lost by {group.rank}") if group.rank in ranks else None
    started = time.monotonic()
    caught: Exception | None = None
    try:
        raise_together(group, own)
    except (KeyError, RemoteError) as error:
        caught = error
    if group.rank in ranks:
        assert caught is own
    return type(caught).__name__, str(caught), time.monotonic() - started


def test_one_ranks_error_is_raised_on_all_within_seconds() -> None:
    results = run_ranks(fail_on, 3, [1])
    assert [name for name, _, _ in results] == ["RemoteError", "KeyError", "RemoteError"]
    assert [text for _, text, _ in results] == [
        "rank 1: every rank must succeed, got KeyError: 'lost by 1'",
        "'lost by 1'",
        "rank 1: every rank must succeed, got KeyError: 'lost by 1'",
    ]
    assert max(seconds for _, _, seconds in results) < 5


def test_of_several_errors_each_rank_raises_its_own_and_the_others_the_first() -> None:
    results = run_ranks(fail_on, 3, [1, 2])
    assert [text for _, text, _ in results] == [
        "rank 1: every rank must succeed, got KeyError: 'lost by 1'",
        "'lost by 1'",
        "'lost by 2'",
    ]


def test_where_no_rank_fails_none_raises() -> None:
    assert [name for name, _, _ in run_ranks(fail_on, 2, [])] == ["NoneType"] * 2


def test_a_rank_alone_agrees_with_itself_and_raises_its_own_error() -> None:
    check_same(SingleRank(), "parameters", SAME)
    raise_together(SingleRank(), None)
    with pytest.raises(KeyError, match="lost"):
        raise_together(SingleRank(), KeyError("lost"))
