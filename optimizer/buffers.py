"""Where do parameters and gradients live? In flat buffers, cut into buckets.

A buffer holds the trained parameters of one model chunk that share (parameter dtype, gradient
dtype), at the places that ``ckpttools.layout.megatron`` gives: the same formula by which files
are read. The model's parameters become views of it. Every bucket is communicated on its own:

    gradients    accumulate → reduce-scatter: this rank's piece holds the sum
    parameters   this rank's piece is updated → all-gather: every piece is there

A bucket counts the gradients that arrive, so that it can be sent off as soon as it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ckpttools.errors import OptimizerError
from ckpttools.layout.megatron import BufferLayout, BufferParam, Cuts, buffer_layout
from ckpttools.optimizer.collectives import Collectives, Work
from ckpttools.optimizer.parameters import ManagedParam
from ckpttools.optimizer.ranges import ParamRange, bucket_members, param_ranges


class Phase(Enum):
    """What a bucket's gradients are at present."""

    LOCAL = auto()
    """This rank's own, being accumulated."""
    SYNCING = auto()
    """On their way."""
    REDUCED = auto()
    """Summed over the ranks, in this rank's piece; the other pieces mean nothing."""


class GradSlot:
    """One parameter of a bucket, its place in the gradient buffer, and whether it has a gradient.

    ``main_grad`` is a view of the buffer in the parameter's shape. Where the dtypes allow,
    ``param.grad`` is that view from the first gradient on; otherwise each gradient is added to it
    and dropped.
    """

    def __init__(self, managed: ManagedParam, main_grad: Tensor) -> None:
        self.managed = managed
        self.param = managed.param
        self.main_grad = main_grad
        self.same_dtype = managed.param.dtype == main_grad.dtype
        self.used = False
        self.arrived = False

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.managed.name

    @property
    def released(self) -> bool:
        """Whether the caller took the gradient away, or put another in its place."""
        if self.same_dtype:
            return self.param.grad is not self.main_grad
        return self.param.grad is not None or not self.used

    def take(self) -> None:
        """Move what stands in ``param.grad`` into the buffer.

        After this ``used`` says whether there is a gradient. A gradient that the caller put there
        himself counts; one that he took away (``param.grad = None``) is gone.
        """
        grad = self.param.grad
        if grad is None:
            if self.same_dtype:
                self.used = False
            if not self.used:
                self.main_grad.zero_()
            return
        if grad is self.main_grad:  # accumulated in place
            self.used = True
            return
        if grad.layout != torch.strided:
            raise OptimizerError(
                f"{self.name}: gradient must be dense, got {grad.layout}",
                hint="build the embedding with sparse=False",
            )
        with torch.no_grad():
            if self.used and not self.same_dtype:
                self.main_grad.add_(grad)
            else:
                self.main_grad.copy_(grad)
        self.param.grad = self.main_grad if self.same_dtype else None
        self.used = True

    def clear(self, *, set_to_none: bool) -> None:
        """Forget the gradient, or make it zero."""
        if set_to_none:
            self.param.grad, self.used = None, False
        else:
            self.main_grad.zero_()


AfterReduce = Callable[["Bucket"], None]
"""Gets a bucket when its reduce-scatter is done: to sum over redundant groups."""


class Bucket:
    """A stretch of a buffer that is communicated at once.

    ``param_data`` and ``grad_data`` are 1-D views of the bucket, padding included, a multiple of
    the number of ranks long; ``local`` is this rank's part of them.
    """

    def __init__(
        self,
        index: int,
        param_data: Tensor,
        grad_data: Tensor,
        slots: Sequence[GradSlot],
        collectives: Collectives,
    ) -> None:
        self.index = index
        self.param_data = param_data  # (padded,)
        self.grad_data = grad_data  # (padded,)
        self.slots = tuple(slots)
        self.collectives = collectives
        self.phase = Phase.LOCAL
        self.param_gather_handle: Work | None = None
        self.after_reduce: AfterReduce | None = None
        self._grad_work: Work | None = None
        numel = param_data.numel() // collectives.size
        self._expect()
        self.local = slice(collectives.rank * numel, (collectives.rank + 1) * numel)

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the bucket, in the order of the buffer."""
        return tuple(slot.param for slot in self.slots)

    @property
    def local_params(self) -> Tensor:
        """This rank's piece of the parameters, 1-D."""
        return self.param_data[self.local]

    @property
    def local_grads(self) -> Tensor:
        """This rank's piece of the gradients, 1-D."""
        return self.grad_data[self.local]

    @property
    def full(self) -> bool:
        """Whether every gradient that can come has arrived since gradients were last cleared."""
        return self._arrived >= self._expected

    @property
    def started(self) -> bool:
        """Whether a gradient has arrived since gradients were last cleared."""
        return self._arrived > 0

    def arrive(self, slot: GradSlot) -> None:
        """Count a parameter's gradient; a second one of the same parameter doesn't count."""
        if not slot.arrived:
            if not self.started:  # what is trained may have changed since gradients were cleared
                self._expect()
            slot.arrived = True
            self._arrived += 1

    def _expect(self) -> None:
        """Count anew; a parameter that is frozen now is not waited for."""
        self._arrived = 0
        self._expected = sum(slot.param.requires_grad for slot in self.slots)
        for slot in self.slots:
            slot.arrived = False

    def start_grad_sync(self) -> None:
        """Send the gradients off: one reduce-scatter, asynchronous.

        Raises:
            OptimizerError: they are on their way already, or reduced.
        """
        if self.phase is not Phase.LOCAL:
            raise OptimizerError(
                f"bucket {self.index} with {self._first_name}: gradients must be reduced once, got "
                f"a second start_grad_sync",
                hint="call zero_grad() before the next backward",
            )
        for slot in self.slots:
            slot.take()
        self._grad_work = self.collectives.reduce_scatter(self.grad_data)
        self.phase = Phase.SYNCING

    def finish_grad_sync(self) -> None:
        """Wait until this rank's piece holds the sum; starts the reduction where it isn't."""
        if self.phase is Phase.LOCAL:
            self.start_grad_sync()
        if self._grad_work is not None:
            self._grad_work.wait()
            self._grad_work = None
            if self.after_reduce is not None:
                self.after_reduce(self)
        self.phase = Phase.REDUCED

    @property
    def cleared_by_caller(self) -> bool:
        """Whether somebody took all gradients away since, as a module's own zero_grad does.

        Or put others in their place, which alone is seen where a gradient is no view of the buffer.
        """
        return all(slot.released for slot in self.slots)

    def restart(self) -> None:
        """Start anew with the gradients that stand in ``param.grad``, if any."""
        for slot in self.slots:
            slot.used = False
        self._expect()
        self.phase = Phase.LOCAL

    def clear_grads(self, *, set_to_none: bool) -> None:
        """Forget the gradients; a reduction that is under way is waited for."""
        if self._grad_work is not None:
            self._grad_work.wait()
            self._grad_work = None
        for slot in self.slots:
            slot.clear(set_to_none=set_to_none)
        self._expect()
        self.phase = Phase.LOCAL

    def start_param_sync(self) -> None:
        """Gather the parameters from all ranks: one all-gather, asynchronous."""
        self.finish_param_sync()
        self.param_gather_handle = self.collectives.all_gather(self.param_data)

    def finish_param_sync(self) -> None:
        """Wait until every rank's piece of the parameters is there."""
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None

    @property
    def _first_name(self) -> str:
        return self.slots[0].name if self.slots else "no parameters"


class ParamAndGradBuffer:
    """The parameters and gradients of one (parameter dtype, gradient dtype) of a model chunk.

    ``param_data`` and ``grad_data`` are 1-D, ``layout.numel`` elements each. Building it copies
    the parameters' values in, and makes each parameter a view.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        grad_dtype: torch.dtype,
        collectives: Collectives,
        *,
        cuts: Cuts,
        busbw: bool = False,
    ) -> None:
        self.params = tuple(params)
        self.cuts = cuts
        self.collectives = collectives
        self.chunk = params[0].chunk
        self.param_dtype = params[0].param.dtype
        self.grad_dtype = grad_dtype
        self.device = params[0].param.device
        self.layout: BufferLayout = buffer_layout(
            [BufferParam(p.name, p.param.numel(), p.shared_embedding) for p in params],
            dp=collectives.size,
            cuts=cuts,
            busbw=busbw,
        )
        self.param_data = torch.zeros(self.layout.numel, dtype=self.param_dtype, device=self.device)
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=self.device)
        slots = []
        for managed, start in zip(params, self.layout.starts, strict=True):
            stop = start + managed.param.numel()
            view = self.param_data[start:stop].view(managed.param.shape)
            with torch.no_grad():
                view.copy_(managed.param)
            managed.param.data = view
            main_grad = self.grad_data[start:stop].view(managed.param.shape)
            managed.param.main_grad = main_grad  # type: ignore[attr-defined]  # Megatron's name
            slots.append(GradSlot(managed, main_grad))
        self.slots = tuple(slots)
        self.buckets = tuple(
            Bucket(
                index,
                self.param_data[start:stop],
                self.grad_data[start:stop],
                [slots[i] for i in members],
                collectives,
            )
            for index, (members, start, stop) in enumerate(
                zip(
                    bucket_members(self.layout),
                    self.layout.bucket_starts,
                    self.layout.bucket_stops,
                    strict=True,
                )
            )
        )

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.layout.numel

    @property
    def ranges(self) -> tuple[ParamRange, ...]:
        """What this rank owns, in the order of the buffer."""
        return tuple(param_ranges(self.layout, self.collectives.size, self.collectives.rank))

    @property
    def param_gather_handle(self) -> Work | None:
        """A gather that is under way, or None."""
        open_handles = (b.param_gather_handle for b in self.buckets)
        return next((handle for handle in open_handles if handle is not None), None)

    def start_grad_sync(self) -> None:
        """Send off the gradients of every bucket that is not under way yet, first bucket first."""
        for bucket in self.buckets:
            if bucket.phase is Phase.LOCAL:
                bucket.start_grad_sync()

    def finish_grad_sync(self) -> None:
        """Wait until this rank's pieces of all buckets hold the sums."""
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish_grad_sync()

    def start_param_sync(self) -> None:
        """Gather all buckets, in the order in which a forward pass needs them."""
        for bucket in reversed(self.buckets):
            bucket.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are there."""
        for bucket in reversed(self.buckets):
            bucket.finish_param_sync()
