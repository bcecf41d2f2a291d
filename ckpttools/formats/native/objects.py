"""What of a run is not tensors, and how does it stand in ``manifest.json``?

Step, iteration, scheduler and the like are kept exactly, with the tags of
:mod:`ckpttools.storage.inert_encoder` for what JSON has not; parameter groups by the names of
their members. ``step`` is a number, or a number for each parameter by name where they differ.
``state_values`` is what an optimizer keeps of a parameter that is neither a tensor nor the step,
by name; ``training`` the state of everything else that a run has; ``per_rank_state`` a list of what
belongs to each rank alone, such as its random state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttools.errors import FormatError
from ckpttools.formats import Carried, CarriedDocument, ParamGroup
from ckpttools.layout.slots import WEIGHT
from ckpttools.manifest import Manifest
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode

ENTRIES = (
    "iteration",
    "step",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
    "grad_scaler",
    "args",
    "adam_w_mode",
    "weight_rounding",
    "state_values",
    "training",
    "per_rank_state",
)
GROUPS = "param_groups"
PER_RANK = "per_rank_state"
_OF_OPTIMIZER = ("step", "grad_scaler", "adam_w_mode", "state_values", GROUPS)


def objects_document(objects: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a Manifest's objects that the native form keeps, as plain data.

    Raises:
        FormatError: one of them holds something else than plain and inert data.
    """
    kept = {key: objects[key] for key in ENTRIES if key in objects}
    _join_steps(kept)
    document = {key: encode(value, where=key) for key, value in kept.items()}
    groups = objects.get(GROUPS)
    if isinstance(groups, Sequence):
        document[GROUPS] = [_group_document(g) for g in groups if isinstance(g, ParamGroup)]
    return document


def read_objects(document: Mapping[str, object], *, where: str) -> dict[str, object]:
    """Return the objects that a document describes.

    Raises:
        FormatError: an entry is unknown or not what it must be.
    """
    unknown = sorted(set(document) - {*ENTRIES, GROUPS})
    if unknown:
        raise FormatError(f"{where}: entries must be {', '.join(ENTRIES)}, got {unknown[0]!r:.60}")
    objects = {
        key: decode(value, where=f"{where}: {key}")
        for key, value in document.items()
        if key != GROUPS
    }
    _join_steps(objects)
    if GROUPS in document:
        objects[GROUPS] = _groups(document[GROUPS], f"{where}: {GROUPS}")
    return objects


def _join_steps(objects: dict[str, object]) -> None:
    """Make one step of those of all parameters where they are equal."""
    step = objects.get("step")
    if isinstance(step, Mapping) and len(steps := {_number(s) for s in step.values()}) == 1:
        objects["step"] = steps.pop()


def _number(value: object) -> int | float:
    """Return the step of one parameter.

    Raises:
        FormatError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"step: must be a number, got {value!r:.60}")
    return value


def carried_documents(objects: Mapping[str, object]) -> dict[str, object]:
    """Return what other formats must know to write these objects' checkpoint again, by format.

    Raises:
        UsageError: one of them can't be carried without a loss that nobody accepted.
    """
    carried = objects.get("carried")
    if not isinstance(carried, Mapping):
        return {}
    return {str(k): v.to_document() for k, v in carried.items() if isinstance(v, Carried)}


def read_carried(document: Mapping[str, object]) -> dict[str, Carried]:
    """Return the documents of other formats, unread."""
    return {name: CarriedDocument(value) for name, value in document.items()}


def kept_objects(
    source: Manifest, carried: Mapping[str, object], *, world_size: int | None = None
) -> tuple[dict[str, object], tuple[str, ...], tuple[str, ...]]:
    """Return the source's objects that are kept; a line for each of them, and for each lost.

    What belongs to each rank alone is kept where ``world_size`` says that there are as many.
    """
    kept: dict[str, object] = {}
    lines: list[str] = []
    lost: list[str] = []
    has_state = any(spec.slot != WEIGHT for spec in source.tensors)
    for key in (*ENTRIES, GROUPS):
        if source.objects.get(key) is None:
            continue
        if key in _OF_OPTIMIZER and not has_state:
            lost.append(f"{key}: no state of the optimizer is written")
            continue
        if key == PER_RANK and _count(source.objects[key]) != world_size:
            lost.append(f"{key}: it belongs to the source's ranks")
            continue
        try:
            objects_document({key: source.objects[key]})
        except FormatError as error:
            lost.append(str(error))
            continue
        kept[key] = source.objects[key]
        lines.append(_LINES.get(key, key))
    lines += [f"what `--to {name}` needs" for name in carried]
    for key, reason in (("per_rank", "it belongs to the source's ranks"), ("unconverted", "")):
        names = source.objects.get(key)
        if not isinstance(names, tuple) or (key == "unconverted" and carried):
            continue
        lost += [f"{name}: {reason or 'the native form has no place for it'}" for name in names]
    return kept, tuple(lines), tuple(lost)


_LINES = {
    GROUPS: "optimizer: parameter groups with their settings and members",
    "state_values": "optimizer: what it keeps beside tensors",
    "training": "training: the state of scheduler, data and the like",
    PER_RANK: "random and other state of each rank",
}


def _count(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple, Mapping)) else None


def _group_document(group: ParamGroup) -> dict[str, object]:
    settings = {
        name: encode(value, where=f"{GROUPS}: {name}") for name, value in group.settings.items()
    }
    members = None if group.members is None else list(group.members)
    return {"settings": settings, "params": members}


def _groups(value: object, where: str) -> tuple[ParamGroup, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{where}: must be a list, got {value!r:.60}")
    groups = []
    for i, group in enumerate(value):
        at = f"{where}[{i}]"
        if not isinstance(group, dict) or set(group) != {"settings", "params"}:
            raise FormatError(f"{at}: must have settings and params, got {group!r:.60}")
        settings, members = group["settings"], group["params"]
        if not isinstance(settings, dict):
            raise FormatError(f"{at}: settings must be an object, got {settings!r:.60}")
        if members is not None and not (
            isinstance(members, list) and all(isinstance(name, str) for name in members)
        ):
            raise FormatError(f"{at}: params must be names, got {members!r:.60}")
        decoded = {k: decode(v, where=f"{at}: {k}") for k, v in settings.items()}
        groups.append(ParamGroup(decoded, None if members is None else tuple(members)))
    return tuple(groups)
