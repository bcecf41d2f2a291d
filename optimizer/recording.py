"""Which collectives did an optimizer issue, in what order, and when did it wait for them?

`RecordingCollectives` stands between an optimizer and its group and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ckpttools.optimizer.collectives import Collectives, Work

Op = Literal[
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "send",
    "recv",
    "all_gather_object",
    "barrier",
    "wait",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One call.

    ``index`` numbers the operations from zero; the first ``wait`` for an operation is an event
    of its own, with that operation's index and bytes. ``nbytes`` is the size of the buffer that
    was passed, not what went over the wire (see ``PointToPoint.sent_bytes``).
    """

    op: Op
    nbytes: int
    index: int


class RecordingCollectives:
    """Another group's collectives, with a list of ``events`` in the order of the calls."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.events: list[Event] = []
        self._issued = 0

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.inner.size

    def reduce_scatter(self, buffer: Tensor) -> Work:
        """Record and pass on."""
        return self._started(
            self._record("reduce_scatter", buffer), self.inner.reduce_scatter(buffer)
        )

    def all_gather(self, buffer: Tensor) -> Work:
        """Record and pass on."""
        return self._started(self._record("all_gather", buffer), self.inner.all_gather(buffer))

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Record and pass on."""
        self._record("all_reduce", tensor)
        self.inner.all_reduce(tensor, op)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Record and pass on."""
        self._record("send", tensor)
        self.inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """Record and pass on."""
        self._record("recv", tensor)
        self.inner.recv(tensor, src)

    def all_gather_object(self, value: object) -> list[object]:
        """Record, with no bytes, and pass on."""
        self._record("all_gather_object", None)
        return self.inner.all_gather_object(value)

    def barrier(self) -> None:
        """Record and pass on."""
        self._record("barrier", None)
        self.inner.barrier()

    def _record(self, op: Op, tensor: Tensor | None) -> Event:
        nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        event = Event(op, nbytes, self._issued)
        self._issued += 1
        self.events.append(event)
        return event

    def _started(self, event: Event, work: Work) -> Work:
        return _RecordedWork(self.events, Event("wait", event.nbytes, event.index), work)


class _RecordedWork:
    def __init__(self, events: list[Event], event: Event, work: Work) -> None:
        self._events = events
        self._event: Event | None = event
        self._work = work

    def wait(self) -> None:
        if self._event is not None:
            self._events.append(self._event)
            self._event = None
        self._work.wait()
