"""Let the unmodified megatron-core wheel run on CPU tensors with the gloo backend.

megatron-core assumes CUDA and NCCL. This module replaces the CUDA calls and the
collectives that gloo lacks by CPU equivalents. It changes nothing that decides where a
value is stored: buffer layout, range maps, state dicts, file reading and scattering are
Megatron's own code.

Call :func:`activate` once, before anything else imports ``megatron``. Every patch is
process-wide, so use it only in a process that exists to run Megatron on CPU.

Written for megatron-core 0.16.1 without Transformer Engine and Apex, where the inner
optimizer is ``torch.optim.AdamW``.
"""

from __future__ import annotations

import contextlib
import os
import types
import warnings
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_ACTIVE: list[TorchFunctionMode] = []


def activate() -> None:
    """Install all patches and import megatron-core. Later calls do nothing."""
    if _ACTIVE:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # no compiler, eager arithmetic
    _fake_cuda_runtime()
    _fake_cuda_tensor_types()
    _move_cuda_requests_to_cpu()
    _emulate_missing_collectives()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the absence of TE and Apex is intended
        _patch_megatron()


# --- torch.cuda ---------------------------------------------------------------------


class _Stream:
    """Stands in for CUDA streams and events: CPU work is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _fake_cuda_runtime() -> None:
    """Answer Megatron's questions about the current device, streams and CUDA RNG."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    # One function object each: torch.compile's tables reject one under several names.
    cuda.set_device = lambda *_, **__: None
    cuda.synchronize = lambda *_, **__: None
    cuda.empty_cache = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.set_rng_state = lambda *_, **__: None
    cuda.get_device_capability = lambda *_, **__: (8, 0)
    cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(
        major=8, minor=0, multi_processor_count=1
    )
    cuda.is_current_stream_capturing = lambda *_, **__: False
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()


class _TypedTensorMeta(type):
    """``torch.cuda.FloatTensor`` and friends: isinstance tests and construction."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return torch.is_tensor(value) and value.dtype == cls.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        is_list = bool(args) and isinstance(args[0], (list, tuple))
        return torch.tensor(args[0] if is_list else args, dtype=cls.dtype)


def _fake_cuda_tensor_types() -> None:
    """Give CPU tensors the CUDA type names by which Megatron tells precisions apart."""
    names = {
        "FloatTensor": torch.float32,
        "DoubleTensor": torch.float64,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
        "ByteTensor": torch.uint8,
    }
    for name, dtype in names.items():
        setattr(torch.cuda, name, _TypedTensorMeta(name, (), {"dtype": dtype}))

    real_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = cuda_type


class _CudaToCpu(TorchFunctionMode):
    """Turn ``device="cuda"`` (or a device number) in any torch call into the CPU."""

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and "cuda" in str(device)):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _move_cuda_requests_to_cpu() -> None:
    """Make ``.cuda()`` a no-op and ``device="cuda"`` mean the CPU."""
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    mode = _CudaToCpu()
    mode.__enter__()  # stays on for the life of the process
    _ACTIVE.append(mode)


# --- torch.distributed ----------------------------------------------------------------


class _Done:
    """The handle of a collective that has already finished."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _emulate_missing_collectives() -> None:
    """Reduce in fp32, and build AVG, reduce-scatter and flat all-gather from gloo's own.

    gloo has no AVG and no complete 16-bit support. The sum is always taken over the ranks
    of the group by one gloo all-reduce, so that a run repeats bit for bit.
    """
    gloo_all_reduce = dist.all_reduce

    def reduce_fp32(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
        total = tensor.detach().to(torch.float32, copy=True)
        average = op == dist.ReduceOp.AVG
        gloo_all_reduce(total, op=dist.ReduceOp.SUM if average else op, group=group)
        return total / dist.get_world_size(group) if average else total

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        half = tensor.dtype in (torch.bfloat16, torch.float16)
        if not half and op != dist.ReduceOp.AVG:
            return gloo_all_reduce(tensor, op=op, group=group, async_op=async_op)
        tensor.copy_(reduce_fp32(tensor, op, group))
        return _Done() if async_op else None

    def reduce_scatter(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        start = dist.get_rank(group) * output.numel()
        total = reduce_fp32(input, op, group).view(-1)
        output.view(-1).copy_(total[start : start + output.numel()])
        return _Done() if async_op else None

    def all_gather(
        output: torch.Tensor, input: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        piece = input.contiguous().view(-1)
        pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, piece, group=group)
        output.view(-1).copy_(torch.cat(pieces))
        return _Done() if async_op else None

    dist.all_reduce = all_reduce
    dist.reduce_scatter_tensor = dist._reduce_scatter_base = reduce_scatter
    dist.all_gather_into_tensor = dist._all_gather_base = all_gather


# --- megatron-core --------------------------------------------------------------------


@contextlib.contextmanager
def _no_coalescing(*_: Any, **__: Any) -> Iterator[_Done]:
    """Collectives above run at once, so there is nothing to coalesce."""
    yield _Done()


def _patch_megatron() -> None:
    """Import megatron-core and mend the four places that need CUDA, NCCL or TE."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.random as mp_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    buffers._coalescing_manager = _no_coalescing
    # The CUDA RNG is used for dropout and GPU initialization; neither happens here.
    mp_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    # Without Transformer Engine this name is undefined where the MoE router tests it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _keep_step_when_setting_state(DistributedOptimizer)


def _keep_step_when_setting_state(optimizer_class: type) -> None:
    """Let the loaders of 0.16.1 work with torch's AdamW.

    AdamW keeps a per-parameter ``step`` tensor that TE and Apex do not have, and no
    checkpoint stores it: ``load_state_dict`` sets it from the param groups. Afterwards most
    loaders hand over param, exp_avg and exp_avg_sq only, and the setter fails with
    KeyError('step'); the dp_reshardable loader hands over the step that this process had
    before the load. Keep the one that ``load_state_dict`` has put there in both cases.

    The setter also gets a ``no_grad``: fp32 main parameters are views of model parameters,
    and only some of the loaders of 0.16.1 turn autograd off before they write to them.
    """
    real_set = optimizer_class._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main_param]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            real_set(self, model_param, tensors)

    optimizer_class._set_main_param_and_optimizer_states = set_states
