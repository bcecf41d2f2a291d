"""How is a distributed NeMo directory read? Keys to names, stacks to layers, boxes to chunks.

1. ``common.pt`` is Lightning's dict; the arrays' places come from the container.
2. Keys are parted into model and optimizer slots. Masters stand under ``fp32_param`` or, where the
   model stores a tensor through a factory (gated ``linear_fc1``), under ``param``.
3. A stack of layers becomes a tensor a layer: its boxes are those of the stack, the first index
   fixed.
4. Every weight must have all slots or none, each with the weight's shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError, LayoutError, UnsupportedError, UsageError
from ckpttools.formats import Candidate, Reading, ReadOptions
from ckpttools.formats.nemo.grouping import DEFAULT_RULE, RULES, Member, roles
from ckpttools.formats.nemo.legacy_files import SUFFIX
from ckpttools.formats.nemo.model import Weight, build_layout, in_module_order
from ckpttools.formats.nemo.names import split_layer, split_prefix, split_slot, split_stack
from ckpttools.formats.nemo.optimizer_state import OPTIMIZER, OptimizerState, read_optimizer
from ckpttools.formats.nemo.places import ManifestBuilder, logical_shapes
from ckpttools.formats.nemo.settings import setting
from ckpttools.formats.nemo.state import (
    DEFAULT_FILE,
    EXTRA_STATE,
    MODEL,
    NemoState,
    describe,
    notes_of,
    param_groups,
)
from ckpttools.formats.nemo.stored import COMMON_FILE, Stored, read_stored
from ckpttools.layout.box import Box
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import MASTER, WEIGHT, TensorSpec
from ckpttools.storage.stored_arrays import StoredArray, StoredBox
from ckpttools.storage.torchzip import load_small_payloads, read_torch_file

MAX_OBJECT_BYTES = 16 << 20
_MAX_LAYERS = 100_000
_SLOTS = ("fp32_param", "exp_avg", "exp_avg_sq")
_MASTERS = ("fp32_param", "param")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of one layer, or of none: its dtype, shape, and its boxes without a stack's axis."""

    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


def read_directory(path: Path, options: ReadOptions) -> Reading:
    """Read a directory of the distributed form.

    Raises:
        FormatError: a file is missing, damaged or contradicts the others.
        UnsupportedError: it is of another optimizer or container.
    """
    if options.layout not in (None, *RULES):
        raise UsageError(f"--layout: must be one of {', '.join(RULES)}, got {options.layout!r}")
    tree = read_common(path / COMMON_FILE)
    optimizer = read_optimizer(tree, str(path / COMMON_FILE))
    stored = read_stored(path)
    prefix, slots, stacked = _parted(stored, str(path))
    _check_slots(slots, optimizer, options, str(path))
    weights = in_module_order(
        [Weight(name, t.shape, t.dtype.name) for name, t in slots[WEIGHT].items()], options
    )
    kinds = {slot: next(iter(slots[slot].values())).dtype.name for slot in slots if slot != WEIGHT}
    layout, notes = _layout(weights, tree, options, kinds)
    members = [Member(weight.name, weight.shape) for weight in weights]
    rule, remark = _grouping(options, members, optimizer)
    state = NemoState(
        tree=_without_tensors(tree, optimizer if len(slots) > 1 else None),
        prefix=prefix,
        grouping=rule,
        stacked=stacked,
        extra=_extra_states(stored),
        file_name=f"{path.name}{SUFFIX}" if path.name else DEFAULT_FILE,
    )
    kept = optimizer if len(slots) > 1 else None
    groups = param_groups(rule, members, kept.groups) if kept is not None else ()
    builder = ManifestBuilder(path)
    for weight in weights:
        for slot in slots:
            _add(builder, weight.name, slot, slots[slot][weight.name], layout)
    objects = describe(state, kept, layout, groups, options)
    try:
        manifest = builder.build("nemo", str(path), objects)
    except LayoutError as error:
        raise FormatError(f"{path}: {error}") from error
    notes += [*remark, *notes_of(state, kept, options)]
    if kept is None:
        notes.append("weights only: the checkpoint has no optimizer state")
    return Reading((Candidate((rule,), manifest),), notes=tuple(notes))


def _add(
    builder: ManifestBuilder, name: str, slot: str, tensor: _Tensor, layout: ShardedLayout | None
) -> None:
    """Add a tensor and its chunks."""
    shape, padding = logical_shapes(layout, name, tensor.shape)
    builder.add_tensor(TensorSpec(name, slot, tensor.dtype, shape, padding))
    for box in tensor.boxes:
        region, file = Box(box.offsets, box.lengths), builder.file(box.path)
        builder.add_chunk((name, slot), region, file, box.offset, box.strides)


def read_common(place: Path) -> dict[str, object]:
    """Return Lightning's dict of a file, payloads of small tensors included.

    Raises:
        FormatError: the file is missing, damaged or holds something else.
    """
    if not place.is_file():
        raise FormatError(f"{place}: a distributed checkpoint must have it, got none")
    file = read_torch_file(place)
    if not isinstance(file.tree, dict) or not all(isinstance(key, str) for key in file.tree):
        raise FormatError(f"{place}: must hold a dict with names, got {type(file.tree).__name__}")
    load_small_payloads(file, file.tree, limit_bytes=MAX_OBJECT_BYTES)
    return {str(key): value for key, value in file.tree.items()}


def _parted(stored: Stored, where: str) -> tuple[str, dict[str, dict[str, _Tensor]], bool]:
    """Return the common prefix, the tensors by slot and name, and whether layers are stacked."""
    slots: dict[str, dict[str, _Tensor]] = {WEIGHT: {}}
    prefixes: dict[str, str] = {}
    depths: dict[str, tuple[int, str]] = {}
    stacked = True
    for key, array in stored.arrays.items():
        kind, model_key = split_slot(key)
        prefix, name = split_prefix(model_key)
        prefixes.setdefault(prefix, key)
        slot = WEIGHT if kind is None else MASTER if kind in _MASTERS else kind
        mine = slots.setdefault(slot, {})
        stack = split_stack(name)
        if stack is not None:
            _check_depth(depths, stack[0], array, where)
        for own, tensor in _layers(name, array):
            if own in mine:
                raise FormatError(f"{where}: {own} ({slot}): must be stored once, got {key} too")
            mine[own] = tensor
        stacked = stacked and split_layer(name) is None
    if len(prefixes) > 1:
        raise FormatError(
            f"{where}: all names must have one prefix, got those of "
            f"{' and '.join(list(prefixes.values())[:2])}"
        )
    if not slots[WEIGHT]:
        raise FormatError(f"{where}: must hold a model, got no key of one")
    order = [s for s in (WEIGHT, *_SLOTS, *slots) if s in slots]
    return next(iter(prefixes)), {slot: slots[slot] for slot in dict.fromkeys(order)}, stacked


def _check_depth(
    depths: dict[str, tuple[int, str]], stack: str, array: StoredArray, where: str
) -> None:
    """Check that a stack has an axis of layers, as long as that of its other arrays."""
    if not array.shape:
        raise FormatError(f"{where}: {array.key}: a stack of layers must have an axis, got none")
    if array.shape[0] > _MAX_LAYERS:
        raise FormatError(
            f"{where}: {array.key}: must have at most {_MAX_LAYERS} layers, got {array.shape[0]}"
        )
    depth, first = depths.setdefault(stack, (array.shape[0], array.key))
    if depth != array.shape[0]:
        raise FormatError(
            f"{where}: {array.key}: must have {depth} layers as {first}, got {array.shape[0]}"
        )


def _layers(name: str, array: StoredArray) -> Iterator[tuple[str, _Tensor]]:
    """Yield the tensors of an array: one for each layer of a stack, or itself."""
    found = split_stack(name)
    if found is None:
        yield name, _Tensor(array.dtype, array.shape, array.boxes)
        return
    stack, rest = found
    boxes: list[list[StoredBox]] = [[] for _ in range(array.shape[0])]
    for box in array.boxes:
        for i in range(box.lengths[0]):
            start = box.offset + i * box.strides[0] * array.dtype.itemsize
            boxes[box.offsets[0] + i].append(
                StoredBox(box.offsets[1:], box.lengths[1:], box.path, start, box.strides[1:])
            )
    for layer, mine in enumerate(boxes):
        yield f"{stack}.{layer}.{rest}", _Tensor(array.dtype, array.shape[1:], tuple(mine))


def _check_slots(
    slots: Mapping[str, Mapping[str, _Tensor]],
    optimizer: OptimizerState | None,
    options: ReadOptions,
    where: str,
) -> None:
    """Check that every weight has all slots or none has any, each in the weight's shape."""
    weights = slots[WEIGHT]
    for slot, tensors in slots.items():
        if odd := sorted(weights.keys() ^ tensors.keys()):
            got = "none" if odd[0] in weights else "no weight of it"
            raise FormatError(
                f"{where}: {odd[0]} ({slot}): must be there, as those of other weights are, got "
                f"{got}"
            )
        kinds = {tensor.dtype for tensor in tensors.values()}
        if slot != WEIGHT and len(kinds) > 1:
            raise FormatError(
                f"{where}: {slot} must have one dtype, got {', '.join(map(str, kinds))}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != weights[name].shape:
                raise UnsupportedError(
                    f"{where}: {name} ({slot}): must have the weight's shape "
                    f"{weights[name].shape}, got {tensor.shape}, as optimizers that flatten their "
                    f"state have it"
                )
    if len(slots) > 1 and optimizer is None:
        raise FormatError(f"{where}: {COMMON_FILE} must hold {OPTIMIZER}, got none of it")
    if len(slots) == 1 and optimizer is not None and "optimizer" not in options.accept_loss:
        raise FormatError(
            f"{where}: must hold the optimizer's tensors, as {COMMON_FILE} says, got none",
            hint="give --accept-loss optimizer to go on with the weights alone",
        )


def _layout(
    weights: Sequence[Weight],
    tree: Mapping[str, object],
    options: ReadOptions,
    slots: Mapping[str, str],
) -> tuple[ShardedLayout | None, list[str]]:
    """Return the layout of the whole model, or none and why."""
    try:
        layout = build_layout(
            {(0, 0): weights},
            tp=1,
            pp=1,
            vpp=1,
            config=setting(tree, "hyper_parameters", "cfg"),
            options=options,
            slots=slots,
        )
    except LayoutError as error:
        if options.rules_path is not None or options.vocab_size is not None:
            raise
        return None, [f"tensors can't be cut, only taken whole: {error}"]
    return layout, []


def _grouping(
    options: ReadOptions, members: Sequence[Member], optimizer: OptimizerState | None
) -> tuple[str, list[str]]:
    """Return the rule of parameter groups, and a remark where no file tells which it is."""
    if optimizer is None or options.layout is not None:
        return options.layout or DEFAULT_RULE, []
    if len(optimizer.groups) == 1:
        return "all", []
    mine = roles(DEFAULT_RULE, members)
    others = [rule for rule in RULES if rule != "all" and roles(rule, members) != mine]
    if not others:
        return DEFAULT_RULE, []
    remark = (
        f"parameter groups: no file tells their members; they are taken by the rule {DEFAULT_RULE} "
        f"(others: {', '.join(others)}, named with --layout)"
    )
    return DEFAULT_RULE, [remark]


def _without_tensors(
    tree: Mapping[str, object], optimizer: OptimizerState | None
) -> dict[str, object]:
    """Return Lightning's dict with an empty model and the optimizer's settings alone."""
    found = {key: value for key, value in tree.items() if optimizer or key != OPTIMIZER}
    found[MODEL] = {}
    if optimizer is not None:
        found[OPTIMIZER] = optimizer.template()
    return found


def _extra_states(stored: Stored) -> dict[str, object]:
    """Return modules' extra states by name with their layer's number; other objects as keyed."""
    found: dict[str, object] = {}
    for key, tree in stored.objects.items():
        entry, _, shard = key.rpartition("/")
        name = split_prefix(entry)[1]
        stack = split_stack(name)
        value = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
        if not name.endswith(EXTRA_STATE):
            found[key] = value
        elif stack is None:
            found[name] = value
        else:
            layer = shard.removeprefix("shard_").split("_")[0].split(".")[0]
            found[f"{stack[0]}.{layer}.{stack[1]}"] = value
    return found
