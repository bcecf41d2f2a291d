"""What trains in the optimizer benchmark: one model of trivial compute, ours and its peers.

Every layer adds a multiple of the sum of its weights to the input. So a forward pass reads the
weights once, a backward pass writes dense gradients once, in the order of real layers, and all
hooks fire as in a real model; nothing else is computed. Where fp32 masters are the parameters
(DDP, FSDP2), a layer rounds them to the compute dtype itself, or FSDP2 does. What a variant alone
needs of torch is imported by it: each import costs every other rank a second.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import megatron_variant
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LR = 1e-4
WEIGHT_DECAY = 0.01  # AdamW's default
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Layer(nn.Module):
    """A square matrix and a vector of weights, and next to no work with them."""

    def __init__(self, width: int, dtype: torch.dtype, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(width, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        matrix, vector = self.weight.to(self.compute), self.bias.to(self.compute)
        return x + 0.5 * matrix.sum() + 0.25 * vector.sum()


@dataclass(frozen=True, slots=True)
class Training:
    """A model and what it takes to train it one step further."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | megatron_variant.Megatron | None
    compute: torch.dtype

    def iterate(self) -> None:
        """Take one whole step; the state is complete when this returns."""
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()
        self.model(torch.zeros((), dtype=self.compute)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        if hasattr(self.optimizer, "finish_param_sync"):
            self.optimizer.finish_param_sync()


def stack(layers: int, width: int, dtype: torch.dtype, compute: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, dtype, compute) for _ in range(layers)))


def prepare(variant: str) -> None:
    """Import what a variant alone needs and is large; its memory isn't the training's."""
    if variant == megatron_variant.NAME:
        megatron_variant.prepare()


def make(variant: str, precision: str, layers: int, width: int) -> Training:
    """Return the training of a variant, on the group of all ranks."""
    compute = DTYPES[precision]
    # Where the optimizer keeps masters, parameters may be 16-bit.
    keeps_masters = variant.startswith(("ours", "compute", megatron_variant.NAME))
    model = stack(layers, width, compute if keeps_masters else torch.float32, compute)
    return MAKERS[variant](model, compute)


def no_optimizer(model: nn.Sequential, compute: torch.dtype) -> Training:
    """Compute alone: no communication, no update; gradients are dropped as they come.

    The others move each gradient to a place that they have, and the allocator hands its memory to
    the next one. Kept gradients would be fresh memory in every step, which costs more than they.
    """
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return Training(model, None, compute)


def ddp(model: nn.Sequential, compute: torch.dtype) -> Training:
    """DDP, and a fused AdamW of everything on every rank."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training(replica, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), compute)


def ddp_zero(model: nn.Sequential, compute: torch.dtype) -> Training:
    """DDP, and torch's ZeRO-1: whole parameters dealt out to ranks, then broadcast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True
    )
    return Training(replica, optimizer, compute)


def fsdp2(model: nn.Sequential, compute: torch.dtype) -> Training:
    """Everything sharded, one unit a layer; gradients are reduced in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), compute)


def megatron_core(model: nn.Sequential, compute: torch.dtype) -> Training:
    """megatron-core's sharded optimizer, overlap off, around torch's AdamW as it makes it."""
    training = megatron_variant.Megatron(model, compute, LR, WEIGHT_DECAY)
    return Training(training.replica, training, compute)


def ours(
    model: nn.Sequential,
    compute: torch.dtype,
    *,
    grad_reduce_in_fp32: bool = True,
    overlap: bool = False,
) -> Training:
    """The sharded optimizer with every overlap off, or with all of them and buckets of 16M."""
    from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

    config = OptimizerConfig(
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        clip_grad=0.0,  # torch's peers don't clip either
        bf16=compute == torch.bfloat16,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        use_distributed_optimizer=True,
        bucket_size=16 << 20 if overlap else None,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        overlap_param_gather_with_optimizer_step=overlap,
    )
    return Training(model, DistributedOptimizer(model, config), compute)


def ours_16(model: nn.Sequential, compute: torch.dtype) -> Training:
    """The same with gradients sent in their own 16 bits (and summed in fp32)."""
    return ours(model, compute, grad_reduce_in_fp32=False)


def ours_overlapped(model: nn.Sequential, compute: torch.dtype) -> Training:
    """The same with all overlap on, as DDP and FSDP2 have it."""
    return ours(model, compute, overlap=True)


def fused(
    model: nn.Sequential,
    compute: torch.dtype,
    *,
    overlap: bool = True,
    remainders: bool = False,
    contiguous: bool = False,
) -> Training:
    """The fused ZeRO-2 optimizer, gradients reduced in fp32, in buckets of 16 MiB."""
    from ckpttools.optimizer import DistributedFusedAdam

    optimizer = DistributedFusedAdam(
        model,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        grad_sync_dtype=torch.float32,
        param_sync_dtype=compute,
        bucket_cap_mb=16,
        overlap_grad_sync=overlap,
        overlap_param_sync=overlap,
        store_params=not remainders,
        store_param_remainders=remainders,
        contiguous_param_buffer=contiguous,
    )
    return Training(model, optimizer, compute)


def fused_contiguous(model: nn.Sequential, compute: torch.dtype) -> Training:
    """The same with parameters in one flat buffer, which gathers write to in place."""
    return fused(model, compute, contiguous=True)


def fused_remainders(model: nn.Sequential, compute: torch.dtype) -> Training:
    """The same with bfloat16 parameters and int16 remainders for masters."""
    return fused(model, compute, remainders=True)


MAKERS: dict[str, Callable[[nn.Sequential, torch.dtype], Training]] = {
    "compute": no_optimizer,
    "DDP + AdamW": ddp,
    "DDP + ZeRO": ddp_zero,
    "FSDP2 + AdamW": fsdp2,
    megatron_variant.NAME: megatron_core,
    "ours": ours,
    "ours, overlapped": ours_overlapped,
    "ours, 16-bit grads": ours_16,
    "ours, ZeRO-2": fused,
    "ours, ZeRO-2 flat": fused_contiguous,
    "ours, remainders": fused_remainders,
}
ONLY_BF16 = frozenset({"ours, 16-bit grads", "ours, remainders"})
VARIANTS = {
    "fp32": tuple(name for name in MAKERS if name not in ONLY_BF16),
    "bf16": tuple(MAKERS),
}


def absent() -> set[str]:
    """Return the variants that can't run here."""
    return set() if megatron_variant.importable() else {megatron_variant.NAME}


# --- memory -----------------------------------------------------------------------------


def state_bytes(optimizer: torch.optim.Optimizer | megatron_variant.Megatron | None) -> int:
    """Return the bytes of masters and moments that this rank holds beside the parameters."""
    if optimizer is None:
        return 0
    optimizer = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer wraps
    parameters = {storage(p) for group in optimizer.param_groups for p in group["params"]}
    if hasattr(optimizer, "shards"):  # of a sharded optimizer's own, some have a state by bucket
        kept = [t for shard in optimizer.shards for t in shard.slots().values()]
        return sum(size for _, size in {storage(t) for t in kept} - parameters)
    tensors = (t for state in optimizer.state.values() for t in state.values())
    held = {storage(t) for t in tensors if isinstance(t, Tensor) and t.ndim > 0}
    return sum(size for _, size in held - parameters)


def live_bytes() -> int:
    """Return the bytes of all tensors that Python knows of, each storage once."""
    return sum(size for _, size in {storage(tensor) for tensor in live_tensors()})


def peak_live_bytes(training: Training) -> int:
    """Return the most bytes of tensors during the backward pass of a step, each storage once.

    Looked at in every third layer, before its pass and after its matrix's gradient when
    everybody's hooks have run: a look takes longer than a layer.
    """
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, live_bytes())

    def before(layer: nn.Module, inputs: object, output: Tensor) -> None:
        del layer, inputs
        output.register_hook(look)

    handles: list[Any] = []
    layers = [layer for layer in training.model.modules() if isinstance(layer, Layer)]
    for layer in layers[::3]:
        handles.append(layer.register_forward_hook(before))
        handles.append(layer.weight.register_post_accumulate_grad_hook(look))
    training.iterate()
    for handle in handles:
        handle.remove()
    return most


def live_tensors() -> Iterator[Tensor]:
    gc.collect()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would wake lazy proxies
            yield thing


def storage(tensor: Any) -> tuple[int, int]:
    """Return address and size of the memory that a tensor's elements on this rank lie in."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
    memory = local.untyped_storage()
    return memory.data_ptr(), memory.nbytes()
