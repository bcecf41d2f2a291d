"""The manager with torch's own optimizers, under DistributedDataParallel and alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from training_runs import give_gradients, model_of

from ckpttools.errors import UsageError
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.testing import assert_resume_exact

KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
}


class TorchRun:
    """A run of a model and an optimizer of torch, wrapped where there are several ranks."""

    def __init__(self, kind: str, *, asynchronous: bool = True) -> None:
        self.inner = model_of()
        self.model: torch.nn.Module = self.inner
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.inner)
        self.optimizer = KINDS[kind](p for p in self.inner.parameters() if p.requires_grad)
        self.asynchronous = asynchronous

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            give_gradients(self.inner, step)
            self.optimizer.step()

    def manager(self, directory: Path) -> CheckpointManager:
        return CheckpointManager(directory, asynchronous=self.asynchronous, preemption_signals=())

    def save(self, directory: Path, step: int) -> None:
        with self.manager(directory) as manager:
            manager.save(step, self.model, self.optimizer)

    def restore(self, directory: Path) -> None:
        with self.manager(directory) as manager:
            manager.restore(self.model, self.optimizer)

    def state(self) -> Mapping[str, Any]:
        return {name: value.detach() for name, value in self.inner.named_parameters()}


def resume(folder: str) -> int:
    count = 0
    for kind in KINDS:
        for asynchronous in (True, False):
            place = Path(folder) / f"{kind}-{asynchronous}"
            assert_resume_exact(
                lambda kind=kind, now=asynchronous: TorchRun(kind, asynchronous=now),
                place,
                save_at=2,
                stop_at=4,
                barrier=dist.barrier,
            )
            count += 1
    return count


def test_runs_with_torchs_own_optimizers_go_on_exactly_and_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    assert run_ranks(resume, 2, str(tmp_path)) == [4, 4]
    for kind in KINDS:
        through, again = TorchRun(kind), TorchRun(kind)
        through.train(0, 4)
        again.restore(tmp_path / f"{kind}-True")
        again.train(2, 4)
        for name, value in through.state().items():
            assert torch.equal(value, again.state()[name])


def test_state_whose_storage_was_replaced_between_two_saves_is_saved_as_it_is_now(
    tmp_path: Path,
) -> None:
    run = TorchRun("AdamW")
    with run.manager(tmp_path) as manager:
        run.train(0, 1)
        manager.save(1, run.model, run.optimizer)
        for state in run.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] + 1
        for param in run.inner.parameters():
            param.data = param.data * 2
        expected = {name: value.clone() for name, value in run.state().items()}
        moments = [state["exp_avg"].clone() for state in run.optimizer.state.values()]
        manager.save(2, run.model, run.optimizer)
        for state in run.optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        for param in run.inner.parameters():
            param.data.zero_()
    again = TorchRun("AdamW")
    again.restore(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in again.state().items())
    found = [state["exp_avg"] for state in again.optimizer.state.values()]
    assert all(map(torch.equal, found, moments))


def test_whole_tensors_of_torchs_optimizers_are_gathered_later_not_here(tmp_path: Path) -> None:
    run = TorchRun("SGD")
    with (
        CheckpointManager(tmp_path, format="gathered", preemption_signals=()) as manager,
        pytest.raises(UsageError, match="format: must be sharded for SGD, got gathered"),
    ):
        manager.save(1, run.model, run.optimizer)
