"""Slices are summed and spread exactly, in the order of ranks, with the fewest bytes."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import point_to_point, slices
from ckpttools.optimizer.collectives import SingleRank, TorchCollectives, Work, collectives_for
from ckpttools.optimizer.exchanges import Exchange
from ckpttools.optimizer.point_to_point import PointToPoint
from ckpttools.optimizer.slices import reduce_in_order

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shrink_pieces() -> None:
    """Let a few hundred elements take the paths that millions take."""
    point_to_point._PIECE_BYTES = 64
    point_to_point._LEAST_PIECE_BYTES = 64
    slices._BLOCK_NUMEL = 7
    point_to_point._WHOLE_BYTES = 64


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """No two ranks, places or salts alike, and magnitudes such that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randn(numel, generator=generator)
    return (numbers * torch.logspace(-2, 2, max(numel, 1))[:numel].flip(0)).to(dtype)


def sum_of(ranks: list[int], numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Add in float32 in the order given, and round once."""
    total = values(ranks[0], numel, dtype, salt).float()
    for rank in ranks[1:]:
        total = total + values(rank, numel, dtype, salt).float()
    return total.to(dtype)


def bits_equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_the_oracle_sees_the_order_of_a_sum() -> None:
    # In bfloat16 a float32 sum of three has bits to spare, so order shows in four or in float32.
    assert not torch.equal(
        sum_of([0, 1, 2], 997, torch.float32), sum_of([2, 1, 0], 997, torch.float32)
    )
    narrow = values(0, 997, torch.bfloat16) + values(1, 997, torch.bfloat16)
    narrow += values(2, 997, torch.bfloat16)
    assert not torch.equal(sum_of([0, 1, 2], 997, torch.bfloat16), narrow)


# --- exact sums and slices ------------------------------------------------------------------


def sum_and_spread() -> None:
    group = collectives_for(None, CPU)
    everyone = list(range(group.size))
    for shrink, dtype, numel in itertools.product((False, True), DTYPES, (0, 1, 2, 7, 97, 211)):
        if shrink:
            shrink_pieces()
        total = numel * group.size
        buffer = values(group.rank, total, dtype)
        group.reduce_scatter(buffer).wait()
        expected = values(group.rank, total, dtype)
        own = slice(group.rank * numel, (group.rank + 1) * numel)
        expected[own] = sum_of(everyone, total, dtype)[own]
        assert bits_equal(buffer, expected), (shrink, dtype, numel)
        group.all_gather(buffer).wait()
        assert bits_equal(buffer, sum_of(everyone, total, dtype)), (shrink, dtype, numel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_own_slice_is_the_sum_in_rank_order_and_the_others_stay_until_gathered(
    world_size: int,
) -> None:
    run_ranks(sum_and_spread, world_size)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64], ids=str)
def test_parts_are_reduced_in_their_order_whichever_is_ones_own(
    rank: int, dtype: torch.dtype
) -> None:
    parts = [(values(k, 97, torch.float32) * 8).to(dtype) for k in range(4)]
    wide = [part.float() if part.element_size() == 2 else part for part in parts]
    total = (((wide[0] + wide[1]) + wide[2]) + wide[3]).to(dtype)
    largest = torch.stack(parts).amax(0)
    copies = [part.clone() for part in parts]
    reduce_in_order("max", copies, rank)
    assert bits_equal(copies[rank], largest)
    reduce_in_order("sum", parts, rank)
    assert bits_equal(parts[rank], total)


def many_outstanding() -> None:
    shrink_pieces()
    numel = 3 * 41
    for order in itertools.permutations(range(4)):
        group = collectives_for(None, CPU)
        assert isinstance(group, PointToPoint)
        everyone = list(range(group.size))
        buffers = [values(group.rank, numel, DTYPES[k % 3], k) for k in range(4)]
        works = [
            group.all_gather(buffer) if k == 2 else group.reduce_scatter(buffer)
            for k, buffer in enumerate(buffers)
        ]
        for k in order:
            works[k].wait()
            works[k].wait()
            expected = values(group.rank, numel, DTYPES[k % 3], k)
            for rank in everyone:
                part = slice(rank * numel // 3, (rank + 1) * numel // 3)
                if k == 2:
                    expected[part] = values(rank, numel, DTYPES[k % 3], k)[part]
                elif rank == group.rank:
                    expected[part] = sum_of(everyone, numel, DTYPES[k % 3], k)[part]
            assert bits_equal(buffers[k], expected), (order, k)


def test_operations_under_way_together_may_be_waited_for_in_any_order() -> None:
    run_ranks(many_outstanding, 3)


# --- groups of global ranks -----------------------------------------------------------------


def two_groups_at_once() -> tuple[list[int], list[int]]:
    shrink_pieces()
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    groups = [collectives_for(row, CPU), collectives_for(column, CPU)]
    members = [dist.get_process_group_ranks(row), dist.get_process_group_ranks(column)]
    buffers = [values(rank, 202, torch.float32, k) for k in range(4)]
    works = [groups[k % 2].reduce_scatter(buffer) for k, buffer in enumerate(buffers)]
    for k in (3, 0, 2, 1):
        works[k].wait()
        groups[k % 2].all_gather(buffers[k]).wait()
        assert bits_equal(buffers[k], sum_of(members[k % 2], 202, torch.float32, k)), k
    return members[0], members[1]


def test_groups_of_any_global_ranks_work_and_two_of_them_at_once() -> None:
    members = run_ranks(two_groups_at_once, 4)
    assert members == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def two_users_of_one_group() -> None:
    shrink_pieces()
    users = [collectives_for(None, CPU) for _ in range(2)]
    everyone = list(range(users[0].size))
    for _ in range(20):
        buffers = [values(users[0].rank, 2 * 997, torch.float32, k) for k in range(4)]
        works = [users[k % 2].reduce_scatter(buffer) for k, buffer in enumerate(buffers)]
        for k in (3, 2, 1, 0):
            works[k].wait()
            users[k % 2].all_gather(buffers[k]).wait()
            assert bits_equal(buffers[k], sum_of(everyone, 2 * 997, torch.float32, k)), k


def test_two_users_of_one_group_never_get_each_others_messages() -> None:
    run_ranks(two_users_of_one_group, 2)


# --- cost -----------------------------------------------------------------------------------


def count_bytes(numel: int) -> tuple[int, int]:
    group = collectives_for(None, CPU)
    assert isinstance(group, PointToPoint)
    buffer = torch.ones(numel)
    group.reduce_scatter(buffer).wait()
    scattered = group.sent_bytes
    group.all_gather(buffer).wait()
    return scattered, group.sent_bytes - scattered


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_sends_all_but_its_own_part_each_way(world_size: int) -> None:
    numel = 12 * 101
    share = 4 * numel * (world_size - 1) // world_size
    assert run_ranks(count_bytes, world_size, numel) == [(share, share)] * world_size


def stay_in_bounds() -> tuple[int, int, int]:
    shrink_pieces()
    group = PointToPoint(dist.group.WORLD, max_in_flight=2)
    most = 0
    works: list[Work] = []
    for numel in (30, 3000, 3, 900, 6000, 3000):
        works.append(group.reduce_scatter(torch.ones(numel)))
        most = max(most, group.in_flight)
    for work in works:
        work.wait()
    return most, group.in_flight, group.staging_bytes


def test_operations_and_memory_are_bounded_whatever_is_issued() -> None:
    two_turns_of_two_peers = 2 * 2 * 64
    for most, left, staging_bytes in run_ranks(stay_in_bounds, 3):
        assert most <= 2
        assert left == 0
        assert 0 < staging_bytes <= 2 * two_turns_of_two_peers


def finish_unwatched() -> bool:
    shrink_pieces()
    group = PointToPoint(dist.group.WORLD)
    buffer = values(group.rank, 2 * 997, torch.float32)
    work = group.reduce_scatter(buffer)
    assert isinstance(work, Exchange)
    deadline = time.monotonic() + 20
    while not work.done and time.monotonic() < deadline:
        torch.ones(1000).sum()
    return work.done


def test_communication_goes_on_while_the_caller_computes() -> None:
    assert run_ranks(finish_unwatched, 2) == [True, True]


# --- errors ---------------------------------------------------------------------------------


def outlive_a_peer(operation: str) -> tuple[float, list[str]]:
    group = collectives_for(None, CPU)
    group.barrier()
    if group.rank == 1:
        os._exit(3)
    started = time.monotonic()
    messages = []
    for _ in range(2):
        try:
            if operation == "all_reduce":
                group.all_reduce(torch.ones(3))
            else:
                getattr(group, operation)(torch.ones(3 << 20)).wait()
        except OptimizerError as error:
            messages.append(str(error))
    return time.monotonic() - started, messages


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_reduce"])
def test_the_death_of_a_peer_is_an_error_within_seconds_then_and_later(operation: str) -> None:
    results = run_ranks(outlive_a_peer, 3, operation, may_die=[1])
    for rank in (0, 2):
        seconds, messages = results[rank]
        assert seconds < 10
        assert len(messages) == 2
        assert f"{operation} on rank {rank} of 3: must reach every rank" in messages[0]


def refuse_uneven() -> list[str]:
    messages = []
    for group in (collectives_for(None, CPU), TorchCollectives(dist.group.WORLD)):
        for operation in (group.reduce_scatter, group.all_gather):
            with pytest.raises(OptimizerError) as caught:
                operation(torch.ones(7))
            messages.append(str(caught.value))
    return messages


def test_a_buffer_that_cannot_be_cut_evenly_is_refused() -> None:
    rule = "communication buffer: its elements must be a multiple of 2 ranks, got 7"
    assert run_ranks(refuse_uneven, 2) == [[rule] * 4] * 2


@pytest.mark.parametrize("buffer", [torch.ones(2, 2), torch.ones(8)[::2]], ids=["2d", "strided"])
def test_a_buffer_of_other_than_one_contiguous_dimension_is_refused(buffer: Tensor) -> None:
    with pytest.raises(OptimizerError, match="must be one contiguous dimension, got shape"):
        SingleRank().reduce_scatter(buffer)


def ask_for_cuda() -> None:
    with pytest.raises(OptimizerError, match="its backend must serve cuda buffers, got {"):
        collectives_for(None, torch.device("cuda"))
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(OptimizerError, match="this rank must be in it"):
            collectives_for(group, CPU)
    with pytest.raises(OptimizerError, match="max_in_flight: must be positive, got 0"):
        PointToPoint(dist.group.WORLD, max_in_flight=0)


def test_a_group_that_cannot_serve_is_refused() -> None:
    run_ranks(ask_for_cuda, 2)


# --- the rest of the interface --------------------------------------------------------------


def all_reduce_everything() -> list[bytes]:
    group = collectives_for(None, CPU)
    everyone = list(range(group.size))
    results = []
    for shrink, dtype, numel in itertools.product((False, True), DTYPES, (1, 2, 7, 97, 211)):
        if shrink:
            shrink_pieces()
        tensor = values(group.rank, numel, dtype)
        group.all_reduce(tensor)
        assert bits_equal(tensor, sum_of(everyone, numel, dtype)), (shrink, dtype, numel)
        results.append(bytes(tensor.view(torch.uint8)))
        largest = values(group.rank, numel, dtype)
        group.all_reduce(largest, "max")
        expected = torch.stack([values(rank, numel, dtype) for rank in everyone]).amax(0)
        assert bits_equal(largest, expected), (shrink, dtype, numel)
    scalar = torch.tensor(float(group.rank + 1))
    group.all_reduce(scalar)
    assert scalar.item() == sum(everyone) + len(everyone)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_gives_every_rank_the_same_bits_in_rank_order(world_size: int) -> None:
    first, *others = run_ranks(all_reduce_everything, world_size)
    assert all(other == first for other in others)


def reduce_a_nan() -> tuple[bool, bool]:
    group = collectives_for(None, CPU)
    largest = torch.tensor([float("nan") if group.rank == 1 else 5.0])
    group.all_reduce(largest, "max")
    total = torch.tensor([float("nan") if group.rank == 0 else 5.0])
    group.all_reduce(total)
    return bool(largest.isnan()), bool(total.isnan())


def test_a_nan_on_any_rank_reaches_all() -> None:
    assert run_ranks(reduce_a_nan, 3) == [(True, True)] * 3


def gather_to_the_first() -> list[float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = collectives_for(groups[dist.get_rank() // 2], CPU)
    tensor = torch.full((5,), float(dist.get_rank()))
    if group.rank == 1:
        group.send(tensor, 0)
        group.send(tensor + 10, 0)
    else:
        group.recv(tensor, 1)
        second = torch.empty(5)
        group.recv(second, 1)
        tensor += second
    group.barrier()
    assert group.all_gather_object({"rank": dist.get_rank()}) == [
        {"rank": rank} for rank in dist.get_process_group_ranks(groups[dist.get_rank() // 2])
    ]
    return tensor.tolist()


def test_ranks_of_a_group_send_to_each_other_in_order() -> None:
    assert run_ranks(gather_to_the_first, 4) == [[12.0] * 5, [1.0] * 5, [16.0] * 5, [3.0] * 5]
