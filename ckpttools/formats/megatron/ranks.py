"""What do one rank's two files hold? Checked in structure, not yet joined with other ranks.

``model_optim_rng.pt``: ``args``, ``checkpoint_version``, ``iteration``, ``model`` (parameters in
module order, ``_extra_state`` entries between them), ``optimizer`` (groups only), scheduler, RNG.
``distrib_optim.pt``, since core 0.7: ``buckets_coalesced`` and, per buffer, flat fp32 tensors
``param``, ``exp_avg``, ``exp_avg_sq`` with ``numel_unpadded`` elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.megatron.arguments import settings_of
from ckpttools.formats.megatron.directory import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    IterationDirectory,
)
from ckpttools.formats.megatron.groups import Settings
from ckpttools.formats.megatron.trees import entry
from ckpttools.storage.inert import Inert, InertType
from ckpttools.storage.torchzip import TensorRef, TorchFile, load_small_payloads, read_torch_file

CHECKPOINT_VERSION = 3.0
EXTRA_STATE = "._extra_state"
_OTHER_MODEL_CHUNKS = ("model0", "model1")


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """One buffer in ``distrib_optim.pt``: its key, declared length and flat tensors by name."""

    key: tuple[InertType, InertType]
    numel_unpadded: int
    tensors: Mapping[str, TensorRef]

    @property
    def param_dtype(self) -> str:
        """Torch's name of the parameters' dtype."""
        return self.key[0].inert_name


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The files of tensor rank ``tp`` and pipeline rank ``pp``.

    ``model`` maps the names in the file to tensors (parameters) or other objects
    (``_extra_state``); ``buffers`` is empty where there is no optimizer state.
    """

    tp: int
    pp: int
    model_path: str
    optimizer_path: str
    model_file: TorchFile
    optimizer_file: TorchFile | None
    tree: Mapping[str, object]
    settings: Mapping[str, object]
    args: Inert
    model: Mapping[str, object]
    groups: tuple[Settings, ...]
    buffers: tuple[SavedBuffer, ...]

    @property
    def where(self) -> str:
        """The path of the model file."""
        return str(self.model_file.path)

    def params(self) -> dict[str, TensorRef]:
        """Return the parameters in module order, by the names in the file."""
        return {k: v for k, v in self.model.items() if isinstance(v, TensorRef)}


def read_rank(iteration: IterationDirectory, tp: int, pp: int) -> RankFiles:
    """Read both files of a rank.

    Raises:
        FormatError: a file is missing or damaged.
        UnsupportedError: it is of a version or kind that isn't covered.
    """
    directory = iteration.path / iteration.ranks[tp, pp]
    model_file = read_torch_file(_must_exist(directory / MODEL_FILE))
    where = str(model_file.path)
    tree = _as_tree(model_file.tree, where)
    version = tree.get("checkpoint_version")
    if version != CHECKPOINT_VERSION:
        raise FormatError(
            f"{where}: checkpoint_version must be {CHECKPOINT_VERSION}, got {version!r}"
        )
    for key in _OTHER_MODEL_CHUNKS:
        if key in tree:
            raise UnsupportedError(
                f"{where}: one model chunk must be there, got {key!r} (interleaved pipeline stages "
                f"are not supported)"
            )
    _check_iteration(tree, iteration, where)
    settings = settings_of(tree.get("args"), where)
    args = entry(tree, "args", Inert, where)
    load_small_payloads(model_file, {k: v for k, v in tree.items() if k != "model"})
    optimizer_path = directory / OPTIMIZER_FILE
    optimizer_file = read_torch_file(optimizer_path) if optimizer_path.exists() else None
    prefix = f"{iteration.name}/{directory.name}"
    return RankFiles(
        tp=tp,
        pp=pp,
        model_path=f"{prefix}/{MODEL_FILE}",
        optimizer_path=f"{prefix}/{OPTIMIZER_FILE}",
        model_file=model_file,
        optimizer_file=optimizer_file,
        tree=tree,
        settings=settings,
        args=args,
        model=_model(tree, where),
        groups=_groups(tree, where),
        buffers=_buffers(optimizer_file) if optimizer_file else (),
    )


def _must_exist(path: Path) -> Path:
    if not path.is_file():
        raise FormatError(f"{path}: every rank must have this file, got none")
    return path


def _as_tree(tree: object, where: str) -> dict[str, object]:
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise FormatError(f"{where}: must hold a dict with names, got {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def _check_iteration(tree: Mapping[str, object], iteration: IterationDirectory, where: str) -> None:
    """Refuse a file of another iteration: it is a stray of an older save."""
    number = tree.get("iteration")
    if iteration.name.startswith("iter_") and number != int(iteration.name[5:]):
        raise FormatError(f"{where}: iteration must be that of {iteration.name}, got {number!r}")


def _model(tree: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the entries of ``model``: tensors, and what stands between them."""
    model = entry(tree, "model", dict, where)
    entries: dict[str, object] = {}
    for name, value in _as_tree(model, f"{where}: model").items():
        if name.endswith(EXTRA_STATE):
            if value is not None:
                raise UnsupportedError(
                    f"{where}: {name} must be None (extra state is not supported), got "
                    f"{type(value).__name__}"
                )
        elif not isinstance(value, TensorRef):
            raise FormatError(f"{where}: {name} must be a tensor, got {type(value).__name__}")
        entries[name] = value
    return entries


def _groups(tree: Mapping[str, object], where: str) -> tuple[Settings, ...]:
    """Return the parameter groups; none where the optimizer was not saved."""
    if "optimizer" not in tree:
        return ()
    outer = tree["optimizer"]
    if isinstance(outer, list):
        raise UnsupportedError(
            f"{where}: one optimizer must be there, got a list of {len(outer)} (chained optimizers "
            f"are not supported)"
        )
    outer = _as_tree(outer, f"{where}: optimizer")
    inner = _as_tree(entry(outer, "optimizer", dict, f"{where}: optimizer"), where)
    groups = entry(inner, "param_groups", list, f"{where}: optimizer")
    unknown = sorted(set(inner) - {"param_groups"})
    if unknown:
        raise UnsupportedError(
            f"{where}: the distributed optimizer must keep only param_groups here, got {unknown[0]}"
        )
    result = []
    for i, group in enumerate(groups):
        settings = _as_tree(group, f"{where}: param_groups[{i}]")
        if "params" in settings:
            raise FormatError(
                f"{where}: param_groups[{i}] must not list params here, got {settings['params']!r}"
            )
        result.append(settings)
    return tuple(result)


def _buffers(file: TorchFile) -> tuple[SavedBuffer, ...]:
    """Read ``distrib_optim.pt``."""
    where = str(file.path)
    if isinstance(file.tree, list):
        raise UnsupportedError(
            f"{where}: one optimizer must be there, got a list of {len(file.tree)} (chained "
            f"optimizers are not supported)"
        )
    if not isinstance(file.tree, dict) or file.tree.get("buckets_coalesced") is not True:
        raise UnsupportedError(
            f"{where}: must be of the version with 'buckets_coalesced' (core 0.7 and later), got "
            f"{sorted(map(str, file.tree)) if isinstance(file.tree, dict) else type(file.tree)}"
        )
    indices = [key for key in file.tree if key != "buckets_coalesced"]
    if not indices or indices != list(range(len(indices))):
        raise FormatError(f"{where}: buffers must be numbered from 0, got {indices}")
    buffers = tuple(_buffer(file.tree[i], f"{where}: buffer {i}") for i in indices)
    _check_disjoint(buffers, where)
    return buffers


def _check_disjoint(buffers: Sequence[SavedBuffer], where: str) -> None:
    """Refuse flat tensors that share elements: one slot's values would pass for another's."""
    taken = sorted(
        (id(tensor.storage), tensor.offset, tensor.offset + tensor.numel, name)
        for buffer in buffers
        for name, tensor in buffer.tensors.items()
        if tensor.numel
    )
    for (storage, _, stop, first), (other, start, _, second) in pairwise(taken):
        if storage == other and start < stop:
            raise FormatError(
                f"{where}: {second} must have elements of its own, got some of {first}'s"
            )


def _buffer(value: object, where: str) -> SavedBuffer:
    """Check one buffer's dict: {(param dtype, grad dtype): {name: flat tensor, numel}}."""
    if not isinstance(value, dict) or len(value) != 1:
        raise FormatError(f"{where}: must have one dtype key, got {value!r:.80}")
    ((key, inner),) = value.items()
    if not (
        isinstance(key, tuple)
        and len(key) == 2
        and all(isinstance(k, InertType) and k.inert_module == "torch" for k in key)
    ):
        raise FormatError(f"{where}: the key must be (param dtype, grad dtype), got {key!r}")
    tree = _as_tree(inner, where)
    numel = tree.get("numel_unpadded")
    if type(numel) is not int or numel < 0:
        raise FormatError(f"{where}: numel_unpadded must be a size, got {numel!r}")
    tensors: dict[str, TensorRef] = {}
    for name, tensor in tree.items():
        if name == "numel_unpadded":
            continue
        if not isinstance(tensor, TensorRef) or tensor.shape != (numel,) or not tensor.is_dense:
            shape = tensor.shape if isinstance(tensor, TensorRef) else type(tensor).__name__
            raise FormatError(
                f"{where}: {name} must be a flat tensor of numel_unpadded = {numel}, got {shape}"
            )
        tensors[name] = tensor
    if "param" not in tensors:
        raise FormatError(f"{where}: must have a tensor 'param', got {sorted(tensors)}")
    return SavedBuffer(key=key, numel_unpadded=numel, tensors=tensors)
