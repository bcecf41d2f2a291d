"""Does state reach data-parallel rank zero whole, in bounded pieces, and do errors reach all?"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch_reference import exact_grads, weights

from ckpttools.optimizer import (
    DistributedOptimizer,
    Gathered,
    OptimizerConfig,
    ParallelGroups,
    RecordingCollectives,
    RemoteError,
    collectives_for,
    gather_to_zero,
)

# One parameter fills a bucket of which most ranks hold padding alone.
SHAPES = ((7,), (13, 17), (), (257,), (64,))
MEMBERS = (3, 1, 2)  # rank zero of the data-parallel group is global rank 3


def _mine(**settings: Any) -> tuple[DistributedOptimizer, RecordingCollectives] | None:
    """Return an optimizer over ranks 3, 1 and 2 of four, recorded; None on rank 0."""
    group = dist.new_group(list(MEMBERS), sort_ranks=False)
    if dist.get_rank() not in MEMBERS:
        return None
    recorder = RecordingCollectives(collectives_for(group, torch.device("cpu")))
    config = OptimizerConfig(**{"lr": 0.01, "bucket_size": 100, "clip_grad": 0.0, **settings})
    dtype = config.params_dtype
    assert isinstance(dtype, torch.dtype)
    model = weights(SHAPES, dtype)
    optimizer = DistributedOptimizer(
        model, config, groups=ParallelGroups(dp=group), collectives=recorder
    )
    recorder.events.clear()
    return optimizer, recorder


@pytest.mark.parametrize("bf16", [False, True])
def test_the_state_on_rank_zero_equals_the_layout_filled_by_hand(bf16: bool) -> None:
    results = run_ranks(_filled, 4, bf16)
    assert [result is not None for result in results] == [False, False, False, True]


def _filled(bf16: bool) -> bool | None:
    mine = _mine(bf16=bf16)
    if mine is None:
        return None
    optimizer, recorder = mine
    (buffer,) = optimizer.buffers
    # The value of each element is its own place in the live buffer, and tells the slot by its sign
    # and its half. The places are below 2^24, so fp32 holds them.
    for bucket in buffer.buckets:
        shard = optimizer.shard_of(bucket)
        start = (bucket.param_data.data_ptr() - buffer.param_data.data_ptr()) // (
            buffer.param_data.element_size()
        )
        places = torch.arange(start + bucket.local.start, start + bucket.local.stop).float()
        shard.master.copy_(places)
        shard.exp_avg.copy_(-places)
        shard.exp_avg_sq.copy_(places + 0.5)
    found = optimizer.sharded_param_state_dp_zero()
    kinds = {event.op for event in recorder.events}
    assert kinds <= {"send", "recv", "all_gather_object"}
    assert sum(e.op == "all_gather_object" for e in recorder.events) == len(buffer.buckets)
    if optimizer.dp.rank != 0:
        assert found is None
        return None
    # Without the padding at bucket ends: gaps between parameters stay.
    layout = buffer.layout
    places = torch.cat(
        [
            torch.arange(start, start + unpadded)
            for start, unpadded in zip(layout.bucket_starts, layout.bucket_unpadded, strict=True)
        ]
    ).float()
    assert len(places) < layout.numel
    assert found is not None
    assert list(found) == [0]
    entry = found[0][buffer.param_dtype, buffer.grad_dtype]
    assert entry["numel_unpadded"] == len(places)
    assert torch.equal(entry["param"], places)
    assert torch.equal(entry["exp_avg"], -places)
    assert torch.equal(entry["exp_avg_sq"], places + 0.5)
    return True


def test_pieces_are_bounded_cover_every_bucket_once_and_every_rank_sends_as_many() -> None:
    results = run_ranks(_pieces, 4)
    assert results[0] is None
    sends = [sum(op == "send" for op in ops) for ops in results[1:3]]
    assert sends[0] == sends[1] > 0
    assert sum(op == "recv" for op in results[3]) == sum(sends)


def _pieces() -> list[str] | None:
    mine = _mine()
    if mine is None:
        return None
    optimizer, recorder = mine
    seen: dict[tuple[int, str], list[tuple[int, int]]] = {}

    def sink(got: Gathered) -> None:
        assert got.data.numel() <= 50
        seen.setdefault((got.bucket, got.slot), []).append(
            (got.start, got.start + got.data.numel())
        )

    gather_to_zero(optimizer, sink, piece_numel=50)
    if optimizer.dp.rank == 0:
        buckets = optimizer.buffers[0].buckets
        slots = ("weight", "exp_avg", "exp_avg_sq")
        assert set(seen) == {(bucket.index, slot) for bucket in buckets for slot in slots}
        for (bucket, _), parts in seen.items():
            assert [0, *(stop for _, stop in parts)] == [
                *(start for start, _ in parts),
                buckets[bucket].param_data.numel(),
            ]
    else:
        assert not seen
    return [event.op for event in recorder.events]


def test_an_error_of_the_sink_is_raised_on_every_rank_within_seconds() -> None:
    results = run_ranks(_sink_fails, 4, timeout_s=60)
    assert results[0] is None
    for text, seconds in results[1:]:
        assert seconds < 10
        assert "no space left" in text
    assert results[3][0] == "OSError: no space left"
    assert results[1][0].startswith("RemoteError: rank 0: every rank must succeed, got OSError")


def _sink_fails() -> tuple[str, float] | None:
    mine = _mine()
    if mine is None:
        return None
    optimizer, _ = mine

    def sink(got: Gathered) -> None:
        if got.bucket == 1:
            raise OSError("no space left")

    begin = time.monotonic()
    with pytest.raises((OSError, RemoteError)) as caught:
        gather_to_zero(optimizer, sink)
    # The ranks are still in step with one another: they can go on.
    optimizer.sharded_param_state_dp_zero()
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - begin


def test_state_is_gathered_while_parameters_are_still_on_their_way() -> None:
    run_ranks(_while_gathering, 4)


def _while_gathering() -> None:
    mine = _mine(overlap_param_gather=False)
    if mine is None:
        return
    optimizer, _ = mine
    model = {managed.name: managed.param for managed in optimizer.managed}
    for name, grad in exact_grads(weights(SHAPES), 0, 0).items():
        model[name].grad = grad
    optimizer.step()
    optimizer.start_param_sync()
    found = optimizer.sharded_param_state_dp_zero()
    optimizer.finish_param_sync()
    if found is not None:
        (buffer,) = optimizer.buffers
        entry = found[0][torch.float32, torch.float32]
        for name, start in zip(
            (p.name for p in buffer.params), buffer.layout.file_starts, strict=True
        ):
            flat = model[name].detach().reshape(-1)
            assert torch.equal(entry["param"][start : start + flat.numel()], flat), name
