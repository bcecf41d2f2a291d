"""How is a file of torch's container planned around live tensors? Elements, and the bytes between.

Each item is an archive with a CRC-32 of its elements behind them. A plan knows every byte but the
elements and what depends on that sum, which is given when the elements before it were summed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ckpttools.errors import StorageError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.file_content import Held
from ckpttools.hooks.save_plan import FilePlan, Item
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, Part, TensorSpec
from ckpttools.storage.dcp_writer import DcpFile, PlacedItem


def plan_file(file: DcpFile, live: Mapping[int, Tensor]) -> FilePlan:
    """Plan a file; ``live`` are the tensors by the identity of the items that they fill."""
    (_, header), *gaps = _gaps(file)
    items: list[Item] = []
    for placed, (start, data) in zip(_filled(file), gaps, strict=True):
        key, between = _key(placed), torch.frombuffer(data, dtype=torch.uint8)
        alone = DcpFile(file.path, file.size, (placed,))
        items.append(Item(key, placed.payload or 0, live[id(placed.item)]))
        items.append(Item(f"@{start}", start, between, partial(_sealed, alone, key, start, data)))
    return FilePlan(file.path, bytes(header), file.size, tuple(items))


def check_stated(file: DcpFile, stated: StatedFile) -> None:
    """Check that a rank has written the elements that the list of all files names, there.

    Raises:
        StorageError: it hasn't, so ranks have planned different files.
    """
    expected = {_key(placed) for placed in _filled(file)}
    if odd := sorted(expected ^ {key for key in stated.crcs if not key.startswith("@")}):
        raise StorageError(
            f"{file.path}: every rank must write what all have planned, got a difference: {odd[0]}"
        )


def held_in(
    number: int, file: DcpFile, boxes: Mapping[int, tuple[TensorSpec, Box]]
) -> Iterator[Held]:
    """Yield the chunks in a file, which has this number among those of its rank.

    ``boxes`` has tensor and box of each item with elements, by the item's identity.
    """
    for placed in _filled(file):
        spec, box = boxes[id(placed.item)]
        extent = Extent(number, placed.payload or 0, box.numel * spec.dtype.itemsize)
        yield spec, Chunk(0, box, (Part(extent, spec.dtype),))


def _filled(file: DcpFile) -> list[PlacedItem]:
    """Return the items whose elements come from live tensors."""
    return [placed for placed in file.items if placed.payload is not None]


def _key(placed: PlacedItem) -> str:
    return f"{placed.item.key}@{placed.payload}"


def _gaps(file: DcpFile) -> list[tuple[int, bytearray]]:
    """Return what is not elements, by offset: before, between and behind them, without sums."""
    gaps: list[tuple[int, bytearray]] = []
    start = 0
    for placed in _filled(file):
        _, offset, length = placed.draft.storages[0]
        at = placed.offset + offset
        gaps.append((start, bytearray(at - start)))
        start = at + length
    gaps.append((start, bytearray(file.size - start)))
    known = tuple(placed for placed in file.items if placed.payload is None)
    starts = [start for start, _ in gaps]
    for offset, data in (*file.pieces(), *DcpFile(file.path, file.size, known).seal({})):
        start, gap = gaps[bisect_right(starts, offset) - 1]
        _put(gap, start, [(offset, data)])
    return gaps


def _sealed(
    alone: DcpFile, key: str, start: int, data: bytearray, crcs: Mapping[str, int]
) -> bytes:
    """Return the bytes behind the elements of one item, with their sum in its archive."""
    sealed = bytearray(data)
    (placed,) = alone.items
    _put(sealed, start, alone.seal({placed.payload or 0: crcs[key]}))
    return bytes(sealed)


def _put(data: bytearray, start: int, pieces: Iterable[tuple[int, bytes]]) -> None:
    """Put pieces of a file to their places in its bytes from ``start`` on."""
    for offset, piece in pieces:
        data[offset - start : offset - start + len(piece)] = piece
