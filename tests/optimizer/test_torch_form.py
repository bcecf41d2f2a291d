"""State goes to torch's own AdamW and comes back: both take the same next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, Sharding, megatron_groups

SHAPES = {"matrix": (7, 5), "bias": (11,), "scalar": (), "never": (3,), "empty": (0, 2)}


def model() -> torch.nn.ParameterDict:
    torch.manual_seed(3)
    return torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    )


def give_gradients(params: torch.nn.ParameterDict, step: int) -> None:
    for name, param in params.items():
        if name != "never":
            generator = torch.Generator().manual_seed(100 * step + len(name))
            param.grad = torch.randint(-8, 9, param.shape, generator=generator) / 8


def sharded(params: torch.nn.ParameterDict) -> DistributedOptimizer:
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=0.0, bucket_size=20)
    return DistributedOptimizer(megatron_groups(config, [params]), config, modules=[params])


def plain(params: torch.nn.ParameterDict) -> torch.optim.AdamW:
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    return torch.optim.AdamW(megatron_groups(config, [params]), fused=True)


def to_torch_and_back() -> Any:
    mine = model()
    optimizer = sharded(mine)
    for step in range(3):
        give_gradients(mine, step)
        optimizer.step()
    state = optimizer.gather_torch_state_dict()
    weights = {name: param.detach().clone() for name, param in mine.items()}
    fresh = model()
    with torch.no_grad():
        for name, param in fresh.items():
            param.copy_(weights[name])
    again = sharded(fresh)
    shared = again.dp.all_gather_object(state)[0]
    assert isinstance(shared, dict)
    before = {name: param.detach().clone() for name, param in fresh.items()}
    again.load_torch_state_dict(shared)
    assert all(torch.equal(before[name], fresh[name]) for name in before)
    for params, one in ((mine, optimizer), (fresh, again)):
        give_gradients(params, 3)
        one.step()
    same = all(torch.equal(mine[name], fresh[name]) for name in mine)
    return state, weights, {name: param.detach().clone() for name, param in mine.items()}, same


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_gathered_goes_on_in_torch_as_it_does_here_and_comes_back(world_size: int) -> None:
    ranks = run_ranks(to_torch_and_back, world_size)
    state, weights, after, _ = ranks[0]
    assert [rank[0] for rank in ranks[1:]] == [None] * (world_size - 1)
    assert all(rank[3] for rank in ranks)
    params = model()
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])
    theirs = plain(params)
    theirs.load_state_dict(state)
    assert len(theirs.state) == len(SHAPES) - 1  # one never had a gradient
    give_gradients(params, 3)
    theirs.step()
    assert not torch.equal(weights["matrix"], after["matrix"])
    for name, param in params.items():
        assert torch.equal(param, after[name]), name


def test_another_models_state_is_refused_and_changes_nothing() -> None:
    params = model()
    optimizer = sharded(params)
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.gather_torch_state_dict()
    assert state is not None
    before = {piece.name: piece.exp_avg.clone() for piece in optimizer.pieces}
    index = state["param_groups"][0]["params"][1]  # a ParameterDict sorts its names
    entry = state["state"][index]
    entry["exp_avg"] = entry["exp_avg"].T.contiguous()
    with pytest.raises(OptimizerError, match=r"matrix \(exp_avg\): shape must be \(7, 5\), got"):
        optimizer.load_torch_state_dict(state)
    with pytest.raises(OptimizerError, match="groups must have"):
        optimizer.load_torch_state_dict({"state": {}, "param_groups": []})
    assert all(torch.equal(before[p.name], p.exp_avg) for p in optimizer.pieces)


def test_a_state_that_would_have_to_be_cast_or_rounded_is_refused() -> None:
    params = model()
    optimizer = sharded(params)
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.gather_torch_state_dict()
    assert state is not None
    entry = state["state"][state["param_groups"][0]["params"][1]]
    kept = entry["exp_avg"]
    entry["exp_avg"] = kept.double()
    with pytest.raises(OptimizerError, match=r"\(exp_avg\): dtype must be torch.float32"):
        optimizer.load_torch_state_dict(state)
    entry["exp_avg"], entry["step"] = kept, torch.tensor(1.5)
    with pytest.raises(OptimizerError, match="step must be a whole number, got 1.5"):
        optimizer.load_torch_state_dict(state)


def test_a_frozen_parameter_outside_of_all_groups_may_have_a_sharding() -> None:
    params = model()
    params["bias"].requires_grad_(requires_grad=False)
    config = OptimizerConfig(lr=0.1)
    optimizer = DistributedOptimizer(
        megatron_groups(config, [params]),
        config,
        modules=[params],
        shardings={"bias": Sharding(stage="layer", layer=3)},
    )
    assert [m.sharding.layer for m in optimizer.managed if m.name == "bias"] == [3]
