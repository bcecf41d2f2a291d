"""Work that was stopped is gone on with: what is right is kept, the rest done, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
from crash_jobs import (
    JOBS,
    TILES,
    Expected,
    convert,
    journal_of,
    known,
    listing,
    names,
    partial,
    stop_after,
    undisturbed,
)

from ckpttools import api
from ckpttools.api import Resources, Target
from ckpttools.errors import MismatchError, StorageError
from ckpttools.storage.journal import Done
from ckpttools.storage.local import FilePool


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


Extents = set[tuple[str, int, int]]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Extents]:
    """Note every write through a pool: path, offset and length."""
    extents: Extents = set()
    write_at, lock = FilePool.write_at, threading.Lock()

    def noted(self: FilePool, file: int, offset: int, data: memoryview) -> None:
        with lock:
            extents.add((self.path(file), offset, len(data)))
        write_at(self, file, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(FilePool, "write_at", noted)
        yield extents


def extents_of(tiles: list[Done], out: Path, order: Sequence[str]) -> Extents:
    """Return the pieces of finished tiles as :func:`counted` notes them."""
    place = partial(out)
    return {(str(place / order[p.file]), p.offset, p.length) for t in tiles for p in t.pieces}


# --- stopped by the system ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "count"), [("reshard", 1), ("reshard", TILES - 1), ("gather", 23), ("zarr", 40)]
)
def test_what_is_finished_is_not_written_again(
    count: int,
    job: str,
    source: Path,
    out: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = stop_after(count, source, out, job, monkeypatch)
    assert names(out.parent) == [partial(out).name, journal_of(out).name]
    assert error.hint == (
        f"then give --resume to go on, or remove {partial(out).name} beside the destination"
    )
    order = expected[job].order
    tiles = known(out)
    finished = extents_of(tiles, out, order)
    assert len(tiles) == count
    with counted(monkeypatch) as written:
        report = convert(source, out, job, resume=True)
    assert not written & finished
    assert len(written) >= TILES - count
    assert f"resumed: {count} tiles of an earlier run were still right" in report.findings
    assert names(out.parent) == ["out"]
    assert listing(out) == expected[job].files
    assert api.verify(out, against=source).ok


def test_unfinished_work_is_named_and_left_where_nobody_asks_for_it(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(9, source, out, "reshard", monkeypatch)
    before = listing(out.parent)
    message = (
        f"{partial(out)}: unfinished work of the same kind must be resumed or removed, got 9 "
        f"finished tiles"
    )
    for _ in range(2):
        with pytest.raises(StorageError, match=re.escape(message)) as caught:
            convert(source, out, "reshard")
        assert caught.value.hint == (
            f"give --resume to go on with it, or remove it and {journal_of(out).name}"
        )
        assert listing(out.parent) == before


def test_work_may_be_stopped_again_and_again(
    source: Path, out: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(5, source, out, "gather", monkeypatch)
    for count in (6, 20, 41):
        stop_after(count, source, out, "gather", monkeypatch, resume=True)
        assert len(known(out)) == count
    report = convert(source, out, "gather", resume=True)
    assert "resumed: 41 tiles of an earlier run were still right" in report.findings
    assert listing(out) == expected["gather"].files


def test_with_nothing_to_resume_work_begins_and_says_so(
    source: Path, out: Path, expected: Expected
) -> None:
    report = convert(source, out, "reshard", resume=True)
    note = "nothing to resume: no earlier run of this work left a finished tile"
    assert note in report.findings
    assert listing(out) == expected["reshard"].files
    assert note not in convert(source, out, "reshard", overwrite=True).findings


@pytest.mark.parametrize("gone", ["directory", "journal", "both", "content"])
def test_what_was_removed_by_hand_is_made_anew(
    gone: str,
    source: Path,
    out: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_after(9, source, out, "reshard", monkeypatch)
    directory, journal = partial(out), journal_of(out)
    if gone in ("directory", "both", "content"):
        shutil.rmtree(directory)
    if gone in ("journal", "both"):
        journal.unlink()
    if gone == "content":
        directory.mkdir()
    report = convert(source, out, "reshard", resume=gone == "content")
    assert not any("tiles of an earlier run" in note for note in report.findings)
    assert names(out.parent) == ["out"]
    assert listing(out) == expected["reshard"].files


# --- what was changed meanwhile ----------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("job", "place"),
    [("reshard", "first"), ("reshard", "last"), ("gather", "middle"), ("zarr", "first")],
)
def test_a_tile_whose_bytes_were_changed_is_written_again_and_no_other(
    place: str,
    job: str,
    source: Path,
    out: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_after(30, source, out, job, monkeypatch)
    order = expected[job].order
    tiles = known(out)
    bad = tiles[17]
    path, offset, length = min(extents_of([bad], out, order))
    flip(Path(path), offset + {"first": 0, "middle": length // 2, "last": length - 1}[place])
    others = extents_of([t for t in tiles if t is not bad], out, order)
    mine = extents_of([bad], out, order)
    with counted(monkeypatch) as written:
        report = convert(source, out, job, resume=True)
    assert mine <= written
    assert not others & written
    assert "resumed: 29 tiles of an earlier run were still right" in report.findings
    assert listing(out) == expected[job].files


@pytest.mark.parametrize(
    ("job", "change"),
    [
        ("reshard", "deleted"),
        ("reshard", "cut"),
        ("reshard", "other file"),
        ("gather", "deleted"),
        ("gather", "emptied"),
        ("gather", "longer"),
        ("zarr", "other file"),
    ],
)
def test_a_file_that_was_changed_in_size_is_made_anew_and_the_others_kept(
    change: str,
    job: str,
    source: Path,
    out: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_after(30, source, out, job, monkeypatch)
    order = expected[job].order
    tiles = known(out)
    path = Path(min(extents_of([tiles[17]], out, order))[0])
    lost = [t for t in tiles if any(e[0] == str(path) for e in extents_of([t], out, order))]
    if change == "deleted":
        path.unlink()
    elif change == "longer":
        with path.open("ab") as file:
            file.write(b"!")
    elif change == "other file":
        lost = []
        for name in ("note", "new/note", "zarr.json", "state.json"):
            (partial(out) / name).parent.mkdir(exist_ok=True)
            (partial(out) / name).write_text("of somebody else")
    else:
        os.truncate(path, 0 if change == "emptied" else path.stat().st_size - 1)
    report = convert(source, out, job, resume=True)
    kept = 30 - len(lost)
    note = f"resumed: {kept} tiles of an earlier run were still right"
    assert note in report.findings or not kept
    assert {k: v for k, v in listing(out).items() if v} == expected[job].files


def test_what_follows_damage_in_the_journal_is_written_again(
    source: Path, out: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(30, source, out, "gather", monkeypatch)
    data = journal_of(out).read_bytes()
    lines = [i for i, byte in enumerate(data) if byte == ord("\n")]
    flip(journal_of(out), (lines[11] + lines[12]) // 2)  # line 0 is the header, so tile 12
    report = convert(source, out, "gather", resume=True)
    assert "resumed: 11 tiles of an earlier run were still right" in report.findings
    assert listing(out) == expected["gather"].files


def test_a_byte_between_tensors_that_was_changed_is_never_published(
    source: Path, out: Path, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tile has it and no header; the files' own checksums find it, and work begins anew."""
    stop_after(30, source, out, "reshard", monkeypatch)
    path, offset = _gap(source)
    flip(partial(out) / path, offset)
    with pytest.raises(MismatchError, match="must be sound after work was resumed, got"):
        convert(source, out, "reshard", resume=True)
    assert names(out.parent) == []
    convert(source, out, "reshard")
    assert listing(out) == expected["reshard"].files


def _gap(source: Path) -> tuple[str, int]:
    """Return a byte of a storage that no tensor has: the buffer aligns their starts."""
    opened = api.open_checkpoint(source)
    draft = opened.format.lay_out(opened.manifest, JOBS["reshard"]["target"], "")
    for seal in draft.seals:
        extents = sorted(
            (part.extent.offset, part.extent.offset + part.extent.length)
            for chunk in draft.manifest.chunks
            for part in chunk.parts
            if part.extent.file == seal.file
            and seal.offset <= part.extent.offset < seal.offset + seal.length
        )
        for (_, stop), (start, _) in pairwise(extents):
            if stop < start:
                return draft.manifest.files[seal.file].path, stop
    raise AssertionError("the buffers have no gap")


# --- another source, or other work -------------------------------------------------------------


def model_file(source: Path) -> Path:
    return next(source.glob("iter_*/mp_rank_*/model_optim_rng.pt"))


def touch(path: Path) -> None:
    """Give a file a time of change that is not its own."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize("other", ["source", "memory", "part", "target"])
def test_other_work_is_not_resumed_but_noted_and_left_alone(
    other: str,
    source: Path,
    out: Path,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_after(30, source, out, "reshard", monkeypatch)
    left, before = partial(out).name, listing(partial(out))
    options: dict[str, Any] = {}
    if other == "source":
        touch(model_file(source))
    elif other == "memory":
        options["resources"] = Resources(budget_bytes=1 << 16, workers=1)
    elif other == "part":
        options["selection"] = api.Selection(include=("weight",))
    else:
        options["target"] = Target(tp=4)
    report = convert(source, out, "reshard", resume=True, **options)
    assert "nothing to resume: no earlier run of this work left a finished tile" in report.findings
    assert f"{left} beside the destination is of other work, left alone" in report.findings
    assert names(out.parent) == [left, f"{left}.journal", "out"]
    assert listing(partial(out)) == before
    assert other in ("part", "target") or listing(out) == expected["reshard"].files


@pytest.mark.parametrize("step", ["write", "compare"])
@pytest.mark.parametrize("change", ["time", "size", "gone"])
def test_a_source_that_changes_while_it_is_read_is_never_published(
    change: str, step: str, source: Path, out: Path
) -> None:
    path = model_file(source)
    changed = path.with_name("changed")

    def stage(name: str, total_bytes: int) -> None:
        assert total_bytes > 0
        if name == step and change == "time":
            touch(path)
        elif name == step and change == "size":
            with path.open("ab") as file:
                file.write(b"!")
        elif name == step:
            shutil.copy(path, changed)
            changed.replace(path)

    message = f"{path}: must not change while it is read, got a change"
    with pytest.raises(MismatchError, match=re.escape(message)):
        convert(source, out, "gather", stage=stage)
    assert names(out.parent) == []
