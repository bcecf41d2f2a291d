"""A run moves from Megatron over Apex's files through both optimizers; torch's AdamW is the judge.

Megatron's checkpoint → Apex's file → fused ZeRO-2 on two ranks, a step → ZeRO-1 on three ranks,
a step → Megatron's files.
"""

from __future__ import annotations

from pathlib import Path

import oracle_megatron as oracle
import pytest
import torch
from gloo_ranks import run_ranks
from hooks.test_megatron_checkpoints import (
    STATE,
    continue_in_torch,
    fresh_groups,
    gradient,
    truth_of,
)
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.api import Target
from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    ShardedOptimizer,
    Sharding,
)

CASES = ["gqa_tp2_pp2_dp1", "tied_tp2_pp1_dp1_fp32"]


def build(kind: str, name: str) -> ShardedOptimizer:
    """Return an optimizer of a fixture's parameters, which hold nothing yet."""
    case = oracle.case(name)
    weights = truth_of(case)["model"]
    groups = fresh_groups(weights)
    rows = Sharding(vocab_rows=case.model["vocab_size"])  # padded for the fixture's tensor ranks
    shardings = {n: rows for n in oracle.VOCABULARY if n in weights}
    if kind == "zero1":
        config = OptimizerConfig(
            lr=1.0,
            clip_grad=0.0,
            bf16=case.dtype == "bf16",
            grad_reduce_in_fp32=True,
            bucket_size=5000,
        )
        return DistributedOptimizer(groups, config, shardings=shardings)
    return DistributedFusedAdam(
        groups,
        lr=1.0,
        grad_sync_dtype=torch.float32,
        param_sync_dtype=torch.bfloat16 if kind == "remainders" else None,
        bucket_cap_mb=0.01,
        store_params=kind != "remainders",
        store_param_remainders=kind == "remainders",
        shardings=shardings,
    )


def go_on(kind: str, name: str, source: str, out: str, iteration: int) -> int:
    """Load a checkpoint of any format, take a step, and save."""
    optimizer = build(kind, name)
    restored = load_sharded(source, optimizer)
    weights = truth_of(oracle.case(name))["model"]
    for managed in optimizer.managed:
        managed.param.grad = gradient(managed.name, weights[managed.name])
    optimizer.step()
    save_sharded(out, optimizer, iteration=iteration, carry=restored.objects)
    return restored.tensors


def chain(name: str, scratch: Path, fused: str) -> Path:
    """Return Megatron's files after the whole way, two steps further."""
    case = oracle.case(name)
    masters = None if case.dtype == "fp32" else "stored"
    target = Target(tp=1, pp=1, dp=1, masters=masters)
    api.reshard(case.directory, scratch / "apex", to="apex", target=target)
    first, second = case.step + 1, case.step + 2
    run_ranks(go_on, 2, fused, name, str(scratch / "apex"), str(scratch / "fused"), first)
    api.reshard(scratch / "fused", scratch / "flat", to="zero1", target=Target(dp=3))
    run_ranks(go_on, 3, "zero1", name, str(scratch / "flat"), str(scratch / "on"), second)
    own = Target(tp=case.tp, pp=case.pp, dp=case.dp)
    api.reshard(scratch / "on", scratch / "megatron", to="megatron", target=own)
    return scratch / "megatron"


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, "zero2") for name in CASES), (CASES[0], "remainders")]
)
def test_two_steps_on_the_way_are_the_two_that_torch_takes(
    name: str, fused: str, tmp_path: Path
) -> None:
    case = oracle.case(name)
    out = chain(name, tmp_path, fused)
    expected = continue_in_torch(case, truth_of(case), steps=2)
    api.gather(out, tmp_path / "whole")
    manifest = api.read_manifest(out)
    assert manifest.objects["step"] == case.step + 2
    found = {
        f"{slot}/{n}": t for slot in STATE for n, t in gathered(tmp_path / "whole", slot).items()
    }
    assert len(found) == 3 * len(expected["fp32_param"])
    for slot in STATE:
        for n, tensor in expected[slot].items():
            mine = found[f"{slot}/{n}"]
            rows = mine.shape[0] if mine.dim() else 0
            assert torch.equal(mine, tensor[:rows] if rows else tensor), (n, slot)


def gathered(directory: Path, slot: str) -> dict[str, torch.Tensor]:
    """Return one slot of whole tensors by name, read by the safetensors library."""
    tensors = load_file(directory / "optimizer.safetensors")
    end = f".{slot}"
    return {
        key.removeprefix("state.").removesuffix(end): tensor
        for key, tensor in tensors.items()
        if key.endswith(end)
    }
