"""An error on one rank is raised on all, and leaves neither half of a save nor of a load."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.errors import CkptError, MismatchError, StorageError, UsageError
from ckpttools.hooks import load_sharded, save_gathered, save_sharded, sharded
from ckpttools.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    ParallelGroups,
    RemoteError,
)

SOON_S = 10


def trained() -> tuple[torch.nn.Module, DistributedOptimizer]:
    torch.manual_seed(7)
    model = torch.nn.Linear(19, 11)
    optimizer = DistributedOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=0.0))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: DistributedOptimizer) -> list[torch.Tensor]:
    moments = [value for shard in optimizer.shards for value in shard.slots().values()]
    return [value.detach().clone() for value in (*model.parameters(), *moments)]


def failing_save(folder: str, kind: str) -> tuple[str, float]:
    _, optimizer = trained()
    if dist.get_rank() == 1 and kind == "sharded":

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        sharded.os.pwrite = full  # the disk of this rank is full
    save = save_sharded if kind == "sharded" else save_gathered
    if dist.get_rank() == 0 and kind == "gathered":
        from ckpttools.hooks import gathered

        def refuse(*_: object) -> None:
            raise StorageError("disk: must have room, got none")

        gathered.write_tile = refuse
    started = time.monotonic()
    try:
        save(Path(folder) / "run", optimizer, iteration=1)
    except (CkptError, OSError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing was raised", 0.0


@pytest.mark.parametrize(("kind", "rank"), [("sharded", 1), ("gathered", 0)])
def test_a_rank_that_cannot_write_is_named_on_every_rank_and_nothing_is_published(
    kind: str, rank: int, tmp_path: Path
) -> None:
    found = run_ranks(failing_save, 3, str(tmp_path), kind)
    for number, (message, seconds) in enumerate(found):
        assert seconds < SOON_S
        assert message.startswith("RemoteError: rank") == (number != rank), message
        if number != rank:
            assert f"rank {rank}: " in message
    assert list(tmp_path.iterdir()) == []


def overwritten(folder: str) -> list[str]:
    """Save twice to one place: refused, then asked for."""
    _, optimizer = trained()
    place = Path(folder) / "run"
    save_sharded(place, optimizer, iteration=1)
    said = []
    try:
        save_sharded(place, optimizer, iteration=2)
    except (StorageError, RemoteError, UsageError) as error:
        said.append(str(error))
    save_sharded(place, optimizer, iteration=3, overwrite=True)
    return said


def test_a_save_that_is_there_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    found = run_ranks(overwritten, 2, str(tmp_path))
    assert [len(said) for said in found] == [1, 1]
    assert all("run: the destination must not exist" in said[0] for said in found)
    assert api.read_manifest(tmp_path / "run").objects["iteration"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def failing_load(folder: str) -> tuple[bool, str]:
    """Load a checkpoint of which one rank's files are cut short on disk."""
    model, optimizer = trained()
    before = state_of(model, optimizer)
    try:
        load_sharded(Path(folder) / "run", optimizer)
    except (CkptError, OSError) as error:
        same = all(map(torch.equal, before, state_of(model, optimizer)))
        return same and set(optimizer.steps.values()) == {1}, str(error)
    return False, "nothing was raised"


def saved(folder: str) -> bool:
    _, optimizer = trained()
    save_sharded(Path(folder) / "run", optimizer, iteration=1)
    return True


def test_a_torn_checkpoint_is_refused_on_every_rank_and_changes_none(tmp_path: Path) -> None:
    assert all(run_ranks(saved, 2, str(tmp_path)))
    victim = tmp_path / "run" / "rank-00001.safetensors"
    os.truncate(victim, victim.stat().st_size - 4)
    for unchanged, message in run_ranks(failing_load, 2, str(tmp_path)):
        assert unchanged
        assert "rank-00001.safetensors" in message


def test_a_checkpoint_with_parameters_that_the_run_has_not_is_refused_unless_told(
    tmp_path: Path,
) -> None:
    _, optimizer = trained()
    save_sharded(tmp_path / "run", optimizer, iteration=1)
    smaller = torch.nn.Linear(19, 11, bias=False)
    other = DistributedOptimizer(smaller, OptimizerConfig(lr=0.1))
    with pytest.raises(MismatchError, match="bias: must be a parameter of this run, got none"):
        load_sharded(tmp_path / "run", other)
    load_sharded(tmp_path / "run", other, strict=False)
    assert other.steps == {"weight": 1}


def test_weights_alone_make_the_masters_anew_and_leave_the_moments(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(19, 11).bfloat16()
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, bf16=True)
    optimizer = DistributedOptimizer(model, config)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_sharded(tmp_path / "run", optimizer, iteration=1)
    fresh_model = torch.nn.Linear(19, 11).bfloat16()
    fresh = DistributedOptimizer(fresh_model, config)
    restored = load_sharded(tmp_path / "run", fresh, weights_only=True)
    assert len(restored.unused) == 6  # masters and moments of two parameters
    assert all(map(torch.equal, fresh_model.parameters(), model.parameters()))
    for piece in fresh.pieces:
        assert torch.equal(piece.master.bfloat16(), piece.slot.param.reshape(-1))
        assert not piece.exp_avg.any()
    assert set(fresh.steps.values()) == {0}


def load_two_stages(folder: str) -> list[str]:
    """Load on two stages with a parameter each: a checkpoint of both, and one of a third too."""
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    groups = ParallelGroups(dp=alone, pp=dist.new_group([0, 1]))
    name = "ab"[rank]
    named = [(name, torch.nn.Parameter(torch.zeros(3)))]
    optimizer = DistributedOptimizer(named, OptimizerConfig(lr=0.1), groups=groups)
    said = []
    for names in ("ab", "abc"):
        try:
            load_sharded(Path(folder) / names, optimizer)
        except MismatchError as error:
            said.append(str(error))
        else:
            said.append(f"loaded {int(optimizer.managed[0].param.detach().sum())}")
    return said


def test_what_another_stage_has_is_no_stranger_and_what_none_has_is_refused(tmp_path: Path) -> None:
    for names in ("ab", "abc"):
        named = [(n, torch.nn.Parameter(torch.full((3,), float(ord(n))))) for n in names]
        save_sharded(tmp_path / names, DistributedOptimizer(named, OptimizerConfig(lr=0.1)))
    found = run_ranks(load_two_stages, 2, str(tmp_path))
    for rank, (both, third) in enumerate(found):
        assert both == f"loaded {3 * ord('ab'[rank])}"
        assert "c: must be a parameter of this run, got none" in third


def test_what_a_load_does_not_take_is_named(tmp_path: Path) -> None:
    def run(**settings: object) -> DistributedOptimizer:
        param = torch.nn.Parameter(torch.zeros(3))
        group = {"params": [("a", param)], "lr": 0.1, **settings}
        return DistributedOptimizer([group], OptimizerConfig(lr=0.1, loss_scale=8.0))

    save_sharded(tmp_path / "run", run(wd_mult=1.0))
    notes = load_sharded(tmp_path / "run", run()).notes
    assert "parameter groups: this run's have no place for wd_mult" in notes
    assert "grad_scaler: the checkpoint has none, so this run's loss scale stays" in notes
    assert load_sharded(tmp_path / "run", run(), weights_only=True).notes == ()
