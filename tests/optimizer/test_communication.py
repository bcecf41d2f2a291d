"""What does a step communicate, how many bytes, in what order, and when is it waited for?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch_reference import Weights, assert_same_bits, exact_grads, snapshot, weights

from ckpttools.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    RecordingCollectives,
    collectives_for,
)
from ckpttools.optimizer.point_to_point import PointToPoint
from ckpttools.optimizer.recording import Event

SHAPES = ((300,), (7,), (0,), (), (13, 17), (257,), (64,))
BUCKET_SIZE = 200
ALL_OVERLAPS: dict[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "overlap_param_gather_with_optimizer_step": True,
}
OVERLAPS: list[dict[str, Any]] = [
    {},
    {"overlap_grad_reduce": True},
    {"overlap_param_gather": True},
    ALL_OVERLAPS,
]


def recorded(model: Weights, **settings: Any) -> tuple[DistributedOptimizer, RecordingCollectives]:
    """Return an optimizer whose data-parallel communication is recorded from now on."""
    recorder = RecordingCollectives(collectives_for(None, torch.device("cpu")))
    config = OptimizerConfig(**{"lr": 0.01, "bucket_size": BUCKET_SIZE, **settings})
    optimizer = DistributedOptimizer(model, config, collectives=recorder)
    recorder.events.clear()
    return optimizer, recorder


def started(events: list[Event], op: str) -> list[int]:
    """Return the bytes of the operations of one kind, in the order in which they were issued."""
    return [event.nbytes for event in events if event.op == op]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_makes_one_reduce_scatter_and_one_all_gather_a_bucket(
    ranks: int, overlap: dict[str, Any]
) -> None:
    results = run_ranks(_events_of_steps, ranks, overlap)
    for buckets, steps in results:
        assert len(buckets) == 3
        for events in steps:
            assert started(events, "reduce_scatter") == buckets
            # Parameters are gathered in the order in which a forward pass needs them.
            assert started(events, "all_gather") == buckets[::-1]
            kinds = Counter(event.op for event in events)
            assert set(kinds) <= {"reduce_scatter", "all_gather", "all_reduce", "wait"}
            # Norm, non-finite count and a flag for each parameter, in fp64.
            assert started(events, "all_reduce") == [8 * (4 + len(SHAPES))]
    order = [[(e.op, e.nbytes) for e in steps[1] if e.op != "wait"] for _, steps in results]
    assert all(mine == order[0] for mine in order)


def _events_of_steps(overlap: dict[str, Any]) -> tuple[list[int], list[list[Event]]]:
    model = weights(SHAPES)
    optimizer, recorder = recorded(model, **overlap)
    buckets = [4 * bucket.grad_data.numel() for bucket in optimizer.buffers[0].buckets]
    # Padded: a multiple of what every rank's equal share asks for.
    assert all(nbytes % (4 * dist.get_world_size()) == 0 for nbytes in buckets)
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        model(exact_grads(model, step, dist.get_rank())).backward()
        optimizer.step()
        steps.append(list(recorder.events))
        recorder.events.clear()
    optimizer.finish_param_sync()
    return buckets, steps


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_sends_its_part_of_the_padded_bytes_once_for_gradients_and_once_for_parameters(
    ranks: int,
) -> None:
    for sent, padded, flags in run_ranks(_bytes_on_the_wire, ranks):
        assert sent == 2 * padded * (ranks - 1) // ranks + flags * (ranks - 1)


def _bytes_on_the_wire() -> tuple[int, int, int]:
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, OptimizerConfig(lr=0.01, bucket_size=BUCKET_SIZE))
    assert isinstance(optimizer.dp, PointToPoint)
    before = optimizer.dp.sent_bytes
    model(exact_grads(model, 0, dist.get_rank())).backward()
    optimizer.step()
    padded = 4 * optimizer.buffers[0].numel
    return optimizer.dp.sent_bytes - before, padded, 8 * (4 + len(SHAPES))


@pytest.mark.parametrize("overlap", [True, False])
def test_with_overlap_a_bucket_is_sent_as_soon_as_it_is_full(overlap: bool) -> None:
    for sent_by_gradient in run_ranks(_sent_during_backward, 2, overlap):
        # What was sent when each gradient came, from the last parameter's to the first's: the
        # buckets hold parameters 5 and 6, then 4, then the rest.
        assert sent_by_gradient == ([0, 0, 1, 2, 2, 2, 2] if overlap else [0] * 7)


def _sent_during_backward(overlap: bool) -> list[int]:
    model = weights(SHAPES)
    sent: list[int] = []
    recorders: list[RecordingCollectives] = []

    def look(param: torch.Tensor) -> None:  # before the optimizer's hook, which is registered later
        del param
        sent.append(len(started(recorders[0].events, "reduce_scatter")))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    optimizer, recorder = recorded(model, overlap_grad_reduce=overlap)
    recorders.append(recorder)
    model(exact_grads(model, 0, dist.get_rank())).backward()
    optimizer.step()
    assert len(started(recorder.events, "reduce_scatter")) == 3
    return sent


def test_with_overlap_gathers_are_open_after_the_step_and_a_module_waits_for_its_bucket_alone() -> (
    None
):
    assert run_ranks(_waits_of_a_forward, 2) == [True, True]


def _waits_of_a_forward() -> bool:
    model = weights(SHAPES)
    optimizer, recorder = recorded(model, **ALL_OVERLAPS)
    model(exact_grads(model, 0, dist.get_rank())).backward()
    optimizer.step()
    buckets = optimizer.buffers[0].buckets
    assert [bucket.param_gather_handle is not None for bucket in buckets] == [True] * 3
    assert optimizer.param_gather_handle is not None
    assert optimizer.buffers[0].param_gather_handle is not None
    recorder.events.clear()
    for module, open_after in (
        ("0", [True, True, False]),
        ("3", [True, True, False]),
        ("6", [False, True, False]),
        ("4", [False, False, False]),
    ):
        weight = model.get_submodule(module).weight
        model.get_submodule(module)(torch.zeros(weight.shape))
        assert [b.param_gather_handle is not None for b in buckets] == open_after, module
    assert [event.op for event in recorder.events] == ["wait"] * 3
    assert optimizer.param_gather_handle is None
    return True


def test_with_the_step_overlap_a_bucket_is_gathered_before_the_next_is_updated() -> None:
    for eager, at_update in run_ranks(_gathers_during_update, 2):
        assert eager == [0, 1, 2]
        assert at_update == [0, 0, 0]


def _gathers_during_update() -> tuple[list[int], list[int]]:
    found = []
    for eager in (True, False):
        model = weights(SHAPES)
        optimizer, recorder = recorded(model, overlap_param_gather_with_optimizer_step=eager)
        gathers: list[int] = []
        for shard in optimizer.shards:
            update = shard.calls

            def calls(used: Any, update: Any = update) -> Any:
                gathers.append(len(started(recorder.events, "all_gather")))  # noqa: B023
                return update(used)

            shard.calls = calls  # type: ignore[method-assign]
        model(exact_grads(model, 0, dist.get_rank())).backward()
        optimizer.step()
        found.append(gathers)
    return found[0], found[1]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_ranks_with_other_backward_orders_and_unused_parameters_come_to_the_same_parameters(
    overlap: dict[str, Any],
) -> None:
    run_ranks(_unlike_backwards, 3, overlap, timeout_s=60)


def _unlike_backwards(overlap: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, _ = recorded(model, clip_grad=0.0, weight_decay=0.1, **overlap)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    names = [name for name, _ in model.named_parameters()]

    def used(step: int, rank: int) -> list[str]:
        # Rank 0 never uses parameter 5, rank 1 another one each step, rank 2 all of them;
        # and none uses parameter 1.
        absent = {0: names[5], 1: names[(step * 2) % 7], 2: names[1]}[rank]
        return [name for name in names if name not in (absent, names[1])]

    for step in range(4):
        optimizer.zero_grad()
        grads = exact_grads(model, step, rank)
        chosen = used(step, rank)
        total = torch.zeros(())
        for name in chosen if rank % 2 else chosen[::-1]:  # the backward pass goes the other way
            total = model.get_submodule(name.split(".")[0])(grads[name]) + total
        total.backward()
        optimizer.step()
        for name, param in alone.named_parameters():
            every = [
                exact_grads(alone, step, other)[name]
                for other in range(size)
                if name in used(step, other)
            ]
            param.grad = torch.stack(every).sum(0) / size if every else None
        reference.step()
    optimizer.finish_param_sync()
    assert_same_bits("unlike backward passes", snapshot(model), snapshot(alone))
    assert optimizer.steps[names[1]] == 0


@pytest.mark.parametrize("overlap", [{}, ALL_OVERLAPS])
def test_gradients_that_are_thrown_away_without_a_step_leave_no_rank_waiting(
    overlap: dict[str, Any],
) -> None:
    left, right = run_ranks(_thrown_away, 2, overlap, timeout_s=60)
    assert_same_bits("thrown away", left, right)


def _thrown_away(overlap: dict[str, Any]) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, _ = recorded(model, clip_grad=0.0, **overlap)
    for step in range(3):
        grads = exact_grads(model, step, rank)
        if rank == 0:
            del grads["6.weight"]  # so rank 0 fills no bucket, and rank 1 sends all of them
        model(grads).backward()
        optimizer.zero_grad()
    model(exact_grads(model, 9, rank)).backward()
    optimizer.step()
    optimizer.finish_param_sync()
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.01, fused=True)
    for name, param in alone.named_parameters():
        param.grad = (exact_grads(alone, 9, 0)[name] + exact_grads(alone, 9, 1)[name]) / 2
    reference.step()
    assert_same_bits("after throwing away", snapshot(model), snapshot(alone))
    return snapshot(model)
