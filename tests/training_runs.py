"""Small training runs that are exact on any number of ranks, for tests that save and resume.

Gradients are small whole numbers over eight, the same on every rank and drawn from the step alone,
so sums and means are exact: a run is the same, bit for bit, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckpttools.hooks.manager import CheckpointManager
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    ParallelGroups,
    ShardedOptimizer,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("zero1", "zero2")


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build a model of odd sizes: one parameter is smaller than the number of ranks."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 29), torch.nn.Tanh(), torch.nn.Linear(29, 3), torch.nn.Linear(3, 1)
    ).to(dtype)
    model[0].bias.requires_grad_(requires_grad=False)  # frozen: a weight without state
    return model


def optimizer_of(
    model: torch.nn.Module, kind: str = "zero1", precision: str = "fp32", group: Any = None
) -> ShardedOptimizer:
    groups = ParallelGroups(dp=group)
    bf16 = precision == "bf16"
    if kind == "zero1":
        config = OptimizerConfig(
            lr=0.02, weight_decay=0.1, clip_grad=0.0, bf16=bf16, bucket_size=100
        )
        return DistributedOptimizer(model, config, groups=groups)
    return DistributedFusedAdam(
        model,
        lr=0.02,
        weight_decay=0.1,
        groups=groups,
        bucket_cap_mb=0.0004,
        store_params=not bf16,
        store_param_remainders=bf16,
        param_sync_dtype=torch.bfloat16 if bf16 else torch.float32,
        unused_parameters="skip",
    )


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        values = torch.randint(-8, 9, param.shape, generator=generator) / 8
        if param.requires_grad:
            param.grad = values.to(param.dtype)


class Run:
    """A run with a scheduler, a counter of samples, and randomness of its own."""

    def __init__(
        self,
        kind: str = "zero1",
        precision: str = "fp32",
        group: Any = None,
        **settings: Any,
    ) -> None:
        self.model = model_of(DTYPES[precision])
        self.optimizer = optimizer_of(self.model, kind, precision, group)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.settings = {"preemption_signals": (), **settings}
        self.samples = 0
        self.drawn: list[float] = []

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            give_gradients(self.model, step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.samples += 12
            self.drawn.append(float(torch.rand(1)))

    def manager(self, directory: Path) -> CheckpointManager:
        return CheckpointManager(directory, **self.settings)

    def save(self, directory: Path, step: int) -> None:
        with self.manager(directory) as manager:
            extra = {"samples": self.samples}
            manager.save(step, self.model, self.optimizer, self.scheduler, extra=extra)

    def restore(self, directory: Path) -> None:
        with self.manager(directory) as manager:
            restored = manager.restore(self.model, self.optimizer, self.scheduler)
        self.samples = restored.objects["extra"]["samples"]

    def state(self) -> Mapping[str, Any]:
        lr = [group["lr"] for group in self.optimizer.param_groups]
        return {
            "samples": str(self.samples).encode(),
            "lr": repr(lr).encode(),
            **{name: value.detach() for name, value in self.model.named_parameters()},
        }
