"""The note of a restore tells a script the step and what it had given along, typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpttools.hooks import CheckpointManager, load_sharded, save_sharded
from ckpttools.hooks.restore import Restored
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig


def run(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    if kind == "torch":
        return model, torch.optim.AdamW(model.parameters())
    return model, DistributedOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=0.0))


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize("extra", [None, {"samples": 24, "name": "x"}])
def test_step_and_extra_are_those_that_were_saved(
    kind: str, extra: dict[str, object] | None, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(17, *run(kind), extra=extra)
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore(*run(kind))
    assert (restored.step, restored.extra) == (17, extra)


def test_a_checkpoint_that_tells_no_step_has_none(tmp_path: Path) -> None:
    _, optimizer = run("ours")
    assert isinstance(optimizer, DistributedOptimizer)
    save_sharded(tmp_path / "a", optimizer)
    restored = load_sharded(tmp_path / "a", optimizer)
    assert (restored.step, restored.extra) == (None, None)


def test_objects_of_another_kind_are_not_taken_for_a_step() -> None:
    for odd in ("7", 7.0, True, None):
        note = Restored("p", "f", 0, 0, (), (), {"iteration": odd, "extra": odd})
        assert (note.step, note.extra) == (None, None)
