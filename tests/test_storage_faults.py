"""Whatever the system refuses, and whenever: one error that names a file, and nothing is harmed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest

from ckpttools import api, conversion
from ckpttools.api import Report, Resources, Selection, Target
from ckpttools.errors import StorageError
from ckpttools.storage import commit
from ckpttools.storage.local import FilePool

SMALL = Resources(budget_bytes=1 << 16, workers=1)
SOME = Selection(include=("decoder.final_layernorm.weight", "decoder.layers.1.*layernorm.weight"))

SOURCE = oracle.case("gqa_tp1_pp1_dp1").directory
RULES = Path(api.__file__).parent / "rules"

JOBS: dict[str, dict[str, Any]] = {
    "reshard": {"target": Target(tp=2), "selection": Selection(include=("*:weight",))},
    "gather": {"to": "safetensors"},
    "overwrite": {"to": "safetensors", "overwrite": True},
}


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def convert(source: Path, out: Path, job: str, **options: Any) -> Report:
    given = {"resources": SMALL, "cross_check": False, **JOBS[job], **options}
    return api.reshard(source, out, **given)


@dataclass(frozen=True, slots=True)
class Case:
    """A source, and the files that a job makes of it when nothing fails."""

    source: Path
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Return the cases of all jobs: a Megatron source, and a small one that is quick to read."""
    place = tmp_path_factory.mktemp("cases")
    api.gather(SOURCE, place / "small", selection=SOME)
    sources = {"reshard": SOURCE, "gather": place / "small", "overwrite": place / "small"}
    for job, source in sources.items():
        convert(source, place / job, job)
    return {job: Case(source, listing(place / job)) for job, source in sources.items()}


# --- the calls that can fail -------------------------------------------------------------------


def refuse(code: int) -> Callable[..., Any]:
    """Return a function that fails as the system does: with a file name where it has one."""

    def call(*args: object, **_: object) -> None:
        names = [str(arg) for arg in args[:1] if isinstance(arg, str | Path)]
        raise OSError(code, os.strerror(code), *names)

    return call


def _read_nothing(*_: object) -> int:
    return 0


def _renameat2_fails(*_: object) -> int:
    return errno.EIO


# Where the function is, its name, and what it does when it fails.
FAULTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "open": (os, "open", refuse(errno.EACCES)),
    "read": (os, "preadv", refuse(errno.EIO)),
    "end of file": (os, "preadv", _read_nothing),
    "read of records": (os, "pread", refuse(errno.EIO)),
    "write": (os, "pwrite", refuse(errno.ENOSPC)),
    "journal": (os, "write", refuse(errno.ENOSPC)),
    "reserve": (os, "posix_fallocate", refuse(errno.ENOSPC)),
    "truncate": (os, "ftruncate", refuse(errno.EFBIG)),
    "sync": (os, "fsync", refuse(errno.EIO)),
    "small file": (Path, "open", refuse(errno.EMFILE)),
    "directory": (Path, "mkdir", refuse(errno.ENOSPC)),
    "removal": (Path, "unlink", refuse(errno.EACCES)),
    "status": (Path, "stat", refuse(errno.ESTALE)),
    "list": (Path, "iterdir", refuse(errno.EACCES)),
    "rename": (commit, "_renameat2", _renameat2_fails),
    "free room": (shutil, "disk_usage", refuse(errno.EIO)),
}


@contextmanager
def failing(
    fault: str, number: int, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> Iterator[None]:
    """Let call ``number`` of a function fail, and note all of them."""
    owner, name, broken = FAULTS[fault]
    function, lock = getattr(owner, name), threading.Lock()

    def call(*args: Any, **options: Any) -> Any:
        with lock:
            calls.append(name)
            mine = len(calls) == number + 1
        return broken(*args, **options) if mine else function(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


# --- each call, one after the other ------------------------------------------------------------


IN_ONE_JOB = ("read", "end of file", "small file", "directory", "status", "list", "free room")
RESUMED = {"gather": 1, "overwrite": 1, "reshard": 5}
"""Of so many failures the work is gone on with after one: a Megatron source takes long to read."""

RUNS = [
    *(("gather", fault) for fault in FAULTS if fault != "read of records"),  # torch files' own
    *(("reshard", fault) for fault in FAULTS if fault not in IN_ONE_JOB),
    *(("overwrite", fault) for fault in ("write", "journal", "sync", "removal", "rename")),
]


@pytest.mark.parametrize(("job", "fault"), RUNS)
def test_the_nth_call_that_fails_is_one_error_and_no_harm_whichever_n(
    job: str,
    fault: str,
    tmp_path: Path,
    cases: dict[str, Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cases[job]
    before = listing(case.source)
    number = refused = 0
    while True:
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        old = lay_old(out) if job == "overwrite" else {}
        calls: list[str] = []
        with failing(fault, number, monkeypatch, calls):
            error = outcome(case.source, out, job)
        if len(calls) <= number:  # there is no such call any more
            assert error is None
            break
        if error is None:  # in what only cleans up
            assert listing(out) == case.files
        else:
            refused += 1
            check_error(error, case.source, out)
            published = "was published" in str(error)
            assert listing(out) == (case.files if published else old)
            if number % RESUMED[job] == 0 and any(out.parent.glob(".out.partial-*/")):
                check_resumes(case, out, job)
        number += 1
    assert number
    assert refused
    assert listing(case.source) == before


def lay_old(out: Path) -> dict[str, bytes]:
    out.mkdir()
    (out / "old").write_text("old")
    return listing(out)


def outcome(source: Path, out: Path, job: str) -> StorageError | None:
    try:
        convert(source, out, job)
    except StorageError as error:
        return error
    return None


def check_error(error: StorageError, source: Path, out: Path) -> None:
    """Hold that an error is one line that names a path, and says what to do where work is left."""
    text = str(error)
    assert "\n" not in text
    assert any(str(path) in text for path in (out.parent, source, RULES)), text
    for partial in out.parent.glob(".out.partial-*/"):
        assert partial.with_name(f"{partial.name}.journal").stat().st_size
        assert f"give --resume to go on, or remove {partial.name} beside the" in error.hint


def check_resumes(case: Case, out: Path, job: str) -> None:
    """Hold that work which was left is gone on with."""
    report = convert(case.source, out, job, resume=True)
    assert any(note.startswith("resumed: ") for note in report.findings)
    assert listing(out) == case.files
    assert list(out.parent.iterdir()) == [out]


def test_a_disk_that_can_not_be_set_to_work_early_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is only asked to begin; what goes wrong shows when it must be done."""
    (tmp_path / "file").write_bytes(b"12345")
    with FilePool(str(tmp_path), ["file", "gone"], writable=True) as pool:
        pool.start_writeback(0, 0, 5)
        pool.start_writeback(1, 0, 5)
        monkeypatch.setattr(os, "open", refuse(errno.EMFILE))
        pool.start_writeback(1, 0, 5)


# --- calls that do less than they were asked for -----------------------------------------------


@pytest.mark.parametrize("name", ["preadv", "pwrite", "write"])
def test_reads_and_writes_that_come_in_parts_give_the_same_bytes(
    name: str,
    tmp_path: Path,
    cases: dict[str, Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, calls = getattr(os, name), []

    def part(descriptor: int, data: Any, *offset: int) -> int:
        calls.append(name)
        view = memoryview(data[0] if name == "preadv" else data)
        some = view[: max(1, len(view) // 3)]
        return int(function(descriptor, [some] if name == "preadv" else some, *offset))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, part)
        convert(cases["gather"].source, tmp_path / "out", "gather")
    assert len(calls) > 30
    assert listing(tmp_path / "out") == cases["gather"].files


# --- a real full disk --------------------------------------------------------------------------

ROOM_BYTES = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Lend a small file system of its own, where the system lets us have one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    options = ["-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(place)]
    if os.geteuid() or not mount or not umount:
        pytest.skip("needs root and mount")
    if subprocess.run([mount, *options], check=False, capture_output=True).returncode:
        pytest.skip("needs a system where root may mount")
    yield place
    subprocess.run([umount, str(place)], check=True)


@pytest.mark.parametrize("job", ["reshard", "gather"])
def test_a_disk_that_fills_up_keeps_the_work_and_with_room_it_is_gone_on_with(
    job: str, disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"selection": Selection()}
    convert(SOURCE, tmp_path / "expected", job, **options)
    files = listing(tmp_path / "expected")
    hog = disk / "hog"
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM_BYTES - sum(map(len, files.values())) // 2)
    out = disk / "out"
    with pytest.raises(StorageError, match="must have .* free, got") as caught:
        convert(SOURCE, out, job, **options)
    assert caught.value.hint == "free some room, or choose another disk"
    assert list(disk.iterdir()) == [hog]  # refused before anything was written

    monkeypatch.setattr(conversion, "check_room", lambda *_: None)
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))  # so files are sparse
    with pytest.raises(StorageError, match="No space left on device") as caught:
        convert(SOURCE, out, job, **options)
    (partial,) = (p for p in disk.glob(".out.partial-*") if p.is_dir())
    assert caught.value.hint == (
        "free some room, or choose another disk; then give --resume to go on, or remove "
        f"{partial.name} beside the destination"
    )
    with pytest.raises(StorageError, match="unfinished work of the same kind"):
        convert(SOURCE, out, job, **options)
    hog.unlink()
    report = convert(SOURCE, out, job, resume=True, **options)
    assert any(note.startswith("resumed: ") for note in report.findings)
    assert listing(out) == files
    assert list(disk.iterdir()) == [out]
