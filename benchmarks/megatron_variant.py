"""How does the benchmark's model train with megatron-core's own sharded optimizer on CPU?

Megatron's DistributedDataParallel and DistributedOptimizer run as they are installed, over the
stand-ins for CUDA of tests/peers/megatron. Those emulate reduce-scatter and all-gather, to be
reproducible; here the two are gloo's own, or Megatron would be charged for the emulation.
Importing Megatron patches the whole process, so only a rank of this variant may call ``prepare``.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAME = "megatron-core"
STAND_INS = Path(__file__).parent.parent / "tests" / "peers" / "megatron"


def importable() -> bool:
    """Tell whether megatron-core is installed, without importing it."""
    return all(importlib.util.find_spec(name) for name in ("megatron", "megatron.core"))


def prepare() -> None:
    """Import megatron-core, with CPU stand-ins for CUDA and gloo's own collectives."""
    # Newer torch has these names and warns of the others, which Megatron calls.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    logging.disable(logging.WARNING)  # that Transformer Engine and Apex are absent
    warnings.filterwarnings("ignore", module="megatron")
    sys.path.insert(0, str(STAND_INS))
    import megatron_on_cpu

    megatron_on_cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter
    param_and_grad_buffer.dist_all_gather_func = all_gather
    parallel_state.initialize_model_parallel()  # every rank is data-parallel


class Megatron:
    """A wrapped model and its optimizer, with the methods that the benchmark calls."""

    def __init__(self, model: nn.Module, compute: torch.dtype, lr: float, decay: float) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        self.replica = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1),  # not built
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        config = OptimizerConfig(
            lr=lr,
            weight_decay=decay,
            clip_grad=0.0,
            bf16=compute == torch.bfloat16,
            params_dtype=compute,
            use_distributed_optimizer=True,
        )
        # Without overrides vectors decay too, as in the other variants.
        self.chained = get_megatron_optimizer(config, [self.replica], config_overrides={})

    def zero_grad(self) -> None:
        self.replica.zero_grad_buffer()
        self.chained.zero_grad()

    def step(self) -> None:
        """Reduce gradients, update this rank's share, gather parameters."""
        self.replica.finish_grad_sync()
        updated, _, _ = self.chained.step()
        assert updated

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameters of the model, all in one group."""
        return [{"params": list(self.replica.parameters())}]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Return state by slice of this rank, the slice itself included.

        In bf16 the slices are the fp32 masters. In fp32 they are views of the parameters, which
        whoever counts takes off again.
        """
        (optimizer,) = self.chained.chained_optimizers
        inner = optimizer.optimizer.state
        return {main: {**state, "main": main} for main, state in inner.items()}
