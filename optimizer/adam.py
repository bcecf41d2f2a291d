"""How does one rank update its pieces of parameters, bit for bit as torch would?

A piece is the part of one parameter that a rank owns in one bucket: a flat range, seen as a 1-D
view of the fp32 masters, the gradients and both moments. One call takes a list of pieces, so
each keeps its own start. That is what makes the result equal to torch's on the whole parameter:
the CPU kernel works on vectors from the start of each tensor, and rounds the last few elements,
which fill no vector, otherwise. A piece cut at a multiple of `PIECE_ALIGNMENT` elements from its
parameter's start has the same vectors and the same last elements as the parameter.

Facts of torch's fused CPU kernel (2.13) that this module relies on, each held by a test:

* it divides the gradients by ``grad_scale`` (it doesn't multiply by the reciprocal) and leaves
  the quotient in the gradient tensor, for decoupled and coupled decay alike;
* the step is read, not counted up, and one step tensor may stand for many pieces; an infinite
  step makes both bias corrections 1;
* gradients and parameters must have one dtype, so 16-bit gradients go through fp32 scratch;
* an empty list is refused by the dispatcher, so it never gets there.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from ckpttools.errors import ConfigError, OptimizerError

Kernel = Literal["fused", "foreach", "apex", "transformer_engine"]
KERNELS: Final[tuple[str, ...]] = get_args(Kernel)

PIECE_ALIGNMENT: Final = 16
"""Elements at whose multiples, from a parameter's start, it may be cut: one AVX-512 vector."""

# Elements that one block of a multi-tensor launch works on: what Apex and Transformer Engine use.
_LAUNCH_CHUNK: Final = 2048 * 32

_GRAD_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

# op(chunk, noop flag, [grads, params, exp_avgs, exp_avg_sqs], lr, beta1, beta2, eps, step,
#    mode: 0 coupled, 1 decoupled, bias correction: 0 or 1, weight decay)
_LaunchOp = Callable[..., object]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Hold what one parameter group asks of Adam, as Python numbers.

    ``decoupled`` decay multiplies the parameter by ``1 - lr * weight_decay`` (AdamW); otherwise
    ``weight_decay * parameter`` is added to the gradient (L2). Without ``bias_correction`` the
    moments are used as they are.

    Raises:
        ConfigError: a number is out of its range, or not a Python number. A tensor is refused
            because the kernels round a learning rate from a tensor otherwise.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            _check_number(name, getattr(self, name), math.inf)
        for name in ("beta1", "beta2"):
            _check_number(name, getattr(self, name), 1.0)

    @classmethod
    def from_group(
        cls, group: Mapping[str, object], *, decoupled: bool, bias_correction: bool
    ) -> AdamSettings:
        """Read a torch parameter group: ``lr``, ``betas``, ``eps``, ``weight_decay``.

        A learning rate that a scheduler keeps as a tensor is read as a number, which waits for
        the device it is on.

        Raises:
            ConfigError: the group lacks one of these, or a number is out of its range.
        """
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"parameter group: betas must be two numbers, got {betas!r}")
        return cls(
            lr=_group_number(group, "lr"),
            beta1=betas[0],
            beta2=betas[1],
            eps=_group_number(group, "eps"),
            weight_decay=_group_number(group, "weight_decay"),
            decoupled=decoupled,
            bias_correction=bias_correction,
        )


def _group_number(group: Mapping[str, object], name: str) -> float:
    value = group.get(name)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (float, int)):
        raise ConfigError(f"parameter group: {name} must be a number, got {value!r}")
    return value


def _check_number(name: str, value: object, below: float) -> None:
    if not (isinstance(value, (float, int)) and 0.0 <= value < below):
        limit = "finite" if below == math.inf else f"below {below:g}"
        raise ConfigError(f"{name}: must be a number at least 0 and {limit}, got {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Hold the views that one call updates: made once, used every step.

    Entry i of each list is piece i; its tensors are 1-D, contiguous, of one size and on one
    device. ``params`` (the masters) and both moments are fp32. ``grads`` are fp32, or all
    bfloat16 or all float16; then ``scratch`` holds an fp32 tensor of the same size for each,
    made here unless given (`scratch_views` cuts them from memory that several `Pieces` share,
    since nothing in it outlives a call).

    Raises:
        OptimizerError: the lists are not as described; the message names list and piece.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    scratch: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        grad_dtypes = {grad.dtype for grad in self.grads} or {torch.float32}
        if len(grad_dtypes) > 1 or not grad_dtypes <= _GRAD_DTYPES:
            found = ", ".join(sorted(str(dtype) for dtype in grad_dtypes))
            raise OptimizerError(
                f"grads: must be all float32, all bfloat16 or all float16, got {found}"
            )
        widened = grad_dtypes != {torch.float32}
        if widened and not self.scratch:
            object.__setattr__(self, "scratch", scratch_views(self.grads))
        count = len(self.params)
        for name in ("grads", "exp_avgs", "exp_avg_sqs", "scratch"):
            needed = count if widened or name != "scratch" else 0
            if len(getattr(self, name)) != needed:
                raise OptimizerError(
                    f"{name}: must be {needed} tensors for {count} parameter pieces, "
                    f"got {len(getattr(self, name))}"
                )
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "scratch"):
            self._check_tensors(name, getattr(self, name))

    def _check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            first, where = self.params[index], f"{name}[{index}]"
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise OptimizerError(
                    f"{where}: must be 1-D and contiguous, got shape {tuple(tensor.shape)} "
                    f"with strides {tensor.stride()}"
                )
            if tensor.numel() != first.numel() or tensor.device != first.device:
                raise OptimizerError(
                    f"{where}: must have {first.numel()} elements on {first.device}, "
                    f"got {tensor.numel()} on {tensor.device}"
                )
            if name != "grads" and tensor.dtype != torch.float32:
                raise OptimizerError(f"{where}: must be torch.float32, got {tensor.dtype}")

    @property
    def fp32_grads(self) -> list[Tensor]:
        """The gradients that the kernel reads: ``scratch`` where there is one, else ``grads``."""
        return self.scratch or self.grads


def scratch_views(grads: Sequence[Tensor], memory: Tensor | None = None) -> list[Tensor]:
    """Cut one fp32 view per gradient from ``memory``, a 1-D fp32 tensor, in order.

    Without ``memory`` a tensor of just the size needed is made, on the gradients' device.

    Raises:
        OptimizerError: ``memory`` is not 1-D fp32, or smaller than the gradients together.
    """
    sizes = [grad.numel() for grad in grads]
    total = sum(sizes)
    if memory is None:
        device = grads[0].device if grads else None
        memory = torch.empty(total, dtype=torch.float32, device=device)
    if memory.dim() != 1 or memory.dtype != torch.float32 or memory.numel() < total:
        raise OptimizerError(
            f"scratch memory: must be 1-D torch.float32 with at least {total} elements, "
            f"got shape {tuple(memory.shape)} of {memory.dtype}"
        )
    return list(torch.split(memory[:total], sizes))


def grad_scale_tensor(divisor: float | Tensor, device: torch.device | str = "cpu") -> Tensor | None:
    """Return the 0-d fp32 tensor that the kernels divide gradients by; None for the number 1.

    A divisor that fp32 doesn't hold is rounded to the nearest that it holds. A tensor is not
    looked at, so that a divisor computed on a device isn't waited for.

    Raises:
        OptimizerError: the number is not positive and finite in fp32, or the tensor has more
            than one element.
    """
    if isinstance(divisor, Tensor):
        if divisor.numel() != 1:
            raise OptimizerError(
                f"gradient divisor: must be one element, got shape {tuple(divisor.shape)}"
            )
        return divisor.detach().reshape(()).to(device=device, dtype=torch.float32)
    if not 0.0 < divisor < math.inf:
        raise OptimizerError(f"gradient divisor: must be positive and finite, got {divisor!r}")
    if divisor == 1.0:
        return None
    # By way of fp64, since a conversion beyond fp32's range raises torch's own error.
    scale = torch.tensor(divisor, dtype=torch.float64).to(torch.float32)
    if not 0.0 < scale.item() < math.inf:
        raise OptimizerError(
            f"gradient divisor: must be positive and finite in fp32, got {divisor!r}"
        )
    return scale.to(device)


@torch.no_grad()
def adam_step(
    kernel: Kernel,
    pieces: Pieces,
    settings: AdamSettings,
    steps: Sequence[int],
    grad_scale: Tensor | None = None,
) -> None:
    """Update parameters and moments of all pieces in place; no pieces, no work.

    ``steps[i]`` is the number of the step that piece i takes now, the first being 1. Gradients
    are divided by ``grad_scale`` (0-d fp32, on the pieces' device) first. Afterwards
    ``pieces.fp32_grads`` hold the divided gradients, whichever the kernel; 16-bit ``grads`` are
    never written. "fused" equals torch's ``fused=True`` bit for bit, "foreach" its
    ``foreach=True`` and ``foreach=False``.

    Raises:
        OptimizerError: ``steps`` is not one positive number per piece.
        ConfigError: the kernel is unknown or not installed, or needs CUDA.
    """
    if len(steps) != len(pieces.params):
        raise OptimizerError(
            f"steps: must be {len(pieces.params)} numbers, one per piece, got {len(steps)}"
        )
    if not pieces.params:
        return
    if min(steps) < 1:
        raise OptimizerError(f"steps: must be at least 1, got {min(steps)}")
    if pieces.scratch:
        torch._foreach_copy_(pieces.scratch, pieces.grads)
    if kernel == "fused":
        _fused_step(pieces, settings, steps, grad_scale)
        return
    if grad_scale is not None:
        torch._foreach_div_(pieces.fp32_grads, grad_scale)
    if kernel == "foreach":
        _foreach_step(pieces, settings, steps)
    else:
        _launch_step(kernel, pieces, settings, steps)


def _fused_step(
    pieces: Pieces, settings: AdamSettings, steps: Sequence[int], grad_scale: Tensor | None
) -> None:
    """Run torch's fused kernel: one pass over lists of params, grads and moments (numel_i,)."""
    device = pieces.params[0].device
    numbers: Sequence[float] = steps if settings.bias_correction else [math.inf] * len(steps)
    # `full` on a device is a kernel, where `tensor` would be a copy that waits for the device.
    tensors = {
        number: torch.full((), float(number), dtype=torch.float32, device=device)
        for number in set(numbers)
    }
    step_tensors = [tensors[number] for number in numbers]
    run = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    run(
        pieces.params,
        pieces.fp32_grads,
        pieces.exp_avgs,
        pieces.exp_avg_sqs,
        [],
        step_tensors,
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=None,
    )


def _foreach_step(pieces: Pieces, settings: AdamSettings, steps: Sequence[int]) -> None:
    """Run Adam (Kingma and Ba, 2015, algorithm 1; decay after Loshchilov and Hutter, 2019).

    With g the gradient, every list below is one tensor (numel_i,) per piece::

        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / c1 * m / (sqrt(v) / c2 + eps),  c1 = 1 - beta1^step, c2 = sqrt(1 - beta2^step)

    The order of operations is torch's, since another order rounds otherwise.
    """
    params, grads = pieces.params, pieces.fp32_grads
    if settings.weight_decay != 0.0:
        if settings.decoupled:
            torch._foreach_mul_(params, 1.0 - settings.lr * settings.weight_decay)
        else:
            grads = list(torch._foreach_add(grads, params, alpha=settings.weight_decay))
    torch._foreach_lerp_(pieces.exp_avgs, grads, 1.0 - settings.beta1)
    torch._foreach_mul_(pieces.exp_avg_sqs, settings.beta2)
    torch._foreach_addcmul_(pieces.exp_avg_sqs, grads, grads, 1.0 - settings.beta2)
    factors = {step: _corrections(settings, step) for step in set(steps)}
    denominators = torch._foreach_sqrt(pieces.exp_avg_sqs)
    torch._foreach_div_(denominators, [factors[step][1] for step in steps])
    torch._foreach_add_(denominators, settings.eps)
    step_sizes = [-factors[step][0] for step in steps]
    torch._foreach_addcdiv_(params, pieces.exp_avgs, denominators, step_sizes)


def _corrections(settings: AdamSettings, step: int) -> tuple[float, float]:
    """Return lr / (1 - beta1^step) and sqrt(1 - beta2^step), in double precision."""
    if not settings.bias_correction:
        return settings.lr, 1.0
    first = 1.0 - settings.beta1**step
    second = 1.0 - settings.beta2**step
    # A power, not math.sqrt: torch takes a power, and the two may differ in the last bit.
    return settings.lr / first, second**0.5


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Check that a kernel is installed and runs on a device; meant for construction.

    Raises:
        ConfigError: it is unknown, not installed, or needs CUDA.
    """
    if kernel not in KERNELS:
        raise ConfigError(f"kernel: must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if kernel in _LAUNCH_MODULES:
        _launch_op(kernel)
        if device.type != "cuda":
            raise ConfigError(f"kernel: {kernel} needs tensors on CUDA, got {device}")


# The last module of each has `multi_tensor_adam`; importing the others first is what finds it.
_LAUNCH_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "apex": ("amp_C",),
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch"),
}


@functools.cache
def _launch_op(kernel: str) -> _LaunchOp:
    try:
        modules = [importlib.import_module(name) for name in _LAUNCH_MODULES[kernel]]
        op: _LaunchOp = modules[-1].multi_tensor_adam
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kernel: {kernel} must be installed with its CUDA extensions, got {error}",
            hint='set kernel to "fused" for the one of torch',
        ) from error
    return op


def _launch_step(
    kernel: Kernel, pieces: Pieces, settings: AdamSettings, steps: Sequence[int]
) -> None:
    """Run Apex's or Transformer Engine's kernel, once for each distinct step number."""
    device = pieces.params[0].device
    check_kernel(kernel, device)
    op = _launch_op(kernel)
    noop_flag = torch.zeros(1, dtype=torch.int32, device=device)
    lists = (pieces.fp32_grads, pieces.params, pieces.exp_avgs, pieces.exp_avg_sqs)
    for number in dict.fromkeys(steps):
        chosen = [index for index, step in enumerate(steps) if step == number]
        op(
            _LAUNCH_CHUNK,
            noop_flag,
            [[tensors[index] for index in chosen] for tensors in lists],
            settings.lr,
            settings.beta1,
            settings.beta2,
            settings.eps,
            number,
            int(settings.decoupled),
            int(settings.bias_correction),
            settings.weight_decay,
        )
