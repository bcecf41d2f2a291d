"""A destination is the old one or the new one at any moment, and nothing else is left behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttools.errors import StorageError
from ckpttools.storage import commit
from ckpttools.storage.commit import Staging, check_destination, repair, sync_tree
from ckpttools.storage.journal import Done


def fill(directory: Path, text: str) -> None:
    (directory / "inner" / "empty").mkdir(parents=True)
    (directory / "a").write_text(text)
    (directory / "inner" / "b").write_text(text * 2)


def content(directory: Path) -> str:
    """Return what a checkpoint holds, once it is seen to be whole."""
    text = (directory / "a").read_text()
    assert (directory / "inner" / "b").read_text() == text * 2
    return text


def old_in(tmp_path: Path) -> Path:
    destination = tmp_path / "out"
    destination.mkdir()
    fill(destination, "old")
    return destination


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def no_renameat2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_renameat2", lambda *_: errno.ENOSYS)


# --- the usual way -----------------------------------------------------------------------------


@pytest.mark.parametrize("fallback", [False, True])
def test_a_new_destination_appears_whole(
    tmp_path: Path, fallback: bool, request: pytest.FixtureRequest
) -> None:
    if fallback:
        request.getfixturevalue("no_renameat2")
    with Staging(tmp_path / "out") as staging:
        fill(staging.path, "new")
        assert names(tmp_path) == [staging.path.name, f"{staging.path.name}.journal"]
        assert re.fullmatch(r"\.out\.partial-[0-9a-f]{12}", staging.path.name)
        staging.publish()
        assert content(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("fallback", [False, True])
def test_an_old_destination_is_replaced_and_removed(
    tmp_path: Path, fallback: bool, request: pytest.FixtureRequest
) -> None:
    if fallback:
        request.getfixturevalue("no_renameat2")
    destination = old_in(tmp_path)
    with Staging(destination, overwrite=True) as staging:
        fill(staging.path, "new")
        assert content(destination) == "old"
        staging.publish()
    assert content(destination) == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_link_in_the_way_is_replaced_and_removed(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    destination = tmp_path / "out"
    if kind == "file":
        destination.write_text("old")
    else:
        destination.symlink_to(other)
    with Staging(destination, overwrite=True) as staging:
        fill(staging.path, "new")
        staging.publish()
    assert content(destination) == "new"
    assert not destination.is_symlink()
    assert names(tmp_path) == ["other", "out"]
    assert names(other) == []  # what the link pointed to is not touched


def test_overwrite_without_anything_to_overwrite_is_a_new_destination(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", overwrite=True) as staging:
        fill(staging.path, "new")
        staging.publish()
    assert content(tmp_path / "out") == "new"


# --- refusals and errors -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_existing_destination_is_refused(tmp_path: Path, kind: str) -> None:
    destination = tmp_path / "out"
    if kind == "directory":
        destination.mkdir()
    elif kind == "file":
        destination.touch()
    else:
        destination.symlink_to(tmp_path / "nowhere")
    message = f"{destination}: the destination must not exist, got an existing path"
    with pytest.raises(StorageError, match=re.escape(message)) as caught, Staging(destination):
        pass
    assert "--overwrite" in caught.value.hint
    check_destination(destination, overwrite=True)


def test_a_destination_without_a_parent_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path / 'no'}: must be a directory, got none"
    with pytest.raises(StorageError, match=re.escape(message)), Staging(tmp_path / "no" / "out"):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_the_old_and_no_staging(
    tmp_path: Path, error: type[BaseException], overwrite: bool
) -> None:
    if overwrite:
        old_in(tmp_path)

    def work() -> None:
        with Staging(tmp_path / "out", overwrite=overwrite) as staging:
            fill(staging.path, "new")
            raise error

    with pytest.raises(error):
        work()
    assert names(tmp_path) == (["out"] if overwrite else [])
    assert not overwrite or content(tmp_path / "out") == "old"


@pytest.mark.parametrize("fallback", [False, True])
def test_what_another_process_put_there_meanwhile_is_never_replaced(
    tmp_path: Path, fallback: bool, request: pytest.FixtureRequest
) -> None:
    if fallback:
        request.getfixturevalue("no_renameat2")

    def work() -> None:
        with Staging(tmp_path / "out") as staging:
            fill(staging.path, "mine")
            (tmp_path / "out").mkdir()  # empty: a plain rename would replace it
            staging.publish()

    message = f"{tmp_path / 'out'}: can't publish it: File exists"
    with pytest.raises(StorageError, match=re.escape(message)):
        work()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == []


@pytest.mark.usefixtures("no_renameat2")
def test_a_failed_second_rename_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = old_in(tmp_path)
    rename = Path.rename

    def fail_on_staging(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    def work() -> None:
        with Staging(destination, overwrite=True) as staging:
            fill(staging.path, "new")
            monkeypatch.setattr(Path, "rename", fail_on_staging)
            staging.publish()

    with pytest.raises(StorageError, match="can't publish it: Input/output error"):
        work()
    assert content(destination) == "old"
    assert names(tmp_path) == ["out"]


def test_another_error_of_the_rename_is_not_taken_for_a_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_renameat2", lambda *_: errno.EACCES)
    for overwrite in (False, True):
        if overwrite:
            old_in(tmp_path)
        with Staging(tmp_path / "out", overwrite=overwrite) as staging:
            fill(staging.path, "new")
            with pytest.raises(StorageError, match="can't publish it: Permission denied"):
                staging.publish()
    assert content(tmp_path / "out") == "old"


# --- synced before it is seen ------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_every_file_and_directory_is_synced_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    if overwrite:
        old_in(tmp_path)
    events: list[str] = []
    fsync, renameat2 = os.fsync, commit._renameat2

    def log_sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(re.sub(r"\.partial-\w+", ".partial", os.path.relpath(path, tmp_path)))
        fsync(descriptor)

    def log_rename(src: Path, dst: Path, flags: int) -> int:
        events.append("rename")
        return renameat2(src, dst, flags)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(commit, "_renameat2", log_rename)
    with Staging(tmp_path / "out", overwrite=overwrite) as staging:
        fill(staging.path, "new")
        staging.publish()
    assert events[-2:] == ["rename", "."]
    before = events[:-2]
    assert sorted(before) == [
        ".out.partial",
        ".out.partial/a",
        ".out.partial/inner",
        ".out.partial/inner/b",
        ".out.partial/inner/empty",
    ]
    # a directory after what is in it
    assert before.index(".out.partial/inner") > before.index(".out.partial/inner/b")
    assert before[-1] == ".out.partial"


def test_a_failing_sync_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Staging(tmp_path / "out") as staging:
        fill(staging.path, "new")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="can't publish it: Input/output error"):
            staging.publish()
    assert names(tmp_path) == []


def test_what_the_disk_refused_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be read back from memory, and a second sync may succeed; on the disk it is not."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def work(*, early: bool) -> None:
        with Staging(tmp_path / "out") as staging:
            fill(staging.path, "new")
            staging.journal.add(Done(0, ()))
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                if early:
                    staging.begin_sync()
                    staging._join_sync()
                else:
                    staging.publish()
            raise StorageError("the proof: can't read it: Input/output error")

    with pytest.raises(StorageError, match="can't publish it: Input/output error"):
        work(early=False)
    assert names(tmp_path) == []
    with pytest.raises(StorageError, match="the proof: can't read it") as caught:
        work(early=True)
    assert (caught.value.hint, names(tmp_path)) == ("", [])


def test_syncing_follows_no_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "self").symlink_to(tmp_path / "tree")
    sync_tree(tmp_path / "tree")


# --- killed at any step ------------------------------------------------------------------------

_CHILD = """
import os, signal, sys
from pathlib import Path
from ckpttools.storage import commit

destination, overwrite, fallback, kill_at = sys.argv[1], *map(int, sys.argv[2:])
steps = 0

def step(name):
    global steps
    if steps == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1

def stepped(function):
    def call(*args, **kwargs):
        step(function.__name__)
        return function(*args, **kwargs)
    return call

os.fsync = stepped(os.fsync)
Path.rename = stepped(Path.rename)
Path.mkdir = stepped(Path.mkdir)
commit.shutil.rmtree = stepped(commit.shutil.rmtree)
commit._renameat2 = (lambda *_: 38) if fallback else stepped(commit._renameat2)

with commit.Staging(destination, overwrite=bool(overwrite)) as staging:
    step("before the files")
    (staging.path / "inner" / "empty").mkdir(parents=True)
    (staging.path / "a").write_text("new")
    step("between the files")
    (staging.path / "inner" / "b").write_text("newnew")
    staging.publish()
    step("published")
print(steps)
"""


def run_child(destination: Path, overwrite: bool, fallback: bool, kill_at: int) -> int | None:
    """Publish in another process that is killed before step ``kill_at``; return its steps."""
    arguments = [str(destination), str(int(overwrite)), str(int(fallback)), str(kill_at)]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments], capture_output=True, check=False, text=True
    )
    if child.returncode == -signal.SIGKILL:
        return None
    assert child.returncode == 0, child.stderr
    return int(child.stdout)


@pytest.mark.parametrize(("overwrite", "fallback"), [(False, False), (True, False), (True, True)])
def test_a_kill_before_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, overwrite: bool, fallback: bool
) -> None:
    def fresh(name: str) -> Path:
        parent = tmp_path / name
        parent.mkdir()
        return old_in(parent) if overwrite else parent / "out"

    steps = run_child(fresh("whole"), overwrite, fallback, -1)
    assert steps is not None
    assert steps >= 12
    seen = []
    for kill_at in range(steps):
        destination = fresh(str(kill_at))
        assert run_child(destination, overwrite, fallback, kill_at) is None
        aside = not destination.exists() and overwrite  # the moment between two renames
        assert repair(destination) == aside
        seen.append(content(destination) if destination.exists() else "none")
        # a later run is not hindered by what the killed one left
        assert fallback or not aside
        with Staging(destination, overwrite=True) as staging:
            fill(staging.path, "later")
            staging.publish()
        assert content(destination) == "later"
    old = "old" if overwrite else "none"
    assert seen == sorted(seen, key=["none", "old", "new"].index)  # never back and forth
    assert set(seen) == {old, "new"}


# --- repair ------------------------------------------------------------------------------------


def test_a_destination_set_aside_is_put_back_by_the_next_run(tmp_path: Path) -> None:
    destination = old_in(tmp_path)
    destination.rename(tmp_path / ".out.old-12345678")
    message = f"{destination}: the destination must not exist, got an existing path"
    with pytest.raises(StorageError, match=re.escape(message)), Staging(destination):
        pass
    assert content(destination) == "old"
    assert names(tmp_path) == ["out"]


def test_nothing_is_put_back_where_a_destination_stands(tmp_path: Path) -> None:
    destination = old_in(tmp_path)
    (tmp_path / ".out.old-12345678").mkdir()
    assert not repair(destination)
    assert content(destination) == "old"
    assert not repair(tmp_path / "other")
    assert not repair(tmp_path / "no" / "out")


def test_several_destinations_set_aside_are_left_to_the_user(tmp_path: Path) -> None:
    for end in "12":
        (tmp_path / f".out.old-{end}").mkdir()
    message = f"{tmp_path / 'out'}: at most one .out.old-* must stand beside it, got 2"
    with pytest.raises(StorageError, match=re.escape(message)):
        repair(tmp_path / "out")


def test_a_system_without_renameat2_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit.ctypes, "CDLL", lambda *_, **__: object())
    assert commit._renameat2(tmp_path, tmp_path, 0) == errno.ENOSYS
