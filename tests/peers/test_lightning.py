"""Lightning's Trainer goes on from every step to the bits of a run that never stopped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
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
    needs,
    network,
    set_aside,
    state_of,
    without_random,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from ckpttools.errors import CkptError, MismatchError, UnsupportedError
from ckpttools.hooks.lightning import ShardedCheckpoint
from ckpttools.hooks.loader import ResumableLoader
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.supported import check_strategy

pytestmark = needs("lightning")
EPOCHS = 3


def module(*, sharded: bool = False) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.seen = 0

        def configure_model(self) -> None:
            if sharded and not isinstance(self.net, FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for layer in (self.net[0], self.net[3], self.net):
                    fully_shard(layer, mesh=mesh)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            del index
            self.seen += 1
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            del index
            self.net(batch[0])
            torch.rand(3)  # validation may draw, and its loader draws too

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = self.seen

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["seen"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
            return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]

    return Module()


def run(
    folder: str,
    *,
    stop: int = -1,
    accumulate: int = 1,
    loader: Any = None,
    signal_at: int | None = None,
    others: Sequence[Any] = (),
    sharded: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], ShardedCheckpoint]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from lightning.pytorch import Trainer

    model = module(sharded=sharded)
    torch.manual_seed(9)
    signals = () if signal_at is None else (10,)
    with CheckpointManager(folder, every_steps=1, preemption_signals=signals) as manager:
        callback = ShardedCheckpoint(manager)
        trainer = Trainer(
            max_steps=stop,
            max_epochs=EPOCHS,
            accelerator="cpu",
            callbacks=[callback, *others, *([] if signal_at is None else [signaller(signal_at)])],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=accumulate,
            val_check_interval=2,
            num_sanity_val_steps=1,
            **options,
        )
        trainer.fit(model, loader or ResumableLoader(data(), BATCH), DataLoader(data(), BATCH))
    rates = [config.scheduler.get_last_lr()[0] for config in trainer.lr_scheduler_configs]
    state = state_of(model.net, trainer.optimizers[0], rates, trainer.global_step)
    return state | {"seen": torch.tensor(model.seen)}, callback


def signaller(step: int) -> Any:
    from lightning.pytorch import Callback

    class Signaller(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            del args
            if trainer.global_step == step:
                os.kill(os.getpid(), 10)

    return Signaller()


# Validation follows batches 2 and 4 of each epoch's 5: steps before, at and after it, the first
# and the last of an epoch, and of the run.
@pytest.mark.parametrize(("accumulate", "steps"), [(1, (1, 2, 4, 5, 6, 14)), (2, (2, 3, 4))])
def test_a_run_goes_on_from_any_step_to_the_bits_of_one_that_never_stopped(
    tmp_path: Path, accumulate: int, steps: tuple[int, ...]
) -> None:
    through, _ = run(str(tmp_path / "through"), accumulate=accumulate)
    for step in steps:
        place = str(tmp_path / str(step))
        stopped, _ = run(place, stop=step, accumulate=accumulate)
        assert differences(stopped, through)
        ended, callback = run(place, accumulate=accumulate)
        assert differences(ended, through) == [], step
        assert callback.restored is not None
        assert callback.restored.objects["iteration"] == step
        assert callback.restored.notes == ()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_signal_saves_the_step_and_stops_the_trainer(accumulate: int, tmp_path: Path) -> None:
    through, _ = run(str(tmp_path / "through"), accumulate=accumulate)
    stopped, callback = run(str(tmp_path / "run"), signal_at=6, accumulate=accumulate)
    assert callback.manager.latest() == stopped["step"] == 7
    ended, _ = run(str(tmp_path / "run"), accumulate=accumulate)
    assert differences(ended, through) == []


def test_a_loader_without_a_state_is_told_of(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(data(), BATCH, shuffle=True, drop_last=True)
    run(str(tmp_path), stop=2, loader=loader)
    _, callback = run(str(tmp_path), stop=3, loader=loader)
    assert callback.restored is not None
    assert any("dataloader: it had no state_dict" in note for note in callback.restored.notes)


def test_a_step_that_was_saved_by_a_manager_alone_is_refused(tmp_path: Path) -> None:
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        manager.save(1, model, optimizer, Two())
    with pytest.raises(MismatchError, match="extra: must be the progress of Lightning's loops"):
        run(str(tmp_path))


class Two:
    """Looks like two schedulers of the run."""

    def state_dict(self) -> list[dict[str, object]]:
        return [{}, {}]

    def load_state_dict(self, state: list[dict[str, object]]) -> None:
        del state


def on_ranks(folder: str, sharded: bool) -> list[Any]:
    """Return what ends elsewhere than the run that never stopped, and the state at step 7."""
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.strategies import ModelParallelStrategy

    be_launched()
    warnings.simplefilter("ignore")
    ranks = dist.get_world_size()

    def options() -> dict[str, Any]:
        strategy = ModelParallelStrategy(ranks, 1) if sharded else "ddp"
        others = [Timer(interval="step")]  # its state, of times, is each rank's own
        return {"devices": ranks, "strategy": strategy, "sharded": sharded, "others": others}

    through, _ = run(f"{folder}/through", **options())
    found: list[Any] = []
    for step in (2, 7):
        stopped, _ = run(f"{folder}/{step}", stop=step, **options())
        set_aside(f"{folder}/{step}")
        ended, _ = run(f"{folder}/{step}", **options())
        found.append(differences(ended, through))
    return [*found, stopped]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_go_on_to_the_same_bits_and_one_takes_over(sharded: bool, tmp_path: Path) -> None:
    found = run_ranks(on_ranks, 2, str(tmp_path), sharded, timeout_s=240)
    assert [odd for *odd, _ in found] == [[[], []]] * 2
    stopped = found[0][-1]
    place = str(tmp_path / "7-aside")
    taken, callback = run(place, stop=7)
    assert differences(without_random(taken), without_random(stopped)) == []
    assert callback.restored is not None
    ended, _ = run(place)
    assert ended["step"] == 15
    assert differences(ended, taken)


class DyingError(Exception):
    """The run dies here."""


def dying(step: int) -> Any:
    from lightning.pytorch import Callback

    class Dying(Callback):
        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            del args
            if trainer.global_step == step:
                raise DyingError

    return Dying()


def test_a_run_that_died_in_the_middle_of_a_step_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    through, _ = run(str(tmp_path / "through"))
    with pytest.raises(DyingError):
        run(str(tmp_path / "run"), others=[dying(8)])
    ended, callback = run(str(tmp_path / "run"))
    assert callback.restored is not None
    assert callback.restored.objects["iteration"] == 8
    assert differences(ended, through) == []


def test_a_run_that_has_ended_does_nothing_more(tmp_path: Path) -> None:
    ended, _ = run(str(tmp_path))
    again, callback = run(str(tmp_path))
    assert differences(again, ended) == []
    assert callback.manager.all_steps() == list(range(1, 16))


def test_a_validation_after_the_training_leaves_random_generators_alone(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    _, callback = run(str(tmp_path), stop=2)
    torch.manual_seed(77)
    seeded = torch.get_rng_state()
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(callbacks=[callback], **quiet)
    trainer.validate(module(), DataLoader(data(), BATCH), verbose=False)
    after = torch.get_rng_state()
    torch.set_rng_state(seeded)
    Trainer(callbacks=[], **quiet).validate(module(), DataLoader(data(), BATCH), verbose=False)
    assert torch.equal(torch.get_rng_state(), after)


def test_what_can_not_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    model = module()
    for optimizers, message in (
        ([torch.optim.LBFGS(model.parameters())], "state for each parameter alone, got .*LBFGS"),
        ([torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)], "must be one .* got 2"),
    ):
        model.configure_optimizers = lambda made=optimizers: made
        model.automatic_optimization = False
        with CheckpointManager(tmp_path, preemption_signals=()) as manager:
            trainer = Trainer(
                accelerator="cpu", callbacks=[ShardedCheckpoint(manager)], logger=False
            )
            with pytest.raises(CkptError, match=message):
                trainer.fit(model, DataLoader(data(), BATCH))
        assert model.seen == 0


def test_strategies_that_keep_parameters_elsewhere_are_refused_by_name() -> None:
    from lightning.pytorch import strategies

    class Mine(strategies.DDPStrategy):
        """Somebody's own."""

    for kind in (strategies.SingleDeviceStrategy, Mine, strategies.ModelParallelStrategy):
        check_strategy(kind.__new__(kind))
    for kind in (strategies.FSDPStrategy, strategies.DeepSpeedStrategy, strategies.XLAStrategy):
        with pytest.raises(UnsupportedError, match=f"strategy: must be .*, got {kind.__name__}$"):
            check_strategy(kind.__new__(kind))
