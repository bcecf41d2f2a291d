"""What optimizer state does a rank hold in ZeRO-2, and how is it updated in any form?

All is flat, one element per element of the rank's piece of a bucket, padding included (where it
stays zero); scales are one number for each slice of a parameter in the piece, in the order of the
slices. Forms that aren't fp32 are widened in scratch that all buckets share, a batch of pieces at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ckpttools.layout.slots import MASTER, REMAINDER_SLOT, SCALE_SUFFIX, WEIGHT
from ckpttools.optimizer.adam import Pieces, scratch_views
from ckpttools.optimizer.fused_buckets import FusedBucket, FusedBuffer, FusedSlot
from ckpttools.optimizer.fused_settings import FusedSettings
from ckpttools.optimizer.kept import Kept, Plain, Scaled, Widened, WithRemainder
from ckpttools.optimizer.ranges import ParamRange
from ckpttools.optimizer.shards import EXP_AVG, EXP_AVG_SQ, MOMENTS, batched

UPDATED = (MASTER, EXP_AVG, EXP_AVG_SQ)
"""What a step changes."""

SCRATCH_NUMEL = 1 << 21
"""Elements that are widened at once: 8 MiB of fp32 for each slot that isn't fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedPiece:
    """The part of one parameter that this rank owns in one bucket.

    ``grad`` and ``weight`` are 1-D views, ``range.param.size`` elements long; ``kept`` has the
    master and both moments. ``exclusive`` says that this rank's copy is the one that norms count.
    """

    slot: FusedSlot
    range: ParamRange
    grad: Tensor
    weight: Tensor
    kept: dict[str, Kept]
    flat: dict[str, Tensor]
    exclusive: bool

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.slot.name

    def logical_slots(self) -> tuple[str, ...]:
        """Return the slots of state: the master where it isn't the weight, and both moments."""
        return _logical(self.flat)

    def values(self, slot: str) -> Tensor:
        """Return a slot's values: fp32, 1-D; perhaps a view, so only to be read."""
        kept = self.kept[slot]
        if kept.in_place is not None:
            return kept.in_place
        values = torch.empty(self.weight.shape, dtype=torch.float32, device=self.weight.device)
        kept.read(values)
        return values

    @torch.no_grad()
    def put(self, slot: str, values: Tensor) -> None:
        """Keep fp32 values, 1-D, in whatever form the slot has.

        Where the master is kept as a remainder, this sets the weight too.
        """
        self.kept[slot].write(values.to(self.weight.device, torch.float32))

    def memory(self, slot: str) -> Tensor | None:
        """Return a slot's own memory, 1-D; None where its values are kept in another form."""
        return self.kept[slot].in_place

    def stored(self) -> dict[str, Tensor]:
        """Return the state as it is kept, as views.

        With a remainder the weight is among it, since it is the master's other half.
        """
        return self.flat | ({WEIGHT: self.weight} if REMAINDER_SLOT in self.flat else {})


def _logical(stored: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the slots whose values `stored` ones make."""
    master = MASTER in stored or REMAINDER_SLOT in stored
    return (*((MASTER,) if master else ()), *MOMENTS)


class Scratch:
    """fp32 memory in which forms that aren't fp32 are widened; made as large as is needed."""

    def __init__(self, shards: Sequence[FusedShard], settings: FusedSettings) -> None:
        pieces = [piece for shard in shards for piece in shard.pieces]
        sizes = [shard.numel for shard in shards]
        most = min(SCRATCH_NUMEL, max(sizes, default=0))
        if settings.with_scaled_states:  # a scale is of a whole piece
            most = max(most, max((piece.range.param.size for piece in pieces), default=0))
        self.limit = most
        self.grads = _memory(most, any(p.grad.dtype != torch.float32 for p in pieces), pieces)
        self.slots = {
            slot: _memory(most, any(p.kept[slot].in_place is None for p in pieces), pieces)
            for slot in UPDATED
        }


def _memory(numel: int, wanted: bool, pieces: Sequence[FusedPiece]) -> Tensor:
    device = pieces[0].weight.device if pieces else None
    return torch.empty(numel if wanted else 0, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class FusedCall:
    """One kernel call: pieces, or parts of them, of a bucket that belong to one group.

    ``widened`` are (form, fp32 scratch): to be read before, and written after; ``masters`` are
    then rounded to the parameters.
    """

    group: int
    names: tuple[str, ...]
    pieces: Pieces
    masters: tuple[Kept, ...]
    widened: tuple[tuple[Kept, Tensor], ...] = field(default=())

    def load(self) -> None:
        """Widen what isn't fp32."""
        for kept, values in self.widened:
            kept.read(values)

    @torch.no_grad()
    def store(self) -> None:
        """Put it back, and round the masters to the parameters."""
        for kept, values in self.widened:
            kept.write(values)
        for master in self.masters:
            master.publish()


class FusedShard:
    """This rank's optimizer state of one bucket, in the form that the settings say.

    ``ranges`` are the slices of parameters in the rank's piece of it, in order.
    """

    def __init__(
        self,
        buffer: FusedBuffer,
        bucket: FusedBucket,
        ranges: Sequence[ParamRange],
        settings: FusedSettings,
        counts_in_norm: Callable[[FusedSlot], bool],
    ) -> None:
        self.bucket = bucket
        self.numel = bucket.local.stop - bucket.local.start
        self._ranges = tuple(ranges)
        self._device = buffer.device
        self._flat = {
            slot: self._zeros(slot, kind)
            for slot, kind in settings.native_slots(buffer.param_dtype).items()
            if slot != WEIGHT
        }
        self.pieces = tuple(self._pieces(buffer, counts_in_norm))
        self._calls: dict[tuple[bool, ...], tuple[FusedCall, ...]] = {}
        self.read_params()

    def slots(self) -> dict[str, Tensor]:
        """Return the flat state by slot, as native files hold it."""
        return dict(self._flat)

    def logical_slots(self) -> tuple[str, ...]:
        """Return the names that `logical` knows."""
        return _logical(self._flat)

    def logical(self, slot: str) -> Tensor:
        """Return a slot's values over the whole shard, fp32; zero in padding."""
        values = torch.zeros(self.numel, dtype=torch.float32, device=self._device)
        for piece in self.pieces:
            place = piece.range.gbuf_local
            piece.kept[slot].read(values[place.start : place.end])
        return values

    @torch.no_grad()
    def read_params(self) -> None:
        """Make the masters anew of the parameters."""
        for piece in self.pieces:
            if MASTER in piece.logical_slots():
                piece.kept[MASTER].write(piece.weight.float())

    def calls(self, used: Callable[[FusedPiece], bool], scratch: Scratch) -> tuple[FusedCall, ...]:
        """Return the kernel calls for the pieces that are to be updated, in order."""
        mask = tuple(used(piece) for piece in self.pieces)
        if mask not in self._calls:
            chosen = [piece for piece, use in zip(self.pieces, mask, strict=True) if use]
            if len(self._calls) > 8:  # patterns of unused parameters may be many
                self._calls.clear()
            self._calls[mask] = tuple(_group_calls(chosen, scratch))
        return self._calls[mask]

    def _zeros(self, slot: str, kind: str) -> Tensor:
        numel = len(self._ranges) if slot.endswith(SCALE_SUFFIX) else self.numel
        return torch.zeros(numel, dtype=getattr(torch, kind), device=self._device)

    def _pieces(
        self, buffer: FusedBuffer, counts_in_norm: Callable[[FusedSlot], bool]
    ) -> Iterator[FusedPiece]:
        for number, part in enumerate(self._ranges):
            slot = buffer.slots[part.index]
            span = slice(part.gbuf_local.start, part.gbuf_local.end)
            weight = slot.flat[part.param.start : part.param.end]
            flat = {
                name: memory[number : number + 1] if name.endswith(SCALE_SUFFIX) else memory[span]
                for name, memory in self._flat.items()
            }
            kept: dict[str, Kept] = {name: _moment(flat, name) for name in MOMENTS}
            kept[MASTER] = _master(flat, weight)
            grad = self.bucket.grad_shard[span]
            yield FusedPiece(slot, part, grad, weight, kept, flat, counts_in_norm(slot))


def _moment(flat: dict[str, Tensor], slot: str) -> Kept:
    scale = flat.get(f"{slot}{SCALE_SUFFIX}")
    return Plain(flat[slot]) if scale is None else Scaled(flat[slot], scale)


def _master(flat: dict[str, Tensor], weight: Tensor) -> Kept:
    if REMAINDER_SLOT in flat:
        return WithRemainder(weight, flat[REMAINDER_SLOT])
    if MASTER not in flat:
        return Plain(weight) if weight.dtype == torch.float32 else Widened(weight)
    scale = flat.get(f"{MASTER}{SCALE_SUFFIX}")
    if scale is None:
        return Plain(flat[MASTER], weight)
    return Scaled(flat[MASTER], scale, weight)


def _group_calls(chosen: Sequence[FusedPiece], scratch: Scratch) -> Iterator[FusedCall]:
    """Build the calls, one a parameter group, or several where scratch holds less."""
    for group in sorted({piece.slot.managed.group for piece in chosen}):
        members = [piece for piece in chosen if piece.slot.managed.group == group]
        yield from _calls_of(group, members, scratch)


def _calls_of(group: int, members: list[FusedPiece], scratch: Scratch) -> Iterator[FusedCall]:
    widen = any(piece.grad.dtype != torch.float32 for piece in members)
    narrow = any(kept.in_place is None for piece in members for kept in piece.kept.values())
    whole = any(isinstance(k, Scaled) for piece in members for k in piece.kept.values())
    if not (widen or narrow):
        batches = [[(piece, 0, piece.range.param.size) for piece in members]]
    elif whole:
        batches = whole_batches(members, scratch.limit)
    else:
        batches = batched(members, scratch.limit)
    for batch in batches:
        grads = [piece.grad[low:high] for piece, low, high in batch]
        work: dict[str, list[Tensor]] = {}
        widened: list[tuple[Kept, Tensor]] = []
        masters: list[Kept] = []
        for slot in UPDATED:
            parts = [piece.kept[slot].part(low, high) for piece, low, high in batch]
            inside = [part.in_place for part in parts]
            work[slot] = [memory for memory in inside if memory is not None]
            if len(work[slot]) < len(parts):  # one dtype and one form for all of a bucket
                work[slot] = scratch_views(grads, scratch.slots[slot])
                widened += zip(parts, work[slot], strict=True)
            if slot == MASTER:
                masters = parts
        yield FusedCall(
            group=group,
            names=tuple(piece.name for piece, _, _ in batch),
            pieces=Pieces(
                params=work[MASTER],
                grads=grads,
                exp_avgs=work[EXP_AVG],
                exp_avg_sqs=work[EXP_AVG_SQ],
                scratch=scratch_views(grads, scratch.grads) if widen else [],
            ),
            masters=tuple(masters),
            widened=tuple(widened),
        )


_Span = tuple[FusedPiece, int, int]
"""Elements of a piece, from and to."""


def whole_batches(pieces: Sequence[FusedPiece], limit: int) -> list[list[_Span]]:
    """Put whole pieces in batches of at most ``limit`` elements, in order.

    ``limit`` is at least the largest piece.
    """
    batches: list[list[_Span]] = [[]]
    room = limit
    for piece in pieces:
        size = piece.range.param.size
        if size > room:
            batches.append([])
            room = limit
        batches[-1].append((piece, 0, size))
        room -= size
    return [batch for batch in batches if batch]
