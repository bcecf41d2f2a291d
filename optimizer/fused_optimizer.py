"""What does a fused ZeRO-2 optimizer do with gradients and parameters between two steps?

It owns buckets and state, syncs gradients and parameters, knows norm and scale, and describes
itself. Options and step are in ``distributed_fused_adam``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ckpttools.errors import OptimizerError
from ckpttools.layout.sharded import Kind
from ckpttools.optimizer.agreement import check_same
from ckpttools.optimizer.amp import loss_scale
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.describe import (
    RankDescription,
    describe_chunks,
    describe_grads,
    dtype_name,
)
from ckpttools.optimizer.forward import ForwardGathers
from ckpttools.optimizer.fused_buckets import FusedBuffer
from ckpttools.optimizer.fused_building import (
    FillOrder,
    build_fused_buffers,
    build_fused_shards,
    names_of,
)
from ckpttools.optimizer.fused_gathers import ParamGathers
from ckpttools.optimizer.fused_reduction import FusedReduction, fill_order
from ckpttools.optimizer.fused_settings import FusedSettings
from ckpttools.optimizer.fused_shards import FusedPiece, FusedShard, Scratch
from ckpttools.optimizer.live import LiveBucket
from ckpttools.optimizer.norms import clip_divisor, norm_squared
from ckpttools.optimizer.parameters import Params
from ckpttools.optimizer.sharded_optimizer import ShardedOptimizer


class FusedOptimizer(ShardedOptimizer):
    """The buckets, gradients and parameters of a ZeRO-2 optimizer; it has no step of its own."""

    kind: Kind = "zero2"
    buffers: tuple[FusedBuffer, ...] = ()
    shards: tuple[FusedShard, ...] = ()
    pieces: tuple[FusedPiece, ...] = ()

    def _set_up(
        self,
        params: Params,
        settings: FusedSettings,
        config: OptimizerConfig,
        **given: Any,
    ) -> None:
        self.settings = settings
        super().__init__(
            params,
            config,
            defaults={"bias_correction": config.bias_correction},
            agreed=settings.items(),
            **given,
        )
        settings.check_params({managed.param.dtype for managed in self._collected.trained})
        self._order = FillOrder(self._collected.trained)
        self._divisor = 1.0  # of gradients, beside what `_base_divisor` says
        self._unscaled = False
        self.last_grad_norm: float | None = None
        self._lay_out()

    def _lay_out(self) -> None:
        """Build buffers and fresh state for the order that buckets have now."""
        settings = self.settings
        self.buffers = tuple(
            build_fused_buffers(self._collected.trained, settings, self.dp, self._order)
        )
        order = fill_order(self.buffers, self._order.places())
        self._reduction = FusedReduction(
            self.buffers,
            order,
            self._redundant,
            overlap=settings.overlap_grad_sync,
            pipeline_size=settings.pipeline_size,
        )
        whole = settings.contiguous_param_buffer  # then a gather needs no memory
        self._gathers = ParamGathers(
            order[::-1],
            self._reduction.pool,
            limit=len(order) if whole else settings.pipeline_size,
        )
        self.shards = tuple(build_fused_shards(self.buffers, settings, self._counts_in_norm))
        self.pieces = tuple(piece for shard in self.shards for piece in shard.pieces)
        self._scratch = Scratch(self.shards, settings)
        self._by_bucket = {id(shard.bucket): shard for shard in self.shards}
        self._forward = ForwardGathers(
            self._collected.modules,
            self.buffers,
            wait=settings.overlap_param_sync,
            setting="overlap_param_sync",
        )
        self._own(self.buffers, self.shards, self.pieces)
        self.state.clear()
        for piece in self.pieces:
            mine = self.state[piece.slot.param].setdefault("fragments", [])
            mine.append(piece.stored())

    # ---- order of buckets ----------------------------------------------------------------

    def init_params(self, params: nn.Parameter | Iterable[nn.Parameter] | None = None) -> None:
        """Put parameters in buckets next, in this order; None: all that are left, group by group.

        To be called before the first gradient, with the same parameters on every rank: the order
        is part of the layout. Parameters that no call names follow in the reverse of module order.

        Raises:
            OptimizerError: a gradient came, ranks differ, or a parameter is not trained here.
        """
        if params is None:
            params = [param for param in self.parameters() if param.requires_grad]
        self._place(params, own_bucket=False)

    def init_params_bucket(self, params: nn.Parameter | Iterable[nn.Parameter]) -> None:
        """Put parameters in buckets that hold nothing else, as `init_params`."""
        self._place(params, own_bucket=True)

    def _place(self, params: nn.Parameter | Iterable[nn.Parameter], *, own_bucket: bool) -> None:
        names = names_of(self._collected.trained, params)
        if any(self.steps.values()) or not self._reduction.untouched:
            raise OptimizerError(
                "init_params: buckets must be laid out before the first gradient, got it after"
            )
        for group in (self.dp, self._redundant):
            check_same(group, "init_params", [(name, "given") for name in names])
        self._order.add(names, own_bucket=own_bucket)
        self._reduction.remove_hooks()
        self._forward.remove_hooks()
        self.finish_param_sync()
        self.buffers, self.shards, self.pieces = (), (), ()  # before the new ones take memory
        self._by_bucket.clear()
        self.state.clear()
        self._lay_out()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Yield all parameters, group by group."""
        for group in self.param_groups:
            yield from group["params"]

    # ---- gradients -----------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:  # torch's own
        """Forget all gradients, and what they were to be divided by."""
        self._reduction.clear(set_to_none=set_to_none)
        self._divisor, self._unscaled = 1.0, False

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate whole gradients without reducing them: more memory, less traffic."""
        return self._reduction.no_sync()

    @property
    def in_no_sync(self) -> bool:
        """Whether this is inside :meth:`no_sync`, in the middle of an accumulation."""
        return not self._reduction.syncing

    @property
    def has_pending_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used since they were last cleared."""
        return self._reduction.unspent

    def grad_sync(self) -> None:
        """Wait until this rank's piece of every bucket holds the sum over the ranks.

        ``step`` does it too.
        """
        self._reduction.finish()

    finish_grad_sync = grad_sync

    def start_grad_sync(self) -> None:
        """Start the reduction of what was not sent."""
        self._reduction.start()

    def grad_norm(
        self, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Return the L2 norm of the gradients as a step would take them: 0-d fp32.

        A collective call of all ranks. ``parameters`` None: of all.

        Raises:
            OptimizerError: another norm is asked for.
        """
        norm = self._norm(parameters, norm_type)
        return torch.tensor(norm, dtype=torch.float32, device=self._collected.device)

    def _norm(self, parameters: Iterable[nn.Parameter] | None, norm_type: float) -> float:
        """Return the norm in double precision."""
        if norm_type != 2.0:
            raise OptimizerError(f"grad_norm: norm_type must be 2, got {norm_type}")
        self.grad_sync()
        chosen: Sequence[FusedPiece] = self.pieces
        if parameters is not None:
            ids = {id(param) for param in parameters}
            chosen = [piece for piece in self.pieces if id(piece.slot.param) in ids]
        device = self._collected.device
        squared = norm_squared(chosen, self.dp, self.model_groups, device)
        return float(squared**0.5 / (self._base_divisor() * self._divisor))

    def clip_grad_norm(
        self,
        max_norm: float,
        parameters: Iterable[nn.Parameter] | None = None,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Divide all gradients so that their norm is at most ``max_norm``; return the norm before.

        ``parameters`` must be all. Where the norm is not finite gradients stay as they are.

        Raises:
            OptimizerError: some parameters are left out, or another norm is asked for.
        """
        if parameters is not None and {id(p) for p in parameters} != {
            id(p) for p in self.parameters()
        }:
            raise OptimizerError("clip_grad_norm: must be given all parameters, got some of them")
        norm = self._norm(None, norm_type)
        if math.isfinite(norm):
            self._divisor *= clip_divisor(norm, max_norm)
        return torch.tensor(norm, dtype=torch.float32, device=self._collected.device)

    def unscale_grads(self, inv_scale: Tensor | float, *args: object) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale``; what Apex's gradient scalers call.

        Returns:
            zero for this device: whether gradients are finite is found by ``step``.
        """
        del args  # a scaler's found_inf
        self._divisor /= float(inv_scale)
        self._unscaled = True
        device = self._collected.device
        return {device: torch.zeros(1, dtype=torch.float32, device=device)}

    # ---- parameters ----------------------------------------------------------------------

    def start_param_sync(self) -> None:
        """Gather all parameters, asynchronously, in the order in which a forward needs them."""
        self._gathers.start_all()

    def param_sync(self) -> None:
        """Wait until all parameters are whole on this rank."""
        self._gathers.finish_all()

    finish_param_sync = param_sync

    def _base_divisor(self) -> float:
        """Return what the sums are divided by: the loss scale, and for a mean the ranks."""
        ranks = self.dp.size * self._redundant.size if self.settings.average_grad_sync else 1
        return loss_scale(self, self.scaler) * ranks

    # ---- state ---------------------------------------------------------------------------

    def shard_of(self, bucket: LiveBucket) -> FusedShard:
        """Return this rank's state of one bucket of :attr:`buffers`."""
        return self._by_bucket[id(bucket)]

    def _describe_rank(self) -> RankDescription:
        fills = {}
        for buffer in self.buffers:
            if buffer.groups != (tuple(reversed(range(len(buffer.params)))),):
                names = tuple(
                    tuple(buffer.params[i].name for i in group) for group in buffer.groups
                )
                fills[buffer.chunk, dtype_name(buffer.param_dtype)] = names
        kinds = {dtype_name(buffer.param_dtype): buffer.param_dtype for buffer in self.buffers}
        return RankDescription(
            kind=self.kind,
            chunks=describe_chunks(self),
            slots={name: self.settings.native_slots(kind) for name, kind in kinds.items()},
            grad_dtypes=describe_grads(self.buffers),
            fixed={name: self.settings.buckets(kind) for name, kind in kinds.items()},
            fills=fills,
        )
