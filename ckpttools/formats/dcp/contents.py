"""What goes into a directory beside the tensors, and under which keys? For every kind of writer.

Steps, settings and numbers of the optimizer stand where torch's state dict APIs put them, what a
script had saved where it had it, and everything else in ``ckpttools.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import FormatError, UnsupportedError, UsageError
from ckpttools.formats import Carried, ParamGroup
from ckpttools.formats.dcp.keys import STATE, Naming, Path, sort_keys
from ckpttools.formats.dcp.settings import setting_items, torch_groups
from ckpttools.formats.dcp.sidecar import ENTRIES, Padding, Sidecar
from ckpttools.formats.dcp.state import FORMAT, PLAIN_STEP, DcpState, Other, is_plain
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import WEIGHT, TensorSpec
from ckpttools.storage.dcp_writer import NewChunk, NewObject
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.torchzip import TensorRef

STEP = "step"
_OF_OPTIMIZER = ("grad_scaler", "adam_w_mode")
_PER_RANK = "per_rank_state"
_WRAPPERS = ("module.", "_orig_mod.")

Item = NewChunk | NewObject


@dataclass(frozen=True, slots=True)
class Contents:
    """What all ranks write alike: items for the first file, with their paths, and the sidecar."""

    naming: Naming
    items: tuple[Item, ...]
    paths: Mapping[str, Path]
    sidecar: Sidecar
    carried: tuple[str, ...]
    lost: tuple[str, ...]


def key_of(naming: Naming, name: str, slot: str) -> str:
    """Return a tensor's key.

    >>> key_of(Naming(), "fc.weight", "weight"), key_of(Naming(), "fc.weight", "exp_avg")
    ('model.fc.weight', 'optimizer.state.fc.weight.exp_avg')
    """
    if slot == WEIGHT:
        return f"{naming.model}{name}"
    return f"{naming.optimizer}{STATE}.{name}.{slot}"


def path_of(naming: Naming, name: str, slot: str) -> Path:
    """Return where a tensor stands in the nested state."""
    if slot == WEIGHT:
        prefix = naming.model
        for wrapper in _WRAPPERS:  # belongs to the name, which is one part
            if prefix.endswith(wrapper):
                prefix, name = prefix.removesuffix(wrapper), wrapper + name
        return (*_parts(prefix), name)
    if naming.flat:
        return (*_parts(naming.optimizer), f"{STATE}.{name}.{slot}")
    return (*_parts(naming.optimizer), STATE, name, slot)


def contents_of(
    specs: Sequence[TensorSpec],
    objects: Mapping[str, object],
    state: DcpState,
    padding: Padding,
    *,
    world_size: int,
    stateless: bool = False,
) -> Contents:
    """Return what is written beside the tensors ``specs``.

    ``stateless`` says that an optimizer which keeps no tensors has its groups all the same.

    Raises:
        UsageError: a reader couldn't tell the names from the keys, a step isn't exact in the
            dtype of steps, or another format's part of ``objects`` can't be carried.
    """
    naming = state.naming
    trained = {spec.name for spec in specs if spec.slot != WEIGHT}
    items: list[Item] = []
    paths = {key_of(naming, *spec.key): path_of(naming, *spec.key) for spec in specs}
    lines: list[str] = []
    lost: list[str] = []

    def add(item: Item, path: Path) -> None:
        items.append(item)
        paths[item.key] = path

    values = objects.get("state_values")
    plain = values if isinstance(values, Mapping) else {}
    for name, slot, value in _values(trained, objects.get(STEP), plain):
        key = key_of(naming, name, slot)
        if not is_plain(value):
            lost.append(f"{key}: it is no plain data")
            continue
        kind = naming.step if slot == STEP else PLAIN_STEP
        add(_number(key, value, kind), path_of(naming, name, slot))
    if trained or plain or stateless:
        groups, missing = torch_groups(
            _groups(objects), {spec.slot for spec in specs}, objects.get("adam_w_mode")
        )
        lost += missing
        for key, path, value in setting_items(groups, flat=naming.flat):
            add(NewObject(naming.optimizer + key, value), (*_parts(naming.optimizer), *path))
        if groups:
            lines.append("optimizer: parameter groups with their settings and members")
    elif _groups(objects) or STEP in objects:
        lost.append("param_groups, step: no state of the optimizer is written")
    for key, other in _others(state, objects, lost):
        add(_other(key, other.tree), other.path)
        lines.append(key)
    kept = _kept(objects, lines, lost, has_state=bool(trained), world_size=world_size)
    layout = objects.get("sharded_layout")
    documents = _documents(objects)
    lines += [f"what `--to {name}` needs" for name in documents]
    lost += _foreign(objects, bool(documents) or FORMAT in _carried(objects))
    _check_names(specs, naming, items, paths)
    known = layout if isinstance(layout, ShardedLayout) else None
    sidecar = Sidecar(padding, known, kept, documents, world_size)
    return Contents(naming, tuple(items), paths, sidecar, tuple(lines), tuple(lost))


def _check_names(
    specs: Sequence[TensorSpec], naming: Naming, items: Sequence[Item], paths: Mapping[str, Path]
) -> None:
    """Check that a reader finds each tensor under its own name and slot."""
    if odd := next((spec for spec in specs if spec.slot == STEP), None):
        raise UsageError(f"--to dcp: {odd}: steps must be numbers, got a tensor")
    wanted = {spec.key: key_of(naming, *spec.key) for spec in specs}
    tensors = [item.key for item in items if isinstance(item, NewChunk)]
    objects = [item.key for item in items if isinstance(item, NewObject)]
    try:
        keys = sort_keys([*wanted.values(), *tensors], objects, paths, where="--to dcp")
    except (FormatError, UnsupportedError) as error:
        raise UsageError(str(error)) from error
    found = {(name, WEIGHT): key for name, key in keys.weights.items()} | dict(keys.state)
    for (name, slot), key in wanted.items():
        if found.get((name, slot)) != key:
            raise UsageError(
                f"--to dcp: {name} ({slot}): must be told from its key, got {key!r}, which reads "
                "as another"
            )


def _parts(prefix: str) -> Path:
    return tuple(prefix.split(".")[:-1])


def _groups(objects: Mapping[str, object]) -> list[ParamGroup]:
    groups = objects.get("param_groups")
    return [g for g in groups if isinstance(g, ParamGroup)] if isinstance(groups, tuple) else []


def _values(
    trained: set[str], step: object, plain: Mapping[str, object]
) -> Iterator[tuple[str, str, object]]:
    """Yield name, key and value of what an optimizer keeps of a parameter that is no tensor."""
    for name in sorted({*trained, *plain}):
        count = step.get(name) if isinstance(step, Mapping) else step
        if count is not None:
            yield name, STEP, count
        mine = plain.get(name)
        for slot, value in mine.items() if isinstance(mine, Mapping) else ():
            yield name, str(slot), value


def _number(key: str, value: object, kind: str) -> Item:
    """Return the item of a step: a tensor of one number, or the number."""
    if kind == PLAIN_STEP or not isinstance(value, (int, float)):
        return NewObject(key, value)
    dtype = BY_NAME[kind]
    stored = np.array(value).astype(dtype.carrier)
    if stored.item() != value:
        raise UsageError(f"{key}: must be exact in {kind}, got {value}")
    return NewChunk(key, dtype, (), (), (), stored.tobytes())


def _others(
    state: DcpState, objects: Mapping[str, object], lost: list[str]
) -> Iterator[tuple[str, Other]]:
    """Yield what a script saved beside model and optimizer, if it was at this step."""
    if _joined(state.step) != _joined(objects.get(STEP)):
        lost += [f"{key}: it was saved at another step" for key in state.others]
        return
    for key, other in state.others.items():
        if is_plain(other.tree):
            yield key, other
        else:
            lost.append(f"{key}: it is no plain data")


def _other(key: str, tree: object) -> Item:
    """Return the item of what a script saved: a tensor is one in torch's list too."""
    if not isinstance(tree, TensorRef) or not tree.is_dense or tree.offset:
        return NewObject(key, tree)
    data = (tree.storage.payload or b"")[: tree.numel * tree.dtype.itemsize]
    return NewChunk(key, tree.dtype, tree.shape, (0,) * len(tree.shape), tree.shape, data)


def _joined(step: object) -> object:
    """Return one step where all parameters have the same."""
    counts = set(step.values()) if isinstance(step, Mapping) else {step}
    return counts.pop() if len(counts) == 1 else step


def _kept(
    objects: Mapping[str, object],
    lines: list[str],
    lost: list[str],
    *,
    has_state: bool,
    world_size: int,
) -> dict[str, object]:
    """Return the objects that the sidecar keeps."""
    kept: dict[str, object] = {}
    for key in ENTRIES:
        value = objects.get(key)
        if value is None:
            continue
        if key in _OF_OPTIMIZER and not has_state:
            lost.append(f"{key}: no state of the optimizer is written")
            continue
        if key == _PER_RANK and _count(value) != world_size:
            lost.append(f"{key}: it belongs to the source's ranks")
            continue
        try:
            encode(value, where=key)
        except FormatError as error:
            lost.append(str(error))
            continue
        kept[key] = value
        lines.append(key)
    return kept


def _count(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple, Mapping)) else None


def _carried(objects: Mapping[str, object]) -> Mapping[str, object]:
    carried = objects.get("carried")
    return carried if isinstance(carried, Mapping) else {}


def _documents(objects: Mapping[str, object]) -> dict[str, object]:
    """Return what other formats need to write the checkpoint again."""
    found = _carried(objects).items()
    return {str(k): v.to_document() for k, v in found if isinstance(v, Carried) and k != FORMAT}


def _foreign(objects: Mapping[str, object], carried: bool) -> list[str]:
    """Return a line for what belongs to the source's ranks, or has no place here."""
    lost = []
    for key, reason in (("per_rank", "it belongs to the source's ranks"), ("unconverted", "")):
        names = objects.get(key)
        if isinstance(names, tuple) and not (key == "unconverted" and carried):
            lost += [f"{name}: {reason or 'torch has no place for it'}" for name in names]
    return lost
