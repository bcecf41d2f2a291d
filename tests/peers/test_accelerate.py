"""A loop with an Accelerator goes on from every step to the bits of one that never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
from torch.utils.data import DataLoader

from ckpttools.errors import MismatchError, UnsupportedError, UsageError
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


def accelerator(accumulate: int = 1, *, seedable: bool = True, sharded: bool = False) -> Any:
    from accelerate import (
        Accelerator,
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
    )
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
        **({"fsdp_plugin": plugin} if sharded else {}),
    )


def run(
    folder: str, *, stop: int = -1, accumulate: int = 1, sharded: bool = False
) -> dict[str, Tensor]:
    """Train to the end or to step ``stop``, going on from what is in the folder."""
    from accelerate.utils import set_seed

    accelerate = accelerator(accumulate, sharded=sharded)
    set_seed(5)
    inner = network()
    torch.manual_seed(9)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    model, prepared, loader, scheduler = accelerate.prepare(
        inner,
        optimizer,
        DataLoader(data(), BATCH // accelerate.num_processes, shuffle=True),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    assert isinstance(model, FSDPModule) == sharded
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
    state = state_of(accelerate.unwrap_model(model), optimizer, scheduler.get_last_lr(), step)
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


def on_ranks(folder: str, sharded: bool) -> list[Any]:
    """Return what ends elsewhere than the run that never stopped, and the state at step 7."""
    warnings.simplefilter("ignore")
    be_launched()
    with fsdp_on_cpu():
        through = run(f"{folder}/through", sharded=sharded)
        found: list[Any] = []
        for step in (2, 6, 7):  # an epoch has 6 batches for each rank
            stopped = run(f"{folder}/{step}", stop=step, sharded=sharded)
            set_aside(f"{folder}/{step}")
            found.append(differences(run(f"{folder}/{step}", sharded=sharded), through))
    return [*found, stopped]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_go_on_to_the_same_bits_and_one_takes_over(
    sharded: bool, tmp_path: Path
) -> None:
    found = run_ranks(on_ranks, 2, str(tmp_path), sharded, timeout_s=240)
    assert [odd for *odd, _ in found] == [[[], [], []]] * 2
    stopped = found[0][-1]
    place = str(tmp_path / "7-aside")
    taken = run(place, stop=7)
    assert differences(without_random(taken), without_random(stopped)) == []
    ended = run(place)
    assert ended["step"] == 18
    assert differences(ended, taken)


def own_counts(folder: str) -> bool:
    """Save where each process has registered another count."""
    warnings.simplefilter("ignore")
    be_launched()
    accelerate = accelerator()
    model = network()
    counter = Counter()
    counter.count = dist.get_rank()
    accelerate.register_for_checkpointing(counter)
    with CheckpointManager(folder, preemption_signals=()) as manager:
        prepared = accelerate.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return AcceleratedCheckpoints(accelerate, manager).save(1, *prepared)


def test_what_differs_between_processes_is_told_where_their_number_is_another(
    tmp_path: Path,
) -> None:
    assert run_ranks(own_counts, 2, str(tmp_path)) == [True, True]
    accelerate = accelerator()
    model = network()
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        prepared = accelerate.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(MismatchError, match="extra: .* one for each of another number of"):
            AcceleratedCheckpoints(accelerate, manager).restore(*prepared)


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


def test_nothing_is_saved_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    accelerate = accelerator(accumulate=2)
    model = network()
    model, optimizer, loader = accelerate.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data(), BATCH)
    )
    saved: list[bool] = []
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        checkpoints = AcceleratedCheckpoints(accelerate, manager)
        for number, (inputs, targets) in enumerate(checkpoints.batches(loader)):
            with accelerate.accumulate(model):
                accelerate.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            saved.append(checkpoints.save(number, model, optimizer))
            if number == 2:
                with pytest.raises(UsageError, match="save: must follow a step, got force=True"):
                    checkpoints.save(number, model, optimizer, force=True)
    assert saved == [False, True] * 3
    assert manager.all_steps() == [1, 3, 5]


@pytest.mark.parametrize(
    ("kind", "version"), [("DEEPSPEED", 0), ("XLA", 0), ("MEGATRON_LM", 0), ("FSDP", 1)]
)
def test_runs_that_keep_parameters_elsewhere_are_refused_by_name(
    kind: str, version: int, tmp_path: Path
) -> None:
    from accelerate.utils import DistributedType

    told = SimpleNamespace(distributed_type=DistributedType(kind), is_fsdp2=version == 2)
    got = f"FSDP version {version}" if version else kind
    with pytest.raises(UnsupportedError, match=f"accelerator: must train .*, got {got}$"):
        AcceleratedCheckpoints(told, CheckpointManager(tmp_path, preemption_signals=()))


def test_an_evaluation_between_steps_leaves_the_place_in_the_data_alone(tmp_path: Path) -> None:
    accelerate = accelerator()
    model = network()
    model, optimizer, loader, other = accelerate.prepare(
        model, torch.optim.AdamW(model.parameters()), *(DataLoader(data(), BATCH) for _ in "ab")
    )
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        checkpoints = AcceleratedCheckpoints(accelerate, manager)
        for number, _ in enumerate(checkpoints.batches(loader), start=1):
            for inputs, _ in other:
                model(inputs)
            if number == 2:
                checkpoints.save(1, model, optimizer)
                break
        fresh = AcceleratedCheckpoints(accelerate, manager)
        fresh.restore(model, optimizer)
    assert (fresh.epoch, fresh.batch) == (0, 2)
    rest = [inputs for inputs, _ in fresh.batches(loader)]
    assert [len(inputs) for inputs in rest] == [4, 4, 4, 3]
    assert torch.equal(rest[0], data().tensors[0][2 * BATCH : 3 * BATCH])
