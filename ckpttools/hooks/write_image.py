"""How is an image in host memory written with the least work? Past the page cache, where it can be.

Direct I/O lets the disk take the bytes from the image itself: a tenth of the processor time of a
write through the page cache, which copies them and has the kernel copy them out again, while
training computes. The last, broken page goes through the cache, and so does everything on a
filesystem without direct I/O; then the writer rests after each block. Sums are taken of the image
first, since bytes of it may depend on them; nobody else changes it meanwhile.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpttools.errors import StorageError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.file_content import FileContent
from ckpttools.hooks.host_images import ALIGNMENT
from ckpttools.hooks.save_plan import FilePlan
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import create_file
from ckpttools.storage.sealed_json import sha256

BLOCK_BYTES = 16 << 20
"""How much is written at once; each block costs a turn of Python's lock."""

Pause = Callable[[float], None]
"""Called between blocks with the seconds of processor time that the last one took."""


def write_image(
    root: Path, file: FilePlan, image: memoryview, pause: Pause, content: FileContent
) -> StatedFile:
    """Write and sync a file of which ``image`` holds every byte, aligned to pages.

    What is late is put into the image first.

    Raises:
        StorageError: the system refuses.
        Exception: what ``pause`` raises, to break off.
    """
    sums = _sums(file, image, pause, content)
    place = root / file.path
    create_file(place, file.size_bytes)
    try:
        with ExitStack() as stack:
            plain = stack.enter_context(_opened(place, 0))
            whole = file.size_bytes - file.size_bytes % ALIGNMENT
            done = _write_direct(place, image[:whole], pause)
            _write(plain, image, done, pause)
            os.fsync(plain)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{place}: can't write it: {error.strerror or error}") from error
    return StatedFile(file.path, sha256(file.header), sums, content.shares())


def _write_direct(place: Path, image: memoryview, pause: Pause) -> int:
    """Write whole pages past the page cache; return how many bytes were."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux
    if not flag or not image:
        return 0
    try:
        with _opened(place, flag) as direct:
            return _write(direct, image, 0, pause)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return 0
        raise


def _write(descriptor: int, image: memoryview, start: int, pause: Pause) -> int:
    """Write an image from ``start`` on; return where it ends."""
    done = start
    while done < len(image):
        used = time.thread_time()
        stop = min(len(image), done + BLOCK_BYTES)
        while done < stop:
            done += os.pwrite(descriptor, image[done:stop], done)
        pause(time.thread_time() - used)
    return done


def _sums(file: FilePlan, image: memoryview, pause: Pause, content: FileContent) -> dict[str, int]:
    """Return the CRC-32 of each item's bytes, and let ``content`` see them."""
    sums: dict[str, int] = {}
    for item in file.items:
        crc, stop = 0, item.offset + item.length
        if item.late is not None:
            image[item.offset : stop] = item.late(sums)
        for low in range(item.offset, stop, BLOCK_BYTES):
            used = time.thread_time()
            block = image[low : min(low + BLOCK_BYTES, stop)]
            crc = crc32(block, crc)
            content.add(low, block)
            pause(time.thread_time() - used)
        sums[item.key] = crc
    used = time.thread_time()
    for _ in content.rest():
        pause(time.thread_time() - used)
        used = time.thread_time()
    return sums


@contextmanager
def _opened(place: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(place, os.O_WRONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
