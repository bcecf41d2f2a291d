"""Which options of a fused ZeRO-2 optimizer go together, and what do they make it keep?

Names, defaults and refusals are those of Apex's ``DistributedFusedAdam``. Differences:

* an fp32 parameter is its own master in every mode, so it is held and saved once;
* parameters travel in their own dtype whatever ``param_sync_dtype`` is: rounding before the
  gather or after it gives the same bits, and before is fewer bytes. A dtype to which all
  parameters would be rounded is refused;
* state in 16 bits is scaled or refused: it is lost at once otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal

import torch

from ckpttools.errors import ConfigError
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.slots import MASTER, REMAINDER_SLOT, SCALE_SUFFIX, WEIGHT
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.parameters import SUPPORTED_DTYPES
from ckpttools.optimizer.shards import MOMENTS

Master = Literal["weight", "stored", "remainder", "scaled"]
"""How the fp32 master of a parameter is kept: it *is* the parameter, or as `kept` says."""

_WHERE: Final = "DistributedFusedAdam"
_HALF: Final = (torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class FusedSettings:
    """The options beside those of Adam; checked when made.

    ``dtype`` is that of moments and stored masters. ``grad_sync_dtype`` None is each parameter's
    own dtype. ``bucket_cap_mb`` is in MiB of gradients.

    Raises:
        ConfigError: a value is out of its range, or two contradict each other.
    """

    dtype: torch.dtype = torch.float32
    grad_sync_dtype: torch.dtype | None = torch.float32
    param_sync_dtype: torch.dtype = torch.float32
    average_grad_sync: bool = True
    overlap_grad_sync: bool = True
    overlap_param_sync: bool = False
    bucket_cap_mb: float = 100.0
    pipeline_size: int = 2
    contiguous_param_buffer: bool = False
    contiguous_grad_buffer: bool = False
    store_params: bool = True
    store_param_remainders: bool = False
    with_scaled_states: bool = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refusal(f"{name} must be true or false", getattr(self, name))
        if self.grad_sync_dtype is not None and self.grad_sync_dtype not in SUPPORTED_DTYPES:
            raise _refusal(
                "grad_sync_dtype must be float32, bfloat16 or float16", self.grad_sync_dtype
            )
        if self.param_sync_dtype not in (*SUPPORTED_DTYPES, *_INTEGERS):
            raise _refusal(
                "param_sync_dtype must be a floating-point dtype, or an integer one for the "
                "parameters' own bytes",
                self.param_sync_dtype,
            )
        if not isinstance(self.bucket_cap_mb, (int, float)) or not 0 < self.bucket_cap_mb < 2**40:
            raise _refusal("bucket_cap_mb must be above 0", self.bucket_cap_mb)
        if type(self.pipeline_size) is not int or self.pipeline_size < 1:
            raise _refusal("pipeline_size must be at least 1", self.pipeline_size)
        self._check_remainders()
        self._check_scaled()

    def _check_remainders(self) -> None:
        if not self.store_param_remainders:
            return
        if self.store_params:
            raise _refusal("store_param_remainders needs store_params=False", True)
        if self.dtype != torch.float32:
            raise _refusal("store_param_remainders needs dtype float32", self.dtype)
        if self.param_sync_dtype != torch.bfloat16:
            raise _refusal(
                "store_param_remainders needs param_sync_dtype bfloat16", self.param_sync_dtype
            )

    def _check_scaled(self) -> None:
        if not self.with_scaled_states:
            if self.dtype != torch.float32:
                raise _refusal(
                    "dtype must be float32 without with_scaled_states, since 16 bits lose what a "
                    "step adds",
                    self.dtype,
                )
            return
        if self.store_param_remainders:
            raise _refusal("with_scaled_states needs store_param_remainders=False", True)
        if not self.store_params:
            raise _refusal("with_scaled_states needs store_params=True", False)
        if self.dtype not in _HALF:
            raise _refusal("with_scaled_states needs dtype float16 or bfloat16", self.dtype)
        if self.param_sync_dtype == torch.float32:
            raise _refusal(
                "with_scaled_states needs a param_sync_dtype other than float32",
                self.param_sync_dtype,
            )

    def check_params(self, kinds: Collection[torch.dtype]) -> None:
        """Check that ``param_sync_dtype`` is not one that would round all parameters.

        Raises:
            ConfigError: it has 16 bits and no parameter has it.
        """
        sync = self.param_sync_dtype
        if sync in _HALF and sync not in kinds and not self.with_scaled_states:
            raise _refusal(
                f"param_sync_dtype must hold the parameters, which are "
                f"{' and '.join(sorted(map(str, kinds)))}",
                sync,
            )

    def master(self, kind: torch.dtype) -> Master:
        """Return how the master of a parameter of a dtype is kept."""
        if kind == torch.float32:
            return "weight"
        if self.with_scaled_states:
            return "scaled"
        if self.store_param_remainders and kind == torch.bfloat16:
            return "remainder"
        # Apex stores the masters of parameters of other dtypes than the remainders are for.
        return "stored" if self.store_params or self.store_param_remainders else "weight"

    def grad_dtype(self, kind: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of a dtype are reduced."""
        return self.grad_sync_dtype or kind

    def buckets(self, kind: torch.dtype) -> FixedBuckets:
        """Return the size of buckets for parameters of a dtype."""
        return FixedBuckets.of_bytes(self.bucket_cap_mb * 2**20, self.grad_dtype(kind).itemsize)

    def native_slots(self, kind: torch.dtype) -> dict[str, str]:
        """Return the slots that are kept for parameters of a dtype, and the dtype of each."""
        states = str(self.dtype).removeprefix("torch.")
        slots = {WEIGHT: str(kind).removeprefix("torch.")}
        master = self.master(kind)
        if master == "remainder":
            slots[REMAINDER_SLOT] = "int16"
        elif master != "weight":
            slots[MASTER] = states
        slots |= dict.fromkeys(MOMENTS, states)
        if self.with_scaled_states:
            scaled = [slot for slot in (MASTER, *MOMENTS) if slot in slots]
            slots |= {f"{slot}{SCALE_SUFFIX}": "float32" for slot in scaled}
        return slots

    def items(self) -> list[tuple[str, str]]:
        """Return names and values, which must be the same on every rank."""
        return [
            (f"setting {field.name}", repr(getattr(self, field.name))) for field in fields(self)
        ]


_FLAGS: Final = tuple(f.name for f in fields(FusedSettings) if isinstance(f.default, bool))


def _refusal(rule: str, value: object) -> ConfigError:
    return ConfigError(f"{_WHERE}: {rule}, got {value}")


def refuse_unsupported(**given: object) -> None:
    """Refuse options of Apex's class that have no meaning here; false ones pass.

    Raises:
        ConfigError: one is asked for.
    """
    for name, reason in _UNSUPPORTED.items():
        if given.get(name):
            raise _refusal(f"{name} must be false, since {reason}", given[name])


_UNSUPPORTED: Final[Mapping[str, str]] = {
    "amsgrad": "Apex and Megatron-LM have none and no checkpoint format of theirs could hold it",
    "capturable": "a step decides on the host what to skip, so no CUDA graph can hold it",
    "nccl_ub": "buffers come from torch's own allocator",
}


def settings_from_config(config: OptimizerConfig) -> FusedSettings:
    """Return the options that a configuration of Megatron's names asks for.

    ``bucket_size`` is in elements of gradients; ``bucket_cap_mb`` counts where it is not given.

    Raises:
        ConfigError: two contradict each other.
    """
    kind = config.params_dtype
    params = kind if isinstance(kind, torch.dtype) else torch.float32
    grads = torch.float32 if config.grad_reduce_in_fp32 else None
    cap = config.bucket_cap_mb
    if config.bucket_size is not None:
        cap = config.bucket_size * (grads or params).itemsize / 2**20
    scaled = config.with_scaled_states
    return FusedSettings(
        dtype=torch.float16 if scaled else torch.float32,
        grad_sync_dtype=grads,
        param_sync_dtype=torch.uint8 if scaled and params == torch.float32 else params,
        average_grad_sync=config.average_grad_sync,
        overlap_grad_sync=config.overlap_grad_reduce,
        overlap_param_sync=config.overlap_param_gather,
        bucket_cap_mb=cap,
        pipeline_size=config.pipeline_size,
        contiguous_param_buffer=config.contiguous_param_buffer,
        contiguous_grad_buffer=config.contiguous_grad_buffer,
        store_params=config.store_params,
        store_param_remainders=config.store_param_remainders,
        with_scaled_states=scaled,
    )
