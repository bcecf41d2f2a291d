"""What would torch's own Adam do with the same gradients in one process? The optimizers' oracle.

The model multiplies each parameter with a tensor that the test chooses, so that tensor *is* the
gradient. Gradients are small whole numbers times powers of two: their sums are exact in any
order, so that the mean over ranks has one right value, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

# Primes, fewer elements than ranks, one, none, a multiple of every vector length, and one that
# two threads share. Padding fills some ranks' whole share of it.
SHAPES: tuple[tuple[int, ...], ...] = (
    (7,),
    (1,),
    (),
    (0,),
    (13, 17),
    (257,),
    (31, 37),
    (64,),
    (1009,),
)
LARGE_SHAPE = (100003,)


class Weight(nn.Module):
    """One parameter, whose gradient is the argument of ``forward``."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)
        self.seen: Tensor | None = None

    def forward(self, grad: Tensor) -> Tensor:
        self.seen = self.weight.detach().clone()
        return (self.weight * grad).sum()


class Weights(nn.Module):
    """Parameters ``0.weight``, ``1.weight`` …, used in that order, so their gradients come last."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for index, shape in enumerate(shapes):
            values = torch.randn(shape, generator=generator).to(dtype)
            self.add_module(str(index), Weight(values))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Use the parameters that have an entry, by name."""
        total = torch.zeros(())
        for name, module in self.named_children():
            grad = grads.get(f"{name}.weight")
            if grad is not None:
                # Adding in turn makes a backward pass go from the last to the first.
                total = module(grad.to(module.weight.dtype)).float() + total
        return total

    def seen(self) -> dict[str, Tensor]:
        """Return the values that the last forward pass saw."""
        return {f"{name}.weight": module.seen for name, module in self.named_children()}


def weights(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> Weights:
    """Return the same model on every call."""
    return Weights(shapes, dtype)


def exact_grads(model: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """Return gradients for every parameter, by name; each rank and step has its own."""
    found = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed((index * 1009 + step) * 101 + rank)
        whole = torch.randint(-64, 65, param.shape, generator=generator).float()
        found[name] = whole * 2.0 ** -(4 + (index + step) % 5)
    return found


def mean_grads(model: nn.Module, step: int, ranks: int) -> dict[str, Tensor]:
    """Return the mean of all ranks' gradients: their sum, divided once."""
    every = [exact_grads(model, step, rank) for rank in range(ranks)]
    return {name: torch.stack([g[name] for g in every]).sum(0) / ranks for name in every[0]}


@dataclass
class Reference:
    """What torch came to: parameters before each step and after the last, and its state."""

    params: list[dict[str, Tensor]] = field(default_factory=list)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


def read_reference(
    model: nn.Module, optimizer: torch.optim.Optimizer, params: list[dict[str, Tensor]]
) -> Reference:
    """Read the end of a run of torch's optimizer."""
    reference = Reference(params)
    for name, param in model.named_parameters():
        state = optimizer.state.get(param, {})
        reference.steps[name] = int(state.get("step", 0))
        for slot in ("exp_avg", "exp_avg_sq"):
            getattr(reference, slot)[name] = state.get(slot, torch.zeros_like(param))
    return reference


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Say whether two tensors are equal in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8),
        right.detach().contiguous().view(-1).view(torch.uint8),
    )


def assert_same_bits(where: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Check that both have the same names and bits."""
    assert list(left) == list(right), where
    for name, value in left.items():
        if not same_bits(value, right[name]):
            off = (value != right[name]).reshape(-1).nonzero().reshape(-1)
            raise AssertionError(
                f"{where}: {name} differs at {off.numel()} of {value.numel()} elements, first at "
                f"{off[:3].tolist()}: got {value.reshape(-1)[off[:3]].tolist()}, expected "
                f"{right[name].reshape(-1)[off[:3]].tolist()}"
            )


def require_vector_kernels() -> None:
    """Refuse to test bits where torch uses no vectors: all elements are rounded like the tail."""
    kind = torch.backends.cpu.get_cpu_capability()
    if kind in ("DEFAULT", "NO AVX"):
        pytest.fail(f"torch's CPU kernels must use vectors, got {kind}: unset ATEN_CPU_CAPABILITY")


def set_mean(alone: nn.Module, every: Sequence[Mapping[str, Tensor]]) -> None:
    """Give a single process the mean of what each rank has, over all ranks.

    A parameter that no rank has a gradient for gets none.
    """
    for name, param in alone.named_parameters():
        found = [grads[name] for grads in every if name in grads]
        param.grad = torch.stack(found).sum(0) / len(every) if found else None
