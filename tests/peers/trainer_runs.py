"""What the tests of training libraries train: a small network with dropout, on fixed data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peers.megatron_runs import installed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SAMPLES, WIDTH, CLASSES, BATCH = 23, 7, 3, 4


def needs(distribution: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test module that asks a library."""
    return [
        pytest.mark.peers,
        pytest.mark.skipif(
            not installed(distribution), reason=f"{distribution} is not installed: `make peers`"
        ),
        # Whatever these libraries warn of at import and in their own calls is theirs.
        pytest.mark.filterwarnings("default"),
    ]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 11), nn.Dropout(0.3), nn.ReLU(), nn.Linear(11, CLASSES))


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=draws)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=draws))


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float], step: int
) -> dict[str, Tensor]:
    """Return all that must be equal in the end, by name."""
    found: dict[str, Tensor] = {
        "random": torch.get_rng_state(),
        "rates": torch.tensor(rates, dtype=torch.float64),
        "step": torch.tensor(step),
    }
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = value.clone()
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what isn't equal bit for bit."""
    assert set(one) == set(other)
    return [name for name in one if not torch.equal(one[name], other[name])]
