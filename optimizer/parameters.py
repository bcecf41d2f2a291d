"""Which parameters does an optimizer manage, under which names, in which groups? Checked once.

Names are canonical: those of the model without the prefixes that wrappers add. State is kept and
saved by name, so two parameters never share one, and a tied parameter appears once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ckpttools.errors import OptimizerError
from ckpttools.layout.rules import Split

WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What DistributedDataParallel, torch.compile and FSDP put before a module's own names."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Params = (
    nn.Module
    | Sequence[nn.Module]
    | Iterable[tuple[str, nn.Parameter]]
    | Iterable[Mapping[str, object]]
)
"""What an optimizer may be built from."""

Rename = Callable[[str, int], str]
"""Maps a module's own name of a parameter, and the number of its model chunk, to a canonical name.

Model chunks number their layers from zero each; in a checkpoint every layer has one number.
"""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How tensor parallelism cut a parameter of which this rank holds a part.

    ``split`` None: every tensor rank holds an equal copy, which norms count once. ``stage`` is
    ``first``, ``last`` or ``layer`` (then ``layer`` is its number in the whole model); without it
    the number of pipeline stages of a checkpoint can't be changed. ``tied_to`` names the tensor
    that a pipeline stage's own copy belongs to.
    """

    split: Split | None = None
    stage: str | None = None
    layer: int | None = None
    tied_to: str = ""
    vocab_rows: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ManagedParam:
    """One parameter. ``group`` and ``chunk`` are its parameter group and its model chunk.

    ``order`` is its place among all parameters of this rank in module order.
    """

    name: str
    param: nn.Parameter
    group: int
    chunk: int
    order: int
    sharding: Sharding

    @property
    def shared_embedding(self) -> bool:
        """Whether another pipeline stage holds a copy (Megatron's mark on the parameter)."""
        return bool(getattr(self.param, "shared_embedding", False))


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """All parameters in module order: those that are trained, and those that are frozen.

    ``groups`` are the settings that the caller gave for each group; ``modules`` the model chunks,
    empty where the optimizer was built from named parameters.
    """

    trained: tuple[ManagedParam, ...]
    frozen: tuple[ManagedParam, ...]
    groups: tuple[dict[str, object], ...]
    modules: tuple[nn.Module, ...]
    device: torch.device


def canonical_name(name: str) -> str:
    """Return a name without the prefixes of wrappers.

    >>> canonical_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    parts = name.split(".")
    wrappers = {prefix.rstrip(".") for prefix in WRAPPER_PREFIXES}
    while len(parts) > 1 and parts[0] in wrappers:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in wrappers - {"module"})


def collect(
    params: Params,
    shardings: Mapping[str, Sharding],
    rename: Rename | None = None,
    modules: Sequence[nn.Module] = (),
) -> Collected:
    """Collect parameters from a module, model chunks, named parameters or groups of them.

    ``modules`` are the model chunks that parameters given by name belong to.

    Raises:
        OptimizerError: a parameter is there twice, has no name, or is of an unsupported kind.
    """
    found, groups = _groups_of(params)
    modules = found or tuple(modules)
    chunk_of = {
        id(p): index
        for index, module in reversed(list(enumerate(modules)))
        for p in module.parameters()
    }
    seen: dict[str, int] = {}
    owners: dict[int, str] = {}
    place = {id(p): i for i, p in enumerate(p for m in modules for p in m.parameters())}
    managed: list[ManagedParam] = []
    for index, (members, _) in enumerate(groups):
        for given, param in members:
            chunk = chunk_of.get(id(param), 0)
            name = canonical_name(given)
            if rename is not None:
                name = rename(name, chunk)
            _check(name, param)
            if id(param) in owners:
                raise OptimizerError(
                    f"{name}: a parameter must be given once, got it as {owners[id(param)]} too"
                )
            if name in seen:
                raise OptimizerError(f"{name}: a name must be given once, got two parameters of it")
            owners[id(param)], seen[name] = name, index
            sharding = shardings.get(name, Sharding())
            order = place.get(id(param), len(managed))
            managed.append(ManagedParam(name, param, index, chunk, order, sharding))
    managed += _frozen_outside(modules, owners, seen, rename, shardings)
    if unknown := sorted(set(shardings) - {one.name for one in managed}):
        raise OptimizerError(f"{unknown[0]}: a sharding must be of a parameter, got no such name")
    if not managed:
        raise OptimizerError("optimizer: must have at least one parameter, got none")
    ordered = sorted(managed, key=lambda item: (item.chunk, item.order))
    return Collected(
        trained=tuple(p for p in ordered if p.param.requires_grad),
        frozen=tuple(p for p in ordered if not p.param.requires_grad),
        groups=tuple(settings for _, settings in groups),
        modules=modules,
        device=_one_device(ordered),
    )


def _frozen_outside(
    modules: Sequence[nn.Module],
    owners: Mapping[int, str],
    seen: Mapping[str, int],
    rename: Rename | None,
    shardings: Mapping[str, Sharding],
) -> list[ManagedParam]:
    """Return the frozen parameters of the modules that no group names: they are kept as weights.

    Raises:
        OptimizerError: a parameter that is trained is in no group.
    """
    found: list[ManagedParam] = []
    known = set(owners)
    order = 0
    for chunk, module in enumerate(modules):
        for given, param in module.named_parameters():
            order += 1
            if id(param) in known:
                continue
            known.add(id(param))
            name = canonical_name(given)
            if rename is not None:
                name = rename(name, chunk)
            if param.requires_grad or name in seen:
                raise OptimizerError(
                    f"{name}: a parameter that is trained must be in a group, got it in none"
                )
            _check(name, param)
            sharding = shardings.get(name, Sharding())
            found.append(ManagedParam(name, param, -1, chunk, order - 1, sharding))
    return found


_Group = tuple[list[tuple[str, nn.Parameter]], dict[str, object]]


def _groups_of(params: Params) -> tuple[tuple[nn.Module, ...], list[_Group]]:
    """Return the model chunks and the groups: (named members, settings)."""
    if isinstance(params, nn.Module):
        return (params,), [(list(params.named_parameters()), {})]
    items = list(params)
    if items and all(isinstance(item, nn.Module) for item in items):
        modules = tuple(item for item in items if isinstance(item, nn.Module))
        seen: dict[int, nn.Parameter] = {}
        named = []
        for module in modules:
            for name, param in module.named_parameters():
                if id(param) not in seen:
                    seen[id(param)] = param
                    named.append((name, param))
        return modules, [(named, {})]
    if items and all(isinstance(item, Mapping) for item in items):
        return (), [_group(item, i) for i, item in enumerate(items) if isinstance(item, Mapping)]
    return (), [(list(_named(items, "parameters")), {})]


def _group(group: Mapping[str, object], index: int) -> _Group:
    members = group.get("params")
    if not isinstance(members, Iterable):
        raise OptimizerError(f"group {index}: must have params, got {members!r:.60}")
    return list(_named(members, f"group {index}")), {
        str(key): value for key, value in group.items() if key != "params"
    }


def _named(items: Iterable[object], where: str) -> Iterator[tuple[str, nn.Parameter]]:
    for item in items:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            yield item[0], item[1]
            continue
        shape = tuple(item.shape) if isinstance(item, torch.Tensor) else f"{item!r:.60}"
        raise OptimizerError(
            f"{where}: a parameter must have a name, since state is saved by name, got {shape}",
            hint="give the module, or model.named_parameters()",
        )


def _check(name: str, param: object) -> None:
    """Check that a parameter is of a kind that can live in a flat buffer."""
    if not isinstance(param, nn.Parameter):
        raise OptimizerError(f"{name}: must be a Parameter, got {type(param).__name__}")
    if param.layout != torch.strided or type(param.data) is not torch.Tensor:
        raise OptimizerError(
            f"{name}: must be a plain dense tensor, got {type(param.data).__name__} in "
            f"{param.layout}"
        )
    if param.requires_grad and param.dtype not in SUPPORTED_DTYPES:
        kinds = ", ".join(str(kind) for kind in SUPPORTED_DTYPES)
        raise OptimizerError(f"{name}: dtype must be one of {kinds}, got {param.dtype}")


def _one_device(managed: Sequence[ManagedParam]) -> torch.device:
    """Return the device of all trained parameters."""
    trained = [m for m in managed if m.param.requires_grad] or list(managed)
    device = trained[0].param.device
    for other in trained:
        if other.param.device != device:
            raise OptimizerError(
                f"{other.name}: must be on {device} as {trained[0].name} is, got "
                f"{other.param.device}"
            )
    return device
