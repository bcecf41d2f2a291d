"""When are gradients reduced? As each bucket fills, in one order on every rank.

Hooks take each gradient as it is made. With ``overlap`` a bucket's reduce-scatter starts as soon
as all of its gradients are there *and* all buckets before it in the order have started: so every
rank starts the same buckets in the same order, whatever its own backward pass did first. What is
left (unused parameters, no overlap) is started when the gradients are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.hooks import RemovableHandle

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.buffers import Bucket, GradSlot, ParamAndGradBuffer, Phase
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.gradient_hooks import hook_gradient
from ckpttools.optimizer.no_sync import NoSync


class GradReduction(NoSync):
    """Reduces the gradients of several buffers, bucket by bucket in one order.

    Each reduced piece is then summed over ``redundant``, which hold replicas of the sharding.
    """

    def __init__(
        self, buffers: Sequence[ParamAndGradBuffer], redundant: Collectives, *, overlap: bool
    ) -> None:
        super().__init__()
        self.overlap = overlap
        self.order = tuple(backward_order(buffers))
        self.divided = False  # whether a step took the sums and divided them
        self._next = 0
        self._slots = [(bucket, slot) for bucket in self.order for slot in bucket.slots]
        self._handles: list[RemovableHandle] = [
            hook_gradient(slot.param, self, number) for number, (_, slot) in enumerate(self._slots)
        ]
        for bucket in self.order:
            if redundant.size > 1:
                bucket.after_reduce = lambda reduced: redundant.all_reduce(reduced.local_grads)

    @property
    def unspent(self) -> bool:
        """Whether a gradient has come that no step has used."""
        return not self.divided and any(slot.used for b in self.order for slot in b.slots)

    @property
    def reduced(self) -> bool:
        """Whether every bucket's sum is there."""
        return all(bucket.phase is Phase.REDUCED for bucket in self.order)

    def start(self) -> None:
        """Send off all buckets that are not under way yet.

        Raises:
            OptimizerError: called inside ``no_sync``.
        """
        if not self._syncing:
            raise OptimizerError("gradients: must be reduced outside no_sync(), got it inside")
        if self.reduced:
            self._restart_if_cleared()
            self._refuse_late()
        while self._next < len(self.order):
            self._send()

    def finish(self) -> None:
        """Wait until this rank's piece of every bucket holds the sum over the ranks."""
        self.start()
        for bucket in self.order:
            bucket.finish_grad_sync()

    def clear(self, *, set_to_none: bool) -> None:
        """Forget all gradients, or make them zero.

        Where no step came between, the buckets that this rank didn't fill are sent all the same:
        other ranks may have filled and sent them.
        """
        if self.overlap and any(bucket.started for bucket in self.order):
            while self._next < len(self.order):
                self._send()
        for bucket in self.order:
            bucket.clear_grads(set_to_none=set_to_none)
        self._next, self.divided = 0, False

    def on_gradient(self, number: int) -> None:
        """Take a gradient that a backward pass has made, and send off the buckets that are full.

        Raises:
            OptimizerError: its bucket was reduced already, or its parameter isn't gathered yet.
        """
        bucket, slot = self._slots[number]
        if bucket.param_gather_handle is not None:
            raise OptimizerError(
                f"{slot.name}: must be gathered before it is used, got a gradient while its "
                f"gather was under way",
                hint="a module used a parameter of another module: call finish_param_sync() "
                "before the forward pass, or turn overlap_param_gather off",
            )
        if bucket.phase is Phase.REDUCED:
            self._restart_if_cleared()
        if bucket.phase is not Phase.LOCAL:
            raise _late(slot)
        slot.take()
        if self._syncing:
            bucket.arrive(slot)
            while self.overlap and self._next < len(self.order) and self.order[self._next].full:
                self._send()

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()

    def _send(self) -> None:
        bucket = self.order[self._next]
        self._next += 1
        if bucket.phase is Phase.LOCAL:
            bucket.start_grad_sync()

    def _restart_if_cleared(self) -> None:
        """Start anew where the model's own ``zero_grad`` took all gradients away."""
        if self.reduced and all(bucket.cleared_by_caller for bucket in self.order):
            for bucket in self.order:
                bucket.restart()
            self._next, self.divided = 0, False

    def _refuse_late(self) -> None:
        """Refuse a gradient that the caller put beside others that are reduced already."""
        if not self.reduced:
            return
        for bucket in self.order:
            for slot in bucket.slots:
                if slot.param.grad is not None and slot.param.grad is not slot.main_grad:
                    raise _late(slot)


def _late(slot: GradSlot) -> OptimizerError:
    return OptimizerError(
        f"{slot.name}: a gradient must come before its bucket is reduced, got one after",
        hint="call the optimizer's zero_grad() after each step, wrap all backward passes "
        "but the last in no_sync(), and turn overlap_grad_reduce off for parameters that "
        "get several gradients in one pass (reentrant checkpointing)",
    )


def backward_order(buffers: Sequence[ParamAndGradBuffer]) -> list[Bucket]:
    """Return the buckets of all buffers in the order in which a backward pass fills them.

    A bucket is full when the gradient of its first parameter in module order is there; later
    model chunks come before earlier ones. The order depends on names and sizes alone, so it is
    the same on every rank.
    """

    def first(bucket: Bucket) -> tuple[int, int]:
        places = [(slot.managed.chunk, slot.managed.order) for slot in bucket.slots]
        return min(places, default=(-1, -1))

    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return sorted(buckets, key=first, reverse=True)
