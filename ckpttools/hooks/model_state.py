"""Which tensors does a model have, and under which names? Those of its state, without wrappers.

Parameters and persistent buffers, in the order of the modules. A tensor that hangs in several
places (a tied embedding) is one tensor with several names; it is known by the first. What wraps a
module (DistributedDataParallel, torch.compile, activation checkpointing) adds nothing to names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ckpttools.errors import UnsupportedError, UsageError
from ckpttools.optimizer.parameters import canonical_name

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
"""Classes that wrap one module, and the attribute that it hangs at."""

_FLAT = "FullyShardedDataParallel"


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """A parameter or persistent buffer; ``names`` are all that it has, the first one leads."""

    names: tuple[str, ...]
    tensor: Tensor
    is_buffer: bool

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def model_tensors(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the tensors of a model, as they are between two steps.

    FSDP2 modules that still hold gathered parameters are resharded first.

    Raises:
        UnsupportedError: a module keeps its state in a form that has no names.
        UsageError: two tensors would have one name.
    """
    reshard(model)
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[Tensor, bool]] = {}
    owner: dict[str, int] = {}
    for given, tensor, is_buffer in _walk(model, ""):
        name = canonical_name(given)
        key = id(tensor)
        if owner.setdefault(name, key) != key:
            raise UsageError(f"{name}: a name must be of one tensor, got two of it in the model")
        found.setdefault(key, (tensor, is_buffer))
        mine = names.setdefault(key, [])
        if name not in mine:
            mine.append(name)
    return tuple(
        ModelTensor(tuple(names[key]), tensor, is_buffer)
        for key, (tensor, is_buffer) in found.items()
    )


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that FSDP2 keeps after a forward pass without a backward one."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]  # a method, which Module's types hide


def _has_extra_state(module: nn.Module) -> bool:
    """Say whether a module has state beside tensors; Transformer Engine's is empty without fp8."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return False
    state = module.get_extra_state()
    return state is not None and not (isinstance(state, Tensor) and not state.numel())


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield name, tensor and whether it is a buffer, of a module and those in it."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    if _FLAT in kinds:
        raise UnsupportedError(
            f"{prefix or 'model'}: must keep its parameters one by one, got {_FLAT}",
            hint="use fully_shard (FSDP2)",
        )
    if _has_extra_state(module):
        raise UnsupportedError(
            f"{prefix}_extra_state: must be empty, got that of {type(module).__name__}",
            hint="keep it in a buffer",
        )
    wrapped = next((_WRAPPERS[kind] for kind in kinds if kind in _WRAPPERS), None)
    for name, param in module._parameters.items():  # named_parameters drops names
        if param is not None:
            yield prefix + name, param, False
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer, True
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name == wrapped else f"{prefix}{name}.")
