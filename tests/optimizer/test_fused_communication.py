"""What does a ZeRO-2 step communicate and hold, and when? One reduce-scatter a bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankFailedError, run_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch_reference import Weights, assert_same_bits, exact_grads, set_mean, snapshot, weights

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.optimizer import DistributedFusedAdam, RecordingCollectives, collectives_for
from ckpttools.optimizer.recording import Event

SHAPES = ((300,), (7,), (0,), (), (13, 17), (257,), (64,))
CAP = 200 * 4 / 2**20  # 192 elements a bucket on one, two or three ranks
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bucket_cap_mb": CAP}


def recorded(model: Weights, **options: Any) -> tuple[DistributedFusedAdam, RecordingCollectives]:
    """Return an optimizer whose data-parallel communication is recorded from now on."""
    recorder = RecordingCollectives(collectives_for(None, torch.device("cpu")))
    optimizer = DistributedFusedAdam(model, **SETTINGS, collectives=recorder, **options)
    recorder.events.clear()
    return optimizer, recorder


def started(events: list[Event], op: str) -> list[int]:
    """Return the bytes of the operations of one kind, in the order in which they were issued."""
    return [event.nbytes for event in events if event.op == op]


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_grad_sync": False},
    {"overlap_param_sync": True},
    {"contiguous_param_buffer": True, "contiguous_grad_buffer": True},
)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_makes_one_reduce_scatter_and_one_all_gather_a_bucket(ranks: int) -> None:
    for rows in run_ranks(_events_of_steps, ranks, timeout_s=120):
        for options, (buckets, steps) in zip(OPTIONS, rows, strict=True):
            assert len(buckets) == 5
            for events in steps:
                assert started(events, "reduce_scatter") == buckets, options
                # In the order in which a forward pass needs them; one rank has them all.
                gathers = buckets[::-1] if ranks > 1 else []
                assert started(events, "all_gather") == gathers, options
                # Norm, non-finite count and a flag for each parameter, in fp64.
                assert started(events, "all_reduce") == [8 * (4 + len(SHAPES))]


def _events_of_steps() -> list[tuple[list[int], list[list[Event]]]]:
    found = []
    for options in OPTIONS:
        model = weights(SHAPES)
        optimizer, recorder = recorded(model, **options)
        buckets = [4 * bucket.numel for bucket in optimizer.buffers[0].buckets]
        steps: list[list[Event]] = []
        for step in range(3):
            optimizer.zero_grad()
            model(exact_grads(model, step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.param_sync()
            steps.append(list(recorder.events))
            recorder.events.clear()
        found.append((buckets, steps))
    return found


def test_a_bucket_is_sent_as_soon_as_it_is_full_while_the_backward_pass_goes_on() -> None:
    for by_overlap in run_ranks(_sent_during_backward, 2):
        # When the gradient of each parameter came, from the last to the first: 64 elements, 257
        # (which fill the first bucket and the second), 221, … : all but the last go before the
        # pass ends.
        assert by_overlap == [([0, 0, 1, 3, 3, 3, 3], 5), ([0] * 7, 0)]


def _sent_during_backward() -> list[tuple[list[int], int]]:
    found = []
    for overlap in (True, False):
        model = weights(SHAPES)
        sent: list[int] = []
        recorders: list[RecordingCollectives] = []

        def look(param: Tensor, sent: list[int] = sent, mine: list[Any] = recorders) -> None:
            del param  # before the optimizer's hook, which is registered later
            sent.append(len(started(mine[0].events, "reduce_scatter")))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(look)
        optimizer, recorder = recorded(model, overlap_grad_sync=overlap)
        recorders.append(recorder)
        model(exact_grads(model, 0, dist.get_rank())).backward()
        found.append((sent, len(started(recorder.events, "reduce_scatter"))))
        optimizer.step()
        assert len(started(recorder.events, "reduce_scatter")) == 5
    return found


class _Storages(TorchDispatchMode):
    """Follows all memory that operations make while it is on, and lets none of it live on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(  # torch's own
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self) -> int:
        """Return the bytes that are still there."""
        return sum(nbytes for ref, nbytes in self.made if not ref.expired())


BIG = ((50,), (2011,), (31, 37), (613,), (5000,), (257,))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_take_at_most_a_rank_s_part_two_buckets_and_the_largest_gradient(
    ranks: int,
) -> None:
    for bound, most, without_sync in run_ranks(_gradient_bytes, ranks, timeout_s=120):
        assert most <= bound
        assert most > bound // 2  # it is measured at all
        assert without_sync > bound or ranks == 1  # whole gradients are seen, and are more


def _gradient_bytes() -> tuple[int, int, int]:
    model = weights(BIG)
    seen: list[int] = []
    mode = _Storages()

    def look(param: Tensor) -> None:
        del param
        seen.append(mode.alive() + optimizer.buffers[0].grad_shards.nbytes)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    cap = 600 * 4 / 2**20
    optimizer = DistributedFusedAdam(model, lr=0.01, bucket_cap_mb=cap)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for bucket in optimizer.buffers[0].buckets:
        bucket.collectives = _Looking(bucket.collectives, look)  # type: ignore[assignment]
    (buffer,) = optimizer.buffers
    padded = 4 * buffer.numel
    bound = padded // dist.get_world_size() + 2 * 4 * buffer.buckets[0].numel + 4 * 5000
    found, one = [], torch.ones(())
    for context in (nullcontext, optimizer.no_sync):
        seen.clear()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(exact_grads(model, step, dist.get_rank()))
            with mode, context():
                loss.backward(one)
            del loss
            optimizer.step() if context is nullcontext else optimizer.zero_grad()
        found.append(max(seen))
    return bound, found[0], found[1]


class _Looking:
    """Collectives that look before each reduce-scatter, and whose own memory isn't followed."""

    def __init__(self, inner: Any, look: Callable[[Any], None]) -> None:
        self._inner, self._look = inner, look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce_scatter(self, buffer: Tensor) -> Any:
        self._look(buffer)
        with _disable_current_modes():
            return self._inner.reduce_scatter(buffer)


@functools.cache
def _absent(step: int, rank: int) -> tuple[str, ...]:
    """Rank 0 never uses parameter 5, rank 1 another one each step; and none uses parameter 1."""
    return {0: ("5.weight",), 1: (f"{(step * 2) % 7}.weight",), 2: ()}[rank] + ("1.weight",)


def test_ranks_with_other_backward_orders_and_unused_parameters_come_to_the_same_parameters() -> (
    None
):
    run_ranks(_unlike_backwards, 3, timeout_s=120)


def _unlike_backwards() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for options in (*OPTIONS, {"pipeline_size": 1}):
        model, alone = weights(SHAPES), weights(SHAPES)
        optimizer, recorder = recorded(model, unused_parameters="skip", **options)
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        for step in range(4):
            optimizer.zero_grad()
            grads = exact_grads(model, step, rank)
            chosen = [name for name in grads if name not in _absent(step, rank)]
            total = torch.zeros(())
            for name in chosen if rank % 2 else chosen[::-1]:  # the pass goes the other way
                total = model.get_submodule(name.split(".")[0])(grads[name]) + total
            total.backward()
            optimizer.step()
            every = [
                {n: g for n, g in exact_grads(alone, step, r).items() if n not in _absent(step, r)}
                for r in range(size)
            ]
            for name, param in alone.named_parameters():
                found = [mine[name] for mine in every if name in mine]
                param.grad = torch.stack(found).sum(0) / size if found else None
            reference.step()
        optimizer.param_sync()
        assert len(started(recorder.events, "reduce_scatter")) == 4 * 5
        assert_same_bits("unlike backward passes", snapshot(model), snapshot(alone))
        assert optimizer.steps["1.weight"] == 0


def test_a_parameter_without_gradient_decays_as_in_apex_unless_it_is_to_be_skipped() -> None:
    for decayed, skipped in run_ranks(_unused, 2):
        assert_same_bits("skipped", skipped["params"], skipped["torch"])
        assert_same_bits("decayed", decayed["params"], decayed["torch"])
        start = weights(SHAPES)
        assert torch.equal(skipped["params"]["4.weight"], start.get_submodule("4").weight)
        assert not torch.equal(decayed["params"]["4.weight"], start.get_submodule("4").weight)


def _unused() -> list[dict[str, dict[str, Tensor]]]:
    found = []
    for policy in ("decay", "skip"):
        model, alone = weights(SHAPES), weights(SHAPES)
        optimizer, _ = recorded(
            model, **({} if policy == "decay" else {"unused_parameters": "skip"})
        )
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        for step in range(2):
            optimizer.zero_grad()
            every = [exact_grads(model, step, rank) for rank in range(2)]
            for grads in every:
                del grads["4.weight"]
            model(every[dist.get_rank()]).backward()
            optimizer.step()
            set_mean(alone, every)
            if policy == "decay":
                alone.get_submodule("4").weight.grad = torch.zeros(13, 17)
            reference.step()
        assert optimizer.steps["4.weight"] == (2 if policy == "decay" else 0)
        found.append({"params": snapshot(model), "torch": snapshot(alone)})
    return found


def test_gradients_that_are_thrown_away_leave_no_rank_waiting_and_no_trace() -> None:
    run_ranks(_thrown_away, 2, timeout_s=120)


def _thrown_away() -> None:
    rank = dist.get_rank()
    for options in OPTIONS:
        model, alone = weights(SHAPES), weights(SHAPES)
        optimizer, _ = recorded(model, **options)
        for step in range(3):
            grads = exact_grads(model, step, rank)
            if rank == 0:
                del grads["6.weight"]  # so rank 0 fills no bucket
            model(grads).backward()
            optimizer.zero_grad()
        model(exact_grads(model, 9, rank)).backward()
        optimizer.step()
        optimizer.param_sync()
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        set_mean(alone, [exact_grads(alone, 9, r) for r in range(2)])
        reference.step()
        assert_same_bits("after throwing away", snapshot(model), snapshot(alone))


def test_distributed_and_redundant_groups_train_as_one() -> None:
    run_ranks(_grid, 4, timeout_s=120)


def _grid() -> None:
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for options in OPTIONS:
        model, alone = weights(SHAPES), weights(SHAPES)
        optimizer = DistributedFusedAdam(
            model,
            **SETTINGS,
            process_group=dist.group.WORLD,
            distributed_process_group=shards,
            redundant_process_group=copies,
            **options,
        )
        assert (optimizer.dp.size, optimizer.dp.rank) == (2, rank % 2)
        # Thrown away, after some ranks summed buckets over the copies and others none.
        names = [str(i) for i in range(len(SHAPES))]
        grads, total = exact_grads(model, 9, rank), torch.zeros(())
        for name in names if rank < 2 else names[::-1]:
            total = model.get_submodule(name)(grads[f"{name}.weight"]) + total
        total.backward()
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            model(exact_grads(model, step, rank)).backward()
            optimizer.step()
            set_mean(alone, [exact_grads(alone, step, r) for r in range(4)])
            reference.step()
        optimizer.param_sync()
        assert_same_bits("redundant groups", snapshot(model), snapshot(alone))
    with pytest.raises(ConfigError, match="process_group must have 2 x 1 ranks.*got 4"):
        DistributedFusedAdam(
            model, process_group=dist.group.WORLD, distributed_process_group=shards
        )


def test_gradients_and_steps_at_the_wrong_time_are_refused() -> None:
    model = weights(SHAPES)
    optimizer, _ = recorded(model)
    model(exact_grads(model, 0, 0)).backward()
    with optimizer.no_sync(), pytest.raises(OptimizerError, match=r"outside no_sync\(\), got it"):
        optimizer.step()
    optimizer.step()
    with pytest.raises(OptimizerError, match="step: gradients must be used once, got a second"):
        optimizer.step()
    model.zero_grad()
    with pytest.raises(OptimizerError, match=r"6.weight: a gradient must come after zero_grad\(\)"):
        model(exact_grads(model, 1, 0)).backward()
    optimizer.zero_grad()
    model.get_submodule("5").weight.grad = torch.eye(257)[0].to_sparse()
    with pytest.raises(OptimizerError, match="5.weight: gradient must be dense, got torch.sparse"):
        optimizer.grad_sync()


def test_a_parameter_used_before_its_gather_ended_is_refused_when_its_gradient_comes() -> None:
    with pytest.raises(RankFailedError, match="0.weight: must be gathered before it is used"):
        run_ranks(_use_early, 2)


def _use_early() -> None:
    model = weights(SHAPES)
    optimizer, _ = recorded(model, overlap_param_sync=True)
    model(exact_grads(model, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.get_submodule("0").weight.sum().backward()
