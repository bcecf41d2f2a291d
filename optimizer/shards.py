"""What optimizer state does a rank hold? fp32 masters and moments of its piece of each bucket.

All are flat, one element per element of the rank's piece, padding included (where they stay
zero), so the memory of a rank is (bytes per element) x (padded elements / ranks). A parameter's
part of a piece is a view, built once; updates are one kernel call over a list of views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ckpttools.manifest import MASTER
from ckpttools.optimizer.adam import PIECE_ALIGNMENT, Pieces, scratch_views
from ckpttools.optimizer.buffers import Bucket, GradSlot, ParamAndGradBuffer
from ckpttools.optimizer.live import LivePiece
from ckpttools.optimizer.ranges import ParamRange

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one parameter that this rank owns: views of gradient, master and moments.

    All are 1-D, ``range.param.size`` elements long. ``exclusive`` says that this rank's copy is
    the one that norms count.
    """

    slot: GradSlot
    range: ParamRange
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exclusive: bool

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.slot.name

    def slots(self) -> dict[str, Tensor]:
        """Return the piece of each optimizer slot by its name."""
        return {MASTER: self.master, EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}

    def logical_slots(self) -> tuple[str, ...]:
        """Return the slots of state: the master where it isn't the weight, and both moments."""
        return MOMENTS if self.slot.param.dtype == torch.float32 else (MASTER, *MOMENTS)

    def values(self, slot: str) -> Tensor:
        """Return a slot's values: fp32, 1-D, a view; only to be read."""
        return self.slots()[slot]

    @torch.no_grad()
    def put(self, slot: str, values: Tensor) -> None:
        """Keep fp32 values, 1-D."""
        self.slots()[slot].copy_(values)

    def memory(self, slot: str) -> Tensor | None:
        """Return a slot's own memory, 1-D."""
        return self.slots()[slot]

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that are state: the master only where it is no parameter."""
        return {slot: self.values(slot) for slot in self.logical_slots()}


class BucketShard:
    """This rank's optimizer state of one bucket.

    ``master`` is fp32; for fp32 parameters it *is* the rank's piece of them.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        bucket: Bucket,
        scratch: Tensor,
        counts_in_norm: Callable[[GradSlot], bool],
    ) -> None:
        self.bucket = bucket
        self._scratch = scratch
        params = bucket.local_params
        self.owns_master = params.dtype != torch.float32
        self.master = params.float() if self.owns_master else params  # (local,)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.pieces = tuple(self._pieces(buffer, counts_in_norm))
        self._calls: dict[tuple[bool, ...], tuple[GroupCall, ...]] = {}

    def slots(self) -> dict[str, Tensor]:
        """Return the flat state by slot; fp32 parameters have no master beside themselves."""
        master = {MASTER: self.master} if self.owns_master else {}
        return {**master, EXP_AVG: self.exp_avg, EXP_AVG_SQ: self.exp_avg_sq}

    def logical_slots(self) -> tuple[str, ...]:
        """Return the names that `logical` knows."""
        return tuple(self.slots())

    def logical(self, slot: str) -> Tensor:
        """Return a slot's values over the whole shard, fp32; zero in padding."""
        return self.slots()[slot]

    def calls(self, used: Callable[[Piece], bool]) -> tuple[GroupCall, ...]:
        """Return the kernel calls for the pieces that are to be updated, one a parameter group."""
        mask = tuple(used(piece) for piece in self.pieces)
        if mask not in self._calls:
            chosen = [piece for piece, use in zip(self.pieces, mask, strict=True) if use]
            if len(self._calls) > 8:  # patterns of unused parameters may be many
                self._calls.clear()
            self._calls[mask] = tuple(_group_calls(chosen, self._scratch))
        return self._calls[mask]

    def write_params(self) -> None:
        """Round the masters to the parameters' dtype, to nearest even."""
        if self.owns_master:
            self.bucket.local_params.copy_(self.master)

    def read_params(self) -> None:
        """Make the masters anew of the parameters."""
        if self.owns_master:
            self.master.copy_(self.bucket.local_params)

    def _pieces(
        self, buffer: ParamAndGradBuffer, counts_in_norm: Callable[[GradSlot], bool]
    ) -> Iterator[Piece]:
        grads = self.bucket.local_grads
        for part in buffer.ranges:
            if part.bucket != self.bucket.index:
                continue
            slot = buffer.slots[part.index]
            span = slice(part.gbuf_local.start, part.gbuf_local.end)
            yield Piece(
                slot=slot,
                range=part,
                grad=grads[span],
                master=self.master[span],
                exp_avg=self.exp_avg[span],
                exp_avg_sq=self.exp_avg_sq[span],
                exclusive=counts_in_norm(slot),
            )


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """One kernel call: the pieces of a bucket that belong to one parameter group."""

    group: int
    names: tuple[str, ...]
    pieces: Pieces


def _group_calls(chosen: Sequence[Piece], scratch: Tensor) -> Iterator[GroupCall]:
    """Build the calls; 16-bit gradients are widened in ``scratch``, a batch of pieces at a time."""
    for group in sorted({piece.slot.managed.group for piece in chosen}):
        members = [piece for piece in chosen if piece.slot.managed.group == group]
        widen = any(piece.grad.dtype != torch.float32 for piece in members)
        batches = batched(members, scratch.numel()) if widen else [[_whole(p) for p in members]]
        for batch in batches:
            grads = [piece.grad[low:high] for piece, low, high in batch]
            yield GroupCall(
                group=group,
                names=tuple(piece.name for piece, _, _ in batch),
                pieces=Pieces(
                    params=[piece.master[low:high] for piece, low, high in batch],
                    grads=grads,
                    exp_avgs=[piece.exp_avg[low:high] for piece, low, high in batch],
                    exp_avg_sqs=[piece.exp_avg_sq[low:high] for piece, low, high in batch],
                    scratch=scratch_views(grads, scratch) if widen else [],
                ),
            )


_P = TypeVar("_P", bound=LivePiece)
_Span = tuple[_P, int, int]
"""Elements of a piece, from and to."""


def _whole(piece: Piece) -> _Span[Piece]:
    return piece, 0, piece.range.param.size


def batched(pieces: Sequence[_P], limit: int) -> list[list[_Span[_P]]]:
    """Cut pieces in batches of at most ``limit`` elements, in order, all elements once.

    Cuts lie at multiples of 16 elements from the parameter's start, where they change no bit of
    the update. ``limit`` is at least 16, or the largest piece.
    """
    batches: list[list[_Span[_P]]] = [[]]
    room = limit
    for piece in pieces:
        low, size = 0, piece.range.param.size
        while low < size:
            take = min(size - low, room)
            if take < size - low:  # the cut must fall on a multiple of the alignment
                take -= (piece.range.param.start + low + take) % PIECE_ALIGNMENT
            if take <= 0:
                batches.append([])
                room = limit
                continue
            batches[-1].append((piece, low, low + take))
            low, room = low + take, room - take
    return [batch for batch in batches if batch]
