"""What do one rank's two files hold? Checked in structure, not yet joined with other ranks.

``model_optim_rng.pt``: ``args``, ``checkpoint_version``, ``iteration``, ``model`` (parameters in
module order, ``_extra_state`` entries between them; ``model0``, ``model1`` … with interleaved
stages), ``optimizer`` (groups only), scheduler, RNG. ``distrib_optim.pt`` is read by
:mod:`ckpttools.formats.megatron.saved_buffers`. Where optimizers are chained, ``optimizer`` and
``distrib_optim.pt`` are lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.megatron.arguments import settings_of
from ckpttools.formats.megatron.directory import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    IterationDirectory,
)
from ckpttools.formats.megatron.groups import Settings
from ckpttools.formats.megatron.saved_buffers import SavedBuffer, read_optimizers
from ckpttools.formats.megatron.trees import as_tree, entry
from ckpttools.storage.inert import Inert
from ckpttools.storage.torchzip import TensorRef, TorchFile, load_small_payloads, read_torch_file

CHECKPOINT_VERSION = 3.0
EXTRA_STATE = "._extra_state"
_MODEL_KEY = re.compile(r"model([0-9]*)")


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """One of the chained optimizers of a rank: its parameter groups and its buffers in order."""

    groups: tuple[Settings, ...]
    buffers: tuple[SavedBuffer, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The files of tensor rank ``tp`` and pipeline rank ``pp``.

    ``models`` maps, for each model chunk, the names in the file to tensors (parameters) or other
    objects (``_extra_state``); an optimizer's ``buffers`` are empty where there is no optimizer
    state.
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
    models: tuple[Mapping[str, object], ...]
    optimizers: tuple[SavedOptimizer, ...]

    @property
    def where(self) -> str:
        """The path of the model file."""
        return str(self.model_file.path)

    @property
    def where_optimizer(self) -> str:
        """The path of the optimizer file, whether it is there or not."""
        return str(Path(self.where).parent / OPTIMIZER_FILE)

    @property
    def has_groups(self) -> bool:
        """Whether parameter groups were saved."""
        return any(optimizer.groups for optimizer in self.optimizers)

    def params(self, chunk: int) -> dict[str, TensorRef]:
        """Return a chunk's parameters in module order, by the names in the file."""
        return {
            name: value
            for name, value in self.models[chunk].items()
            if isinstance(value, TensorRef) and not name.endswith(EXTRA_STATE)
        }

    def extra_states(self, chunk: int) -> dict[str, object]:
        """Return what modules keep beside parameters (Transformer Engine's fp8 scales)."""
        return {k: v for k, v in self.models[chunk].items() if k.endswith(EXTRA_STATE)}


def is_model_key(key: str) -> bool:
    """Say whether a top-level key of the model file is a model chunk."""
    return _MODEL_KEY.fullmatch(key) is not None


def read_rank(iteration: IterationDirectory, tp: int, pp: int) -> RankFiles:
    """Read both files of a rank.

    Raises:
        FormatError: a file is missing or damaged.
        UnsupportedError: it is of a version or kind that isn't covered.
    """
    directory = iteration.path / iteration.ranks[tp, pp]
    model_file = read_torch_file(_must_exist(directory / MODEL_FILE))
    where = str(model_file.path)
    tree = as_tree(model_file.tree, where)
    version = tree.get("checkpoint_version")
    if version != CHECKPOINT_VERSION:
        raise FormatError(
            f"{where}: checkpoint_version must be {CHECKPOINT_VERSION}, got {version!r}"
        )
    _check_iteration(tree, iteration, where)
    settings = settings_of(tree.get("args"), where)
    args = entry(tree, "args", Inert, where)
    models = _models(tree, where)
    load_small_payloads(model_file, {k: v for k, v in tree.items() if not is_model_key(k)})
    extra = [v for model in models for k, v in model.items() if k.endswith(EXTRA_STATE)]
    load_small_payloads(model_file, extra)
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
        models=models,
        optimizers=_optimizers(tree, optimizer_file, where),
    )


def _must_exist(path: Path) -> Path:
    if not path.is_file():
        raise FormatError(f"{path}: every rank must have this file, got none")
    return path


def _check_iteration(tree: Mapping[str, object], iteration: IterationDirectory, where: str) -> None:
    """Refuse a file of another iteration: it is a stray of an older save."""
    number = tree.get("iteration")
    if iteration.name.startswith("iter_") and number != int(iteration.name[5:]):
        raise FormatError(f"{where}: iteration must be that of {iteration.name}, got {number!r}")


def _models(tree: Mapping[str, object], where: str) -> tuple[dict[str, object], ...]:
    """Return the entries of each model chunk: tensors, and what stands between them."""
    keys = [key for key in tree if is_model_key(key)]
    if not keys or keys not in (["model"], [f"model{i}" for i in range(len(keys))]):
        raise FormatError(f"{where}: must have 'model', or 'model0', 'model1' …, got {keys}")
    return tuple(_model(entry(tree, key, dict, where), f"{where}: {key}") for key in keys)


def _model(model: Mapping[object, object], where: str) -> dict[str, object]:
    """Check the entries of one model chunk."""
    entries: dict[str, object] = {}
    for name, value in as_tree(model, where).items():
        if not name.endswith(EXTRA_STATE) and not isinstance(value, TensorRef):
            raise FormatError(f"{where}: {name} must be a tensor, got {type(value).__name__}")
        entries[name] = value
    return entries


def _optimizers(
    tree: Mapping[str, object], file: TorchFile | None, where: str
) -> tuple[SavedOptimizer, ...]:
    """Join the groups in the model file with the buffers in the optimizer file."""
    groups = _groups(tree, where)
    buffers = read_optimizers(file) if file else ((),) * max(1, len(groups))
    if groups and len(groups) != len(buffers):
        raise FormatError(
            f"{where}: must have as many optimizers as its optimizer file, got {len(groups)} and "
            f"{len(buffers)}"
        )
    listed = groups or ((),) * len(buffers)
    return tuple(SavedOptimizer(g, b) for g, b in zip(listed, buffers, strict=True))


def _groups(tree: Mapping[str, object], where: str) -> tuple[tuple[Settings, ...], ...]:
    """Return the parameter groups of each optimizer; none where the optimizer was not saved."""
    if "optimizer" not in tree:
        return ()
    outer = tree["optimizer"]
    optimizers = outer if isinstance(outer, list) else [outer]
    return tuple(_groups_of(one, f"{where}: optimizer") for one in optimizers)


def _groups_of(outer: object, where: str) -> tuple[Settings, ...]:
    """Check one optimizer's entry."""
    inner = as_tree(entry(as_tree(outer, where), "optimizer", dict, where), where)
    groups = entry(inner, "param_groups", list, where)
    unknown = sorted(set(inner) - {"param_groups"})
    if unknown:
        raise UnsupportedError(
            f"{where}: the distributed optimizer must keep only param_groups here, got {unknown[0]}"
        )
    result = []
    for i, group in enumerate(groups):
        settings = as_tree(group, f"{where}: param_groups[{i}]")
        if "params" in settings:
            raise FormatError(
                f"{where}: param_groups[{i}] must not list params here, got {settings['params']!r}"
            )
        result.append(settings)
    return tuple(result)
