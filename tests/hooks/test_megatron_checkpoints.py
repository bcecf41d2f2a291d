"""A real Megatron checkpoint goes on in our optimizer as it would have in torch's AdamW.

The truth of a fixture is what the live run held when it saved; torch's own AdamW, filled with it,
takes the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from gloo_ranks import run_ranks

from ckpttools.errors import MismatchError
from ckpttools.hooks import load_sharded
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

CASES = [
    "gqa_tp2_pp2_dp1",
    "gqa_tp1_pp1_dp2_bucket6000",
    "tied_tp1_pp2_dp2",
    "tied_tp2_pp1_dp1_fp32",
    "megadlms_gqa_tp1_pp1_dp2_bucket6000",
    "v0.12.3_tied_tp2_pp1_dp1",
    "deep_tp1_pp2_dp1_vpp2",
]
STATE = ("fp32_param", "exp_avg", "exp_avg_sq")


def truth_of(case: oracle.Case) -> dict[str, dict[str, torch.Tensor]]:
    """Return the truth by slot and name."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in case.truth_tensors().items():
        slot, name = key.split("/", 1)
        tensors.setdefault(slot, {})[name] = value
    return tensors


def decays(name: str, value: torch.Tensor) -> bool:
    return not (name.endswith(".bias") or value.dim() == 1)


def fresh_groups(weights: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return named parameters that hold nothing yet, in Megatron's two groups."""
    named = {name: torch.nn.Parameter(torch.zeros_like(w)) for name, w in weights.items()}
    return [
        {"params": [(n, p) for n, p in named.items() if decays(n, p) == wanted], "wd_mult": mult}
        for wanted, mult in ((True, 1.0), (False, 0.0))
    ]


def gradient(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return small whole numbers over eight: sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(len(name) * 1009 + weight.numel())
    values = torch.randint(-8, 9, weight.shape, generator=generator)
    return (values / 8).to(weight.dtype)


def continue_in_torch(
    case: oracle.Case, truth: Mapping[str, Mapping[str, torch.Tensor]], *, steps: int = 1
) -> dict[str, dict[str, torch.Tensor]]:
    """Take steps of torch's AdamW from the truth, with the settings in the file."""
    settings = oracle.decode(case.directory, case.layout()).param_groups
    masters = {n: m.clone().requires_grad_() for n, m in truth["param"].items()}
    groups = []
    for group in settings:
        wanted = group["wd_mult"] == 1.0
        groups.append(
            {
                "params": [m for n, m in masters.items() if decays(n, m) == wanted],
                **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")},
            }
        )
    reference = torch.optim.AdamW(groups, fused=True)
    for name, master in masters.items():
        master.grad = gradient(name, truth["model"][name]).float()
        reference.state[master] = {
            "step": torch.tensor(float(case.step)),
            "exp_avg": truth["exp_avg"][name].clone(),
            "exp_avg_sq": truth["exp_avg_sq"][name].clone(),
        }
    for _ in range(steps):
        reference.step()
    return {
        "fp32_param": {n: m.detach() for n, m in masters.items()},
        **{slot: {n: reference.state[m][slot] for n, m in masters.items()} for slot in STATE[1:]},
    }


def train_one_step(name: str) -> dict[str, Any]:
    """Load a fixture into an empty optimizer, report what it holds, take a step."""
    case = oracle.case(name)
    weights = truth_of(case)["model"]
    groups = fresh_groups(weights)
    params = dict(pair for group in groups for pair in group["params"])
    config = OptimizerConfig(
        lr=1.0, clip_grad=0.0, bf16=case.dtype == "bf16", grad_reduce_in_fp32=True, bucket_size=5000
    )
    optimizer = DistributedOptimizer(groups, config)
    restored = load_sharded(case.directory, optimizer)
    loaded = parts(optimizer), {n: p.detach().clone() for n, p in params.items()}
    for n, p in params.items():
        p.grad = gradient(n, weights[n])
    optimizer.step()
    stepped = parts(optimizer), {n: p.detach().clone() for n, p in params.items()}
    return {"loaded": loaded, "stepped": stepped, "steps": optimizer.steps, "read": restored}


def parts(optimizer: DistributedOptimizer) -> dict[tuple[str, str, int, int], torch.Tensor]:
    """Return this rank's parts of the state by name, slot and range."""
    return {
        (piece.name, slot, piece.range.param.start, piece.range.param.end): value.clone()
        for piece in optimizer.pieces
        for slot, value in piece.slots().items()
    }


def whole(ranks: list[dict[str, Any]], when: str, shapes: Mapping[str, torch.Tensor]) -> Any:
    """Put the ranks' parts together: every element exactly once."""
    tensors = {
        slot: {n: torch.full((w.numel(),), float("nan")) for n, w in shapes.items()}
        for slot in STATE
    }
    for rank in ranks:
        for (name, slot, start, stop), value in rank[when][0].items():
            assert tensors[slot][name][start:stop].isnan().all()
            tensors[slot][name][start:stop] = value
    return tensors


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_megatron_checkpoint_is_loaded_and_takes_the_step_that_torch_would(
    name: str, world_size: int
) -> None:
    case = oracle.case(name)
    truth = truth_of(case)
    ranks = run_ranks(train_one_step, world_size, name)
    loaded = whole(ranks, "loaded", truth["model"])
    expected = {"fp32_param": truth["param"], **{slot: truth[slot] for slot in STATE[1:]}}
    stepped = continue_in_torch(case, truth)
    after = whole(ranks, "stepped", truth["model"])
    for slot in STATE:
        for n in truth["model"]:
            assert torch.equal(loaded[slot][n], expected[slot][n].reshape(-1)), (slot, n)
            assert not torch.equal(after[slot][n], loaded[slot][n]), (slot, n)
            assert torch.equal(after[slot][n], stepped[slot][n].reshape(-1)), (slot, n)
    for rank in ranks:
        assert set(rank["steps"].values()) == {case.step + 1}
        for n, weight in truth["model"].items():
            assert torch.equal(rank["loaded"][1][n], weight)
            assert torch.equal(rank["stepped"][1][n], stepped["fp32_param"][n].to(weight.dtype))


def load_into_another_model(name: str) -> tuple[str, bool]:
    case = oracle.case(name)
    weights = dict(truth_of(case)["model"])
    victim = min(weights)
    weights[victim] = weights[victim][:-1]
    groups = fresh_groups(weights)
    optimizer = DistributedOptimizer(groups, OptimizerConfig(lr=1.0, bf16=True))
    with pytest.raises(MismatchError, match=f"{victim}.*shape must be") as caught:
        load_sharded(case.directory, optimizer)
    untouched = all(not p.any() for group in groups for _, p in group["params"])
    return str(caught.value), untouched and set(optimizer.steps.values()) == {0}


def test_a_tensor_of_another_shape_is_refused_on_every_rank_and_nothing_is_loaded() -> None:
    found = run_ranks(load_into_another_model, 2, "gqa_tp1_pp1_dp1")
    assert [untouched for _, untouched in found] == [True, True]
