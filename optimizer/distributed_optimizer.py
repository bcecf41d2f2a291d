"""Adam whose state is sharded over data-parallel ranks: ZeRO-1, as in Megatron-LM.

One step, in the order of the code::

    gradients    reduce-scatter per bucket: each rank gets the sum of its piece
    agreement    one small all-reduce: norm, non-finite values, which parameters have gradients
    update       one fused call per bucket and parameter group, on this rank's piece in fp32
    parameters   rounded to their dtype; all-gather per bucket

Source of the semantics: megatron/core/optimizer/distrib_optimizer.py of core 0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ckpttools.errors import OptimizerError
from ckpttools.layout.sharded import Kind
from ckpttools.optimizer.adam import AdamSettings, adam_step, grad_scale_tensor
from ckpttools.optimizer.amp import found_by_amp, loss_scale, spread_non_finite
from ckpttools.optimizer.buffers import ParamAndGradBuffer
from ckpttools.optimizer.building import build_buffers, build_shards
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.describe import (
    RankDescription,
    describe_chunks,
    describe_grads,
    dtype_name,
    zero1_slots,
)
from ckpttools.optimizer.forward import ForwardGathers
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.live import LiveBucket
from ckpttools.optimizer.norms import StepFacts, clip_divisor
from ckpttools.optimizer.parameters import Params, Rename, Sharding
from ckpttools.optimizer.ranges import Range
from ckpttools.optimizer.reduction import GradReduction
from ckpttools.optimizer.sharded_optimizer import ShardedOptimizer
from ckpttools.optimizer.shards import BucketShard, Piece


class DistributedOptimizer(ShardedOptimizer):
    """Shard fp32 masters and Adam moments over the data-parallel ranks (ZeRO-1).

    Parameters and gradients live whole on every rank, in flat buffers; of masters and moments a
    rank holds 1/DP. With P padded elements and N data-parallel ranks it takes 4P/N bytes for each
    moment and, unless parameters are fp32, 4P/N for the masters. A step moves (N-1)/N of the
    gradient bytes and (N-1)/N of the parameter bytes out of and into each rank.

    ``params`` is a module, a list of modules (model chunks), named parameters, or groups of them;
    with the latter two ``modules`` are the model chunks that they belong to.
    ``shardings`` says how tensor or pipeline parallelism cut parameters, by name. ``rename`` maps
    a module's name and the number of its model chunk to a canonical one. ``collectives`` replaces
    the data-parallel communication (to record it).

    Raises:
        OptimizerError: parameters are given twice, have no name, are of an unsupported kind, or
            differ between ranks.
        ConfigError: settings contradict each other.
    """

    kind: Kind = "zero1"
    buffers: tuple[ParamAndGradBuffer, ...]
    shards: tuple[BucketShard, ...]
    pieces: tuple[Piece, ...]

    def __init__(
        self,
        params: Params,
        config: OptimizerConfig | None = None,
        *,
        modules: Sequence[nn.Module] = (),
        groups: ParallelGroups | None = None,
        shardings: Mapping[str, Sharding] | None = None,
        rename: Rename | None = None,
        collectives: Collectives | None = None,
        check_values: bool = True,
    ) -> None:
        super().__init__(
            params,
            config or OptimizerConfig(),
            modules=modules,
            groups=groups,
            shardings=shardings,
            rename=rename,
            collectives=collectives,
            check_values=check_values,
        )
        self.buffers = tuple(build_buffers(self._collected.trained, self.config, self.dp))
        self._reduction = GradReduction(
            self.buffers, self._redundant, overlap=self.config.overlap_grad_reduce
        )
        self._forward_order = tuple(reversed(self._reduction.order))
        self.shards = tuple(build_shards(self.buffers, self._counts_in_norm))
        self._by_bucket = {id(shard.bucket): shard for shard in self.shards}
        self.pieces = tuple(piece for shard in self.shards for piece in shard.pieces)
        self._slots = tuple(slot for buffer in self.buffers for slot in buffer.slots)
        self._own(self.buffers, self.shards, self.pieces)
        self.grad_norm: float | None = None
        self._forward = ForwardGathers(
            self._collected.modules, self.buffers, wait=self.config.overlap_param_gather
        )
        self.state.update({piece.slot.param: piece.slots() for piece in self.pieces})

    # ---- gradients -----------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:  # torch's own
        """Forget all gradients; with ``set_to_none=False`` make them zero, as torch does."""
        self._reduction.clear(set_to_none=set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them, for all micro-batches but the last."""
        return self._reduction.no_sync()

    @property
    def in_no_sync(self) -> bool:
        """Whether this is inside :meth:`no_sync`, in the middle of an accumulation."""
        return not self._reduction.syncing

    @property
    def has_pending_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used since they were last cleared."""
        return self._reduction.unspent

    def start_grad_sync(self) -> None:
        """Start the reduction of every bucket that is not under way."""
        self._reduction.start()

    def finish_grad_sync(self) -> None:
        """Wait until this rank's piece of every bucket holds the sum over the ranks.

        ``step`` does it too; call it before anything that looks at gradients.
        """
        self._reduction.finish()

    # ---- parameters ----------------------------------------------------------------------

    def start_param_sync(self) -> None:
        """Gather all parameters, asynchronously, in the order in which a forward needs them."""
        for bucket in self._forward_order:
            bucket.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are whole on this rank."""
        for bucket in self._forward_order:
            bucket.finish_param_sync()

    # ---- the step ------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # torch's own signature
        """Update this rank's shard and gather the parameters.

        With a loss scale, or under ``torch.amp``, a step with non-finite gradients anywhere is
        skipped on every rank: parameters, state and step counts stay.

        Returns:
            what ``closure`` returned.

        Raises:
            OptimizerError: called inside ``no_sync``, or ranks disagree about ``torch.amp``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_param_sync()
        self.finish_grad_sync()
        self._check_fresh()
        amp = found_by_amp(self, ranks=self.dp.size)
        facts = self._agree(
            want_norm=self.config.clip_grad > 0.0,
            want_finite=self.scaler is not None or amp is not None,
            amp_found=amp,
        )
        if self._skips(facts):
            return loss
        self._update(facts)
        return loss

    def _skips(self, facts: StepFacts) -> bool:
        """Say whether this step is skipped, and tell the loss scale."""
        if not facts.amp_agrees:
            raise OptimizerError(
                f"torch.amp: every rank must find what is so, non-finite gradients "
                f"{facts.non_finite}, got ranks that differ",
            )
        if self.scaler is not None:
            self.scaler.update(facts.non_finite)
        return facts.non_finite

    def _update(self, facts: StepFacts) -> None:
        """Update every bucket in forward order; gather each at once, or all behind."""
        self.num_zeros_in_grad = facts.zeros
        scale = grad_scale_tensor(self._divisor(facts), self._collected.device)
        settings = self._group_settings()
        self._reduction.divided = True
        self._count_steps(facts)
        eager = self.config.overlap_param_gather_with_optimizer_step
        for bucket in self._forward_order:
            self._update_bucket(self.shard_of(bucket), facts, settings, scale)
            if eager:
                bucket.start_param_sync()
        if not eager:
            self.start_param_sync()
        if not self.config.overlap_param_gather:
            self.finish_param_sync()

    def _update_bucket(
        self,
        shard: BucketShard,
        facts: StepFacts,
        settings: Sequence[AdamSettings],
        scale: Tensor | None,
    ) -> None:
        """Update this rank's piece of one bucket."""
        for call in shard.calls(self._is_used(facts)):
            steps = [self.steps[name] for name in call.names]
            adam_step(self.config.kernel, call.pieces, settings[call.group], steps, scale)
        shard.write_params()

    def _divisor(self, facts: StepFacts) -> float:
        """Return what the summed gradients are divided by: mean, loss scale and clip in one."""
        divisor = 1.0
        if not self._reduction.divided:
            divisor = loss_scale(self, self.scaler) * self.dp.size * self._redundant.size
        if facts.norm_squared is not None:
            self.grad_norm = facts.norm_squared**0.5 / divisor
            if not math.isfinite(self.grad_norm):
                raise OptimizerError(f"clip_grad: the norm must be finite, got {self.grad_norm}")
            divisor *= clip_divisor(self.grad_norm, self.config.clip_grad)
        return divisor

    def _check_fresh(self) -> None:
        """Refuse a second step on gradients that lie in the buffer undivided."""
        if self._reduction.divided and any(b.grad_dtype != torch.float32 for b in self.buffers):
            raise OptimizerError(
                "step: 16-bit gradients must be used once, got a second step on them",
                hint="call zero_grad() after each step",
            )

    # ---- torch.amp -----------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Say yes; torch.amp asks before it looks for infinities, the last moment to reduce.

        Where any rank's gradients are not finite, they are made so on every rank: the scaler of
        each looks at its own gradients alone, and all must come to the same scale.
        """
        self.finish_grad_sync()
        spread_non_finite(self.pieces, self._slots, (self.dp, *self.model_groups))
        return True

    # ---- state ---------------------------------------------------------------------------

    def build_model_gbuf_param_range_map(self) -> dict[nn.Parameter, dict[str, Range]]:
        """Return for each parameter of which this rank owns a part where that part lies.

        Keys are Megatron-LM's: ``gbuf_world``, ``gbuf_world_in_bucket``, ``gbuf_local``, ``param``.
        """
        return {
            piece.slot.param: {
                "gbuf_world": piece.range.gbuf_world,
                "gbuf_world_in_bucket": piece.range.gbuf_world_in_bucket,
                "gbuf_local": piece.range.gbuf_local,
                "param": piece.range.param,
            }
            for piece in self.pieces
        }

    def shard_of(self, bucket: LiveBucket) -> BucketShard:
        """Return this rank's state of one bucket of :attr:`buffers`."""
        return self._by_bucket[id(bucket)]

    def _describe_rank(self) -> RankDescription:
        return RankDescription(
            kind=self.kind,
            chunks=describe_chunks(self),
            slots=zero1_slots(dtype_name(buffer.param_dtype) for buffer in self.buffers),
            grad_dtypes=describe_grads(self.buffers),
            cuts={(b.chunk, dtype_name(b.param_dtype)): b.cuts for b in self.buffers},
            busbw=self.config.pad_buckets_for_high_nccl_busbw,
        )
