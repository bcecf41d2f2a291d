"""How does sharded state come to data-parallel rank zero? A bucket at a time, in bounded pieces.

Rank zero of the *group* receives; it need not be global rank zero. Every rank makes the same
calls whatever its share holds, padding included, and after each bucket the ranks agree whether to
go on, so an error on one (a full disk under the sink) is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpttools.layout.megatron import BufferLayout
from ckpttools.manifest import MASTER, WEIGHT
from ckpttools.optimizer.agreement import raise_together
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.live import LiveShard, StateOwner
from ckpttools.optimizer.shards import MOMENTS

PIECE_NUMEL = 1 << 22
"""Elements of a message: 16 MiB of fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A stretch of one bucket's state, as it reaches rank zero.

    ``data`` is 1-D on the host and is only valid inside the call that gets it. ``start`` is the
    element of the *bucket* where it begins. ``buffer`` and ``bucket`` count from zero.
    """

    buffer: int
    bucket: int
    slot: str
    start: int
    data: Tensor


Sink = Callable[[Gathered], None]


def gather_to_zero(
    optimizer: StateOwner, sink: Sink | None, *, piece_numel: int = PIECE_NUMEL
) -> None:
    """Send every rank's state to data-parallel rank zero, whose ``sink`` gets it in pieces.

    ``sink`` is used on rank zero only. Takes one host buffer of ``piece_numel`` elements there.

    Raises:
        CkptError: any rank had an error; it is raised on all of them.
    """
    scratch: dict[torch.dtype, Tensor] = {}
    for buffer_index, shard in _shards(optimizer):
        error: Exception | None = None
        for slot in (WEIGHT, *shard.logical_slots()):
            local = shard.bucket.local_params if slot == WEIGHT else shard.logical(slot)
            for owner in range(optimizer.dp.size):
                for low in range(0, local.numel(), piece_numel):
                    part = local[low : low + piece_numel]
                    data = _bring(optimizer.dp, owner, part, scratch, piece_numel)
                    if data is None or sink is None or error is not None:
                        continue
                    start = owner * local.numel() + low
                    try:
                        sink(Gathered(buffer_index, shard.bucket.index, slot, start, data))
                    except Exception as caught:  # noqa: BLE001  # raised on all ranks below
                        error = caught
        raise_together(optimizer.dp, error)


def _bring(
    dp: Collectives, owner: int, part: Tensor, scratch: dict[torch.dtype, Tensor], limit: int
) -> Tensor | None:
    """Bring one rank's part to rank zero; returns it there, None elsewhere."""
    if dp.rank == 0:
        if owner == 0:
            return part.detach().cpu()
        if part.dtype not in scratch:
            scratch[part.dtype] = torch.empty(limit, dtype=part.dtype, device=part.device)
        target = scratch[part.dtype][: part.numel()]
        dp.recv(target, owner)
        return target.cpu()
    if dp.rank == owner:
        dp.send(part.contiguous(), 0)
    return None


def gathered_param_state(optimizer: StateOwner) -> dict[int, dict[Any, dict[str, Any]]] | None:
    """Gather masters and moments in the form of Megatron's ``distrib_optim.pt``, version 2.

    ``{buffer: {(parameter dtype, gradient dtype): {"param", "exp_avg", "exp_avg_sq":
    fp32 (numel_unpadded,), "numel_unpadded"}}}``: the padding at bucket ends is taken out.
    """
    result: dict[int, dict[Any, dict[str, Any]]] = {}
    if optimizer.dp.rank == 0:
        for index, buffer in enumerate(optimizer.buffers):
            numel = buffer.layout.numel_unpadded
            tensors: dict[str, Any] = {
                name: torch.zeros(numel, dtype=torch.float32) for name in ("param", *MOMENTS)
            }
            tensors["numel_unpadded"] = numel
            result[index] = {(buffer.param_dtype, buffer.grad_dtype): tensors}

    masters = [WEIGHT] * len(optimizer.buffers)
    for index, shard in _shards(optimizer):
        if MASTER in shard.logical_slots():
            masters[index] = MASTER

    def keep(got: Gathered) -> None:
        buffer = optimizer.buffers[got.buffer]
        name = _megatron_slot(got.slot, masters[got.buffer])
        if name is None:
            return
        target = result[got.buffer][buffer.param_dtype, buffer.grad_dtype][name]
        at, length = unpadded_place(buffer.layout, got.bucket, got.start, got.data.numel())
        target[at : at + length] = got.data[:length]

    gather_to_zero(optimizer, keep)
    return result if optimizer.dp.rank == 0 else None


def unpadded_place(layout: BufferLayout, bucket: int, start: int, numel: int) -> tuple[int, int]:
    """Return where a stretch of a bucket lies without the padding at bucket ends, and its length.

    >>> from ckpttools.layout.megatron import BufferParam, buffer_layout, Cuts
    >>> layout = buffer_layout([BufferParam("a", 10), BufferParam("b", 70)], dp=1, cuts=Cuts(1))
    >>> unpadded_place(layout, 0, 64, 64), unpadded_place(layout, 1, 0, 128)
    ((64, 6), (70, 10))
    """
    before = sum(layout.bucket_unpadded[:bucket])
    length = max(0, min(numel, layout.bucket_unpadded[bucket] - start))
    return before + start, length


def _megatron_slot(slot: str, master: str) -> str | None:
    """Return Megatron's name of a slot; ``master`` is the slot of masters, or the weight."""
    if slot in MOMENTS:
        return slot
    return "param" if slot == master else None


def _shards(optimizer: StateOwner) -> Iterator[tuple[int, LiveShard]]:
    """Yield every bucket's shard with the number of its buffer; the same order on every rank."""
    at = iter(optimizer.shards)
    for index, buffer in enumerate(optimizer.buffers):
        for _ in buffer.buckets:
            yield index, next(at)
