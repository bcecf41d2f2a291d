"""What does one rank's ``.ckpt`` file hold? Model, optimizer, and the rest of Lightning's dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttools.errors import FormatError
from ckpttools.formats.nemo.legacy_files import RankFiles
from ckpttools.formats.nemo.names import split_layer, split_prefix
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER, OptimizerState, read_optimizer
from ckpttools.formats.nemo.state import EXTRA_STATE, MODEL
from ckpttools.storage.torchzip import TensorRef, TorchFile, load_small_payloads, read_torch_file

MAX_OBJECT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """One rank's file.

    ``models`` are the weights of each model chunk by local name, ``extra`` its extra states;
    ``prefix`` stood before the names; ``rest`` is the dict with an empty model and without the
    optimizer's tensors.
    """

    where: str
    path: str
    file: TorchFile
    models: tuple[Mapping[str, TensorRef], ...]
    extra: tuple[Mapping[str, object], ...]
    prefix: str
    optimizer: OptimizerState | None
    rest: Mapping[str, object] = field(default_factory=dict)

    def layers(self, chunk: int) -> int:
        """Return how many layers a model chunk has; local numbers run from 0.

        Raises:
            FormatError: they don't.
        """
        found = {split[1] for name in self.models[chunk] if (split := split_layer(name))}
        if found != set(range(len(found))):
            raise FormatError(
                f"{self.where}: layers must be numbered from 0 on, got {sorted(found)[:8]}"
            )
        return len(found)


def read_rank(ranks: RankFiles, path: str) -> RankState:
    """Read the file of a rank.

    Raises:
        FormatError: it is damaged or isn't Lightning's dict.
        UnsupportedError: its optimizer isn't Apex's in format 2.
    """
    place = ranks.root / path
    file = read_torch_file(place)
    where = str(place)
    if not isinstance(file.tree, dict) or not all(isinstance(key, str) for key in file.tree):
        raise FormatError(f"{where}: must hold a dict with names, got {type(file.tree).__name__}")
    tree = {str(key): value for key, value in file.tree.items()}
    keys = _model_keys(tree, where)
    rest = {key: value for key, value in tree.items() if key not in keys and key != OPTIMIZER}
    load_small_payloads(file, rest, limit_bytes=MAX_OBJECT_BYTES)
    load_small_payloads(file, _settings(tree.get(OPTIMIZER)), limit_bytes=MAX_OBJECT_BYTES)
    optimizer = read_optimizer(tree, where)
    models: list[dict[str, TensorRef]] = []
    extras: list[dict[str, object]] = []
    prefixes: dict[str, str] = {}
    for key in keys:
        weights, extra, prefix = _model(tree[key], f"{where}: {key}")
        load_small_payloads(file, extra, limit_bytes=MAX_OBJECT_BYTES)
        models.append(weights)
        extras.append(extra)
        prefixes[prefix] = key
    if len(prefixes) > 1:
        raise FormatError(f"{where}: all names must have one prefix, got {sorted(prefixes)}")
    ordered: dict[str, object] = {
        key: {} if key == MODEL else optimizer.template() if optimizer and key == OPTIMIZER else v
        for key, v in tree.items()
        if key == MODEL or key not in keys
    }
    if optimizer is None:
        ordered.pop(OPTIMIZER, None)
    return RankState(
        where, path, file, tuple(models), tuple(extras), next(iter(prefixes)), optimizer, ordered
    )


def _model_keys(tree: Mapping[str, object], where: str) -> list[str]:
    """Return the keys of model chunks: ``model0`` … with virtual stages, else ``state_dict``."""
    chunks = [key for key in tree if key.startswith("model") and key[5:].isdigit()]
    if not chunks:
        if not isinstance(tree.get(MODEL), Mapping) or not tree[MODEL]:
            raise FormatError(f"{where}: must hold a model under {MODEL}, got none")
        return [MODEL]
    if chunks != [f"model{i}" for i in range(len(chunks))]:
        raise FormatError(f"{where}: model chunks must be numbered from 0 on, got {chunks}")
    return chunks


def _settings(listed: object) -> list[object]:
    """Return the parts of ``optimizer_states`` that may hold a number as a tensor."""
    found: list[object] = []
    for state in listed if isinstance(listed, list) else ():
        if isinstance(state, Mapping):
            inner = state.get("state")
            step = inner.get("step") if isinstance(inner, Mapping) else None
            found += [step, state.get("param_groups")]
    return found


def _model(value: object, where: str) -> tuple[dict[str, TensorRef], dict[str, object], str]:
    """Return the weights and extra states of a model chunk by name, and the names' prefix."""
    if not isinstance(value, Mapping):
        raise FormatError(f"{where}: must be a dict of tensors, got {type(value).__name__}")
    weights: dict[str, TensorRef] = {}
    extra: dict[str, object] = {}
    prefixes: set[str] = set()
    for key, entry in value.items():
        prefix, name = split_prefix(str(key))
        prefixes.add(prefix)
        if name.endswith(EXTRA_STATE):
            extra[name] = entry
        elif isinstance(entry, TensorRef):
            weights[name] = entry
        else:
            raise FormatError(f"{where}: {name}: must be a tensor, got {type(entry).__name__}")
    if len(prefixes) != 1 or not weights:
        raise FormatError(f"{where}: all names must have one prefix, got {sorted(prefixes)}")
    return weights, extra, prefixes.pop()
