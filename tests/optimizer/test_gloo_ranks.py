"""The harness reports what a rank did: its result, its error, its death, or where it hangs."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankFailedError, run_ranks


@dataclass(frozen=True, slots=True)
class Answer:
    rank: int
    world_size: int
    threads: int
    argument: str


def answer(argument: str) -> Answer:
    return Answer(dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), argument)


def test_results_of_the_test_modules_own_classes_come_in_rank_order() -> None:
    assert run_ranks(answer, 3, "x") == [Answer(rank, 3, 1, "x") for rank in range(3)]
    assert run_ranks(answer, 1, "x", threads=2) == [Answer(0, 1, 2, "x")]


def is_initialized() -> bool:
    return dist.is_initialized()


def test_a_process_without_a_group_is_one_on_demand() -> None:
    assert run_ranks(is_initialized, 1, process_group=False) == [False]


def fail_on_one(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        if how == "warns":
            warnings.warn("a warning of rank one", stacklevel=1)
        raise KeyError("an error of rank one")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "KeyError: 'an error of rank one'"),
        ("warns", "UserWarning: a warning of rank one"),
    ],
)
def test_an_error_or_warning_on_any_rank_is_raised_with_its_traceback(how: str, text: str) -> None:
    # The other rank waits in a barrier, and may be the first to say that its peer has gone.
    with pytest.raises(RankFailedError, match="in fail_on_one") as caught:
        run_ranks(fail_on_one, 2, how)
    assert text in str(caught.value) or "Connection" in str(caught.value)


def test_a_rank_that_dies_is_an_error_unless_it_may() -> None:
    with pytest.raises(RankFailedError, match="rank 1 ended with code 3|Connection"):
        run_ranks(fail_on_one, 2, "dies")
    assert run_ranks(die_alone, 2, may_die=[1]) == [0, None]


def die_alone() -> int:
    if dist.get_rank() == 1:
        os._exit(3)
    return dist.get_rank()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_ended_at_the_timeout_and_named_with_its_stack() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 were still running") as caught:
        run_ranks(hang_on_one, 2, timeout_s=5)
    assert "in hang_on_one" in str(caught.value)
