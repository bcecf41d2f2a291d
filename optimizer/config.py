"""What may a user set on the sharded optimizers, and is it sound?

Names, defaults and meanings are those of Megatron-core 0.16's `OptimizerConfig` and of the
settings of its `DistributedDataParallelConfig` that concern gradients and buckets; those of
`distributed_fused_adam` alone are Apex's; `kernel`, `bias_correction` and `unused_parameters` are
ours. A name that isn't known is an error that suggests the nearest one, since a misspelled setting
that is passed over trains another model.
"""

from __future__ import annotations

import argparse
import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Self

import torch

from ckpttools.errors import ConfigError
from ckpttools.layout.megatron import default_bucket_size
from ckpttools.optimizer.adam import KERNELS, Kernel

UnusedParameters = Literal["skip", "decay"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a value must be, in words, and a function that returns it in its own type, or None."""

    words: str
    read: Callable[[object], object]
    optional: bool = False


def _flag() -> _Rule:
    return _Rule("true or false", lambda value: value if isinstance(value, bool) else None)


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _number(words: str, test: Callable[[float], bool], *, optional: bool = False) -> _Rule:
    def read(value: object) -> float | None:
        number = _real(value)
        return number if number is not None and test(number) else None

    return _Rule(f"a finite number {words}", read, optional)


def _count(*, optional: bool = False) -> _Rule:
    def read(value: object) -> int | None:
        number = _real(value)
        return int(number) if number is not None and number >= 1 and number.is_integer() else None

    return _Rule("a whole number at least 1", read, optional)


def _choice(*names: str, optional: bool = False) -> _Rule:
    def read(value: object) -> object:
        return value if value in names else None

    return _Rule(f"one of {', '.join(names)}", read, optional)


_DTYPE_NAMES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def _read_dtype(value: object) -> object:
    if isinstance(value, str):
        return _DTYPE_NAMES.get(value.removeprefix("torch."))
    return value if value in _DTYPE_NAMES.values() else None


def _rule(rule: _Rule) -> dict[str, _Rule]:
    return {"rule": rule}


_FLAG: Final = _rule(_flag())
_COUNT: Final = _rule(_count())
_BETA: Final = _rule(_number("from 0 to below 1", lambda value: 0.0 <= value < 1.0))
_NOT_NEGATIVE: Final = _rule(_number("at least 0", lambda value: value >= 0.0))
_RATE: Final = _rule(_number("at least 0", lambda value: value >= 0.0, optional=True))
_POSITIVE: Final = _rule(_number("above 0", lambda value: value > 0.0))


@dataclass(slots=True, kw_only=True)
class OptimizerConfig:
    """Hold the settings of a sharded optimizer; validated when made, and again by `validate`.

    Sizes are elements. ``lr`` may be missing where every parameter group names its own.
    ``bucket_size`` closes a bucket that holds at least so many elements; see `bucket_limit` for
    what stands in when there is none. ``loss_scale`` is a constant scale; without one, ``fp16``
    scales dynamically. ``clip_grad`` 0 doesn't clip. ``unused_parameters`` says what a step does
    with a parameter that got no gradient since the last: "skip" leaves it and its state alone,
    "decay" takes a zero gradient, as Apex's fused Adam does. ``overlap_grad_reduce`` and
    ``overlap_param_gather`` are what Apex calls ``overlap_grad_sync`` and ``overlap_param_sync``.

    Raises:
        ConfigError: a name is unknown, a value is out of its range, or two contradict.
    """

    # General.
    optimizer: Literal["adam", "distributed_fused_adam"] = field(
        default="adam", metadata=_rule(_choice("adam", "distributed_fused_adam"))
    )
    lr: float | None = field(default=None, metadata=_RATE)
    min_lr: float | None = field(default=None, metadata=_RATE)
    decoupled_lr: float | None = field(default=None, metadata=_RATE)
    decoupled_min_lr: float | None = field(default=None, metadata=_RATE)
    weight_decay: float = field(default=0.01, metadata=_NOT_NEGATIVE)
    clip_grad: float = field(default=1.0, metadata=_NOT_NEGATIVE)
    log_num_zeros_in_grad: bool = field(default=False, metadata=_FLAG)
    # Adam.
    adam_beta1: float = field(default=0.9, metadata=_BETA)
    adam_beta2: float = field(default=0.999, metadata=_BETA)
    adam_eps: float = field(default=1e-8, metadata=_NOT_NEGATIVE)
    decoupled_weight_decay: bool = field(default=True, metadata=_FLAG)
    bias_correction: bool = field(default=True, metadata=_FLAG)
    kernel: Kernel = field(default="fused", metadata=_rule(_choice(*KERNELS)))
    # None becomes "decay" for distributed_fused_adam, as in Apex, else "skip", as in torch.
    unused_parameters: UnusedParameters | None = field(
        default=None, metadata=_rule(_choice("skip", "decay", optional=True))
    )
    # Precision.
    fp16: bool = field(default=False, metadata=_FLAG)
    bf16: bool = field(default=False, metadata=_FLAG)
    # None becomes the dtype that `bf16` or `fp16` says, or float32.
    params_dtype: torch.dtype | str | None = field(
        default=None, metadata=_rule(_Rule("float32, bfloat16 or float16", _read_dtype, True))
    )
    grad_reduce_in_fp32: bool = field(default=False, metadata=_FLAG)
    # Loss scale.
    loss_scale: float | None = field(
        default=None, metadata=_rule(_number("above 0", lambda value: value > 0.0, optional=True))
    )
    initial_loss_scale: float = field(default=2.0**32, metadata=_POSITIVE)
    min_loss_scale: float = field(default=1.0, metadata=_POSITIVE)
    loss_scale_window: int = field(default=1000, metadata=_COUNT)  # steps
    hysteresis: int = field(default=2, metadata=_COUNT)
    # Sharding and its overlap with computation.
    use_distributed_optimizer: bool = field(default=False, metadata=_FLAG)
    overlap_grad_reduce: bool = field(default=False, metadata=_FLAG)
    overlap_param_gather: bool = field(default=False, metadata=_FLAG)
    overlap_param_gather_with_optimizer_step: bool = field(default=False, metadata=_FLAG)
    bucket_size: int | None = field(default=None, metadata=_rule(_count(optional=True)))
    pad_buckets_for_high_nccl_busbw: bool = field(default=False, metadata=_FLAG)
    # Of distributed_fused_adam alone, with Apex's names and defaults.
    bucket_cap_mb: float = field(default=100.0, metadata=_POSITIVE)  # MiB of gradients
    pipeline_size: int = field(default=2, metadata=_COUNT)  # buckets
    average_grad_sync: bool = field(default=True, metadata=_FLAG)
    contiguous_param_buffer: bool = field(default=False, metadata=_FLAG)
    contiguous_grad_buffer: bool = field(default=False, metadata=_FLAG)
    store_params: bool = field(default=True, metadata=_FLAG)
    store_param_remainders: bool = field(default=False, metadata=_FLAG)
    with_scaled_states: bool = field(default=False, metadata=_FLAG)

    def __new__(cls, **settings: object) -> Self:
        """Refuse unknown names before the generated ``__init__`` would, without a suggestion."""
        for name in settings:
            if name not in SETTING_NAMES:
                raise unknown_setting("OptimizerConfig", name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every setting and their combination; to be called after attributes were set.

        Values get their own type: a whole float becomes an int, a dtype's name the dtype.

        Raises:
            ConfigError: a value is out of its range, or two settings contradict each other.
        """
        for name in SETTING_NAMES:
            setattr(self, name, check_setting("OptimizerConfig", name, getattr(self, name)))
        if self.fp16 and self.bf16:
            raise ConfigError("OptimizerConfig: at most one of fp16 and bf16 may be set, got both")
        half = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32
        if self.params_dtype is None:
            self.params_dtype = half
        elif half != torch.float32 and self.params_dtype not in (half, torch.float32):
            flag = "bf16" if self.bf16 else "fp16"
            raise ConfigError(
                f"OptimizerConfig: params_dtype must be {half} or torch.float32 with {flag}, "
                f"got {self.params_dtype}"
            )
        if self.unused_parameters is None:
            fused = self.optimizer == "distributed_fused_adam"
            self.unused_parameters = "decay" if fused else "skip"
        self._check_order("min_lr", "lr")
        self._check_order("decoupled_min_lr", "decoupled_lr")
        self._check_order("min_loss_scale", "initial_loss_scale")

    def _check_order(self, low: str, high: str) -> None:
        least, most = getattr(self, low), getattr(self, high)
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"OptimizerConfig: {low} must be at most {high}, got {least:g} and {most:g}"
            )

    @property
    def sharded(self) -> bool:
        """Whether the state is to be sharded over data-parallel ranks."""
        return self.use_distributed_optimizer or self.optimizer == "distributed_fused_adam"

    def require_unsharded(self) -> None:
        """Check that nothing set here needs a sharded optimizer, before an unsharded one is made.

        Raises:
            ConfigError: a setting has a meaning for a sharded optimizer only.
        """
        for name in ("overlap_param_gather", "overlap_param_gather_with_optimizer_step"):
            if getattr(self, name) and not self.sharded:
                raise ConfigError(
                    f"OptimizerConfig: {name} needs use_distributed_optimizer, got it without"
                )

    def bucket_limit(self, dp: int) -> int | None:
        """Return the elements at which a bucket closes; None: one bucket for each buffer.

        ``bucket_size`` where it is given, else Megatron's default for ``dp`` data-parallel ranks
        where gradient reduction overlaps, else none. Megatron takes ``bucket_size`` only
        together with ``overlap_grad_reduce``; here it counts without it as well.
        """
        if self.bucket_size is not None:
            return self.bucket_size
        return default_bucket_size(dp) if self.overlap_grad_reduce else None

    @classmethod
    def from_args(cls, args: argparse.Namespace | Mapping[str, object]) -> OptimizerConfig:
        """Read the settings from parsed arguments: Megatron's own, or of `parse_yaml_args`.

        Arguments of other parts (model, data) are passed over; an argument that is None is as
        one not given. Those whose names differ between Megatron's command line, its configs and
        Apex (`ARGUMENT_NAMES`) are known by all.

        Raises:
            ConfigError: a value is out of its range; two names of one setting disagree; a name
                looks like a misspelled setting; an argument asks for what isn't done here.
        """
        given = dict(args) if isinstance(args, Mapping) else vars(args)
        settings: dict[str, Any] = {}
        for name, value in given.items():
            key = ARGUMENT_NAMES.get(name, name)
            if value is None:
                continue
            if key in SETTING_NAMES:
                if key in settings and settings[key] != value:
                    raise ConfigError(
                        f"arguments: {key} must have one value under all its names, "
                        f"got {settings[key]!r} and {value!r}"
                    )
                settings[key] = value
            elif name in _NOT_DONE and value != _NOT_DONE[name]:
                raise ConfigError(
                    f"arguments: {name} must be {_NOT_DONE[name]}, nothing else is done here, "
                    f"got {value!r}"
                )
            elif _nearest(name, _MISSPELLED):
                raise unknown_setting("arguments", name)
        return cls(**settings)


_RULES: Final[Mapping[str, _Rule]] = {
    item.name: item.metadata["rule"] for item in fields(OptimizerConfig)
}
SETTING_NAMES: Final[tuple[str, ...]] = tuple(_RULES)
"""The settings' names, in the order of `OptimizerConfig`."""

ARGUMENT_NAMES: Final[Mapping[str, str]] = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "ddp_bucket_size": "bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_sync": "overlap_param_gather",
}
"""Other names of settings: of Megatron's command line, and the last two of Apex and NeMo."""

# Megatron's arguments that change what is stored or how it is sharded, and the one value of each
# that means what is done here.
_NOT_DONE: Final[Mapping[str, object]] = {
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "fp8_param_gather": False,
    "use_custom_fsdp": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
}

# How like a setting's name (difflib's ratio) a foreign argument must be to count as a misspelling
# of it. Of the 700 arguments of Megatron 0.12 to 0.16 the likest that means something else,
# end_weight_decay, has 0.857; two letters swapped in clip_grad leave 0.889.
_MISSPELLED: Final = 0.88
_SUGGESTED: Final = 0.5


def _nearest(name: str, cutoff: float) -> str | None:
    found = difflib.get_close_matches(name, [*SETTING_NAMES, *ARGUMENT_NAMES], n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_setting(where: str, name: str) -> ConfigError:
    """Return the error for an unknown setting, which suggests the nearest known one."""
    nearest = _nearest(name, _SUGGESTED)
    hint = f"did you mean {nearest}?" if nearest else ""
    guess = f" ({hint})" if hint else ""
    return ConfigError(f"{where}: must be a known setting, got {name!r}{guess}", hint=hint)


def check_setting(where: str, name: str, value: object) -> object:
    """Return the value of a setting in the setting's own type; ``where`` begins the error.

    Raises:
        ConfigError: it is not what the setting must be.
    """
    rule = _RULES[name]
    if value is None and rule.optional:
        return None
    kept = rule.read(value)
    if kept is None:
        raise ConfigError(f"{where}: {name} must be {rule.words}, got {value!r}")
    return kept
