"""What does a consolidated checkpoint say beside its tensors? The same for every container."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass

from ckpttools.errors import FormatError
from ckpttools.formats import NewFile, ParamGroup, Written
from ckpttools.formats.consolidated.state import (
    FORMAT,
    FORMAT_VERSION,
    OBJECTS,
    OBJECTS_DIRECTORY,
    TAGGED,
    plain,
)
from ckpttools.manifest import WEIGHT, Manifest, TensorSpec
from ckpttools.storage.inert import Inert
from ckpttools.storage.inert_encoder import encode

_PLAIN = (
    "iteration",
    "num_floating_point_operations_so_far",
    "adam_w_mode",
    "weight_rounding",
)


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
    """Return the part of the document that doesn't depend on the container.

    A consolidated source hands on what it says of its own source: so from container to container
    nothing of the document is lost.
    """
    origin = {"format": source.format, "topology": source.objects.get("topology")}
    optimizer = source.objects if has_optimizer(source) else {}
    names = {spec.name for spec in source.tensors}
    earlier = source.objects.get("not_carried")
    lost = [*(earlier if isinstance(earlier, tuple) else ()), *objects.lost]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "source": source.objects.get("gathered_from", origin),
        **{key: source.objects[key] for key in _PLAIN if key in source.objects},
        "step": optimizer.get("step"),
        "param_groups": _groups(optimizer.get("param_groups"), names),
        "carried": list(objects.carried),
        "not_carried": list(dict.fromkeys(lost)),
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
    if "param_groups" in source.objects:
        if has_optimizer(source):
            carried.append("optimizer: parameter groups with their settings, members and step")
        else:
            lost.append("optimizer: its parameter groups and step, since no state of it is written")
    carried += [key for key in _PLAIN if key in source.objects]
    for key in (*OBJECTS, *TAGGED):
        value = source.objects.get(key)
        if value is None:
            continue
        document, missing = _tagged(key, value) if key in TAGGED else _plain(key, value)
        lost += missing
        if document is not None:
            carried.append(f"{key}, under objects")
            data = (json.dumps(document, indent=1) + "\n").encode()
            files.append(NewFile(f"{OBJECTS_DIRECTORY}/{key}.json", data))
    if source.objects.get("per_rank_state") is not None:
        lost.append("per_rank_state: it belongs to ranks, which whole tensors have not")
    for names, reason in (
        (source.objects.get("per_rank"), "it belongs to ranks, which whole tensors have not"),
        (source.objects.get("unconverted"), "whole tensors have no place for it"),
    ):
        lost += [f"{key}: {reason}" for key in (names if isinstance(names, tuple) else ())]
    return Objects(tuple(files), tuple(carried), tuple(lost))


def _plain(key: str, value: object) -> tuple[object | None, list[str]]:
    """Return the entries of a table that are plain data, and a line on each other one."""
    table = value.state if isinstance(value, Inert) else value
    if not isinstance(table, Mapping):
        return None, [f"{key}: it is not plain data"]
    kept: dict[str, object] = {}
    lost: list[str] = []
    for name, setting in table.items():
        try:
            kept[str(name)] = plain(setting)
        except TypeError:
            lost.append(f"{key}.{name}: it is not plain data")
    return kept, lost


def _tagged(key: str, value: object) -> tuple[object | None, list[str]]:
    """Return a value in the tags of the inert encoder, or a line on why it has none."""
    try:
        return encode(value, where=key), []
    except FormatError as error:
        return None, [str(error)]


def _groups(groups: object, names: Container[str]) -> list[object] | None:
    """Return parameter groups as plain data, with the members in ``names``.

    Settings that are not plain are left out; the proof finds and reports them.
    """
    if not isinstance(groups, tuple):
        return None
    result: list[object] = []
    for group in groups:
        if isinstance(group, ParamGroup):
            known = group.members
            members = None if known is None else [name for name in known if name in names]
            result.append({"settings": _settings(group.settings), "params": members})
    return result


def _settings(settings: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in settings.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            continue
    return kept
