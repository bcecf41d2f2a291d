"""Whatever form a run saves in, what is no tensor comes back with it, and survives conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpttools import api
from ckpttools.hooks import CheckpointManager
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
)

EXTRA = {"samples": 7, "shape": (1, 2), "ratio": float("inf")}


def build(
    kind: str,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    model = torch.nn.Linear(5, 3)
    optimizer: torch.optim.Optimizer
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    elif kind == "zero1":
        optimizer = DistributedOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=0.0))
    else:
        optimizer = DistributedFusedAdam(model, lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "torch"])
@pytest.mark.parametrize("form", ["gathered", "gathered-zarr", "sharded", "dcp"])
def test_scheduler_and_extra_come_back_in_every_form_and_out_of_whole_tensors(
    form: str, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model, optimizer, scheduler = build(kind)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        scheduler.step()
    with CheckpointManager(tmp_path / "run", format=form) as manager:
        assert manager.save(3, model, optimizer, scheduler, extra=EXTRA)
    other, fresh, schedule = build(kind)
    with CheckpointManager(tmp_path / "run", format=form) as manager:
        restored = manager.restore(other, fresh, schedule, rng="gathered" not in form)
    assert restored.objects["extra"] == EXTRA
    assert schedule.state_dict() == scheduler.state_dict()
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]  # of a Linear
    (step,) = (tmp_path / "run").glob("step-*")
    training = api.read_manifest(step).objects["training"]
    for to in ("zarr", "safetensors"):
        report = api.reshard(step, tmp_path / to, to=to)
        assert "training, under objects" in report.carried
        assert api.read_manifest(tmp_path / to).objects["training"] == training
        assert api.verify(tmp_path / to, against=step).ok
