"""When a run is saved, what is kept, and what is the latest: on one rank, where nothing else is."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Run, give_gradients

from ckpttools import api
from ckpttools.errors import FormatError, MismatchError, OptimizerError, StorageError, UsageError
from ckpttools.hooks import manager as manager_module
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.step_directory import StepDirectory, step_name
from ckpttools.manifest import WEIGHT
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig


def saved(directory: Path, *steps: int, **settings: Any) -> Run:
    """Save a run at some steps, one training step before each."""
    run = Run(asynchronous=False, **settings)
    with run.manager(directory) as manager:
        for step in steps:
            run.train(step, step + 1)
            manager.save(step, run.model, run.optimizer, run.scheduler, extra={"step": step})
        assert manager.notes == ()
    return run


def restored(directory: Path, **options: Any) -> tuple[Run, Any]:
    run = Run()
    with run.manager(directory) as manager:
        found = restore(manager, run, **options)
    return run, found


def restore(manager: CheckpointManager, run: Run, **options: Any) -> Restored:
    return manager.restore(run.model, run.optimizer, run.scheduler, **options)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def weights(run: Run) -> list[torch.Tensor]:
    return [param.detach().clone() for param in run.model.parameters()]


# ---- when ------------------------------------------------------------------------------------


def decisions(manager: CheckpointManager, run: Run, steps: range) -> list[int]:
    return [step for step in steps if manager.save(step, run.model, run.optimizer)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_third_step_is_saved_where_that_is_asked_for_and_any_by_force(
    asynchronous: bool, tmp_path: Path
) -> None:
    run = Run(every_steps=3, asynchronous=asynchronous)
    with run.manager(tmp_path) as manager:
        assert decisions(manager, run, range(1, 8)) == [3, 6]
        assert manager.save(8, run.model, run.optimizer, force=True)
        assert not manager.should_save(10)
    assert manager.all_steps() == [3, 6, 8]


def test_a_step_is_saved_when_enough_seconds_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: now[0])
    run = Run(every_seconds=10.0, asynchronous=False)
    with run.manager(tmp_path) as manager:
        taken = []
        for step in range(1, 9):
            now[0] += 4.0
            if manager.save(step, run.model, run.optimizer):
                taken.append(step)
    assert taken == [3, 6]


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        assert manager.save(5, run.model, run.optimizer)
        assert not manager.save(5, run.model, run.optimizer)


def test_a_signal_saves_at_the_next_step_durably_and_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(every_steps=1000, preemption_signals=(signal.SIGTERM,))
    with run.manager(tmp_path) as manager:
        assert not manager.save(1, run.model, run.optimizer)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.preempted  # not before all ranks have agreed
        assert manager.save(2, run.model, run.optimizer)
        assert manager.preempted
        assert manager.latest() == 2  # asynchronous, and on disk all the same
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_are_set_up_in_the_main_thread_or_not_at_all(tmp_path: Path) -> None:
    said: list[str] = []

    def make() -> None:
        CheckpointManager(tmp_path, preemption_signals=())
        try:
            CheckpointManager(tmp_path)
        except UsageError as error:
            said.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "must be set up in the main thread" in said[0]


# ---- what is kept ----------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_steps_and_every_tenth_are_kept(asynchronous: bool, tmp_path: Path) -> None:
    run = Run(keep_last=2, keep_every=10, asynchronous=asynchronous)
    with run.manager(tmp_path) as manager:
        for step in (5, 10, 15, 20, 25, 30, 35):
            manager.save(step, run.model, run.optimizer)
    assert manager.all_steps() == [10, 20, 30, 35]
    assert names(tmp_path) == ["latest", *map(step_name, (10, 20, 30, 35))]


def test_the_latest_is_kept_although_a_later_step_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30)
    saved(tmp_path, 5, keep_last=1)  # a run that began again
    directory = StepDirectory(tmp_path)
    assert (directory.latest(), directory.steps()) == (5, [5, 30])


def test_only_the_last_steps_keep_more_than_their_weights(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep_optimizer_last=2)
    slots = {
        step: {spec.slot for spec in api.read_manifest(tmp_path / step_name(step)).tensors}
        for step in (1, 2, 3)
    }
    assert slots[1] == {WEIGHT}
    assert slots[2] == slots[3] != {WEIGHT}
    assert api.verify(tmp_path / step_name(1)).damage == ()
    assert names(tmp_path) == ["latest", *map(step_name, (1, 2, 3))]


def test_a_step_that_can_not_be_removed_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(keep_last=1, asynchronous=False)
    with run.manager(tmp_path) as manager:
        manager.save(1, run.model, run.optimizer)
        with monkeypatch.context() as patch:

            def refuse(self: StepDirectory, step: int) -> Path:
                raise StorageError(f"{self.path(step)}: can't remove it: no")

            patch.setattr(StepDirectory, "hide", refuse)
            manager.save(2, run.model, run.optimizer)
        assert "step-0000000001: can't remove it" in manager.notes[0]
        assert manager.all_steps() == [1, 2]
        manager.save(3, run.model, run.optimizer)
        assert manager.all_steps() == [3]


def test_a_step_that_is_there_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    with pytest.raises(StorageError, match="step-0000000004: the destination must not exist"):
        saved(tmp_path, 4)
    run = saved(tmp_path, 3, 4, overwrite=True)
    assert same(weights(restored(tmp_path)[0]), weights(run))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# ---- what is the latest ----------------------------------------------------------------------


def test_latest_is_what_the_sealed_file_names_and_else_the_newest(tmp_path: Path) -> None:
    directory = StepDirectory(tmp_path / "run")
    assert directory.latest() is None
    assert directory.steps() == []
    saved(tmp_path / "run", 1, 2, 3)
    with directory.announced(2):
        pass
    assert directory.latest() == 2
    assert directory.newest_first() == [2, 1, 3]
    data = (tmp_path / "run" / "latest").read_bytes()
    (tmp_path / "run" / "latest").write_bytes(data.replace(b'"step": 2', b'"step": 1'))
    assert directory.latest() == 3  # its seal is broken
    with directory.announced(7):
        pass
    assert directory.latest() == 3  # what it names is not there


def test_what_killed_saves_left_is_swept_and_the_rest_stays(tmp_path: Path) -> None:
    left = [".step-0000000009.partial-0123456789ab", ".step-0000000009.ranks-0123456789ab"]
    left += [".step-0000000002.removed-abcdefabcdef"]
    for name in (*left, "notes", ".step-0000000009.other", "step-0000000009.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / f"{left[0]}.journal").write_bytes(b"")
    (tmp_path / ".latest-0123456789ab").write_bytes(b"")
    saved(tmp_path, 1)
    kept = [".step-0000000009.other", "latest", "notes", "step-0000000001"]
    assert names(tmp_path) == [*kept, "step-0000000009.partial"]


# ---- restoring -------------------------------------------------------------------------------


def test_a_damaged_latest_is_passed_over_and_told_and_may_be_saved_again(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)
    saved(tmp_path, 2)
    victim = next((tmp_path / step_name(2)).glob("rank-*"))
    os.truncate(victim, victim.stat().st_size - 4)
    run = Run(asynchronous=False)
    with run.manager(tmp_path) as manager:
        found = manager.restore(run.model, run.optimizer, run.scheduler)
        assert found.objects["iteration"] == 1
        assert found.objects["extra"] == {"step": 1}
        assert any("step 2: damaged, so passed over" in note for note in found.notes)
        assert same(weights(run), weights(first))
        assert manager.save(2, run.model, run.optimizer, run.scheduler)
    assert restored(tmp_path)[1].objects["iteration"] == 2


def test_a_flipped_bit_is_found_before_anything_is_taken_over(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    victim = next((tmp_path / step_name(2)).glob("rank-*"))
    data = bytearray(victim.read_bytes())
    data[-3] ^= 4
    victim.write_bytes(data)
    _, found = restored(tmp_path)
    assert found.objects["iteration"] == 1
    assert "CRC-32 must be" in next(note for note in found.notes if "damaged" in note)
    assert restored(tmp_path, verify=False)[1].objects["iteration"] == 2


def test_a_named_step_that_is_damaged_or_missing_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / step_name(2) / "manifest.json").write_bytes(b"{}")
    with pytest.raises((FormatError, StorageError)):
        restored(tmp_path, step=2)
    with pytest.raises(StorageError, match="must exist"):
        restored(tmp_path, step=3)
    with pytest.raises(StorageError, match="must hold a complete step, got none"):
        restored(tmp_path / "nowhere")


def test_a_checkpoint_that_does_not_fit_is_an_error_and_none_before_it_is_taken(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 1, 2)
    other = torch.nn.Linear(3, 2)
    run = Run()
    optimizer = DistributedOptimizer(other, OptimizerConfig(lr=0.1))
    with run.manager(tmp_path) as manager, pytest.raises(MismatchError, match="weight"):
        manager.restore(other, optimizer, allow=("scheduler",))


def test_what_one_side_lacks_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    run = Run()
    with run.manager(tmp_path) as manager:
        before = weights(run)
        with pytest.raises(MismatchError, match="scheduler: must be taken over, got a run that"):
            manager.restore(run.model, run.optimizer)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(MismatchError, match="scaler: must be in the checkpoint, got none"):
            manager.restore(run.model, run.optimizer, run.scheduler, scaler)
        assert same(before, weights(run))
        with pytest.raises(UsageError, match="allow: must be among"):
            manager.restore(run.model, run.optimizer, allow=("schedule",))
        found = manager.restore(
            run.model, run.optimizer, None, scaler, allow=("scaler", "scheduler")
        )
    assert "scheduler: the checkpoint's is not taken, since this run has none" in found.notes
    assert "scaler: the checkpoint has none for this rank, so this run's stays" in found.notes


class Picky:
    """A scheduler that refuses what it gets, once it has taken half of it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value == 13:
            raise ValueError("not 13")


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    with run.manager(tmp_path) as manager:
        manager.save(2, run.model, run.optimizer, Picky(13))
    fresh, picky = Run(), Picky(4)
    before = weights(fresh)
    with fresh.manager(tmp_path) as manager, pytest.raises(ValueError, match="not 13"):
        manager.restore(fresh.model, fresh.optimizer, picky)
    assert picky.value == 4
    assert same(before, weights(fresh))


def test_restoring_draws_no_random_number_and_takes_no_step(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    run = Run()
    state = torch.get_rng_state()
    with run.manager(tmp_path) as manager:
        manager.restore(run.model, run.optimizer, run.scheduler, rng=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(run.optimizer.steps.values()) == {1}
    assert run.scheduler.last_epoch == 1


# ---- moments at which a run can't be saved ---------------------------------------------------


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_save_inside_no_sync_is_refused_and_unused_gradients_are_told(
    kind: str, tmp_path: Path
) -> None:
    run = Run(kind, asynchronous=False)
    with run.manager(tmp_path) as manager:
        refused = pytest.raises(OptimizerError, match="must be called outside no_sync")
        with run.optimizer.no_sync(), refused:
            manager.save(1, run.model, run.optimizer, run.scheduler)
        run.model(torch.ones(2, 13)).sum().backward()
        manager.save(1, run.model, run.optimizer, run.scheduler)
        found = manager.restore(run.model, run.optimizer, run.scheduler)
        assert any(note.startswith("gradients: some were not used") for note in found.notes)
        run.optimizer.step()
        manager.save(2, run.model, run.optimizer, run.scheduler)
        found = manager.restore(run.model, run.optimizer, run.scheduler)
        assert not any(note.startswith("gradients") for note in found.notes)


def test_what_can_not_be_stored_as_data_is_refused_by_its_path(tmp_path: Path) -> None:
    run = Run(asynchronous=False)
    give_gradients(run.model, 1)
    with run.manager(tmp_path) as manager:
        with pytest.raises(FormatError, match=r"extra\.a\[1\]: must be plain data, got function"):
            manager.save(1, run.model, run.optimizer, extra={"a": [1, give_gradients]})
        assert manager.all_steps() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"format": "zip"},
            "format: must be one of sharded, gathered, gathered-zarr, dcp, got 'zip'",
        ),
        ({"keep_last": 0}, "keep_last: must be at least 1, got 0"),
        ({"every_steps": 0}, "every_steps: must be positive, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointManager(tmp_path, preemption_signals=(), **settings)


@pytest.mark.parametrize(("form", "name"), [("gathered", "safetensors"), ("gathered-zarr", "zarr")])
def test_whole_tensors_are_saved_where_that_is_asked_for(
    form: str, name: str, tmp_path: Path
) -> None:
    run = Run(format=form)
    with run.manager(tmp_path) as manager:
        manager.save(3, run.model, run.optimizer)
        assert manager.latest() == 3
    assert api.detect_format(tmp_path / step_name(3)).name == name
