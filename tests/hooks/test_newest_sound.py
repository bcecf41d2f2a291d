"""The step that a run would go on from can be asked for before there is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from training_runs import Run

from ckpttools.errors import FormatError, StorageError
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.newest_sound import newest_sound
from ckpttools.hooks.step_directory import StepDirectory, step_name
from ckpttools.storage.sealed_json import serialize


def save(folder: Path, *steps: int) -> None:
    run = Run()
    with run.manager(folder) as manager:
        for step in steps:
            run.train(step, step + 1)
            manager.save(step, run.model, run.optimizer)


def damage(folder: Path, step: int) -> None:
    place = folder / step_name(step) / "rank-00000.safetensors"
    stored = bytearray(place.read_bytes())
    stored[-1] ^= 1
    place.write_bytes(stored)


def test_it_is_the_latest_where_that_is_sound_and_none_where_nothing_is_saved(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, preemption_signals=()) as manager:
        assert manager.newest_sound() is None
        save(tmp_path, 1, 2)
        found = manager.newest_sound()
    assert found is not None
    assert (found.step, found.notes) == (2, ())


def test_damaged_ones_are_passed_over_and_told_and_may_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    (tmp_path / step_name(2) / "manifest.json").unlink()
    run = Run(asynchronous=False)
    with run.manager(tmp_path) as manager:
        found = manager.newest_sound()
        assert found is not None
        assert found.step == 1
        assert [note.split(":")[0] for note in found.notes] == ["step 3", "step 2"]
        manager.restore(run.model, run.optimizer, step=1)
        for step in (2, 3):
            manager.save(step, run.model, run.optimizer)
    assert manager.latest() == 3


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"header_sha256": 1, "crc32": {}},
        {"header_sha256": "0" * 64, "crc32": []},
        {"header_sha256": "0" * 64, "keys": "x"},
        {"header_sha256": "0" * 64, "crc32": {"x": {"y": 1}}},
    ],
)
def test_a_manifest_of_another_shape_is_damage_however_well_it_is_sealed(
    entry: object, tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    place = tmp_path / step_name(2) / "manifest.json"
    document = json.loads(place.read_bytes())
    document.pop("sha256")
    document["files"] = dict.fromkeys(document["files"], entry)
    place.write_bytes(serialize(document))
    run = Run()
    with run.manager(tmp_path) as manager:
        assert manager.restore(run.model, run.optimizer).step == 1
        with pytest.raises(FormatError):
            manager.restore(run.model, run.optimizer, step=2)


def test_damage_of_all_steps_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    with (
        CheckpointManager(tmp_path, preemption_signals=()) as manager,
        pytest.raises(StorageError, match="must hold a sound step, got 2: step 2: damaged"),
    ):
        manager.newest_sound()


def test_an_error_of_another_kind_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)

    def attempt(step: int) -> int:
        raise ZeroDivisionError(step)

    with pytest.raises(ZeroDivisionError, match="^2$"):
        newest_sound(StepDirectory(tmp_path), Crew(), attempt)


def ask(folder: str) -> tuple[int, tuple[str, ...]]:
    with CheckpointManager(folder, preemption_signals=()) as manager:
        found = manager.newest_sound()
    assert found is not None
    return found.step, found.notes


def test_all_ranks_come_to_the_same_step_whichever_of_them_meets_the_damage(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path, 2)
    found = run_ranks(ask, 3, str(tmp_path))
    assert [step for step, _ in found] == [1, 1, 1]
    assert all(len(notes) == 1 for _, notes in found)
    assert all("CRC-32 must be" in note for _, (note,) in found)
