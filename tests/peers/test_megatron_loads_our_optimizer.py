"""A Megatron run goes on in our optimizer and comes back: Megatron loads it and steps as its own.

1. With no step in between Megatron takes bit for bit the step that it takes from its own file.
2. With a step in between it holds what torch's AdamW, continued from the truth, would hold.
"""

from __future__ import annotations

from pathlib import Path

import oracle_megatron as oracle
import pytest
import torch
from gloo_ranks import run_ranks
from hooks.test_between_optimizers import chain
from hooks.test_megatron_checkpoints import (
    STATE,
    continue_in_torch,
    fresh_groups,
    gradient,
    truth_of,
)
from peers.megatron_runs import GQA, TIED, Topology, load, needs_megatron, step

from ckpttools import api
from ckpttools.hooks import load_sharded, save_gathered, save_sharded
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

pytestmark = needs_megatron

CASES = [("gqa_tp2_pp2_dp1", GQA), ("tied_tp2_pp1_dp1_fp32", TIED)]


def pass_through(name: str, out: str, steps: int, gathered: bool) -> bool:
    """Load a fixture, take ``steps`` steps, and save with what only Megatron needs."""
    case = oracle.case(name)
    weights = truth_of(case)["model"]
    groups = fresh_groups(weights)
    config = OptimizerConfig(
        lr=1.0, clip_grad=0.0, bf16=case.dtype == "bf16", grad_reduce_in_fp32=True, bucket_size=5000
    )
    optimizer = DistributedOptimizer(groups, config)
    restored = load_sharded(case.directory, optimizer)
    for _ in range(steps):
        for n, p in (pair for group in groups for pair in group["params"]):
            p.grad = gradient(n, weights[n])
        optimizer.step()
    iteration = case.step + steps
    if gathered:
        save_gathered(out, optimizer, to="megatron", iteration=iteration, carry=restored.objects)
    else:
        save_sharded(out, optimizer, iteration=iteration, carry=restored.objects)
    return True


def through(name: str, scratch: Path, steps: int) -> Path:
    """Return a Megatron checkpoint of the fixture's own topology that passed through ours."""
    case = oracle.case(name)
    native, out = scratch / "native", scratch / "megatron"
    assert all(run_ranks(pass_through, 2, name, str(native), steps, False))
    target = api.Target(tp=case.tp, pp=case.pp, dp=case.dp)
    api.reshard(native, out, to="megatron", target=target)
    return out


@pytest.mark.parametrize(("name", "model"), CASES)
def test_megatron_takes_the_same_step_from_a_checkpoint_that_passed_through_our_optimizer(
    name: str, model: str, tmp_path: Path
) -> None:
    case = oracle.case(name)
    ours = step(through(name, tmp_path, 0), model, Topology.of(case), tmp_path)
    theirs = step(case.directory, model, Topology.of(case), tmp_path)
    assert oracle.tensor_differences(theirs.tensors, case.truth_tensors()) != []
    assert oracle.tensor_differences(ours.tensors, theirs.tensors) == []
    assert ours.facts["losses"] == theirs.facts["losses"]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_megatron_holds_the_step_that_our_optimizer_took(
    name: str, model: str, tmp_path: Path
) -> None:
    case = oracle.case(name)
    held = load(through(name, tmp_path, 1), model, Topology.of(case), tmp_path)
    tensors = after(case, 1)
    assert oracle.tensor_differences(tensors, case.truth_tensors()) != []
    assert oracle.tensor_differences(held.tensors, tensors) == []
    assert held.facts["step"] == [float(case.step + 1)]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_megatron_holds_what_went_over_apex_s_file_and_both_of_our_optimizers(
    name: str, model: str, tmp_path: Path
) -> None:
    case = oracle.case(name)
    held = load(chain(name, tmp_path, "zero2"), model, Topology.of(case), tmp_path)
    rows = case.model["vocab_size"]  # padding that went through TP 1 is zero where it had no room
    expected = {key: t[:rows] if vocabulary(key) else t for key, t in after(case, 2).items()}
    found = {key: t[:rows] if vocabulary(key) else t for key, t in held.tensors.items()}
    assert oracle.tensor_differences(found, expected) == []
    assert held.facts["step"] == [float(case.step + 2)]


def vocabulary(key: str) -> bool:
    return key.split("/", 1)[1] in oracle.VOCABULARY


def after(case: oracle.Case, steps: int) -> dict[str, torch.Tensor]:
    """Return what torch's AdamW holds so many steps after the truth."""
    truth = truth_of(case)
    expected = continue_in_torch(case, truth, steps=steps)
    return {
        **{f"{slot}/{n}": t for slot in STATE[1:] for n, t in expected[slot].items()},
        **{f"param/{n}": t for n, t in expected["fp32_param"].items()},
        **{f"model/{n}": t.to(truth["model"][n].dtype) for n, t in expected["fp32_param"].items()},
    }


def test_state_gathered_straight_into_megatrons_files_is_what_resharding_writes(
    tmp_path: Path,
) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    out = tmp_path / "gathered"
    assert all(run_ranks(pass_through, 2, case.name, str(out), 1, True))
    held = load(out, GQA, Topology(dp=2), tmp_path)
    expected = continue_in_torch(case, truth_of(case))["fp32_param"]
    for n, master in expected.items():
        assert torch.equal(held.tensors[f"param/{n}"], master), n
    assert held.facts["step"] == [float(case.step + 1)]
