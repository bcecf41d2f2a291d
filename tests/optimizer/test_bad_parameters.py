"""Is what can't be trained refused by name, on every rank, without a hang and without a change?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn
from torch_reference import Weights, assert_same_bits, exact_grads, snapshot, weights

from ckpttools.errors import CkptError, ConfigError, OptimizerError
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, ParallelGroups, Sharding

SHAPES = ((7,), (13, 17), (257,))
CONFIG = OptimizerConfig(lr=0.01)
DTYPES = "torch.float32, torch.bfloat16, torch.float16"


def _named() -> list[tuple[str, nn.Parameter]]:
    return list(weights(SHAPES).named_parameters())


def _twice() -> Any:
    named = _named()
    return [*named, ("again", named[0][1])]


def _twice_in_groups() -> Any:
    named = _named()
    return [{"params": named}, {"params": named[1:2]}]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a parameter under two names": (
        _twice,
        "again: a parameter must be given once, got it as 0.weight too",
    ),
    "a parameter in two groups": (
        _twice_in_groups,
        "1.weight: a parameter must be given once, got it as 1.weight too",
    ),
    "two parameters of one name": (
        lambda: [("a", nn.Parameter(torch.zeros(2))), ("a", nn.Parameter(torch.zeros(2)))],
        "a: a name must be given once, got two parameters of it",
    ),
    "a parameter without a name": (
        lambda: [nn.Parameter(torch.zeros(2, 3))],
        "parameters: a parameter must have a name, since state is saved by name, got (2, 3)",
    ),
    "a parameter without a name in a group": (
        lambda: [{"params": [nn.Parameter(torch.zeros(2, 3))]}],
        "group 0: a parameter must have a name, since state is saved by name, got (2, 3)",
    ),
    "no parameters": (list, "optimizer: must have at least one parameter, got none"),
    "fp64": (
        lambda: weights(SHAPES).to(torch.float64),
        f"0.weight: dtype must be one of {DTYPES}, got torch.float64",
    ),
    "complex numbers": (
        lambda: [("a", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))],
        f"a: dtype must be one of {DTYPES}, got torch.complex64",
    ),
    "a sparse parameter": (
        lambda: [("a", nn.Parameter(torch.eye(2).to_sparse()))],
        "a: must be a plain dense tensor, got Tensor in torch.sparse_coo",
    ),
    "a plain tensor": (
        lambda: [("a", torch.zeros(2))],
        "a: must be a Parameter, got Tensor",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_parameters_that_cannot_be_managed_are_refused_by_name(what: str) -> None:
    make, message = BAD[what]
    with pytest.raises(OptimizerError, match=f"^{re.escape(message)}$"):
        DistributedOptimizer(make(), CONFIG)


def test_a_sharding_of_an_unknown_parameter_and_a_missing_rate_are_refused() -> None:
    with pytest.raises(OptimizerError, match=r"^9.weight: a sharding must be of a parameter"):
        DistributedOptimizer(weights(SHAPES), CONFIG, shardings={"9.weight": Sharding()})
    with pytest.raises(ConfigError, match="^lr: must be set for parameter group 0, got none"):
        DistributedOptimizer(weights(SHAPES), OptimizerConfig())


def test_a_group_that_comes_later_is_refused() -> None:
    optimizer = DistributedOptimizer(weights(SHAPES), CONFIG)
    with pytest.raises(OptimizerError, match="must be given at construction, got a group later"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = DistributedOptimizer(model, CONFIG)
    with pytest.raises(OptimizerError, match=r"^weight: gradient must be dense, got torch.sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    assert optimizer.managed[0].name == "weight"


def test_a_group_setting_that_is_out_of_range_stops_a_step_before_it_changes_anything() -> None:
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(
        [
            {"params": list(model.named_parameters())[:2]},
            {"params": [("last", model.get_parameter("2.weight"))]},
        ],
        OptimizerConfig(lr=0.01, clip_grad=0.0, bucket_size=1),
    )
    model(exact_grads(model, 0, 0)).backward()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError, match="^lr: must be a number at least 0"):
        optimizer.step()
    assert_same_bits("unchanged", snapshot(model), snapshot(weights(SHAPES)))
    assert set(optimizer.steps.values()) == {0}
    assert all(not piece.exp_avg.any() for piece in optimizer.pieces)


def _other_shape(model: Weights) -> None:
    model.get_submodule("1").weight = nn.Parameter(torch.zeros(17, 13))


def _other_value(model: Weights) -> None:
    with torch.no_grad():
        model.get_parameter("2.weight")[200] += 1


def _frozen(model: Weights) -> None:
    model.get_parameter("1.weight").requires_grad = False


def _one_more(model: Weights) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(1)))


DIFFERENT: dict[str, tuple[Callable[[Weights], None], str]] = {
    "shape": (_other_shape, r"1.weight must be the same on all ranks, got .*13, 17.*17, 13"),
    "value": (_other_value, "2.weight must be the same on all ranks, got .*CRC-32"),
    "frozen": (_frozen, "all ranks must list the same names in the same order, got 1.weight"),
    "one more": (_one_more, "extra"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_parameters_that_differ_between_ranks_are_refused_on_every_rank(what: str) -> None:
    messages = run_ranks(_differ, 3, what, timeout_s=60)
    assert len(set(messages)) == 1
    assert re.search(DIFFERENT[what][1], messages[0]), messages[0]
    assert "parameters of the data-parallel ranks" in messages[0]


def _differ(what: str) -> str:
    model = weights(SHAPES)
    if dist.get_rank() == 1:
        DIFFERENT[what][0](model)
    return _refusal(model, CONFIG)


def test_another_order_of_parameters_is_refused_on_every_rank() -> None:
    messages = run_ranks(_reordered, 2)
    assert messages[0] == messages[1]
    assert "the same order, got 0.weight on rank 0 and 2.weight on rank 1" in messages[0]


def _reordered() -> str:
    named = _named()
    return _refusal(named[::-1] if dist.get_rank() else named, CONFIG)


@pytest.mark.parametrize(
    ("setting", "value"), [("bucket_size", 100), ("overlap_grad_reduce", True), ("clip_grad", 2.0)]
)
def test_settings_that_differ_between_ranks_are_refused_on_every_rank(
    setting: str, value: Any
) -> None:
    messages = run_ranks(_settings, 2, setting, value)
    assert messages[0] == messages[1]
    assert f"setting {setting} must be the same on all ranks" in messages[0]


def _settings(setting: str, value: Any) -> str:
    own = {setting: value} if dist.get_rank() else {}
    return _refusal(weights(SHAPES), OptimizerConfig(lr=0.01, **own))


def _refusal(params: Any, config: OptimizerConfig) -> str:
    with pytest.raises(OptimizerError) as caught:
        DistributedOptimizer(params, config)
    return str(caught.value)


def test_a_group_without_this_rank_is_refused_by_its_number() -> None:
    assert run_ranks(_left_out, 3) == [
        "",
        "",
        "dp group: this rank must be in it, got one without rank 2",
    ]


def _left_out() -> str:
    group = dist.new_group([0, 1])
    try:
        DistributedOptimizer(weights(SHAPES), CONFIG, groups=ParallelGroups(dp=group))
    except CkptError as error:
        return str(error)
    return ""


def _one_rank_is_wrong() -> str:
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    named = [
        ("a", torch.nn.Parameter(torch.zeros(3))),
        ("b", torch.nn.Parameter(torch.zeros(2, dtype=dtype))),
    ]
    try:
        DistributedOptimizer(named, OptimizerConfig(lr=0.1))
    except OptimizerError as error:
        return str(error)
    return "nothing was raised"


def test_a_parameter_that_one_rank_cannot_hold_is_named_on_every_rank() -> None:
    for message in run_ranks(_one_rank_is_wrong, 3):
        assert "b: dtype must be one of" in message


def test_model_chunks_with_the_same_names_need_names_of_their_own() -> None:
    chunks = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    config = OptimizerConfig(lr=0.1)
    with pytest.raises(OptimizerError, match="weight: a name must be given once"):
        DistributedOptimizer(chunks, config)
    optimizer = DistributedOptimizer(
        chunks, config, rename=lambda name, chunk: f"layers.{chunk}.{name}"
    )
    assert sorted(optimizer.steps) == [
        f"layers.{c}.{n}" for c in (0, 1) for n in ("bias", "weight")
    ]
    assert [buffer.chunk for buffer in optimizer.buffers] == [0, 1]
