"""Adam whose gradients and state are sharded over data-parallel ranks: ZeRO-2, as in Apex.

One step, in the order of the code::

    gradients    as a bucket fills it is reduce-scattered and its full-size memory let go
    agreement    one small all-reduce: norm, non-finite values, which parameters have gradients
    update       one fused call per bucket and parameter group, on this rank's piece in fp32
    parameters   rounded to their dtype; all-gather per bucket, a few under way at a time

Source of the semantics: apex/contrib/optimizers/distributed_fused_adam.py. Gradients are divided
once, in the kernel, as in :class:`~ckpttools.optimizer.DistributedOptimizer`, so that both come to
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.adam import AdamSettings, Kernel, adam_step, grad_scale_tensor
from ckpttools.optimizer.amp import scale_of, tell_scaler
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import OptimizerConfig, UnusedParameters
from ckpttools.optimizer.fused_building import fused_config, parallel_groups
from ckpttools.optimizer.fused_optimizer import FusedOptimizer
from ckpttools.optimizer.fused_settings import (
    FusedSettings,
    refuse_unsupported,
    settings_from_config,
)
from ckpttools.optimizer.fused_shards import FusedShard
from ckpttools.optimizer.groups import ParallelGroups
from ckpttools.optimizer.norms import StepFacts, clip_divisor
from ckpttools.optimizer.parameters import Params, Rename, Sharding


class DistributedFusedAdam(FusedOptimizer):
    """Shard gradients, fp32 masters and Adam moments over the data-parallel ranks (ZeRO-2).

    Of gradients a rank holds 1/DP, and beside that the ``pipeline_size`` buckets that are being
    filled or sent, of ``bucket_cap_mb`` MiB each. So with N ranks and P padded elements gradients
    take about itemsize x P/N bytes where ZeRO-1 takes itemsize x P; masters and moments take what
    they take there. ``contiguous_grad_buffer`` holds all full-size gradients as one: that memory
    is for good. Traffic is that of ZeRO-1; every backward pass outside ``no_sync`` sends
    gradients, and must reach a parameter on every rank.

    Options are those of Apex's class, with its defaults; ``overlap_param_sync`` needs the modules.
    ``unused_parameters`` says what a step does with a parameter without a gradient: "decay" takes
    a zero gradient, as Apex does, "skip" leaves it alone, as torch does. ``process_group``
    consists of distributed groups, which shard, and redundant ones, which repeat; ``groups`` says
    the same and has tensor and pipeline groups besides. ``params``, ``modules``, ``shardings``,
    ``rename`` and ``collectives`` are as for
    :class:`~ckpttools.optimizer.DistributedOptimizer`.

    Raises:
        OptimizerError: parameters are given twice, have no name, are of an unsupported kind, or
            differ between ranks.
        ConfigError: settings contradict each other.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        distributed_process_group: dist.ProcessGroup | None = None,
        redundant_process_group: dist.ProcessGroup | None = None,
        average_grad_sync: bool = True,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        bucket_cap_mb: float = 100.0,
        pipeline_size: int = 2,
        contiguous_param_buffer: bool = False,
        contiguous_grad_buffer: bool = False,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        nccl_ub: bool = False,
        capturable: bool = False,
        unused_parameters: UnusedParameters = "decay",
        kernel: Kernel = "fused",
        modules: Sequence[nn.Module] = (),
        groups: ParallelGroups | None = None,
        shardings: Mapping[str, Sharding] | None = None,
        rename: Rename | None = None,
        collectives: Collectives | None = None,
        check_values: bool = True,
    ) -> None:
        refuse_unsupported(amsgrad=amsgrad, nccl_ub=nccl_ub, capturable=capturable)
        settings = FusedSettings(
            dtype=dtype,
            grad_sync_dtype=dtype if grad_sync_dtype is None else grad_sync_dtype,
            param_sync_dtype=dtype if param_sync_dtype is None else param_sync_dtype,
            average_grad_sync=average_grad_sync,
            overlap_grad_sync=overlap_grad_sync,
            overlap_param_sync=overlap_param_sync,
            bucket_cap_mb=bucket_cap_mb,
            pipeline_size=pipeline_size,
            contiguous_param_buffer=contiguous_param_buffer,
            contiguous_grad_buffer=contiguous_grad_buffer,
            store_params=store_params,
            store_param_remainders=store_param_remainders,
            with_scaled_states=with_scaled_states,
        )
        adam = {
            "lr": lr,
            "bias_correction": bias_correction,
            "adam_beta1": betas[0],
            "adam_beta2": betas[1],
            "adam_eps": eps,
            "decoupled_weight_decay": adam_w_mode,
            "weight_decay": weight_decay,
            "unused_parameters": unused_parameters,
            "kernel": kernel,
        }
        self._set_up(
            params,
            settings,
            fused_config(settings, adam),
            modules=modules,
            groups=parallel_groups(
                groups, process_group, distributed_process_group, redundant_process_group
            ),
            shardings=shardings,
            rename=rename,
            collectives=collectives,
            check_values=check_values,
        )

    @classmethod
    def from_config(
        cls,
        config: OptimizerConfig,
        params: Params,
        *,
        modules: Sequence[nn.Module] = (),
        groups: ParallelGroups | None = None,
        shardings: Mapping[str, Sharding] | None = None,
        rename: Rename | None = None,
        collectives: Collectives | None = None,
        check_values: bool = True,
    ) -> DistributedFusedAdam:
        """Build one of a configuration of Megatron's names, clipping and loss scale included.

        ``overlap_grad_reduce`` is ``overlap_grad_sync``, ``overlap_param_gather`` is
        ``overlap_param_sync``, ``bucket_size`` (elements) stands in for ``bucket_cap_mb``.
        Gradients are reduced in the parameters' dtype unless ``grad_reduce_in_fp32`` is set;
        scaled states are float16. A bucket is always gathered as soon as it is updated, as
        ``overlap_param_gather_with_optimizer_step`` asks.
        """
        optimizer = cls.__new__(cls)
        optimizer._set_up(
            params,
            settings_from_config(config),
            config,
            modules=modules,
            groups=groups,
            shardings=shardings,
            rename=rename,
            collectives=collectives,
            check_values=check_values,
        )
        return optimizer

    # ---- the step ------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: object | None = None
    ) -> Any:  # torch's own signature, and what torch.amp passes
        """Update this rank's shard and gather the parameters.

        With a loss scale, or with ``grad_scaler`` (a ``torch.amp.GradScaler``, whose own ``step``
        passes itself), a step with non-finite gradients anywhere is skipped on every rank.

        Returns:
            what ``closure`` returned.

        Raises:
            OptimizerError: called inside ``no_sync``, or twice on the same gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.param_sync()
        self.grad_sync()
        if self._reduction.spent:
            raise OptimizerError(
                "step: gradients must be used once, got a second step on them",
                hint="call zero_grad() after each step",
            )
        if grad_scaler is not None and not self._unscaled:
            self._divisor *= scale_of(grad_scaler, self)
        facts = self._agree(
            want_norm=self.config.clip_grad > 0.0,
            want_finite=self.scaler is not None or grad_scaler is not None,
        )
        self._reduction.spent = True
        found = torch.tensor([float(facts.non_finite)], device=self._collected.device)
        tell_scaler(grad_scaler, self, found)
        divisor = self._base_divisor() * self._divisor
        if self.scaler is not None:
            self.scaler.update(facts.non_finite)
        if not facts.non_finite:
            self._update(facts, divisor)
        return loss

    def _update(self, facts: StepFacts, divisor: float) -> None:
        """Update every bucket in forward order, and gather each as soon as it is."""
        self.num_zeros_in_grad = facts.zeros
        if facts.norm_squared is not None:
            self.last_grad_norm = facts.norm_squared**0.5 / divisor
            if not math.isfinite(self.last_grad_norm):
                raise OptimizerError(
                    f"clip_grad: the norm must be finite, got {self.last_grad_norm}"
                )
            divisor *= clip_divisor(self.last_grad_norm, self.config.clip_grad)
        scale = grad_scale_tensor(divisor, self._collected.device)
        groups = self._group_settings()
        self._count_steps(facts)
        for bucket in self._gathers.order:
            self._update_bucket(self._by_bucket[id(bucket)], facts, groups, scale)
            if not self.settings.overlap_param_sync:
                self._gathers.make_room()
            self._gathers.start(bucket)
        if not self.settings.overlap_param_sync:
            self.param_sync()

    def _update_bucket(
        self,
        shard: FusedShard,
        facts: StepFacts,
        groups: Sequence[AdamSettings],
        scale: Tensor | None,
    ) -> None:
        """Update this rank's piece of one bucket."""
        for call in shard.calls(self._is_used(facts), self._scratch):
            call.load()
            steps = [self.steps[name] for name in call.names]
            adam_step(self.config.kernel, call.pieces, groups[call.group], steps, scale)
            call.store()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Say yes: torch.amp then passes its scaler to ``step``."""
        return True
