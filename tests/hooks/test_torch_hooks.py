"""A script that keeps its own loop and its own ``torch.save`` still resumes exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_runs import Run, give_gradients

from ckpttools.errors import FormatError
from ckpttools.hooks.torch_hooks import KEY, add_training_state, save_after_step


def test_steps_are_saved_by_themselves_until_the_hook_is_removed(tmp_path: Path) -> None:
    run = Run(every_steps=2)
    with run.manager(tmp_path) as manager:
        handle = save_after_step(manager, run.model, run.optimizer, first_step=10, rng=False)
        run.train(0, 5)
        handle.remove()
        run.train(5, 9)
    assert manager.all_steps() == [12, 14]


def adamw(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def test_an_optimizers_own_state_dict_carries_scheduler_and_randomness(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer, scheduler = adamw(model)
    add_training_state(optimizer, scheduler=scheduler)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
        scheduler.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = torch.rand(3)

    fresh, fresh_scheduler = adamw(torch.nn.Linear(3, 2))
    hooks = add_training_state(fresh, scheduler=fresh_scheduler)
    fresh.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert torch.equal(torch.rand(3), expected)
    assert fresh_scheduler.last_epoch == 3
    assert fresh_scheduler.get_last_lr() == scheduler.get_last_lr()
    for handle in hooks:
        handle.remove()
    assert KEY not in fresh.state_dict()


def test_a_state_dict_without_the_entry_is_taken_as_it_is_and_a_wrong_one_refused() -> None:
    optimizer, scheduler = adamw(torch.nn.Linear(3, 2))
    plain = optimizer.state_dict()
    add_training_state(optimizer, scheduler=scheduler)
    optimizer.load_state_dict(plain)
    assert scheduler.last_epoch == 0
    with pytest.raises(FormatError, match="must be a table, got list"):
        optimizer.load_state_dict({**plain, KEY: []})
