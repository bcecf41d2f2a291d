"""What data, tensor and pipeline ranks of our optimizers save for torch is all of their state.

Judges are the native form of the same moment, torch's own reader, and the fact that all topologies
train the same model.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import run_ranks
from hooks.test_model_parallel import TOPOLOGIES, groups_of, run, shapes, train
from torch import nn
from training_runs import Run, model_of

from ckpttools import api
from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.optimizer import DistributedFusedAdam

STEP = 2


def save(folder: str, optimizer: Any) -> None:
    with CheckpointManager(folder, format="dcp", preemption_signals=()) as manager:
        manager.save(STEP, nn.Module(), optimizer, rng=False, force=True)


def save_topologies(folder: str) -> int:
    for name, sizes in TOPOLOGIES.items():
        groups = groups_of(sizes)
        if groups is not None:
            optimizer = run(groups, sizes)
            train(optimizer, groups, 0, STEP)
            save(f"{folder}/{name}", optimizer)
            save_sharded(f"{folder}/{name}-native", optimizer, iteration=STEP)
        dist.barrier()
    return 1


def load_topologies(folder: str) -> int:
    """Load a checkpoint of four ranks into other topologies, and go on as the straight run does."""
    for name in ("tp1", "pp2dp2"):
        groups = groups_of(TOPOLOGIES[name])
        if groups is not None:
            optimizer = run(groups, TOPOLOGIES[name])
            load_sharded(step_of(Path(folder) / "tp2dp2"), optimizer)
            train(optimizer, groups, STEP, STEP + 2)
            save_sharded(f"{folder}/{name}-on", optimizer)
            straight = run(groups, TOPOLOGIES[name])
            train(straight, groups, 0, STEP + 2)
            save_sharded(f"{folder}/{name}-straight", straight)
        dist.barrier()
    return 1


def step_of(folder: Path) -> Path:
    (place,) = folder.glob("step-*")
    return place


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(save_topologies, 4, str(folder), timeout_s=240) == [1] * 4
    return folder


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_writes_whole_tensors_that_equal_its_native_form(
    name: str, saved: Path
) -> None:
    place = step_of(saved / name)
    found = api.verify(place, against=saved / f"{name}-native")
    assert (found.damage, found.differences) == ((), ())
    values, first = weights_of(place), weights_of(step_of(saved / "tp1"))
    for key, tensor in values.items():
        assert tensor.abs().sum() > 0, key
        assert torch.equal(tensor, first[key]), key


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    """Let torch read the weights of a directory."""
    values = {name: torch.zeros(shape) for name, shape in shapes().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.load({"model": values}, checkpoint_id=str(place))
    return values


def test_other_topologies_go_on_from_it_exactly(saved: Path) -> None:
    assert run_ranks(load_topologies, 4, str(saved), timeout_s=240) == [1] * 4
    for name in ("tp1", "pp2dp2"):
        found = api.verify(saved / f"{name}-on", against=saved / f"{name}-straight")
        assert found.differences == ()
        assert api.verify(saved / f"{name}-on", against=saved / f"{name}-native").differences != ()


def save_scaled(folder: str) -> int:
    model = model_of(torch.float16)
    optimizer = DistributedFusedAdam(
        model,
        lr=0.02,
        dtype=torch.float16,
        param_sync_dtype=torch.float16,
        bucket_cap_mb=0.0004,
        with_scaled_states=True,
    )
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        values = torch.randint(-8, 9, param.shape, generator=generator) / 8
        if param.requires_grad:
            param.grad = values.half()
    optimizer.step()
    save(f"{folder}/dcp", optimizer)
    save_sharded(f"{folder}/native", optimizer)
    return 1


def test_scaled_values_are_written_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    assert run_ranks(save_scaled, 2, str(tmp_path)) == [1] * 2
    found = api.verify(step_of(tmp_path / "dcp"), against=tmp_path / "native")
    assert (found.damage, found.differences) == ((), ())
    specs = api.read_manifest(step_of(tmp_path / "dcp")).tensors
    assert {spec.dtype.name for spec in specs if spec.slot == "exp_avg"} == {"float32"}


def torchs_run(folder: str) -> int:
    """Go on with our optimizer from what torch's AdamW left, saved as torch saves it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    alone = Run("zero1", "fp32")
    trained = [p for p in alone.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for param in alone.model.parameters():
            values = torch.randint(-8, 9, param.shape, generator=generator) / 8
            param.grad = values if param.requires_grad else None
        optimizer.step()
    weights, state = get_state_dict(alone.model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    mine = Run("zero1", "fp32")
    with torch.no_grad():
        for param in mine.model.parameters():
            param.zero_()
    load_sharded(folder, mine.optimizer)
    held = dict(alone.model.named_parameters())
    for name, param in mine.model.named_parameters():
        assert torch.equal(param, held[name]), name
    assert set(mine.optimizer.steps.values()) == {2}
    return 1


def test_our_optimizer_goes_on_from_what_torch_saved(tmp_path: Path) -> None:
    assert run_ranks(torchs_run, 2, str(tmp_path / "run")) == [1] * 2
