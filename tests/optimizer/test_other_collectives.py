"""A single rank and the backend's own operations keep the promises of the interface."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.collectives import (
    Collectives,
    SingleRank,
    TorchCollectives,
    Work,
    collectives_for,
)
from ckpttools.optimizer.recording import Event, RecordingCollectives

CPU = torch.device("cpu")


def use_the_backends_own() -> None:
    group = TorchCollectives(dist.group.WORLD)
    assert isinstance(group, Collectives)
    buffer = torch.arange(15.0) * (group.rank + 1)
    group.reduce_scatter(buffer).wait()
    expected = torch.arange(15.0) * (group.rank + 1)
    own = slice(group.rank * 5, group.rank * 5 + 5)
    expected[own] = torch.arange(15.0)[own] * 6
    assert torch.equal(buffer, expected)
    work = group.all_gather(buffer)
    work.wait()
    work.wait()
    assert torch.equal(buffer, torch.arange(15.0) * 6)
    group.reduce_scatter(torch.empty(0)).wait()
    group.all_gather(torch.empty(0)).wait()
    largest = torch.tensor([group.rank, -group.rank])
    group.all_reduce(largest, "max")
    assert largest.tolist() == [2, 0]
    group.all_reduce(largest)
    assert largest.tolist() == [6, 0]
    if group.rank == 2:
        group.send(torch.ones(3), 0)
    elif group.rank == 0:
        received = torch.zeros(3)
        group.recv(received, 2)
        assert received.tolist() == [1, 1, 1]
    group.barrier()
    assert group.all_gather_object(group.rank) == [0, 1, 2]


def test_the_backends_own_operations_keep_the_same_promises() -> None:
    run_ranks(use_the_backends_own, 3)


def test_without_torch_distributed_a_process_is_a_group_of_one() -> None:
    assert not dist.is_initialized()
    group = collectives_for(None, CPU)
    assert isinstance(group, SingleRank)
    assert isinstance(group, Collectives)
    assert (group.rank, group.size) == (0, 1)
    buffer = torch.arange(7.0)
    for work in (group.reduce_scatter(buffer), group.all_gather(buffer)):
        assert isinstance(work, Work)
        work.wait()
    group.all_reduce(buffer)
    group.barrier()
    assert torch.equal(buffer, torch.arange(7.0))
    assert group.all_gather_object("alone") == ["alone"]
    with pytest.raises(OptimizerError, match="send: a group of one rank has no other, got rank 1"):
        group.send(buffer, 1)
    with pytest.raises(OptimizerError, match="recv: a group of one rank has no other, got rank 1"):
        group.recv(buffer, 1)


# --- recording ------------------------------------------------------------------------------


def record() -> tuple[list[Event], bool]:
    inner = collectives_for(None, CPU)
    group = RecordingCollectives(inner)
    assert isinstance(group, Collectives)
    buffer = torch.ones(10, dtype=torch.bfloat16)
    first = group.reduce_scatter(buffer)
    second = group.all_gather(torch.ones(4))
    group.all_reduce(torch.ones(3), "max")
    second.wait()
    second.wait()
    first.wait()
    group.barrier()
    return group.events, group.size == 2 and group.rank == inner.rank


def test_a_record_shows_what_was_issued_and_when_it_was_waited_for() -> None:
    events = [
        Event("reduce_scatter", 20, 0),
        Event("all_gather", 16, 1),
        Event("all_reduce", 12, 2),
        Event("wait", 16, 1),
        Event("wait", 20, 0),
        Event("barrier", 0, 3),
    ]
    assert run_ranks(record, 2) == [(events, True)] * 2
