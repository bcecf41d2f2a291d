"""A run that is killed between a step's publication and the move of ``latest`` has that step.

Ranks are killed at the very operation. A run that then goes on must not meet the step again.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from training_runs import Run

from ckpttools.hooks.step_directory import StepDirectory
from ckpttools.storage.commit import Staging

pytestmark = pytest.mark.slow
MODES = ["now", "behind", "gathered"]


def run_in(mode: str, **settings: object) -> Run:
    form = "gathered" if mode == "gathered" else "sharded"
    return Run(asynchronous=mode == "behind", format=form, **settings)


def save_until_killed(folder: str, mode: str, when: str, overwrite: bool) -> None:
    """Save steps 3 and 6, and be killed when 6 is published."""
    run = run_in(mode, overwrite=overwrite)
    plain_replace, plain_publish = Path.replace, Staging.publish

    def replace(self: Path, target: Path) -> Path:
        if self.name.startswith(".latest-") and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain_replace(self, target)

    def publish(self: Staging) -> None:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        plain_publish(self)

    with run.manager(Path(folder)) as manager:
        run.train(1, 4)
        manager.save(3, run.model, run.optimizer, run.scheduler)
        manager.wait()
        setattr(Path, "replace", replace)  # noqa: B010  # types know it as final
        setattr(Staging, "publish", publish)  # noqa: B010
        run.train(4, 7)
        manager.save(6, run.model, run.optimizer, run.scheduler)
    raise AssertionError("nothing was killed")


def go_on(folder: str, mode: str) -> int:
    """Go on from what is there, without leave to overwrite; return where from."""
    run = run_in(mode)
    with run.manager(Path(folder)) as manager:
        restored = manager.restore(run.model, run.optimizer, run.scheduler)
        step = int(str(restored.objects["iteration"]))
        run.train(step + 1, 10)
        for after in (6, 9):
            if after > step:
                assert manager.save(after, run.model, run.optimizer, run.scheduler)
    return step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("when", "expected"), [("before", 3), ("after", 6)])
def test_what_was_published_is_the_latest_and_is_not_met_again(
    mode: str, when: str, expected: int, tmp_path: Path
) -> None:
    run_ranks(save_until_killed, 1, str(tmp_path), mode, when, False, may_die=[0])
    directory = StepDirectory(tmp_path)
    assert directory.latest() == expected
    assert (6 in directory.steps()) == (expected == 6)
    assert run_ranks(go_on, 1, str(tmp_path), mode) == [expected]
    assert directory.latest() == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        *(f"step-000000000{step}" for step in (3, 6, 9)),
    ]


@pytest.mark.parametrize("mode", ["now", "behind"])
@pytest.mark.parametrize(("when", "expected"), [("before", 3), ("after", 6)])
def test_a_step_of_an_abandoned_branch_is_not_taken_for_the_one_that_replaces_it(
    mode: str, when: str, expected: int, tmp_path: Path
) -> None:
    abandoned = run_in("now")
    with abandoned.manager(tmp_path) as manager:
        manager.save(6, abandoned.model, abandoned.optimizer, abandoned.scheduler)
    run_ranks(save_until_killed, 1, str(tmp_path), mode, when, True, may_die=[0])
    assert StepDirectory(tmp_path).steps() == [3, 6]
    assert StepDirectory(tmp_path).latest() == expected


def test_a_sweep_makes_a_published_step_the_latest(tmp_path: Path) -> None:
    run_ranks(save_until_killed, 1, str(tmp_path), "now", "after", False, may_die=[0])
    directory = StepDirectory(tmp_path)
    directory.sweep()
    assert not list(tmp_path.glob(".latest-*"))
    assert directory.latest() == 6
    with pytest.raises(Exception, match="must not be the latest"):
        directory.hide(6)


def test_a_run_that_goes_on_from_an_earlier_step_is_told_of_those_in_its_way(
    tmp_path: Path,
) -> None:
    def notes(run: Run, step: int | None) -> str:
        with run.manager(tmp_path) as manager:
            found = manager.restore(run.model, run.optimizer, run.scheduler, step=step)
        return " ".join(found.notes)

    run = run_in("now")
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            run.train(step, step + 1)
            manager.save(step, run.model, run.optimizer, run.scheduler)
    assert "later steps are there (2, 3)" in notes(run_in("now"), 1)
    assert "later" not in notes(run_in("now"), None)
    assert "later" not in notes(run_in("now", overwrite=True), 1)


def test_what_is_removed_has_lost_its_name_when_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to delete it."""
    going, gone = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        going.wait(30)
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        gone.set()

    monkeypatch.setattr("ckpttools.hooks.removals.shutil.rmtree", slow)
    run = run_in("now", keep_last=1)
    with run.manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, run.model, run.optimizer, run.scheduler)
        assert manager.all_steps() == [2]
        assert len(list(tmp_path.glob(".step-0000000001.removed-*"))) == 1
        assert not gone.is_set()
        going.set()
    assert gone.is_set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0000000002"]
