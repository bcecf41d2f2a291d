"""A conversion that is killed at any moment leaves the old or the new, and can be gone on with."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import oracle_megatron as oracle
import pytest
from crash_jobs import (
    TILES,
    Expected,
    convert,
    listing,
    names,
    stop_after,
    undisturbed,
)

from ckpttools import api
from ckpttools.errors import StorageError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return undisturbed(tmp_path_factory.mktemp("expected"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(oracle.case("gqa_tp1_pp1_dp1").directory, tmp_path / "run7"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    return place / "out"


# --- killed at random times --------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_at_any_time_leaves_the_old_or_the_new_and_is_gone_on_with() -> None:
    """The laws are those of the script, which breaks off with 1 where one does not hold."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kill.py")]
    done = subprocess.run(
        [*command, "--kills", "15", "--size", "50MB", "--seed", "7", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == []
    assert result["jobs"] == {"reshard": 5, "gather": 5, "overwrite": 5}
    assert result["kills"] > 7  # some runs are faster than their kill
    assert result["resumed"] == result["refused"] > 3
    assert result["tiles"] > 100


# --- signals at chosen points ------------------------------------------------------------------

_CHILD = """
import os, sys
from ckpttools import comparison, conversion
from ckpttools.api import Resources
from ckpttools.cli.main import main
from ckpttools.storage import commit
from ckpttools.storage.journal import Journal

signal, owner, name, after = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
place = {"Journal": Journal, "commit": commit, "conversion": conversion, "comparison": comparison}
function, calls = getattr(place[owner], name), []

def call(*args, **options):
    calls.append(name)
    if len(calls) == after + 1:
        os.kill(os.getpid(), signal)
    return function(*args, **options)

setattr(place[owner], name, call)
sys.argv[1:] = sys.argv[5:]
main()
"""

POINTS = {
    "before a tile is finished": ("Journal", "add", 0),
    "between tiles": ("Journal", "add", 30),
    "before the proof": ("conversion", "prove", 0),
    "in the proof": ("comparison", "compare", 0),
    "before the sync": ("commit", "sync_tree", 0),
    "in the sync": ("commit", "_sync", 2),
    "before the rename": ("commit", "_renameat2", 0),
    "after the rename": ("Journal", "forget", 1),
    "before the old one is removed": ("commit", "_remove_tree", 1),
    "before the journal is removed": ("Journal", "remove", 0),
}
PUBLISHED = tuple(POINTS)[7:]
CLI = {
    "reshard": ["--tp", "2", "--dp", "3"],
    "gather": [],
}


def stop_child(code: int, point: str, source: Path, out: Path, job: str, *options: str) -> str:
    """Run the command line in a process that gets a signal at a point; return its messages."""
    owner, name, after = POINTS[point]
    done = subprocess.run(
        [
            *(sys.executable, "-c", _CHILD, str(code), owner, name, str(after)),
            *(job, str(source), str(out), *CLI[job], "--memory", "1MiB", "--workers", "1"),
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-code if code == signal.SIGKILL else 130), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("job", "point"),
    [
        *(("reshard", point) for point in POINTS),
        *(("overwrite", point) for point in POINTS),
        ("gather", "between tiles"),
        ("gather", "before the rename"),
    ],
)
def test_a_kill_at_any_step_leaves_the_old_or_the_new_and_is_gone_on_with(
    job: str, point: str, source: Path, out: Path, expected: Expected
) -> None:
    old: dict[str, bytes] = {}
    options: tuple[str, ...] = ()
    if job == "overwrite":
        job, options = "reshard", ("--overwrite",)
        convert(source, out, "gather", selection=api.Selection(include=("weight",)))
        old = listing(out)
    stop_child(signal.SIGKILL, point, source, out, job, *options)
    assert listing(out) == (expected[job].files if point in PUBLISHED else old)
    overwrite = point in PUBLISHED or bool(options)
    report = convert(source, out, job, resume=True, overwrite=overwrite)
    assert listing(out) == expected[job].files
    assert names(out.parent) == ["out"]
    tiles = {"before a tile is finished": 0, "between tiles": 30}.get(point, TILES)
    resumed = f"resumed: {tiles} tiles of an earlier run were still right" in report.findings
    assert resumed == (tiles > 0 and point not in PUBLISHED)


@pytest.mark.parametrize("point", ["between tiles", "in the proof", "in the sync"])
def test_an_interrupt_ends_with_130_and_cleans_everything_up(
    point: str, source: Path, out: Path
) -> None:
    said = stop_child(signal.SIGINT, point, source, out, "gather")
    assert said.endswith("error: interrupted\n")
    assert names(out.parent) == []


# --- two at once -------------------------------------------------------------------------------

_WRITER = """
import sys
from ckpttools import api
from ckpttools.storage.journal import Journal

add = Journal.add

def wait(journal, done):
    add(journal, done)
    if journal.count == 30:
        print("writing", flush=True)
        sys.stdin.read()

Journal.add = wait
api.reshard(sys.argv[1], sys.argv[2], target=api.Target(tp=2, dp=3),
            resources=api.Resources(budget_bytes=1 << 20, workers=1))
"""


def test_of_two_on_one_destination_the_second_is_refused_at_once(
    source: Path, out: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the source must not be read")

    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(source), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        before = listing(out.parent)
        message = "must be free, got another process that is writing this destination"
        for job in ("reshard", "gather"):
            with monkeypatch.context() as patch:
                patch.setattr(api, "open_checkpoint", never)
                with pytest.raises(StorageError, match=message):
                    convert(source, out, job, resume=True)
            with monkeypatch.context() as patch:  # it began after the second had looked
                patch.setattr(api, "check_not_written", lambda _: None)
                with pytest.raises(StorageError, match=message):
                    convert(source, out, job, resume=True)
        assert listing(out.parent) == before
        convert(source, out.with_name("out2"), "reshard")  # another destination is free
        child.kill()
    report = convert(source, out, "reshard", resume=True)
    assert "resumed: 30 tiles of an earlier run were still right" in report.findings
    assert listing(out) == expected["reshard"].files
    assert names(out.parent) == ["out", "out2"]


def test_the_journal_of_a_process_that_is_gone_keeps_nobody_out(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(9, source, out, "reshard", monkeypatch)
    assert len(names(out.parent)) == 2
    convert(source, out, "gather")
    assert api.verify(out, against=source).ok
