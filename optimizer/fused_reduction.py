"""When are gradients reduced in ZeRO-2? As each bucket fills; its full size is let go at once.

Buckets are sent in one order, that in which they are filled, whatever a backward pass does first:
so every rank issues the same operations. A *round* sends every bucket once. With ``overlap`` each
backward pass outside ``no_sync`` is one round: a bucket goes when it is full and those before it
have gone, and what is left goes when the pass ends. Otherwise the round is sent when the gradients
are asked for. The sums of several rounds add up in this rank's piece.

A hook that would open a bucket beyond ``pipeline_size`` waits for the oldest one under way. So
where a backward pass fills buckets in their order, at most ``pipeline_size`` of them are whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.fused_buckets import (
    AfterReduce,
    BufferPool,
    Fill,
    FusedBucket,
    FusedBuffer,
    FusedSlot,
)
from ckpttools.optimizer.gradient_hooks import hook_gradient
from ckpttools.optimizer.no_sync import NoSync


class FusedReduction(NoSync):
    """Reduces the gradients of several buffers, bucket by bucket in one order.

    ``order`` holds the buckets as they are filled, ``pool`` the memory of whole ones. Each reduced
    piece is then summed over ``redundant``, which hold replicas of the sharding.
    """

    def __init__(
        self,
        buffers: Sequence[FusedBuffer],
        order: Sequence[FusedBucket],
        redundant: Collectives,
        *,
        overlap: bool,
        pipeline_size: int,
    ) -> None:
        super().__init__()
        self.overlap = overlap
        self.order = tuple(order)
        self.slots = tuple(slot for buffer in buffers for slot in buffer.slots)
        self.spent = False  # whether a step took the sums
        self._position = {id(bucket): i for i, bucket in enumerate(self.order)}
        self._limit = pipeline_size
        nbytes = max((b.numel * b.largest_itemsize for b in self.order), default=0)
        device = buffers[0].device if buffers else torch.device("cpu")
        self.pool = BufferPool(pipeline_size, nbytes, device)
        self._after: AfterReduce | None = redundant.all_reduce if redundant.size > 1 else None
        self._under_way: deque[FusedBucket] = deque()
        self._next = 0
        self._in_round = False
        self._rounds = 0
        self._backward = -1  # the pass whose end is waited for
        self._handles: list[RemovableHandle] = [
            hook_gradient(slot.param, self, number) for number, slot in enumerate(self.slots)
        ]

    @property
    def unspent(self) -> bool:
        """Whether a gradient has come that no step has used."""
        return not self.spent and any(slot.used for slot in self.slots)

    @property
    def untouched(self) -> bool:
        """Whether no gradient has come since gradients were last cleared."""
        return not (
            self._rounds
            or self._in_round
            or any(slot.used or slot.param.grad is not None for slot in self.slots)
        )

    def start(self) -> None:
        """Send off every bucket that holds gradients which were not sent.

        Raises:
            OptimizerError: called inside ``no_sync``.
        """
        if not self._syncing:
            raise OptimizerError("gradients: must be reduced outside no_sync(), got it inside")
        for slot in self.slots:
            if slot.param.grad is not None:  # the caller put it there
                self._take(slot)
        if not self.spent and (self._rounds == 0 or self._pending):
            self._in_round = True
        self._send_rest()

    def finish(self) -> None:
        """Wait until this rank's piece of every bucket holds the sum over the ranks."""
        self.start()
        while self._under_way:
            self._finish_oldest()

    def clear(self, *, set_to_none: bool) -> None:
        """Forget all gradients, or make them zero.

        Where a backward pass was broken off, its round is sent to the end: other ranks may have.
        """
        if self.overlap and self._syncing:
            self._send_rest()
        while self._under_way:
            self._finish_oldest(keep=False)
        for bucket in self.order:
            if bucket.fill is Fill.FILLING:
                self._release(bucket, bucket.close())
            bucket.summed = False
            bucket.expect()
        for slot in self.slots:
            slot.param.grad = None
            slot.arrived = False
            slot.used = slot.used and not set_to_none
        self._next, self._rounds, self._in_round, self.spent = 0, 0, False, False

    def on_gradient(self, number: int) -> None:
        """Take a gradient that a backward pass has made, and send off the buckets that are full.

        Raises:
            OptimizerError: it can't be taken, or its parameter isn't gathered yet.
        """
        slot = self.slots[number]
        for fragment in slot.fragments:
            if fragment.bucket.gathering:
                raise OptimizerError(
                    f"{slot.name}: must be gathered before it is used, got a gradient while its "
                    f"gather was under way",
                    hint="a module used a parameter of another module: call param_sync() before "
                    "the forward pass, or turn overlap_param_sync off",
                )
        self._take(slot)

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()

    @property
    def _pending(self) -> bool:
        return any(bucket.fill is Fill.FILLING for bucket in self.order)

    def _take(self, slot: FusedSlot) -> None:
        """Move a gradient to its buckets, and send those that are full now."""
        grad = slot.param.grad
        if grad is None:
            return
        if self.spent:
            raise OptimizerError(
                f"{slot.name}: a gradient must come after zero_grad(), got one after a step",
                hint="call the optimizer's zero_grad() after each step; the model's own doesn't "
                "reach gradients that are sharded",
            )
        if grad.layout != torch.strided:
            raise OptimizerError(
                f"{slot.name}: gradient must be dense, got {grad.layout}",
                hint="build the embedding with sparse=False",
            )
        counts = self._syncing and self._start_counting()
        if counts and slot.arrived:
            raise OptimizerError(
                f"{slot.name}: a gradient must come once in a backward pass, got a second one",
                hint="turn overlap_grad_sync off for parameters that get several (reentrant "
                "checkpointing)",
            )
        slot.used = True
        slot.arrived = counts
        flat = grad.reshape(-1)
        for fragment in slot.fragments:
            bucket = fragment.bucket
            self._open(bucket)
            with torch.no_grad():
                bucket.add(fragment, flat[fragment.low : fragment.high])
            if counts:
                bucket.arrive()
                self._send_full()
        slot.param.grad = None

    def _start_counting(self) -> bool:
        """Say whether arrivals count: in a backward pass whose end is known."""
        task = torch._C._current_graph_task_id()
        if not self.overlap or task < 0:
            return False
        if task != self._backward:
            self._backward = task
            Variable._execution_engine.queue_callback(self._send_rest)
        self._in_round = True
        return True

    def _open(self, bucket: FusedBucket) -> None:
        """Give a bucket memory for its gradients, which may mean to wait for another's."""
        if bucket.fill is Fill.FILLING:
            return
        while bucket.fill is Fill.SYNCING:  # of the round before
            self._finish_oldest()
        if bucket.grad_data is not None:
            bucket.open(bucket.grad_data)
            return
        while self._under_way and self.pool.in_use >= self._limit:
            self._finish_oldest()
        bucket.open(self.pool.take(bucket.numel, bucket.grad_dtype))

    def _send_full(self) -> None:
        """Send the buckets that are full, as far as the order allows."""
        while self._in_round and self.order[self._next].full:
            self._send()

    def _send_rest(self) -> None:
        """End the round, if there is one."""
        while self._in_round:
            self._send()

    def _send(self) -> None:
        if self._next < len(self.order):
            bucket = self.order[self._next]
            self._open(bucket)
            bucket.start_grad_sync()
            self._under_way.append(bucket)
            self._next += 1
        if self._next >= len(self.order):
            self._next, self._in_round = 0, False
            self._rounds += 1
            for bucket in self.order:
                bucket.expect()
            for slot in self.slots:
                slot.arrived = False

    def _finish_oldest(self, *, keep: bool = True) -> None:
        bucket = self._under_way.popleft()
        self._release(bucket, bucket.finish_grad_sync(self._after, keep=keep))

    def _release(self, bucket: FusedBucket, grads: Tensor) -> None:
        if bucket.grad_data is None:
            self.pool.give_back(grads)


def fill_order(buffers: Sequence[FusedBuffer], places: dict[str, int]) -> list[FusedBucket]:
    """Return the buckets of all buffers in the order in which they become full.

    ``places`` has for each parameter its place in the order in which gradients are expected. A
    bucket is full with the last of its parameters, and one that such a parameter goes on in comes
    after. The order depends on names and sizes alone, so it is the same on every rank.
    """

    def last(bucket: FusedBucket) -> int:
        return max((places[slot.name] for slot in bucket.slots), default=-1)

    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return sorted(buckets, key=last)  # stable: buckets of one buffer keep their order
