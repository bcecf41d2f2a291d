"""Hugging Face's Trainer goes on from every step to the bits of a run that never stopped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from peers.trainer_runs import (
    BATCH,
    be_launched,
    data,
    differences,
    fsdp_on_cpu,
    needs,
    network,
    set_aside,
    state_of,
    without_random,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ckpttools.errors import (
    FormatError,
    MismatchError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.step_directory import step_name
from ckpttools.hooks.transformers import ShardedCheckpoint

pytestmark = needs("transformers")
EPOCHS = 3


class Network(nn.Module):
    """The network with a loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


class DyingError(Exception):
    """The run dies here."""


def stopper(stop: int, *, dies: bool, signals: bool) -> Any:
    """Return a callback that ends the run after step ``stop``, in one way or another."""
    from transformers import TrainerCallback

    class Stopper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, kwargs
            if dies and state.global_step == stop + 1:
                raise DyingError
            if state.global_step == stop and not dies and not signals:
                control.should_training_stop = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control, kwargs
            if signals and state.global_step == stop - 1:
                os.kill(os.getpid(), 10)

    return Stopper()


def looker(seen: list[dict[str, Tensor]]) -> Any:
    """Return a callback that notes the state which a run begins with."""
    from transformers import TrainerCallback

    class Looker(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control
            rates = kwargs["lr_scheduler"].get_last_lr()
            optimizer = kwargs["optimizer"].optimizer
            seen.append(state_of(kwargs["model"], optimizer, rates, state.global_step))

    return Looker()


def run(
    folder: str,
    *,
    stop: int = -1,
    accumulate: int = 1,
    dies: bool = False,
    signals: bool = False,
    train: bool = True,
    step: int | None = None,
    overwrite: bool = False,
    others: Sequence[Any] = (),
    **options: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from transformers import Trainer, TrainingArguments

    model = Network()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments = TrainingArguments(
        **{
            "output_dir": f"{folder}-own",
            "save_strategy": "no",
            "per_device_train_batch_size": BATCH // ranks,
            "num_train_epochs": EPOCHS,
            "gradient_accumulation_steps": accumulate,
            "learning_rate": 0.01,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 9,
            **options,
        }
    )
    samples = [{"x": x, "labels": y} for x, y in data()]
    with CheckpointManager(
        folder, every_steps=1, overwrite=overwrite, preemption_signals=(10,) if signals else ()
    ) as manager:
        callback = ShardedCheckpoint(manager)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=samples,
            eval_dataset=samples,
            callbacks=[
                *([callback] if train else []),
                *others,
                stopper(stop, dies=dies, signals=signals),
            ],
        )
        callback.train(trainer, step=step)
    rates = trainer.lr_scheduler.get_last_lr()
    state = state_of(model, trainer.optimizer.optimizer, rates, trainer.state.global_step)
    return state, (trainer, callback)


# An epoch has 6 batches, or 3 steps of two; every third step is evaluated.
@pytest.mark.parametrize(("accumulate", "steps"), [(1, (1, 3, 6, 7)), (2, (2, 3, 8))])
def test_a_run_goes_on_from_any_step_to_the_bits_of_one_that_never_stopped(
    tmp_path: Path, accumulate: int, steps: tuple[int, ...]
) -> None:
    through, _ = run(str(tmp_path / "through"), accumulate=accumulate)
    for step in steps:
        for dies in (False, True):
            place = str(tmp_path / f"{step}-{dies}")
            if dies:
                with pytest.raises(DyingError):
                    run(place, stop=step, accumulate=accumulate, dies=True)
            else:
                stopped, _ = run(place, stop=step, accumulate=accumulate)
                assert differences(stopped, through)
            ended, (trainer, callback) = run(place, accumulate=accumulate)
            assert differences(ended, through) == [], (step, dies)
            assert callback.restored.objects["iteration"] == step
            assert trainer.state.log_history[0]["step"] == 2 or step < 2


def test_an_earlier_step_may_be_named(tmp_path: Path) -> None:
    through, _ = run(str(tmp_path / "run"))
    again, (_, callback) = run(str(tmp_path / "run"), step=4, overwrite=True)
    assert callback.restored.objects["iteration"] == 4
    assert differences(again, through) == []


# At the end of an epoch, and where it stops within one, the Trainer evaluates with "epoch".
@pytest.mark.parametrize("evaluate", ["steps", "epoch"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_signal_saves_the_step_and_stops_the_trainer(
    accumulate: int, evaluate: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "eval_strategy": evaluate}
    through, (straight, _) = run(str(tmp_path / "through"), **options)
    for step in (3, 7) if accumulate == 1 else (3, 5):
        place = str(tmp_path / str(step))
        stopped, (_, callback) = run(place, stop=step, signals=True, **options)
        assert callback.manager.latest() == stopped["step"] == step
        ended, (trainer, _) = run(place, **options)
        assert differences(ended, through) == [], step
        told = [[entry["step"] for entry in one.state.log_history] for one in (trainer, straight)]
        assert told[0] == told[1], step


def test_a_run_that_has_ended_does_nothing_more(tmp_path: Path) -> None:
    ended, _ = run(str(tmp_path / "run"))
    again, (_, callback) = run(str(tmp_path / "run"))
    assert differences(again, ended) == []
    assert callback.manager.all_steps() == list(range(1, 19))


# ---- damage ----------------------------------------------------------------------------------


def damage(folder: str, step: int, rank: int = 0) -> None:
    """Change the last byte that a rank has written."""
    place = Path(folder) / step_name(step) / f"rank-{rank:05d}.safetensors"
    stored = bytearray(place.read_bytes())
    stored[-1] ^= 1
    place.write_bytes(stored)


def test_damaged_steps_are_passed_over_and_told_and_the_trainer_s_state_is_of_the_one_before(
    tmp_path: Path,
) -> None:
    through, (straight, _) = run(str(tmp_path / "through"))
    place = str(tmp_path / "run")
    run(place, stop=8)
    damage(place, 8)
    damage(place, 7)
    ended, (trainer, callback) = run(place)
    assert callback.restored.objects["iteration"] == 6
    told = [note for note in callback.restored.notes if "damaged, so passed over" in note]
    assert [note.split(":")[0] for note in told] == ["step 8", "step 7"]
    assert all("CRC-32 must be" in note for note in told)
    assert differences(ended, through) == []
    steps = [[entry["step"] for entry in one.state.log_history] for one in (trainer, straight)]
    assert steps[0] == steps[1]
    assert callback.manager.all_steps() == list(range(1, 19))  # 7 and 8 were saved again


def test_a_damaged_step_that_is_named_and_damage_of_all_steps_are_errors(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    run(place, stop=2)
    damage(place, 2)
    with pytest.raises(FormatError, match="step-0000000002.*CRC-32 must be"):
        run(place, step=2)
    damage(place, 1)
    with pytest.raises(StorageError, match="must hold a sound step, got 2: step 2: damaged"):
        run(place)


# ---- ranks -----------------------------------------------------------------------------------


def test_a_trainer_without_the_callback_and_a_step_of_another_kind_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="trainer: must have this among its callbacks"):
        run(str(tmp_path / "run"), train=False)
    model = Network()
    with CheckpointManager(tmp_path / "run", preemption_signals=()) as manager:
        manager.save(1, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(MismatchError, match="step 1: extra: must hold the Trainer's state"):
        run(str(tmp_path / "run"))


def on_ranks(folder: str, sharded: bool) -> list[Any]:
    """Return what ends elsewhere than the run that never stopped, and the state at step 7."""
    warnings.simplefilter("ignore")
    be_launched()
    options: dict[str, Any] = {}
    if sharded:
        wrap = {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20}
        options = {"fsdp": True, "fsdp_config": wrap}
    with fsdp_on_cpu():
        through, (trainer, _) = run(f"{folder}/through", **options)
        assert isinstance(trainer.model, FSDPModule) == sharded
        found: list[Any] = []
        for step, damaged in ((2, False), (6, False), (7, False), (8, True)):
            place = f"{folder}/{step}"
            stopped, _ = run(place, stop=step, **options)
            set_aside(place)
            if damaged and dist.get_rank() == 0:
                damage(place, step, rank=1)
            ended, (_, callback) = run(place, **options)
            assert callback.restored.objects["iteration"] == step - damaged
            found.append(differences(ended, through))
    return [*found, stopped]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_go_on_to_the_same_bits_and_one_takes_over(sharded: bool, tmp_path: Path) -> None:
    found = run_ranks(on_ranks, 2, str(tmp_path), sharded, timeout_s=240)
    assert [odd for *odd, _ in found] == [[[]] * 4] * 2
    stopped = found[0][-1]
    place = str(tmp_path / "8-aside")
    seen: list[dict[str, Tensor]] = []
    ended, (_, callback) = run(place, others=[looker(seen)])
    assert callback.restored.objects["iteration"] == 8
    assert differences(without_random(seen[0]), without_random(stopped)) == []
    assert ended["step"] == 18


def test_what_can_not_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = Network()
    model.net.register_module("odd", WithExtraState())
    arguments = TrainingArguments(output_dir=str(tmp_path / "own"), report_to=[], use_cpu=True)
    with CheckpointManager(tmp_path / "run", preemption_signals=()) as manager:
        callback = ShardedCheckpoint(manager)
        samples = [{"x": x, "labels": y} for x, y in data()]
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
        with pytest.raises(UnsupportedError, match="_extra_state: must be empty"):
            callback.train(trainer)
        trainer.accelerator = SimpleNamespace(distributed_type="DEEPSPEED")
        with pytest.raises(UnsupportedError, match="accelerator: must train .*, got DEEPSPEED"):
            callback.train(trainer)
    assert trainer.state.global_step == 0


class WithExtraState(nn.Identity):
    """A module with state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state
