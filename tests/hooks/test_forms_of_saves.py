"""Whatever form a run saves in, what is no tensor comes back with it, and survives conversions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.errors import UsageError
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


def save_unlike(folder: str, kind: str, form: str) -> tuple[str, list[str]]:
    """Save what differs from rank to rank; return what is said, and what is there."""
    model, optimizer, _ = build(kind)
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    with CheckpointManager(folder, format=form, preemption_signals=()) as manager:
        with pytest.raises(UsageError) as caught:
            manager.save(1, model, optimizer, extra={"samples": 3 + dist.get_rank()})
        dist.barrier()
        left = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()
        manager.save(1, model, optimizer, extra={"samples": 3})
    return str(caught.value), left


@pytest.mark.parametrize("kind", ["zero1", "torch"])
@pytest.mark.parametrize("form", ["gathered", "gathered-zarr"])
def test_what_differs_from_rank_to_rank_has_no_place_in_whole_tensors_and_is_not_dropped(
    form: str, kind: str, tmp_path: Path
) -> None:
    said = f"extra: must be equal on all ranks for format {form}, got others on some"
    assert run_ranks(save_unlike, 2, str(tmp_path), kind, form) == [(said, [])] * 2
    model, optimizer, _ = build(kind)
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        assert manager.restore(model, optimizer).extra == {"samples": 3}


def test_an_optimizer_without_state_yet_is_not_dropped_from_whole_tensors(tmp_path: Path) -> None:
    model, optimizer, _ = build("torch")
    with CheckpointManager(tmp_path, format="gathered", preemption_signals=()) as manager:
        with pytest.raises(UsageError, match="optimizer: must have state to be saved with whole"):
            manager.save(1, model, optimizer)
        assert manager.latest() is None
        manager.save(1, model, None)
        manager.restore(model, None)
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        manager.save(2, model, optimizer)
        assert manager.restore(model, optimizer).step == 2
