"""How do ranks on a gloo group sum and spread a buffer without moving more than they must?

gloo's own reduce-scatter is a copy, an all-reduce and a copy back: half as many bytes again on
the wire, a temporary as large as the buffer, and sums in an order and a precision of its own.
Here every rank sends each other rank the slice that is that rank's, and nothing else:
``(size - 1) / size`` of the buffer each way, which is the least that the operation allows.

A slice that is to be summed arrives in pieces. Two pieces per peer are under way at a time, in
a staging area that is reused, so what an operation needs besides its buffer is bounded and
doesn't grow with the buffer. Pieces are added in the order of ranks; 16-bit numbers are
added in float32 and rounded once at the end. So the sum depends on the values alone. A gathered
slice is received where it belongs and needs no staging.

The calling thread only posts messages. gloo moves them in threads of its own, and one daemon
thread per group waits for them, adds, and posts the next pieces; torch gives up the
interpreter's lock in each of these, so that all of it goes on while the caller computes.
Operations finish in the order in which they were issued, which must be the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.exchanges import Exchange, FinishedWork, Finisher, Message, broken, nothing
from ckpttools.optimizer.slices import own_slice, reduce_in_order

_DEPTH = 2  # pieces under way per peer: one is added while the next arrives
_PIECE_BYTES = 1 << 20  # what a core's cache holds; measured: larger ones cost a quarter more
_STAGING_BYTES = 32 << 20  # per operation; pieces get smaller where there are many peers
_LEAST_PIECE_BYTES = 16 << 10  # below this a message costs more than its bytes
_WHOLE_BYTES = 1 << 16  # tensors up to this are reduced by sending them whole: one trip, not two

_TAG_SEND = 0  # `send` and `recv`, whose number differs between ranks; gloo keeps their order
_TAG_SMALL = 1
_TAG_PROBE = 2  # nobody ever sends with it
_TAG_FIRST = 3  # of the operations, which are numbered alike on all ranks
_TAGS = 1 << 20

# Two objects on one group (two optimizers, say) must never use one tag at a time.
_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class _Incoming:
    """The slices that peers send to be reduced into ``own``, piece by piece.

    ``area`` holds the pieces under way: for each of ``_DEPTH`` turns, one per peer.
    """

    def __init__(self, own: Tensor, rank: int, size: int, area: Tensor, piece: int) -> None:
        self._rank = rank
        self._turns = area.view(own.dtype)[: _DEPTH * (size - 1) * piece].view(_DEPTH, -1, piece)
        self._pieces = torch.split(own, piece)
        self._posted = 0
        self._pending: deque[tuple[list[Message], list[Tensor]]] = deque()

    def post(self, receive: Callable[[Tensor, int], Message]) -> None:
        """Post the receives of the next piece, if there is one."""
        if self._posted == len(self._pieces):
            return
        own = self._pieces[self._posted]
        slots = self._turns[self._posted % _DEPTH, :, : own.numel()]
        parts = [*slots[: self._rank], own, *slots[self._rank :]]
        messages = [receive(part, peer) for peer, part in enumerate(parts) if peer != self._rank]
        self._pending.append((messages, parts))
        self._posted += 1

    def reduce(self, op: Literal["sum", "max"], receive: Callable[[Tensor, int], Message]) -> None:
        """Wait for each piece, reduce it in the order of ranks, and post another."""
        while self._pending:
            messages, parts = self._pending.popleft()
            for message in messages:
                message.wait()
            reduce_in_order(op, parts, self._rank)
            self.post(receive)


class PointToPoint:
    """The collectives of one gloo group, made of messages between pairs of ranks.

    Calls must come from one thread at a time and in the same order on every rank. At most
    ``max_in_flight`` reductions are under way, since each needs staging: one more first waits for
    the oldest. Gathers need none, and as many are under way as are asked for.
    ``sent_bytes`` counts the payload that this rank has sent, ``staging_bytes`` the memory
    held for receiving: at most ``max_in_flight`` times 32 MiB, or 32 KiB per peer where that
    is more.

    Once an operation has failed, all later ones fail with the same error: messages of a broken
    operation may still be under way.
    """

    def __init__(self, group: dist.ProcessGroup, *, max_in_flight: int = 4) -> None:
        if max_in_flight < 1:
            raise OptimizerError(f"max_in_flight: must be positive, got {max_in_flight}")
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._max_in_flight = max_in_flight
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._in_flight: deque[Exchange] = deque()
        self._reducing: deque[Exchange] = deque()
        self._staging: list[Tensor] = []  # free areas, of bytes
        self._tags = _tags.setdefault(group, count())
        self.sent_bytes = 0
        self.staging_bytes = 0
        self._finisher = Finisher()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    @property
    def in_flight(self) -> int:
        """Number of operations that have been issued and aren't finished."""
        return sum(not exchange.done for exchange in self._in_flight)

    def reduce_scatter(self, buffer: Tensor) -> Exchange | FinishedWork:
        """Start to sum ``buffer`` over the group; after ``wait()`` this rank's slice is the sum.

        The other slices keep this rank's own values. Nothing may write to the buffer before
        ``wait()`` has returned.

        Raises:
            OptimizerError: the buffer can't be cut into equal parts, or the group is broken.
        """
        return self._reduce_scatter(buffer, "sum")

    def _reduce_scatter(self, buffer: Tensor, op: Literal["sum", "max"]) -> Exchange | FinishedWork:
        buffer = buffer.detach()  # out= refuses what requires a gradient
        own = buffer[own_slice(buffer, self._rank, self._size)]
        if self._size == 1 or not buffer.numel():
            return FinishedWork()
        with self._errors("reduce_scatter"):
            return self._start_reduce_scatter(buffer, own, op)

    def _start_reduce_scatter(
        self, buffer: Tensor, own: Tensor, op: Literal["sum", "max"]
    ) -> Exchange:
        while len(self._reducing) >= self._max_in_flight:
            self._reducing.popleft().wait()
        tag = self._next_tag()
        piece = self._piece_numel(own)
        sends = [
            self._send(part, peer, tag)
            for start in range(0, own.numel(), piece)
            for peer in self._peers
            for part in [buffer[own_slice(buffer, peer, self._size)][start : start + piece]]
        ]
        area = self._take_staging(_DEPTH * len(self._peers) * piece * own.element_size())
        incoming = _Incoming(own, self._rank, self._size, area, piece)
        receive = partial(self._receive, tag=tag)
        for _ in range(_DEPTH):
            incoming.post(receive)
        staging = self._staging

        def finish() -> None:
            incoming.reduce(op, receive)
            staging.append(area)

        exchange = self._submit("reduce_scatter", finish, sends)
        self._reducing.append(exchange)
        return exchange

    def all_gather(self, buffer: Tensor) -> Exchange | FinishedWork:
        """Start to spread the slices of ``buffer``; after ``wait()`` slice k is as rank k has it.

        Raises:
            OptimizerError: the buffer can't be cut into equal parts, or the group is broken.
        """
        own = buffer[own_slice(buffer, self._rank, self._size)]
        if self._size == 1 or not buffer.numel():
            return FinishedWork()
        with self._errors("all_gather"):
            tag = self._next_tag()
            piece = max(1, _PIECE_BYTES // own.element_size())
            messages = [
                self._receive(part, peer, tag)
                for peer in self._peers
                for part in torch.split(buffer[own_slice(buffer, peer, self._size)], piece)
            ]
            messages += [
                self._send(part, peer, tag)
                for part in torch.split(own, piece)
                for peer in self._peers
            ]
        return self._submit("all_gather", nothing, messages)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduce a tensor of any shape over the group, in place; return when it is done.

        The result has the same bits on every rank: it is taken in the order of ranks.

        Raises:
            OptimizerError: the tensor isn't contiguous, or the communication failed.
        """
        if not tensor.is_contiguous():
            raise OptimizerError(f"all_reduce: must be contiguous, got strides {tensor.stride()}")
        if self._size == 1 or not tensor.numel():
            return
        flat = tensor.detach().view(-1)
        even = flat.numel() - flat.numel() % self._size
        if flat.numel() * flat.element_size() <= _WHOLE_BYTES:
            even = 0
        if even:
            self._reduce_scatter(flat[:even], op).wait()
            self.all_gather(flat[:even]).wait()
        if even < flat.numel():
            self._all_reduce_whole(flat[even:], op)

    def _all_reduce_whole(self, flat: Tensor, op: Literal["sum", "max"]) -> None:
        parts = [
            flat if peer == self._rank else torch.empty_like(flat) for peer in range(self._size)
        ]
        with self._errors("all_reduce"):
            messages = [self._receive(parts[peer], peer, _TAG_SMALL) for peer in self._peers]
            messages += [self._send(flat, peer, _TAG_SMALL) for peer in self._peers]
            for message in messages:
                message.wait()
        reduce_in_order(op, parts, self._rank)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a contiguous tensor to group rank ``dst``; return when it may be written again.

        Raises:
            OptimizerError: the communication failed.
        """
        with self._errors("send"):
            self._send(tensor, dst, _TAG_SEND).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fill a contiguous tensor with the next one that group rank ``src`` sends to this rank.

        Raises:
            OptimizerError: the communication failed.
        """
        with self._errors("recv"):
            self._receive(tensor, src, _TAG_SEND).wait()

    def all_gather_object(self, value: object) -> list[object]:
        """Return what each rank of the group passed, in the order of ranks."""
        values: list[object] = [None] * self._size
        with self._errors("all_gather_object"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        with self._errors("barrier"):
            dist.barrier(group=self._group)

    def _next_tag(self) -> int:
        """Count an operation; forget those that are done."""
        for queue in (self._in_flight, self._reducing):
            while queue and queue[0].done:
                queue.popleft()
        return _TAG_FIRST + next(self._tags) % _TAGS

    def _piece_numel(self, own: Tensor) -> int:
        share = _STAGING_BYTES // (_DEPTH * len(self._peers))
        piece_bytes = max(min(share, _PIECE_BYTES), _LEAST_PIECE_BYTES)
        return min(piece_bytes // own.element_size(), own.numel())

    def _take_staging(self, nbytes: int) -> Tensor:
        nbytes += -nbytes % 64  # so that any dtype fits
        if self._staging:
            area = self._staging.pop()
            if area.numel() >= nbytes:
                return area
            self.staging_bytes -= area.numel()
        self.staging_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def _send(self, part: Tensor, peer: int, tag: int) -> Message:
        self.sent_bytes += part.numel() * part.element_size()
        return self._group.send([part], peer, tag)

    def _receive(self, part: Tensor, peer: int, tag: int) -> Message:
        return self._group.recv([part], peer, tag)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Raise gloo's errors, for one of which it has many types, as OptimizerError."""
        try:
            yield
        except OptimizerError:
            raise
        except RuntimeError as error:
            raise broken(f"{name} on {self._place()}", error) from error

    def _lost(self) -> Exception | None:
        """Return the error of a peer that can't be reached any more, if there is one.

        A receive can't be posted on a broken connection; where it can be, it is given up at once.
        """
        for peer in self._peers:
            try:
                self._receive(torch.empty(1), peer, _TAG_PROBE)
            except RuntimeError as error:
                return error
        return None

    def _place(self) -> str:
        return f"rank {self._rank} of {self._size}"

    def _submit(
        self, name: str, finish: Callable[[], None], messages: Sequence[Message]
    ) -> Exchange:
        exchange = Exchange(f"{name} on {self._place()}", finish, messages, self._lost)
        self._in_flight.append(exchange)
        self._finisher.hand_over(exchange)
        return exchange
