"""The manager with torch's own optimizers, under DistributedDataParallel and alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr
from gloo_ranks import run_ranks
from safetensors.numpy import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_runs import give_gradients, model_of

from ckpttools import api
from ckpttools.errors import StorageError
from ckpttools.hooks import gathered_general
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.optimizer import RemoteError
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


def save_whole(folder: str) -> dict[str, Any]:
    """Save an FSDP2 model as whole tensors in both forms; return what it held."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of().requires_grad_()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for form in ("gathered", "gathered-zarr"):
        with CheckpointManager(
            Path(folder) / form, format=form, keep_last=1, preemption_signals=()
        ) as manager:
            for step in (1, 2):
                manager.save(step, model, optimizer, extra={"step": step}, rng=False)
    held = {name: param.full_tensor() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            held[f"state.{name}.{slot}"] = optimizer.state[param][slot].full_tensor()
    return {key: value.detach().numpy() for key, value in held.items()}


def whole_tensors(step: Path, form: str) -> dict[str, bytes]:
    """Read a consolidated directory with the libraries of its formats."""
    if form == "gathered":
        files = (load_file(path) for path in step.glob("*.safetensors"))
        return {key: value.tobytes() for file in files for key, value in file.items()}
    root = zarr.open_group(step, mode="r")
    found = {}
    for name, node in root["model"].arrays():
        found[name] = node[...].tobytes()
    for name, group in root["optimizer"].groups():
        for slot, node in group.arrays():
            found[f"state.{name}.{slot}"] = node[...].tobytes()
    return found


def test_an_fsdp2_model_is_saved_as_whole_tensors_and_goes_on_under_none(tmp_path: Path) -> None:
    held = run_ranks(save_whole, 3, str(tmp_path))[0]
    for form in ("gathered", "gathered-zarr"):
        step = tmp_path / form / "step-0000000002"
        assert sorted(path.name for path in (tmp_path / form).iterdir()) == ["latest", step.name]
        assert whole_tensors(step, form) == {key: one.tobytes() for key, one in held.items()}
        assert api.verify(step).damage == ()
        run = TorchRun("AdamW", asynchronous=False)
        run.inner.requires_grad_()
        run.optimizer = KINDS["AdamW"](run.inner.parameters())
        with run.manager(tmp_path / form) as manager:
            restored = manager.restore(run.inner, run.optimizer, rng=False)
        assert restored.objects["extra"] == {"step": 2}
        for name, param in run.inner.named_parameters():
            assert param.detach().numpy().tobytes() == held[name].tobytes()
            moment = run.optimizer.state[param]["exp_avg"]
            assert moment.numpy().tobytes() == held[f"state.{name}.exp_avg"].tobytes()


def refuse_whole(folder: str) -> list[str]:
    run = TorchRun("SGD")
    run.train(0, 1)
    if dist.get_rank() == 1:
        gathered_general.write_live = _refuse  # type: ignore[attr-defined]
    with (
        pytest.raises((StorageError, RemoteError), match="no room"),
        CheckpointManager(folder, format="gathered", preemption_signals=()) as manager,
    ):
        manager.save(1, run.model, run.optimizer)
    return sorted(path.name for path in Path(folder).iterdir())


def _refuse(root: Path, plan: object) -> None:
    raise StorageError(f"{root}: no room for {plan}")


def test_whole_tensors_that_one_rank_can_not_write_leave_nothing(tmp_path: Path) -> None:
    assert run_ranks(refuse_whole, 2, str(tmp_path))[0] == []
