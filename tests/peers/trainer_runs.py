"""What the tests of training libraries train: a small network with dropout, on fixed data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from general_models import whole
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
        found[name] = whole(param)
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = whole(value)
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name what isn't equal bit for bit."""
    assert set(one) == set(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


def without_random(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state less the random generators, which another number of ranks doesn't restore."""
    return {name: value for name, value in state.items() if name != "random"}


def be_launched() -> None:
    """Tell a library which rank this process is, as torchrun would."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test"}


def set_aside(folder: str) -> None:
    """Copy a run's checkpoints, for another run to go on from; all ranks call it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder, f"{folder}-aside", ignore=shutil.ignore_patterns(".*"))
    dist.barrier()


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Let Accelerate shard on CPUs what it is told to, as it does on other devices.

    It heeds a plugin for FSDP where the type of the run is one of several GPUs, and on CPUs takes
    DistributedDataParallel. All that follows from the type is its own code.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made: Any = AcceleratorState.__init__

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if (plugin := options.get("fsdp_plugin")) is not None:
            self.fsdp_plugin = plugin
            for shared in (AcceleratorState, PartialState):
                shared._shared_state["distributed_type"] = DistributedType.FSDP

    with patch.object(AcceleratorState, "__init__", make):
        yield
