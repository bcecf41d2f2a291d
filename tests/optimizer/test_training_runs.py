"""Does a sharded run do what a real training loop asks of a torch optimizer? fp32, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor
from torch_reference import (
    Weights,
    assert_same_bits,
    exact_grads,
    require_vector_kernels,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

RANKS = 2
SHAPES = ((7,), (13, 17), (), (257,), (64,))


@pytest.fixture(autouse=True)
def _vector_kernels() -> None:
    require_vector_kernels()


def config(**settings: Any) -> OptimizerConfig:
    """Return settings that make buckets of one or two parameters, and don't clip."""
    return OptimizerConfig(
        **{"lr": 0.01, "clip_grad": 0.0, "weight_decay": 0.1, "bucket_size": 100, **settings}
    )


def adamw(params: Any, **settings: Any) -> torch.optim.AdamW:
    """Return torch's AdamW with the same settings."""
    return torch.optim.AdamW(params, **{"lr": 0.01, "weight_decay": 0.1, "fused": True, **settings})


def every_rank(model: Weights, step: int) -> list[dict[str, Tensor]]:
    """Return the gradients of all ranks."""
    return [exact_grads(model, step, rank) for rank in range(dist.get_world_size())]


def on_ranks(check: Callable[[], None], ranks: int = RANKS) -> None:
    """Run a check on every rank."""
    run_ranks(check, ranks)


def test_groups_keep_their_own_rate_decay_and_betas() -> None:
    on_ranks(_groups)


def _groups() -> None:
    def groups(model: Weights) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": named[1:3], "lr": 0.1, "betas": (0.5, 0.75)},
            {"params": named[:1], "weight_decay": 0.5},
            {"params": named[3:], "eps": 1e-3},
        ]

    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(groups(model), config(bucket_size=None))
    reference = adamw(groups(alone))
    for step in range(3):
        optimizer.zero_grad()
        model(exact_grads(model, step, dist.get_rank())).backward()
        optimizer.step()
        set_mean(alone, every_rank(alone, step))
        reference.step()
    assert_same_bits("groups", snapshot(model), snapshot(alone))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 0.01]


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_later_frozen_thawed_and_never_used_parameters_stay_as_torch_leaves_them(
    overlap: bool,
) -> None:
    run_ranks(_frozen, RANKS, overlap)


def _frozen(overlap: bool) -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    for each in (model, alone):
        each.get_parameter("0.weight").requires_grad = False
    initial = snapshot(model)
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=overlap))
    reference = adamw(alone.parameters())
    for step in range(6):
        trains = not 2 <= step < 4
        optimizer.zero_grad()
        for each in (model, alone):
            each.get_parameter("3.weight").requires_grad = trains
        grads = exact_grads(model, step, dist.get_rank())
        del grads["1.weight"]
        model(grads).backward()
        optimizer.step()
        every = every_rank(alone, step)
        for one in every:
            del one["0.weight"], one["1.weight"]
            if not trains:
                del one["3.weight"]
        set_mean(alone, every)
        reference.step()
        assert_same_bits(f"step {step}", snapshot(model), snapshot(alone))
    assert torch.equal(model.get_parameter("0.weight"), initial["0.weight"])
    assert torch.equal(model.get_parameter("1.weight"), initial["1.weight"])
    assert optimizer.steps == {"1.weight": 0, "2.weight": 6, "3.weight": 4, "4.weight": 6}


def test_unused_parameters_decay_where_that_is_asked_for_but_frozen_ones_do_not() -> None:
    on_ranks(_decays)


def _decays() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(unused_parameters="decay"))
    reference = adamw(alone.parameters())
    model.get_parameter("3.weight").requires_grad = False
    for step in range(3):
        optimizer.zero_grad()
        grads = exact_grads(model, step, dist.get_rank())
        del grads["1.weight"]
        model(grads).backward()
        optimizer.step()
        every = every_rank(alone, step)
        for one in every:
            one["1.weight"] = torch.zeros_like(one["1.weight"])
            del one["3.weight"]
        set_mean(alone, every)
        reference.step()
    assert_same_bits("decay", snapshot(model), snapshot(alone))
    assert not torch.equal(
        model.get_parameter("1.weight"), weights(SHAPES).get_parameter("1.weight")
    )


def test_a_tied_parameter_gets_the_sum_of_its_gradients_and_one_update() -> None:
    on_ranks(_tied)


def _tied() -> None:
    def tied() -> Weights:
        model = weights((*SHAPES, SHAPES[0]))
        model.get_submodule("5").weight = model.get_submodule("0").weight
        return model

    model, alone = tied(), tied()
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=True))
    reference = adamw(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model({**exact_grads(model, step, dist.get_rank()), "5.weight": torch.ones(7)}).backward()
        optimizer.step()
        every = every_rank(alone, step)
        for one in every:
            one["0.weight"] = one["0.weight"] + 1
        set_mean(alone, every)
        reference.step()
    assert "5.weight" not in optimizer.steps
    assert model.get_submodule("5").weight is model.get_submodule("0").weight
    assert_same_bits("tied", snapshot(model), snapshot(alone))


# With overlap the last micro-batch must be told apart from the others.
@pytest.mark.parametrize(("overlap", "no_sync"), [(False, False), (False, True), (True, True)])
def test_gradients_of_micro_batches_are_summed_before_the_mean(
    overlap: bool, no_sync: bool
) -> None:
    run_ranks(_accumulate, RANKS, overlap, no_sync)


def _accumulate(overlap: bool, no_sync: bool) -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=overlap))
    reference = adamw(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        batches = [exact_grads(model, 3 * step + i, dist.get_rank()) for i in range(3)]
        del batches[2]["3.weight"]  # in the first batches only
        for batch in batches[:2]:
            if no_sync:
                with optimizer.no_sync():
                    model(batch).backward()
            else:
                model(batch).backward()
        model(batches[2]).backward()
        optimizer.step()
        sums = []
        for rank in range(dist.get_world_size()):
            every = [exact_grads(alone, 3 * step + i, rank) for i in range(3)]
            every[2]["3.weight"] = torch.zeros(SHAPES[3])
            sums.append({name: sum(one[name] for one in every) for name in every[0]})
        set_mean(alone, sums)
        reference.step()
    assert_same_bits("accumulated", snapshot(model), snapshot(alone))


def test_a_step_inside_no_sync_is_refused() -> None:
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, config())
    with optimizer.no_sync(), pytest.raises(OptimizerError, match=r"outside no_sync\(\)"):
        optimizer.step()


@pytest.mark.parametrize("way", ["none", "zeros", "the model's", "set by hand"])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_may_be_cleared_or_set_as_with_torch(way: str, overlap: bool) -> None:
    run_ranks(_cleared, RANKS, way, overlap)


def _cleared(way: str, overlap: bool) -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=overlap))
    reference = adamw(alone.parameters())
    for step in range(4):
        every = every_rank(alone, step)
        mine = exact_grads(model, step, dist.get_rank())
        if step == 2 and way != "set by hand":
            del mine["1.weight"]
            for one in every:
                del one["1.weight"]
                if way == "zeros":  # a gradient of zeros is one: the moments go on
                    one["1.weight"] = torch.zeros(SHAPES[1])
        if way == "set by hand":
            for name, param in model.named_parameters():
                param.grad = mine[name]
        else:
            model(mine).backward()
        optimizer.step()
        if way in ("none", "zeros"):
            optimizer.zero_grad(set_to_none=way == "none")
        elif way == "the model's":
            model.zero_grad()
        set_mean(alone, every)
        reference.step()
        assert_same_bits(f"{way}, step {step}", snapshot(model), snapshot(alone))


def test_a_gradient_after_the_reduction_is_refused_by_name() -> None:
    on_ranks(_late)


def _late() -> None:
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=True))
    late = "must come before its bucket is reduced, got one after"
    model(exact_grads(model, 0, dist.get_rank())).backward()
    with pytest.raises(OptimizerError, match=f"^3.weight: a gradient {late}"):
        model({"3.weight": torch.ones(SHAPES[3])}).backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match=f"^4.weight: a gradient {late}"):
        model(exact_grads(model, 1, dist.get_rank())).backward()
    model.get_parameter("2.weight").grad = torch.ones(())
    with pytest.raises(OptimizerError, match=f"^2.weight: a gradient {late}"):
        optimizer.step()


def test_a_second_step_on_the_same_gradients_does_not_divide_them_again() -> None:
    on_ranks(_twice)


def _twice() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, reference = DistributedOptimizer(model, config()), adamw(alone.parameters())
    model(exact_grads(model, 0, dist.get_rank())).backward()
    set_mean(alone, every_rank(alone, 0))
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert_same_bits("twice", snapshot(model), snapshot(alone))


SCHEDULERS: Mapping[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "one cycle, which turns beta1 too": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=10
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_schedulers_of_torch_drive_it(scheduler: str) -> None:
    run_ranks(_scheduled, RANKS, scheduler)


def _scheduled(name: str) -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, reference = DistributedOptimizer(model, config()), adamw(alone.parameters())
    schedulers = [SCHEDULERS[name](each) for each in (optimizer, reference)]
    rates = set()
    for step in range(5):
        optimizer.zero_grad()
        model(exact_grads(model, step, dist.get_rank())).backward()
        optimizer.step()
        set_mean(alone, every_rank(alone, step))
        reference.step()
        for each in schedulers:
            each.step()
        rates.add(optimizer.param_groups[0]["lr"])
    assert len(rates) == 5
    assert_same_bits(name, snapshot(model), snapshot(alone))


def test_hooks_run_around_a_step_and_a_closure_before_it() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(overlap_param_gather=True))
    reference = adamw(alone.parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure(model: Weights, own: torch.optim.Optimizer, step: int) -> Tensor:
        calls.append("closure")
        own.zero_grad()
        loss = model(exact_grads(model, step, 0))
        loss.backward()
        return loss

    for step in range(2):
        loss = optimizer.step(lambda step=step: closure(model, optimizer, step))
        expected = reference.step(lambda step=step: closure(alone, reference, step))
        assert torch.equal(loss, expected)
    assert calls == ["pre", "closure", "post", "closure"] * 2
    assert_same_bits("closure", snapshot(model), snapshot(alone))
