"""How does one rank of a data-parallel group sum, spread and exchange with the others?

The optimizers see the interface `Collectives` alone. Behind it stand `SingleRank` where there
is nobody to talk to, `TorchCollectives` where the backend's own operations are good (NCCL), and
`PointToPoint` on gloo. All three work in place on flat buffers: rank r owns the r-th of ``size``
equal slices, a reduce-scatter makes that slice the sum, an all-gather spreads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.exchanges import FinishedWork
from ckpttools.optimizer.point_to_point import PointToPoint
from ckpttools.optimizer.slices import own_slice


@runtime_checkable
class Work(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Return when this rank's part is done; again and again, if asked.

        On an accelerator this makes the current stream wait, not the caller.

        Raises:
            OptimizerError: the communication failed.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """One group as one of its ranks sees it. Calls come in the same order on every rank."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def reduce_scatter(self, buffer: Tensor) -> Work:
        """Start to sum ``buffer`` over the group, in place.

        After ``wait()`` this rank's slice ``[rank * n / size, (rank + 1) * n / size)`` holds the
        sum, and the other slices this rank's own values. Until then nothing may write to it.

        Raises:
            OptimizerError: the buffer isn't one contiguous dimension of a multiple of ``size``.
        """
        ...

    def all_gather(self, buffer: Tensor) -> Work:
        """Start to spread the slices of ``buffer``, in place.

        After ``wait()`` slice k holds what rank k had there. Until then nothing may use it.

        Raises:
            OptimizerError: the buffer isn't one contiguous dimension of a multiple of ``size``.
        """
        ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduce a contiguous tensor over the group, in place: the same bits on every rank."""
        ...

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a contiguous tensor to rank ``dst`` of the group."""
        ...

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fill a contiguous tensor with the next that rank ``src`` of the group sends here."""
        ...

    def all_gather_object(self, value: object) -> list[object]:
        """Return what each rank passed, in the order of ranks. For small plain data."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this."""
        ...


class SingleRank:
    """A group of one: every operation checks its buffer and is done."""

    @property
    def rank(self) -> int:
        """Zero."""
        return 0

    @property
    def size(self) -> int:
        """One."""
        return 1

    def reduce_scatter(self, buffer: Tensor) -> Work:
        """Leave the buffer, which is its own sum."""
        own_slice(buffer, 0, 1)
        return FinishedWork()

    def all_gather(self, buffer: Tensor) -> Work:
        """Leave the buffer, whose one slice is its own."""
        own_slice(buffer, 0, 1)
        return FinishedWork()

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Leave the tensor."""

    def send(self, tensor: Tensor, dst: int) -> None:  # noqa: ARG002 - the interface's
        """Refuse: there is nobody else.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(f"send: a group of one rank has no other, got rank {dst}")

    def recv(self, tensor: Tensor, src: int) -> None:  # noqa: ARG002 - the interface's
        """Refuse: there is nobody else.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(f"recv: a group of one rank has no other, got rank {src}")

    def all_gather_object(self, value: object) -> list[object]:
        """Return the value alone."""
        return [value]

    def barrier(self) -> None:
        """Return."""


class TorchCollectives:
    """The backend's own operations, asynchronous and in place, as NCCL offers them.

    Sums are the backend's: in the buffer's dtype, in an order of its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    def reduce_scatter(self, buffer: Tensor) -> Work:
        """Start the backend's reduce-scatter, with this rank's slice as its output."""
        own = buffer[own_slice(buffer, self._rank, self._size)]
        if self._size == 1 or not buffer.numel():
            return FinishedWork()
        return _TorchWork(_reduce_scatter()(own, buffer, group=self._group, async_op=True))

    def all_gather(self, buffer: Tensor) -> Work:
        """Start the backend's all-gather, with this rank's slice as its input."""
        own = buffer[own_slice(buffer, self._rank, self._size)]
        if self._size == 1 or not buffer.numel():
            return FinishedWork()
        return _TorchWork(_all_gather()(buffer, own, group=self._group, async_op=True))

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduce with the backend's all-reduce."""
        if self._size > 1 and tensor.numel():
            operation = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(tensor, operation, group=self._group)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send with the backend."""
        dist.send(tensor, group=self._group, group_dst=dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive with the backend."""
        dist.recv(tensor, group=self._group, group_src=src)

    def all_gather_object(self, value: object) -> list[object]:
        """Pickle with torch and gather; only among the ranks of one run."""
        values: list[object] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Wait for the other ranks with the backend."""
        dist.barrier(group=self._group)


class _TorchWork:
    """torch's work object, whose ``wait`` says more than the interface does."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


def _reduce_scatter() -> Callable[..., dist.Work]:
    # torch 2.13 renamed this operation and the next one, and warns of the old names.
    name = "reduce_scatter_single"
    operation: Callable[..., dist.Work] = getattr(dist, name, dist.reduce_scatter_tensor)
    return operation


def _all_gather() -> Callable[..., dist.Work]:
    name = "all_gather_single"
    operation: Callable[..., dist.Work] = getattr(dist, name, dist.all_gather_into_tensor)
    return operation


def collectives_for(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """Return the collectives of ``group`` for buffers on ``device``.

    ``None`` is the default group, or this process alone where torch.distributed isn't set up.

    Raises:
        OptimizerError: this rank isn't in the group, or its backend can't serve the device.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return SingleRank()
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise OptimizerError(f"process group: this rank must be in it, got {group!r}")
    # "cpu:gloo,cuda:nccl": a group may have one backend per kind of device.
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    backend = backends.get(device.type)
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise OptimizerError(
            f"process group: its backend must serve {device.type} buffers, got {backends}"
        )
    return PointToPoint(group) if backend == "gloo" else TorchCollectives(group)
