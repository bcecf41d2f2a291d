"""Lightning's Trainer goes on from every step to the bits of a run that never stopped."""

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
from torch.utils.data import DataLoader

from ckpttools.errors import MismatchError
from ckpttools.hooks.lightning import ShardedCheckpoint
from ckpttools.hooks.loader import ResumableLoader
from ckpttools.hooks.manager import CheckpointManager

pytestmark = needs("lightning")
EPOCHS = 3


def module() -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.seen = 0

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            del index
            self.seen += 1
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            del batch, index
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
    **options: Any,
) -> tuple[dict[str, Tensor], ShardedCheckpoint]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from lightning.pytorch import Trainer

    model = module()
    torch.manual_seed(9)
    signals = () if signal_at is None else (10,)
    with CheckpointManager(folder, every_steps=1, preemption_signals=signals) as manager:
        callback = ShardedCheckpoint(manager)
        trainer = Trainer(
            max_steps=stop,
            max_epochs=EPOCHS,
            accelerator="cpu",
            callbacks=[callback, *([] if signal_at is None else [signaller(signal_at)])],
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


def test_a_signal_saves_the_step_and_stops_the_trainer(tmp_path: Path) -> None:
    through, _ = run(str(tmp_path / "through"))
    stopped, callback = run(str(tmp_path / "run"), signal_at=7)
    assert callback.manager.latest() == stopped["step"] == 8
    ended, _ = run(str(tmp_path / "run"))
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


def on_ranks(folder: str) -> list[list[str]]:
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(dist.get_rank()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    warnings.simplefilter("ignore")
    devices = {"devices": dist.get_world_size(), "strategy": "ddp"}
    through, _ = run(f"{folder}/through", **devices)
    found = []
    for step in (2, 7):
        run(f"{folder}/{step}", stop=step, **devices)
        ended, _ = run(f"{folder}/{step}", **devices)
        found.append(differences(ended, through))
    return found


def test_two_ranks_under_ddp_go_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, 2, str(tmp_path), timeout_s=240) == [[[], []]] * 2
