"""Hugging Face's Trainer goes on from every step to the bits of a run that never stopped."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from peers.trainer_runs import BATCH, data, differences, needs, network, state_of
from torch import Tensor, nn

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.manager import CheckpointManager
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


def run(
    folder: str,
    *,
    stop: int = -1,
    accumulate: int = 1,
    dies: bool = False,
    signals: bool = False,
    train: bool = True,
    step: int | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from transformers import Trainer, TrainingArguments

    model = Network()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments = TrainingArguments(
        output_dir=f"{folder}-own",
        save_strategy="no",
        per_device_train_batch_size=BATCH // ranks,
        num_train_epochs=EPOCHS,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.01,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=9,
    )
    samples = [{"x": x, "labels": y} for x, y in data()]
    with CheckpointManager(
        folder, every_steps=1, overwrite=True, preemption_signals=(10,) if signals else ()
    ) as manager:
        callback = ShardedCheckpoint(manager)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=samples,
            eval_dataset=samples,
            callbacks=[*([callback] if train else []), stopper(stop, dies=dies, signals=signals)],
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
    again, (_, callback) = run(str(tmp_path / "run"), step=4, stop=-1)
    assert callback.restored.objects["iteration"] == 4
    assert differences(again, through) == []


def test_a_signal_saves_the_step_and_stops_the_trainer(tmp_path: Path) -> None:
    through, _ = run(str(tmp_path / "through"))
    stopped, (_, callback) = run(str(tmp_path / "run"), stop=7, signals=True)
    assert callback.manager.latest() == stopped["step"] == 7
    ended, _ = run(str(tmp_path / "run"))
    assert differences(ended, through) == []


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


def on_ranks(folder: str) -> list[list[str]]:
    warnings.simplefilter("ignore")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    through, _ = run(f"{folder}/through")
    found = []
    for step in (2, 6):
        run(f"{folder}/{step}", stop=step)
        ended, _ = run(f"{folder}/{step}")
        found.append(differences(ended, through))
    return found


def test_two_ranks_under_ddp_go_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, 2, str(tmp_path), timeout_s=240) == [[[], []]] * 2
