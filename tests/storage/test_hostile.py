"""Every hostile file is refused in its own words, and none runs anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from storage import hostile

from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, walk
from ckpttools.storage.torchzip import read_torch_file
from ckpttools.storage.torchzip_check import check_torch_file

REFUSED = {**hostile.CONTAINERS, **hostile.TREES}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("label", REFUSED)
def test_hostile_file_is_refused_with_its_rule_and_place(label: str, in_empty_folder: Path) -> None:
    path = hostile.FOLDER / f"{label}.pt"
    message = REFUSED[label][1]
    with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: (.*: )?{message}") as caught:
        read_torch_file(path)
    assert "\n" not in str(caught.value)
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("label", REFUSED)
def test_hostile_file_is_a_problem_and_no_error_for_the_check(label: str) -> None:
    assert check_torch_file(hostile.FOLDER / f"{label}.pt") != []


@pytest.mark.parametrize("label", hostile.CALLS)
def test_calls_of_a_pickle_stay_descriptions(label: str, in_empty_folder: Path) -> None:
    tree = read_torch_file(hostile.FOLDER / f"{label}.pt").tree
    assert isinstance(tree, Inert)
    assert list(in_empty_folder.iterdir()) == []


def test_the_canary_sings_when_pickle_itself_reads_the_file(in_empty_folder: Path) -> None:
    # Shows that the files above are loaded guns, not blanks.
    import pickle
    import zipfile

    with zipfile.ZipFile(hostile.FOLDER / "calls_system.pt") as archive:
        pickle.loads(archive.read("a/data.pkl"))
    assert (in_empty_folder / hostile.CANARY).exists()


def test_committed_files_and_table_are_those_that_the_builder_makes() -> None:
    built = dict(hostile.files())
    committed = {path.name: path.read_bytes() for path in hostile.FOLDER.glob("*.pt")}
    assert committed.keys() == built.keys()
    assert [name for name, data in built.items() if committed[name] != data] == []
    assert (hostile.FOLDER / "README.md").read_text() == hostile.readme()


def test_good_file_of_the_same_builder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    path.write_bytes(hostile.archive(hostile.records()))
    tree = read_torch_file(path).tree
    assert next(type(obj).__name__ for obj in walk(tree)) == "TensorRef"
