"""Bytes are read and written whole or not at all, and errors name the file."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from ckpttools.errors import StorageError
from ckpttools.storage import local
from ckpttools.storage.local import (
    FilePool,
    create_file,
    read_small_file,
    write_new_file,
)


def test_reads_and_writes_go_to_their_place(tmp_path: Path) -> None:
    for name, size in (("a", 7), ("b", 5)):
        create_file(tmp_path / name, size)
    with FilePool(str(tmp_path), ["a", "b"], writable=True) as pool:
        pool.write_at(0, 2, b"xyz")
        pool.write_at(1, 0, memoryview(b"12345"))
        buffer = bytearray(4)
        pool.read_into(0, 1, memoryview(buffer))
        assert buffer == b"\0xyz"
        assert (pool.read_bytes, pool.written_bytes) == (4, 8)
        assert pool.path(1) == str(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == b"\0\0xyz\0\0"
    assert (tmp_path / "b").read_bytes() == b"12345"


def test_short_system_calls_are_repeated_until_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_file(tmp_path / "a", 11)
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:2], at))
    with FilePool(str(tmp_path), ["a"], writable=True) as pool:
        pool.write_at(0, 1, b"abcdefghi")
        buffer = bytearray(10)
        pool.read_into(0, 0, memoryview(buffer))
    assert buffer == b"\0abcdefghi"


def test_a_file_that_ends_early_is_named_with_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with FilePool(str(tmp_path), ["a"]) as pool:
        message = f"{tmp_path / 'a'}: must have 4 bytes from 3, got 2"
        with pytest.raises(StorageError, match=re.escape(message)):
            pool.read_into(0, 3, memoryview(bytearray(4)))
        pool.read_into(0, 9, memoryview(bytearray(0)))
        assert pool.read_bytes == 0


def test_what_the_system_refuses_names_the_file_and_the_deed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    with FilePool(str(tmp_path), ["a", "none"]) as pool:
        message = f"{tmp_path / 'none'}: can't open it: No such file or directory"
        with pytest.raises(StorageError, match=re.escape(message)):
            pool.read_into(1, 0, memoryview(bytearray(1)))
        message = f"{tmp_path / 'a'}: can't write it: Bad file descriptor"
        with pytest.raises(StorageError, match=re.escape(message)):
            pool.write_at(0, 0, b"x")

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", fail)
        message = f"{tmp_path / 'a'}: can't read it: Input/output error"
        with pytest.raises(StorageError, match=re.escape(message)):
            pool.read_into(0, 0, memoryview(bytearray(1)))
    assert (tmp_path / "a").read_bytes() == b"12345"


def test_a_full_disk_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    create_file(tmp_path / "a", 5)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        FilePool(str(tmp_path), ["a"], writable=True) as pool,
        pytest.raises(StorageError, match="can't write it: No space left on device") as caught,
    ):
        pool.write_at(0, 0, b"x")
    assert caught.value.hint == "free some room, or choose another disk"
    message = f"{tmp_path / 'b'}: can't reserve 7 bytes for it: No space left on device"
    with pytest.raises(StorageError, match=re.escape(message)):
        create_file(tmp_path / "b", 7)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_pool_keeps_few_descriptors_open_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", limit)
    names = [f"f{i}" for i in range(11)]
    for name in names:
        (tmp_path / name).write_text(name)

    def descriptors() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(link.resolve().is_relative_to(tmp_path.resolve()) for link in links)

    with FilePool(str(tmp_path), names) as pool:
        for i in [*range(11), *range(11)]:
            buffer = bytearray(len(names[i]))
            pool.read_into(i, 0, memoryview(buffer))
            assert buffer.decode() == names[i]
            assert descriptors() <= limit
        assert descriptors() == limit
    assert descriptors() == 0


def test_threads_share_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)
    names = [f"f{i}" for i in range(5)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([i]) * 100)
    wrong: list[int] = []
    with FilePool(str(tmp_path), names) as pool:

        def read(seed: int) -> None:
            buffer = bytearray(7)
            for i in range(300):
                file = (i * seed) % 5
                pool.read_into(file, i % 90, memoryview(buffer))
                if buffer != bytes([file]) * 7:
                    wrong.append(file)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.read_bytes == 4 * 300 * 7
    assert wrong == []


def test_a_new_file_is_full_sized_and_zero(tmp_path: Path) -> None:
    create_file(tmp_path / "a", 10_007)
    assert (tmp_path / "a").read_bytes() == bytes(10_007)
    create_file(tmp_path / "empty", 0)
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_filesystem_that_reserves_nothing_gets_a_sparse_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    create_file(tmp_path / "a", 101)
    assert (tmp_path / "a").read_bytes() == bytes(101)


def test_what_exists_is_not_created_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path / 'a'}: can't create it: File")):
        create_file(tmp_path / "a", 5)
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path / 'a'}: can't write it: File")):
        write_new_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "old"


def test_a_small_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    write_new_file(tmp_path / "a", b"12345")
    assert read_small_file(tmp_path / "a", limit_bytes=5) == b"12345"
    message = f"{tmp_path / 'a'}: must have at most 4 bytes, got more"
    with pytest.raises(StorageError, match=re.escape(message)):
        read_small_file(tmp_path / "a", limit_bytes=4)
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path}: can't read it: Is a directory")):
        read_small_file(tmp_path, limit_bytes=4)
