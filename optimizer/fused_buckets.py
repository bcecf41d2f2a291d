"""Where do gradients live in ZeRO-2? Whole only while their bucket fills, then 1/DP of them.

A buffer is laid out by ``ckpttools.layout.fixed_buckets``. A bucket takes memory of its full size
from a pool when its first gradient comes, and gives it back when the sums are there; what stays is
this rank's piece. A parameter may lie in several buckets: its *fragments*.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.layout.fixed_buckets import FixedBuckets, fill_buckets
from ckpttools.layout.megatron import BufferParam
from ckpttools.optimizer.collectives import Collectives, Work
from ckpttools.optimizer.parameters import ManagedParam
from ckpttools.optimizer.ranges import ParamRange, param_ranges


class Fill(Enum):
    """What a bucket's full-size gradients are at present."""

    EMPTY = auto()
    """Nowhere: it has no memory for them."""
    FILLING = auto()
    """This rank's own, being accumulated."""
    SYNCING = auto()
    """On their way."""


class FusedSlot:
    """One parameter of a buffer, where it lies, and whether it has a gradient.

    ``flat`` is the parameter itself, 1-D.
    """

    def __init__(self, managed: ManagedParam, flat: Tensor) -> None:
        self.managed = managed
        self.param = managed.param
        self.flat = flat
        self.fragments: list[Fragment] = []
        self.used = False
        self.arrived = False

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.managed.name


@dataclass(slots=True, eq=False)
class Fragment:
    """Elements ``low`` to ``high`` of a flattened parameter, at element ``at`` of a bucket.

    ``filled`` says that the bucket's memory holds a gradient there.
    """

    slot: FusedSlot
    bucket: FusedBucket
    at: int
    low: int
    high: int
    filled: bool = False

    @property
    def place(self) -> slice:
        """Where it lies in the bucket."""
        return slice(self.at, self.at + self.high - self.low)


class BufferPool:
    """Memory for whole buckets of gradients or parameters, used again and again.

    It keeps at most ``size`` pieces, those in use counted; more are made where more are needed.
    """

    def __init__(self, size: int, nbytes: int, device: torch.device) -> None:
        self.size = size
        self.in_use = 0
        self._nbytes = nbytes
        self._device = device
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements, 1-D, that hold anything."""
        memory = self._free.pop() if self._free else self._new()
        self.in_use += 1
        return memory[: numel * dtype.itemsize].view(dtype)

    def give_back(self, values: Tensor) -> None:
        """Take memory back."""
        self.in_use -= 1
        if self.in_use + len(self._free) < self.size:
            base = values.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._free.append(whole.set_(base))

    def _new(self) -> Tensor:
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)


AfterReduce = Callable[[Tensor], None]
"""Gets this rank's piece when a reduce-scatter is done: to sum over redundant groups."""


class FusedBucket:
    """A stretch of a buffer that is communicated at once.

    ``numel`` counts padding and is a multiple of the number of ranks; ``local`` is this rank's
    part. ``grad_shard`` (numel / ranks,) holds the sums of that part, where ``summed`` says so.
    """

    def __init__(
        self, index: int, buffer: FusedBuffer, start: int, stop: int, grad_shard: Tensor
    ) -> None:
        collectives = buffer.collectives
        self.index = index
        self.param_dtype = buffer.param_dtype
        self.grad_dtype = buffer.grad_dtype
        self.device = buffer.device
        self.collectives = collectives
        self.start = start
        self.numel = stop - start
        self.param_data = None if buffer.param_data is None else buffer.param_data[start:stop]
        self.grad_data = None if buffer.grad_data is None else buffer.grad_data[start:stop]
        self.grad_shard = grad_shard
        self.summed = False
        self.fill = Fill.EMPTY
        self.fragments: list[Fragment] = []
        self.grads: Tensor | None = None
        self.param_gather_handle: Work | None = None
        self.gathering = False  # asked for, and perhaps under way
        self.wait_for_params: Callable[[FusedBucket], None] | None = None
        shard = self.numel // collectives.size
        self.local = slice(collectives.rank * shard, (collectives.rank + 1) * shard)
        self._grad_work: Work | None = None
        self._gathered: Tensor | None = None
        self._arrived = self._expected = 0

    @property
    def largest_itemsize(self) -> int:
        """Bytes of an element of the gradients or of the parameters, whichever are more."""
        return max(self.grad_dtype.itemsize, self.param_dtype.itemsize)

    @property
    def slots(self) -> tuple[FusedSlot, ...]:
        """The parameters that have elements in it, in the order in which they lie."""
        return tuple(fragment.slot for fragment in self.fragments)

    # ---- gradients -----------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether every gradient that can come has arrived in this round."""
        return self._arrived >= self._expected

    def expect(self) -> None:
        """Count arrivals anew; a parameter that is frozen now is not waited for."""
        self._arrived = 0
        self._expected = sum(f.slot.param.requires_grad for f in self.fragments)

    def arrive(self) -> None:
        """Count a parameter's gradient."""
        self._arrived += 1

    def open(self, grads: Tensor) -> None:
        """Take memory for the gradients of the whole bucket."""
        self.grads = grads
        self.fill = Fill.FILLING
        for fragment in self.fragments:
            fragment.filled = False

    def add(self, fragment: Fragment, grad: Tensor) -> None:
        """Take in the gradient of one fragment, 1-D."""
        if self.grads is None:
            raise OptimizerError(f"bucket {self.index}: must be open for gradients, got it closed")
        target = self.grads[fragment.place]
        if fragment.filled:
            target.add_(grad)
        else:
            target.copy_(grad)
        fragment.filled = True

    def start_grad_sync(self) -> None:
        """Send the gradients off: one reduce-scatter, asynchronous. What never came is zero."""
        if self.grads is None or self.fill is not Fill.FILLING:
            raise OptimizerError(f"bucket {self.index}: must be open to be reduced, got it closed")
        end = 0
        for fragment in self.fragments:
            self.grads[end : fragment.at].zero_()
            if not fragment.filled:
                self.grads[fragment.place].zero_()
            end = fragment.place.stop
        self.grads[end:].zero_()
        self._grad_work = self.collectives.reduce_scatter(self.grads)
        self.fill = Fill.SYNCING

    def finish_grad_sync(self, after: AfterReduce | None, *, keep: bool = True) -> Tensor:
        """Wait for the sums, add them to this rank's piece, and return the full-size memory.

        Without ``keep`` the sums are dropped.
        """
        if self._grad_work is None or self.grads is None:
            raise OptimizerError(f"bucket {self.index}: must be under way, got it at rest")
        self._grad_work.wait()
        self._grad_work = None
        mine = self.grads[self.local]
        if after is not None:  # whether they are kept or not: other ranks may keep theirs
            after(mine)
        if keep:
            if self.summed:
                self.grad_shard.add_(mine)
            else:
                self.grad_shard.copy_(mine)
            self.summed = True
        return self.close()

    def close(self) -> Tensor:
        """Let go of the full-size memory and return it."""
        if self.grads is None:
            raise OptimizerError(f"bucket {self.index}: must be open to be closed, got it closed")
        grads, self.grads, self.fill = self.grads, None, Fill.EMPTY
        return grads

    # ---- parameters ----------------------------------------------------------------------

    @property
    def local_params(self) -> Tensor:
        """This rank's piece of the parameters, 1-D, zeros for padding; only to be read."""
        if self.param_data is not None:
            return self.param_data[self.local]
        shard = torch.zeros(
            self.local.stop - self.local.start, dtype=self.param_dtype, device=self.device
        )
        self._copy_local(shard, self.local.start)
        return shard

    def start_gather(self, pool: BufferPool) -> None:
        """Gather the parameters from all ranks: one all-gather, asynchronous.

        Where they lie alone, they are gathered in memory of ``pool``.
        """
        self._gathered = self.param_data
        if self._gathered is None:
            self._gathered = pool.take(self.numel, self.param_dtype)
            self._gathered[self.local].zero_()
            self._copy_local(self._gathered, 0)
        self.param_gather_handle = self.collectives.all_gather(self._gathered)

    def finish_gather(self, pool: BufferPool) -> None:
        """Wait until every rank's piece is there, and hand each parameter its own."""
        if self.param_gather_handle is not None and self._gathered is not None:
            self.param_gather_handle.wait()
            if self.param_data is None:
                for fragment in self.fragments:
                    target = fragment.slot.flat[fragment.low : fragment.high]
                    target.copy_(self._gathered[fragment.place])
                pool.give_back(self._gathered)
        self.param_gather_handle = self._gathered = None
        self.gathering = False

    def finish_param_sync(self) -> None:
        """Wait until every rank's piece of the parameters is there."""
        if self.gathering and self.wait_for_params is not None:
            self.wait_for_params(self)

    def _copy_local(self, target: Tensor, target_start: int) -> None:
        """Copy this rank's elements of the parameters to where they lie in the bucket."""
        for fragment in self.fragments:
            low = max(fragment.at, self.local.start)
            high = min(fragment.place.stop, self.local.stop)
            if low < high:
                shift = fragment.low - fragment.at
                values = fragment.slot.flat[low + shift : high + shift]
                target[low - target_start : high - target_start].copy_(values)


class FusedBuffer:
    """The parameters of one dtype of a model chunk, cut into buckets of one size.

    ``groups`` are indices into ``params`` in the order in which buckets are filled.
    ``param_data`` is one flat tensor that the parameters become views of, where they are to be
    contiguous; ``grad_data`` likewise is for gradients of full size, which then take memory for
    good. ``grad_shards`` holds this rank's pieces of all buckets.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        grad_dtype: torch.dtype,
        collectives: Collectives,
        *,
        rule: FixedBuckets,
        groups: Sequence[Sequence[int]],
        contiguous_params: bool = False,
        contiguous_grads: bool = False,
    ) -> None:
        self.params = tuple(params)
        self.collectives = collectives
        self.rule = rule
        self.groups = tuple(tuple(group) for group in groups)
        self.chunk = params[0].chunk
        self.param_dtype = params[0].param.dtype
        self.grad_dtype = grad_dtype
        self.device = params[0].param.device
        self.layout = fill_buckets(
            [BufferParam(p.name, p.param.numel(), p.shared_embedding) for p in params],
            groups,
            rule,
            dp=collectives.size,
        )
        numel = self.layout.numel
        self.param_data = self._zeros(numel, self.param_dtype) if contiguous_params else None
        self.grad_data = self._zeros(numel, grad_dtype) if contiguous_grads else None
        self.grad_shards = self._zeros(numel // collectives.size, grad_dtype)
        starts = self.layout.starts
        self.slots = tuple(map(self._slot, self.params, starts))
        self.buckets = tuple(self._build_buckets())

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.layout.numel

    @property
    def ranges(self) -> tuple[ParamRange, ...]:
        """What this rank owns, bucket by bucket in the order of the buffer."""
        return tuple(param_ranges(self.layout, self.collectives.size, self.collectives.rank))

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _slot(self, managed: ManagedParam, start: int) -> FusedSlot:
        """Make a parameter's memory one run, in the buffer or of its own."""
        param = managed.param
        with torch.no_grad():
            if self.param_data is None:
                param.data = param.data.contiguous()
            else:
                view = self.param_data[start : start + param.numel()].view(param.shape)
                view.copy_(param)
                param.data = view
        return FusedSlot(managed, param.data.view(-1))

    def _build_buckets(self) -> list[FusedBucket]:
        layout, size = self.layout, self.collectives.size
        buckets = []
        for index, (start, stop) in enumerate(
            zip(layout.bucket_starts, layout.bucket_stops, strict=True)
        ):
            shard = self.grad_shards[start // size : stop // size]
            buckets.append(FusedBucket(index, self, start, stop, shard))
        placed = sorted(zip(layout.starts, self.slots, strict=True), key=lambda item: item[0])
        for start, slot in placed:
            stop = start + slot.param.numel()
            first = max(0, bisect_right(layout.bucket_starts, start) - 1)
            for bucket in buckets[first : bisect_left(layout.bucket_starts, stop)]:
                low, high = max(start, bucket.start), min(stop, bucket.start + bucket.numel)
                if low < high:
                    at = low - bucket.start
                    fragment = Fragment(slot, bucket, at, low - start, high - start)
                    bucket.fragments.append(fragment)
                    slot.fragments.append(fragment)
        for bucket in buckets:
            bucket.expect()
        return buckets
