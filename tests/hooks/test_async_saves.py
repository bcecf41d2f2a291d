"""A save behind the training holds the values of its call; if it fails, every rank hears of it."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from training_runs import Run

from ckpttools import api
from ckpttools.errors import CkptError
from ckpttools.hooks import background, step_writer
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.step_directory import StepDirectory, step_name

SOON_S = 10


def spoil(run: Run) -> None:
    """Change everything that was saved, in place, at once."""
    with torch.no_grad():
        for param in run.model.parameters():
            param.fill_(7.0)
        for shard in run.optimizer.shards:
            for tensor in shard.slots().values():
                tensor.fill_(3)
    run.optimizer.steps.update(dict.fromkeys(run.optimizer.steps, 99))
    for group in run.optimizer.param_groups:
        group["lr"] = 55.0


# ---- values ----------------------------------------------------------------------------------


def saved_twice_and_spoiled(folder: str, kind: str) -> bool:
    """Save at once, then behind the training with everything changed under it; and once more."""
    root = Path(folder)
    run = Run(kind, "bf16")
    with (
        CheckpointManager(root / "now", asynchronous=False, preemption_signals=()) as now,
        CheckpointManager(root / "behind", preemption_signals=()) as behind,
    ):
        behind.prepare(run.model, run.optimizer)
        for step in (1, 2):
            run.train(step, step + 1)
            now.save(step, run.model, run.optimizer, run.scheduler, extra={"step": step})
            behind.save(step, run.model, run.optimizer, run.scheduler, extra={"step": step})
            if step == 2:
                spoil(run)
    return True


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_what_is_saved_behind_the_training_are_the_values_of_the_call(
    kind: str, tmp_path: Path
) -> None:
    assert all(run_ranks(saved_twice_and_spoiled, 2, str(tmp_path), kind))
    for step in (1, 2):
        now, behind = (tmp_path / name / step_name(step) for name in ("now", "behind"))
        for file in sorted(now.iterdir()):
            if file.suffix == ".safetensors":
                assert file.read_bytes() == (behind / file.name).read_bytes()
        left, right = (api.read_manifest(path).objects for path in (now, behind))
        assert [left[key] for key in ("step", "param_groups")] == [
            right[key] for key in ("step", "param_groups")
        ]
        assert left["training"]["extra"] == {"step": step}
    assert not api.diff(tmp_path / "now" / step_name(1), tmp_path / "now" / step_name(2)).equal


class Gate:
    """Holds every background write at its beginning until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside = threading.Event()
        self._write = background.write_image

    def __call__(self, *args: Any) -> Any:
        self.inside.set()
        assert self.open.wait(SOON_S)
        return self._write(*args)


def overlapping(folder: str) -> list[int]:
    gate = Gate()
    background.write_image = gate
    run = Run()
    seen: list[int] = []
    with run.manager(Path(folder)) as manager:
        run.train(1, 2)
        manager.save(1, run.model, run.optimizer, run.scheduler)
        assert gate.inside.wait(SOON_S)
        run.train(2, 3)  # the groups belong to the training while the first save is held
        seen += manager.all_steps()
        opener = threading.Thread(target=gate.open.set)
        opener.start()
        manager.save(2, run.model, run.optimizer, run.scheduler)  # waits for the first
        seen += manager.all_steps()
        opener.join()
    return [*seen, *manager.all_steps()]


def test_a_second_save_waits_for_the_first_and_both_are_whole(tmp_path: Path) -> None:
    for rank in run_ranks(overlapping, 2, str(tmp_path)):
        assert rank[:1] == [1]  # nothing while it was held; then the first
        assert rank[-2:] == [1, 2]
    again = Run(asynchronous=False)
    with again.manager(tmp_path / "reference") as manager:
        for step in (1, 2):
            again.train(step, step + 1)
            manager.save(step, again.model, again.optimizer, again.scheduler)
    for step in (1, 2):
        assert api.diff(tmp_path / step_name(step), tmp_path / "reference" / step_name(step)).equal


# ---- failures --------------------------------------------------------------------------------


def full_disk(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def break_write(patch: pytest.MonkeyPatch, _folder: str) -> None:
    patch.setattr("ckpttools.storage.local.os.pwrite", full_disk)


def break_file_size(_patch: pytest.MonkeyPatch, _folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))


def break_publish(patch: pytest.MonkeyPatch, _folder: str) -> None:
    patch.setattr("ckpttools.storage.commit._rename_new", full_disk)


def break_latest(patch: pytest.MonkeyPatch, _folder: str) -> None:
    patch.setattr("ckpttools.hooks.step_directory.serialize", full_disk)


def break_view(patch: pytest.MonkeyPatch, folder: str) -> None:
    """Let this rank see another directory under the same name."""

    def elsewhere(first: Any, *rest: Any) -> Path:
        return Path(str(first).replace(folder, f"{folder}-of-another-host"), *rest)

    patch.setattr(step_writer, "Path", elsewhere)


def break_copy(patch: pytest.MonkeyPatch, _folder: str) -> None:
    def no_memory(*_: Any) -> None:
        raise MemoryError("no room for the copy")

    patch.setattr("ckpttools.hooks.host_images.HostImages.take", no_memory)


BREAKS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch, str], None], str]] = {
    "full disk": (1, break_write, "No space left on device"),
    "full disk of rank 0": (0, break_write, "No space left on device"),
    "file too large": (1, break_file_size, "File too large"),
    "can't publish": (0, break_publish, "can't publish it: No space left"),
    "can't move latest": (0, break_latest, "can't move it: No space left"),
    "sees another directory": (1, break_view, "every rank must see this directory"),
    "no memory": (1, break_copy, "no room for the copy"),
}
CALLS: dict[str, Callable[[Any, Run], Any]] = {
    "wait": lambda manager, _run: manager.wait(),
    "should_save": lambda manager, _run: until_told(manager),
    "save": lambda manager, run: manager.save(3, run.model, run.optimizer, run.scheduler),
}


def until_told(manager: Any) -> None:
    """Ask at every step; the answer may still be on its way."""
    stop = time.monotonic() + SOON_S
    step = 3
    while time.monotonic() < stop:
        manager.should_save(step)
        step += 1


def broken_saves(folder: str, asynchronous: bool) -> dict[str, tuple[str, float, list[int], Any]]:
    """Break a save in every way and ask in every way; return what was said, when, and is left."""
    told = {}
    for (name, (victim, break_it, _)), ask in zip(
        BREAKS.items(), list(CALLS.values()) * 3, strict=False
    ):
        place = Path(folder) / name
        run = Run(asynchronous=asynchronous)
        manager = run.manager(place)
        run.train(1, 2)
        manager.save(1, run.model, run.optimizer, run.scheduler)
        manager.wait()
        dist.barrier()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == victim:
                break_it(patch, str(place))
            started = time.monotonic()
            try:
                manager.save(2, run.model, run.optimizer, run.scheduler)
                ask(manager, run)
                said = "nothing was raised"
            except (CkptError, OSError, MemoryError) as error:
                said = str(error)
            seconds = time.monotonic() - started
            dist.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        latest = manager.latest()
        manager.save(9, run.model, run.optimizer, run.scheduler)  # it works again
        manager.close()
        dist.barrier()
        left = sorted(path.name for path in place.iterdir())
        told[name] = (said, seconds, [latest or 0, manager.latest() or 0], left)
    return told


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_on_one_rank_is_told_on_all_and_latest_stays(
    asynchronous: bool, tmp_path: Path
) -> None:
    found = run_ranks(broken_saves, 3, str(tmp_path), asynchronous)
    for told in found:
        for name, (said, seconds, latest, left) in told.items():
            if name == "no memory" and not asynchronous:
                continue  # nothing is copied
            assert BREAKS[name][2] in said, name
            assert seconds < SOON_S, name
            assert latest == [1, 9], name
            assert not [one for one in left if one.startswith(".")], name
            assert [one for one in left if one not in {"latest", step_name(2)}] == [
                step_name(1),
                step_name(9),
            ]


def late(folder: str, victim: int) -> tuple[str, float]:
    gate = Gate()
    if dist.get_rank() == victim:
        background.write_image = gate
    run = Run(deadline_s=0.3)
    manager = run.manager(Path(folder))
    started = time.monotonic()
    manager.save(1, run.model, run.optimizer, run.scheduler)
    if dist.get_rank() == victim:
        meeting = next(Path(folder).glob(".*.ranks-*"))
        threading.Thread(target=open_when, args=(gate, meeting / "verdict")).start()
    try:
        manager.wait()
    except CkptError as error:
        return str(error), time.monotonic() - started
    return "nothing was raised", 0.0


def open_when(gate: Gate, verdict: Path) -> None:
    stop = time.monotonic() + SOON_S
    while not verdict.exists() and time.monotonic() < stop:
        pass
    gate.open.set()


def test_a_rank_that_is_late_is_named_on_all_ranks(tmp_path: Path) -> None:
    for said, seconds in run_ranks(late, 2, str(tmp_path), 1):
        assert "rank 1: must have its files on disk before the deadline, got silence" in said
        assert seconds < SOON_S
    assert StepDirectory(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []


def dying(folder: str, victim: int) -> tuple[str, float]:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        background.write_image = die
    run = Run()
    manager = run.manager(Path(folder))
    started = time.monotonic()
    manager.save(1, run.model, run.optimizer, run.scheduler)
    manager._writer.join()
    error = manager._writer._under_way._error  # type: ignore[union-attr]
    return str(error), time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_is_not_waited_for(victim: int, tmp_path: Path) -> None:
    found = run_ranks(dying, 3, str(tmp_path), victim, may_die=[victim])
    for rank, result in enumerate(found):
        if rank != victim:
            said, seconds = result
            assert f"rank {victim}: must" in said
            assert "got a process that has ended" in said
            assert seconds < SOON_S
    assert StepDirectory(tmp_path).latest() is None
