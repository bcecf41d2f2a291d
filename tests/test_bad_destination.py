"""A destination that isn't fit, a full disk and an interrupt end in one line and leave nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import megatron_edit as edit
import oracle_megatron as oracle
import pytest

from ckpttools import api, conversion
from ckpttools.api import Target
from ckpttools.errors import StorageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return edit.tiny(tmp_path / "src")


def test_destination_that_exists_is_refused_untouched(source: Path) -> None:
    out = source.parent / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    message = f"{re.escape(str(out))}: the destination must not exist, got an existing path"
    edit.assert_refused(source, message, hint="choose another, or give --overwrite")
    assert (out / "precious").read_text() == "x"


def test_destination_that_is_a_dangling_link_is_refused_and_stays(source: Path) -> None:
    out = source.parent / "out"
    out.symlink_to(source.parent / "nothing")
    message = f"{re.escape(str(out))}: the destination must not exist, got an existing path"
    edit.assert_refused(source, message, hint="choose another, or give --overwrite")
    assert out.is_symlink()


def test_destination_without_a_parent_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.iterdir())
    for parent in ("nowhere", "file"):
        with pytest.raises(StorageError, match=f"{parent}: must be a directory, got none"):
            api.reshard(source, tmp_path / parent / "out")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("src", "dst", "overwrite"),
    [
        ("src", "src/out", False),
        ("src", "src/iter_0000003/out", False),
        ("src", "link/out", False),
        ("link", "src/out", False),
        ("src", "src", True),
        ("src/iter_0000003", "src", True),
        ("src/iter_0000003", "link", True),
        ("src", ".", True),
    ],
)
def test_destination_in_or_around_the_source_is_refused(
    src: str, dst: str, *, overwrite: bool, source: Path
) -> None:
    (source.parent / "link").symlink_to(source)
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(StorageError, match="must lie outside of the source and not around it"):
        api.reshard(source.parent / src, source.parent / dst, overwrite=overwrite)
    assert sorted(source.parent.rglob("*")) == before
    assert api.verify(source).ok


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_destination_in_a_directory_that_cannot_be_written_is_refused(
    source: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o555)
    with pytest.raises(StorageError, match="closed: must be a writable directory, got: Permission"):
        api.reshard(source, parent / "out")


def test_too_little_room_is_seen_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    written: list[object] = []
    monkeypatch.setattr(conversion, "write", lambda *_: written.append(1))
    monkeypatch.setattr(
        conversion,
        "shutil",
        SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=5000)),
    )
    assert need > 5000
    place = re.escape(str(source.parent))
    message = f"{place}: must have [0-9.]+ kB free, got 5.00? kB"
    edit.assert_refused(source, message, hint="free some room, or choose another disk")
    assert written == []


_WITH_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv = ["ckpttools", *sys.argv[2:]]
from ckpttools.cli.main import main
main()
"""


@pytest.mark.parametrize(("verb", "limit"), [("reshard", 0), ("reshard", 5000), ("gather", 2500)])
def test_file_that_the_system_will_not_hold_ends_in_one_line_and_no_staging(
    verb: str, limit: int, source: Path
) -> None:
    before = sorted(source.parent.iterdir())
    command = [sys.executable, "-c", _WITH_LIMIT, str(limit), verb, str(source)]
    done = subprocess.run(
        [*command, str(source.parent / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert re.match(r"error: .*/\.out\.partial-[0-9a-f]+[./].*: can't .*: File too large$", last)
    assert sorted(source.parent.iterdir()) == before


# Interrupts.


@pytest.mark.parametrize("step_name", ["write", "compare"])
def test_interrupt_in_the_middle_of_the_work_removes_the_staging_directory(
    step_name: str, tmp_path: Path
) -> None:
    seen: list[str] = []

    def stage(name: str, total_bytes: int) -> Callable[[int], None]:
        assert total_bytes > 0

        def progress(done_bytes: int) -> None:
            assert done_bytes > 0
            if name == step_name:
                seen.extend(path.name for path in tmp_path.iterdir())
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        api.reshard(
            oracle.case("gqa_tp2_pp1_dp2").directory,
            tmp_path / "out",
            target=Target(tp=1),
            stage=stage,
        )
    assert re.match(r"\.out\.partial-", seen[0])  # it was there when the interrupt came
    assert list(tmp_path.iterdir()) == []


def test_interrupted_command_exits_with_130_and_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        assert any(path.name.startswith(".out.partial-") for path in source.parent.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "execute", interrupt)
    outcome = edit.run_cli("reshard", source, source.parent / "out")
    assert (outcome.code, outcome.out) == (130, "")
    assert "interrupted" in outcome.err
    assert [path.name for path in source.parent.iterdir()] == ["src"]
