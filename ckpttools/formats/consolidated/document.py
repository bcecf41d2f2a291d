"""What does a consolidated checkpoint say beside its tensors? The same for every container."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.formats import NewFile, ParamGroup, Written
from ckpttools.formats.consolidated.state import FORMAT, FORMAT_VERSION, plain
from ckpttools.manifest import WEIGHT, Manifest, TensorSpec
from ckpttools.storage.inert import Inert

_OBJECTS = ("args", "opt_param_scheduler", "grad_scaler")
_COUNTERS = ("iteration", "num_floating_point_operations_so_far")


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects that are carried as JSON files, what is carried and what is not."""

    files: tuple[NewFile, ...]
    carried: tuple[str, ...]
    lost: tuple[str, ...]


def has_optimizer(source: Manifest) -> bool:
    """Say whether there is optimizer state, which groups and step belong to."""
    return any(spec.slot != WEIGHT for spec in source.tensors)


def describe(source: Manifest, objects: Objects) -> dict[str, object]:
    """Return the part of the document that doesn't depend on the container."""
    topology = source.objects.get("topology")
    optimizer = source.objects if has_optimizer(source) else {}
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "source": {"format": source.format, "topology": topology},
        **{key: source.objects[key] for key in _COUNTERS if key in source.objects},
        "step": optimizer.get("step"),
        "param_groups": _groups(optimizer.get("param_groups")),
        "carried": list(objects.carried),
        "not_carried": list(objects.lost),
    }


def describe_tensor(spec: TensorSpec, path: str, written: Written) -> dict[str, object]:
    """Return the entry of one tensor, which lies in ``path``."""
    return {
        "name": spec.name,
        "slot": spec.slot,
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "file": path,
        "crc32c": f"{written.digests[spec.key]:08x}",
    }


def carried_objects(source: Manifest) -> Objects:
    """Return files for what is plain, and what is carried and what is not."""
    files: list[NewFile] = []
    carried: list[str] = []
    lost: list[str] = []
    if has_optimizer(source) and "param_groups" in source.objects:
        carried.append("optimizer: parameter groups with their settings, members and step")
    for key in _COUNTERS:
        if key in source.objects:
            carried.append(key)
    for key in _OBJECTS:
        value = source.objects.get(key)
        if value is None:
            continue
        table = value.state if isinstance(value, Inert) else value
        if not isinstance(table, Mapping):
            lost.append(f"{key}: it is not plain data")
            continue
        kept: dict[str, object] = {}
        for name, setting in table.items():
            try:
                kept[str(name)] = plain(setting)
            except TypeError:
                lost.append(f"{key}.{name}: it is not plain data")
        carried.append(f"{key}, under objects")
        data = (json.dumps(kept, indent=1) + "\n").encode()
        files.append(NewFile(f"objects/{key}.json", data))
    per_rank = source.objects.get("per_rank")
    for key in per_rank if isinstance(per_rank, tuple) else ():
        lost.append(f"{key}: it belongs to ranks, which whole tensors have not")
    return Objects(tuple(files), tuple(carried), tuple(lost))


def _groups(groups: object) -> list[object] | None:
    """Return parameter groups as plain data; what isn't plain becomes its text."""
    if not isinstance(groups, tuple):
        return None
    result: list[object] = []
    for group in groups:
        if isinstance(group, ParamGroup):
            members = None if group.members is None else list(group.members)
            result.append({"settings": _settings(group.settings), "params": members})
    return result


def _settings(settings: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in settings.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            kept[name] = repr(value)
    return kept
