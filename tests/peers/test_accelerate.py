"""A loop with an Accelerator goes on from every step to the bits of one that never stopped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from peers.trainer_runs import BATCH, data, differences, needs, network, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.accelerate import AcceleratedCheckpoints
from ckpttools.hooks.manager import CheckpointManager

pytestmark = needs("accelerate")
EPOCHS = 3


class Counter:
    """What a script may give to ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def accelerator(accumulate: int = 1, *, seedable: bool = True) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )


def run(folder: str, *, stop: int = -1, accumulate: int = 1) -> dict[str, Tensor]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from accelerate.utils import set_seed

    accelerate = accelerator(accumulate)
    set_seed(5)
    inner = network()
    torch.manual_seed(9)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    model, prepared, loader, scheduler = accelerate.prepare(
        inner,
        optimizer,
        DataLoader(data(), BATCH, shuffle=True),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    counter = Counter()
    accelerate.register_for_checkpointing(counter)
    step = 0
    with CheckpointManager(folder, every_steps=1, preemption_signals=()) as manager:
        checkpoints = AcceleratedCheckpoints(accelerate, manager)
        restored = checkpoints.restore(model, prepared, scheduler)
        if restored is not None:
            step = int(str(restored.objects["iteration"]))
            extra: Any = restored.objects["extra"]
            assert extra["extra"] == {"name": "mine"}
        while checkpoints.epoch < EPOCHS and step != stop:
            for inputs, targets in checkpoints.batches(loader):
                with accelerate.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerate.backward(loss)
                    prepared.step()
                    scheduler.step()
                    prepared.zero_grad()
                if accelerate.sync_gradients:
                    step += 1
                    counter.count += 1
                    checkpoints.save(step, model, prepared, scheduler, extra={"name": "mine"})
                    if step == stop:
                        break
    state = state_of(inner, optimizer, scheduler.get_last_lr(), step)
    return state | {"counter": torch.tensor(counter.count)}


# An epoch has 6 batches, or 3 steps of two.
@pytest.mark.parametrize(("accumulate", "steps"), [(1, (1, 5, 6, 7, 17)), (2, (2, 3, 8))])
def test_a_loop_goes_on_from_any_step_to_the_bits_of_one_that_never_stopped(
    tmp_path: Path, accumulate: int, steps: tuple[int, ...]
) -> None:
    through = run(str(tmp_path / "through"), accumulate=accumulate)
    for step in steps:
        place = str(tmp_path / str(step))
        assert differences(run(place, stop=step, accumulate=accumulate), through)
        assert differences(run(place, accumulate=accumulate), through) == [], step


def on_ranks(folder: str) -> list[list[str]]:
    warnings.simplefilter("ignore")
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    through = run(f"{folder}/through")
    found = []
    for step in (2, 3, 4):  # an epoch has 3 batches for each rank
        run(f"{folder}/{step}", stop=step)
        found.append(differences(run(f"{folder}/{step}"), through))
    return found


def test_two_processes_go_on_to_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, 2, str(tmp_path), timeout_s=240) == [[[], [], []]] * 2


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Any]:
    """Yield an accelerator, what it has prepared, and a manager."""
    accelerate = accelerator()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        yield accelerate, *accelerate.prepare(model, optimizer), manager


def test_an_order_that_cannot_be_had_again_is_refused(saved: Any) -> None:
    *_, manager = saved
    accelerate = accelerator(seedable=False)
    loader = accelerate.prepare(DataLoader(data(), BATCH, shuffle=True))
    with pytest.raises(UsageError, match="loader: must draw its order from the epoch"):
        next(AcceleratedCheckpoints(accelerate, manager).batches(loader))


def test_a_checkpoint_of_other_objects_or_of_the_manager_alone_is_refused(saved: Any) -> None:
    accelerate, model, optimizer, manager = saved
    manager.save(1, model, optimizer.optimizer)
    checkpoints = AcceleratedCheckpoints(accelerate, manager)
    with pytest.raises(MismatchError, match="extra: must be that of AcceleratedCheckpoints"):
        checkpoints.restore(model, optimizer)
    checkpoints.save(2, model, optimizer)
    accelerate.register_for_checkpointing(Counter())
    with pytest.raises(MismatchError, match="registered: must be the 0 objects .* got 1"):
        checkpoints.restore(model, optimizer)
