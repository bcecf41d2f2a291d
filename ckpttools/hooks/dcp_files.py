"""How is a file of torch's container planned around live tensors? Elements, and the bytes between.

Each item is an archive with a CRC-32 of its elements behind them. A plan knows every byte but the
elements before it is carried out, so the sums are taken when it is made: one pass over memory that
the copy or the write, which follow at once, pass over again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import torch
from torch import Tensor

from ckpttools.errors import StorageError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.save_plan import FilePlan, Item
from ckpttools.hooks.write_files import BLOCK_BYTES, host_bytes
from ckpttools.storage.crc import crc32
from ckpttools.storage.dcp_writer import DcpFile, PlacedItem
from ckpttools.storage.sealed_json import sha256


def plan_file(file: DcpFile, live: Mapping[int, Tensor]) -> FilePlan:
    """Plan a file; ``live`` are the tensors by the identity of the items that they fill."""
    tensors = {id(placed): live[id(placed.item)] for placed in _filled(file)}
    crcs = {id(placed): _crc(tensors[id(placed)]) for placed in _filled(file)}
    gaps = _gaps(file, crcs)
    items: list[Item] = []
    for placed, (start, data) in zip(_filled(file), gaps[1:], strict=True):
        tensor = tensors[id(placed)]
        items.append(Item(_key(placed), placed.payload or 0, tensor))
        items.append(Item(f"@{start}", start, torch.frombuffer(data, dtype=torch.uint8)))
    return FilePlan(file.path, bytes(gaps[0][1]), file.size, tuple(items))


def check_written(file: DcpFile, stated: StatedFile) -> None:
    """Check that the sums in a file are those of the elements that were written.

    Raises:
        StorageError: they aren't, so a tensor changed while it was saved.
    """
    crcs = {id(placed): stated.crcs[_key(placed)] for placed in _filled(file)}
    (_, header), *gaps = _gaps(file, crcs)
    expected = {f"@{start}": crc32(bytes(data)) for start, data in gaps}
    odd = next((key for key, crc in expected.items() if stated.crcs[key] != crc), None)
    if odd is not None or sha256(bytes(header)) != stated.header_sha256:
        raise StorageError(
            f"{file.path}: tensors must stay as they are until they are copied, got a change "
            f"before byte {(odd or '@0')[1:]}"
        )


def _filled(file: DcpFile) -> list[PlacedItem]:
    """Return the items whose elements come from live tensors."""
    return [placed for placed in file.items if placed.payload is not None]


def _key(placed: PlacedItem) -> str:
    return f"{placed.item.key}@{placed.payload}"


def _gaps(file: DcpFile, crcs: Mapping[int, int]) -> list[tuple[int, bytearray]]:
    """Return what is not elements, by offset: before, between and behind them."""
    gaps: list[tuple[int, bytearray]] = []
    start = 0
    by_offset: dict[int, int] = {}
    for placed in _filled(file):
        _, offset, length = placed.draft.storages[0]
        at = placed.offset + offset
        by_offset[at] = crcs[id(placed)]
        gaps.append((start, bytearray(at - start)))
        start = at + length
    gaps.append((start, bytearray(file.size - start)))
    starts = [start for start, _ in gaps]
    for offset, data in (*file.pieces(), *file.seal(by_offset)):
        start, gap = gaps[bisect_right(starts, offset) - 1]
        gap[offset - start : offset - start + len(data)] = data
    return gaps


def _crc(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's elements in row-major order."""
    flat = tensor.detach().reshape(-1)
    step = max(1, BLOCK_BYTES // flat.element_size())
    crc = 0
    for low in range(0, flat.numel(), step):
        crc = crc32(host_bytes(flat[low : low + step]), crc)
    return crc
