"""What a journal says was written is what was written: damage ends it, other work isn't in it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.errors import StorageError
from ckpttools.storage import journal as module
from ckpttools.storage.journal import Done, Journal, Piece, is_open

JOB = {"job": "6f" * 32}
TILES = tuple(
    Done(number, tuple(Piece(p, 1 << 40, 7, 2**32 - 1 - p) for p in range(number % 3)), crc)
    for number, crc in ((0, None), (1, 0), (2, 2**32 - 1), (5, 17), (3, None), (10**9, 1))
)


def write(path: Path, tiles: tuple[Done, ...] = TILES, job: dict[str, str] = JOB) -> bytes:
    """Write a journal as a run would, and return its bytes."""
    journal = Journal.start(path, job)
    for tile in tiles:
        journal.add(tile)
    journal.close()
    return path.read_bytes()


def read(path: Path, job: dict[str, str] = JOB) -> tuple[Done, ...]:
    journal = Journal.start(path, job)
    journal.close()
    return journal.known


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".out.partial-6f6f6f6f6f6f.journal"


def ends(data: bytes) -> list[int]:
    """Return where each line ends."""
    return [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


# --- what is written is known again ------------------------------------------------------------


def test_a_new_journal_knows_nothing_and_an_old_one_what_was_added(path: Path) -> None:
    assert read(path) == ()
    write(path)
    assert read(path) == TILES
    more = Done(7, (Piece(1, 2, 3, 4),), 5)
    journal = Journal.start(path, JOB)
    assert (journal.known, journal.count) == (TILES, 6)
    journal.add(more)
    journal.close()
    assert (read(path), journal.count) == ((*TILES, more), 7)


def test_a_tile_that_was_written_again_counts_as_it_was_written_last(path: Path) -> None:
    again = Done(1, (Piece(9, 9, 9, 9),), 9)
    write(path, (*TILES, again))
    assert [done for done in read(path) if done.number == 1] == [again]
    assert len(read(path)) == len(TILES)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.builds(
            Done,
            st.integers(0, 2**63 - 1),
            st.lists(
                st.builds(Piece, *[st.integers(0, 2**63 - 1)] * 3, st.integers(0, 2**32 - 1)),
                max_size=3,
            ).map(tuple),
            st.none() | st.integers(0, 2**32 - 1),
        ),
        max_size=5,
        unique_by=lambda done: done.number,
    )
)
def test_any_tile_is_read_back_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, tiles: list[Done]
) -> None:
    path = tmp_path_factory.getbasetemp() / "journal"
    path.unlink(missing_ok=True)
    write(path, tuple(tiles))
    assert read(path) == tuple(tiles)


# --- damage ------------------------------------------------------------------------------------


def test_a_torn_line_ends_the_known_part_wherever_it_is_torn(path: Path) -> None:
    data = write(path)
    lines = ends(data)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = sum(end <= size for end in lines)
        assert read(path) == TILES[: max(0, whole - 1)]
        kept = lines[whole - 1] if whole else lines[0]  # without a header it begins anew
        assert path.read_bytes() == data[:kept]


def test_a_flipped_bit_ends_the_known_part_wherever_it_is(path: Path) -> None:
    data = write(path)
    lines = ends(data)
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        assert read(path) == TILES[: max(0, sum(end <= place for end in lines) - 1)]


def _line(text: bytes) -> bytes:
    return text + b" %08x\n" % module.zlib.crc32(text)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"\0" * 4096,
        b"\xff\xfe\n",
        _line(b""),
        _line(b"not json"),
        _line(b"\xff"),
        _line(b"null"),
        _line(b"17"),
        _line(b'"abc"'),
        _line(b"{}"),
        _line(b'{"a":1,"b":2,"c":3}'),
        _line(b"[1,[],null,0]"),
        _line(b"[1,[[1,2,3]],null]"),
        _line(b"[1,[[1,2,3,4,5]],null]"),
        _line(b"[1,[7],null]"),
        _line(b"[1,null,null]"),
        _line(b"[1,[[0,0,1,2]],1.5]"),
        _line(b"[true,[[0,0,1,2]],1]"),
        _line(b'["1",[[0,0,1,2]],1]'),
        _line(b"[-1,[[0,0,1,2]],1]"),
        _line(b"[1,[[0,-1,1,2]],1]"),
        _line(b"[1,[[0,9223372036854775808,1,2]],1]"),
        _line(b"[1,[[0,0,1,[2]]],1]"),
        _line(b"[1,[[0,0,1,2]],1]").upper().replace(b"\n", b"\r\n"),
        _line(b'{"format":"ckpttools-journal-1","job":"' + b"6f" * 32 + b'"}'),
    ],
)
def test_a_foreign_line_ends_the_known_part_even_if_its_checksum_is_right(
    line: bytes, path: Path
) -> None:
    data = write(path)
    end = ends(data)[3]
    path.write_bytes(data[:end] + line + data[end:])
    assert read(path) == TILES[:3]
    assert path.read_bytes() == data[:end]


def test_what_is_added_after_damage_is_known(path: Path) -> None:
    data = write(path)
    path.write_bytes(data[:-3])
    write(path, (Done(77, (), 7),))
    assert read(path) == (*TILES[:-1], Done(77, (), 7))


# --- other work --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["other job", "other version", "other file", "empty", "long"])
def test_the_file_of_another_job_or_of_none_begins_anew(kind: str, path: Path) -> None:
    good = write(path)
    header, lines = good[: ends(good)[0]], good[ends(good)[0] :]
    path.write_bytes(
        {
            "other job": lambda: header.replace(b"6f", b"6e") + lines,
            "other version": lambda: header.replace(b"journal-1", b"journal-2") + lines,
            "other file": lambda: b"PK\x03\x04" + lines,
            "empty": lambda: b"",
            "long": lambda: b"\xff" * (1 << 21),
        }[kind]()
    )
    assert read(path) == ()
    assert path.read_bytes() == header
    assert read(path, {"job": "1"}) == ()
    assert read(path) == ()


def test_what_is_forgotten_is_not_known_any_more(path: Path) -> None:
    good = write(path)
    journal = Journal.start(path, JOB)
    journal.restart()
    assert (journal.known, journal.count) == ((), 0)
    assert path.read_bytes() == good[: ends(good)[0]]
    journal.add(TILES[2])
    assert path.read_bytes().startswith(good[: ends(good)[0]])
    journal.close()
    assert read(path) == (TILES[2],)
    journal = Journal.start(path, JOB)
    journal.forget()
    journal.close()
    assert path.read_bytes() == b""
    assert read(path) == ()


# --- one writer --------------------------------------------------------------------------------

_HOLDER = """
import sys
from pathlib import Path
from ckpttools.storage.journal import Done, Journal
journal = Journal.start(Path(sys.argv[1]), {"job": "6f" * 32})
journal.add(Done(1, (), 2))
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_it_is_killed(
    path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        before = path.read_bytes()
        message = f"{path}: must be free, got another process that is writing this destination"
        with pytest.raises(StorageError, match=re.escape(message)):
            Journal.start(path, JOB)
        with pytest.raises(StorageError, match=re.escape(message)):
            Journal.start(path, {"job": "another"})
        assert is_open(path)
        assert path.read_bytes() == before
        child.kill()
    assert not is_open(path)
    assert read(path) == (Done(1, (), 2),)


def test_a_second_journal_of_this_process_is_refused_too_and_no_descriptor_leaks(
    path: Path,
) -> None:
    journal = Journal.start(path, JOB)
    count = descriptors()
    for _ in range(3):
        with pytest.raises(StorageError, match="must be free"):
            Journal.start(path, JOB)
        assert is_open(path)
    assert descriptors() == count
    journal.close()
    assert not is_open(path)
    assert not is_open(path.parent / "none")


def test_a_journal_that_was_removed_between_opening_and_locking_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each hold the lock of a file, one of which has no name."""
    write(path)
    flock = fcntl.flock
    removed: list[int] = []

    def first_remove(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(descriptor)
            path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", first_remove)
    journal = Journal.start(path, JOB)
    assert removed
    assert journal.known == ()
    assert is_open(path)
    journal.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_keeps_nobody_out(
    code: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(path)
    assert read(path) == TILES
    assert not is_open(path)


def test_another_error_of_the_lock_is_no_other_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        Journal.start(path, JOB)


# --- threads and the system --------------------------------------------------------------------


def test_threads_add_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some, sizes = os.write, itertools.cycle((1, 40, 7, 300, 13))
    monkeypatch.setattr(os, "write", lambda fd, data: write_some(fd, data[: next(sizes)]))
    journal = Journal.start(path, JOB)

    def add(first: int) -> None:
        for number in range(first, first + 50):
            journal.add(Done(number, (Piece(number, number, number, number),), number))

    threads = [threading.Thread(target=add, args=(i * 50,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert journal.count == 400
    assert sorted(done.number for done in read(path)) == list(range(400))
    assert all(done.pieces == (Piece(*[done.number] * 4),) for done in read(path))


def test_a_full_disk_is_a_storage_error_and_leaves_what_was_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.start(path, JOB)
    journal.add(TILES[0])
    write_all = os.write

    def fill(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return write_all(descriptor, data[:5])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill)
    message = f"{path}: can't write it: No space left on device"
    with pytest.raises(StorageError, match=re.escape(message)):
        journal.add(TILES[1])
    assert journal.count == 1
    with pytest.raises(StorageError, match=re.escape(message)):
        journal.restart()
    journal.close()
    monkeypatch.undo()
    assert read(path) == ()


def test_a_journal_that_can_not_be_begun_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="can't write it: No space left on device"):
        Journal.start(path, JOB)
    assert list(path.parent.iterdir()) == []
