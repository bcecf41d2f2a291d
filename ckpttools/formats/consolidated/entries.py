"""How are the parts of a consolidated document read? Each checked, with errors that name it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpttools.errors import CkptError, FormatError
from ckpttools.formats import ParamGroup, Problem
from ckpttools.formats.consolidated.state import (
    MAX_STATE_BYTES,
    OBJECTS,
    OBJECTS_DIRECTORY,
    TAGGED,
)
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json, sha256

_CRC = re.compile("[0-9a-f]{8}")
_ENTRIES = (
    "iteration",
    "num_floating_point_operations_so_far",
    "step",
    "adam_w_mode",
    "weight_rounding",
)


def table(document: Mapping[str, object], key: str, where: str) -> dict[str, object]:
    """Return an object of the document; but for ``tensors`` its keys are paths inside.

    Raises:
        FormatError: it is something else, or a path leads outside.
    """
    value = document.get(key)
    if not isinstance(value, dict):
        raise FormatError(f"{where}: {key} must be an object, got {value!r:.40}")
    for name in value:
        if key != "tensors" and (name[:1] in ("", "/") or ".." in name.split("/") or "\0" in name):
            raise FormatError(f"{where}: {key} must lie in the directory, got {name!r}")
    return value


def crc(entry: Mapping[str, object], where: str) -> int:
    """Return the stated CRC-32C of a tensor."""
    text = entry.get("crc32c")
    if not isinstance(text, str) or _CRC.fullmatch(text) is None:
        raise FormatError(f"{where}: crc32c must be eight hexadecimal digits, got {text!r:.40}")
    return int(text, 16)


def name_and_slot(entry: Mapping[str, object], where: str) -> tuple[str, str]:
    """Return the name and slot of a tensor."""
    name, slot = entry.get("name"), entry.get("slot")
    if not isinstance(name, str) or not isinstance(slot, str):
        raise FormatError(
            f"{where}: must have a name and a slot, got {name!r:.40} and {slot!r:.40}"
        )
    return name, slot


def objects_of(
    document: Mapping[str, object],
    digests: Mapping[tuple[str, str], int],
    carried: Mapping[str, object],
) -> dict[str, object]:
    """Return the objects of the Manifest; ``carried`` are those that have files of their own.

    ``gathered_from`` and ``not_carried`` tell of the source that was gathered first.
    """
    objects: dict[str, object] = {k: document[k] for k in _ENTRIES if document.get(k) is not None}
    objects["digests"] = dict(digests)
    groups = document.get("param_groups")
    if isinstance(groups, list):
        objects["param_groups"] = tuple(_groups(groups))
    if isinstance(document.get("source"), dict):
        objects["gathered_from"] = document["source"]
    lost = document.get("not_carried")
    objects["not_carried"] = tuple(map(str, lost)) if isinstance(lost, list) else ()
    tagged = {k: decode(carried[k], where=f"objects: {k}") for k in TAGGED if k in carried}
    return {**objects, **carried, **tagged}


def carried_of(
    path: Path, document: Mapping[str, object], where: str, end: str
) -> dict[str, object]:
    """Read the objects that have files of their own, ``objects/<key>`` with this end.

    Raises:
        FormatError: one is not what the document says, or no JSON object.
        StorageError: one can't be read.
    """
    files = table(document, "files", where)
    carried: dict[str, object] = {}
    for key in (*OBJECTS, *TAGGED):
        name = f"{OBJECTS_DIRECTORY}/{key}{end}"
        if name not in files:
            continue
        data = read_small_file(path / name, limit_bytes=MAX_STATE_BYTES)
        if sha256(data) != files[name]:
            raise FormatError(f"{path / name}: SHA-256 must be {files[name]}, got another")
        value = parse_json(data, str(path / name))
        if not isinstance(value, dict):
            raise FormatError(f"{path / name}: must be a JSON object, got {value!r:.40}")
        carried[key] = value
    return carried


def check_listed(path: Path, document: Mapping[str, object], where: str) -> list[Problem]:
    """Compare the SHA-256 of every file that the document lists."""
    problems = []
    for name, stated in table(document, "files", where).items():
        try:
            data = read_small_file(path / name, limit_bytes=MAX_STATE_BYTES)
        except CkptError as error:
            problems.append(Problem(str(path / name), str(error)))
            continue
        if sha256(data) != stated:
            problems.append(Problem(str(path / name), f"SHA-256 must be {stated}, got another"))
    return problems


def _groups(value: Sequence[object]) -> Iterator[ParamGroup]:
    """Return the parameter groups of the document."""
    for group in value:
        if isinstance(group, dict) and isinstance(group.get("settings"), dict):
            params = group.get("params")
            members = tuple(map(str, params)) if isinstance(params, list) else None
            yield ParamGroup(group["settings"], members)
