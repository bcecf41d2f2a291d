"""How do the bytes of a plan get to disk? In blocks, summed as they pass, synced at the end.

The bytes come from live tensors, which nobody may change meanwhile. The disk is set to work on each
stretch as soon as it is written, so that the sync at the end has little left to wait for.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.file_content import FileContent, MemoryPool
from ckpttools.hooks.save_plan import FilePlan, Item, SavePlan
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import FilePool, create_file
from ckpttools.storage.sealed_json import sha256

BLOCK_BYTES = 8 << 20
"""How much is written, and summed, at once."""


def write_live(root: Path, plan: SavePlan) -> list[StatedFile]:
    """Write and sync this rank's files from the live tensors; return what vouches for them.

    Raises:
        StorageError: the system refuses.
    """
    held, pool = plan.contents(), MemoryPool(partial(_read_live, plan))
    return [
        write_file(root, file, FileContent(number, held, pool))
        for number, file in enumerate(plan.files)
    ]


def write_file(root: Path, file: FilePlan, content: FileContent) -> StatedFile:
    """Write one file: its header, then each item's bytes, which ``content`` sees; sync it.

    Raises:
        StorageError: the system refuses.
    """
    create_file(root / file.path, file.size_bytes)
    crcs: dict[str, int] = {}
    with FilePool(str(root), [file.path], writable=True) as pool:
        pool.write_at(0, 0, file.header)
        for item in file.items:
            crc, at = 0, item.offset
            for block in _live_blocks(item) if item.late is None else [memoryview(item.late(crcs))]:
                crc = crc32(block, crc)
                content.add(at, block)
                pool.write_at(0, at, block)
                pool.start_writeback(0, at, len(block))
                at += len(block)
            crcs[item.key] = crc
    with (root / file.path).open("rb") as written:
        os.fsync(written.fileno())
    for _ in content.rest():
        pass
    return StatedFile(file.path, sha256(file.header), crcs, content.shares())


def _live_blocks(item: Item) -> Iterator[memoryview]:
    """Yield the bytes of a live tensor on the host, a bounded piece at a time."""
    flat = item.tensor.detach().reshape(-1)
    step = max(1, BLOCK_BYTES // flat.element_size())
    for low in range(0, flat.numel(), step):
        yield host_bytes(flat[low : low + step])


def _read_live(plan: SavePlan, file: int, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with elements of one item of a planned file, from a byte of the file on."""
    items = plan.files[file].items
    item = items[bisect_right(items, offset, key=lambda item: item.offset) - 1]
    flat = item.tensor.detach().reshape(-1)
    low, count = ((n // flat.element_size()) for n in (offset - item.offset, len(buffer)))
    buffer[:] = host_bytes(flat[low : low + count])


def host_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of a 1-D tensor, copied where it isn't on the host."""
    part = flat.cpu().contiguous()
    return memoryview(part.view(torch.uint8).numpy().data)
