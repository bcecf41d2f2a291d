"""What stands in ``state.json``, and how does it vouch for every byte of its directory?

The document holds the SHA-256 of every other file's non-tensor bytes and the CRC-32C of every
tensor, and ends with the SHA-256 of itself (:mod:`ckpttools.storage.sealed_json`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckpttools.storage.sealed_json import check_known, check_seal, parse_json

STATE_FILE = "state.json"
FORMAT = "ckpttools-consolidated"
FORMAT_VERSION = 1
MAX_STATE_BYTES = 256 << 20
OBJECTS = ("args", "opt_param_scheduler", "grad_scaler")
"""What has a JSON file of its own under :data:`OBJECTS_DIRECTORY`."""

TAGGED = ("training", "state_values")
"""The same for what needs more than JSON has, with the tags of ``storage.inert_encoder``."""

OBJECTS_DIRECTORY = "objects"
MAX_DEPTH = 64
"""How deep plain data may be nested; what holds itself is no plain data."""


def parse(data: bytes, where: str) -> dict[str, object]:
    """Parse and check the bytes of a ``state.json``.

    Raises:
        FormatError: they are not what ``sealed_json.serialize`` wrote, or of a newer version.
    """
    document = check(parse_json(data, where), where)
    check_seal(document, data, where)
    return document


def check(document: object, where: str) -> dict[str, object]:
    """Return a document of a known version.

    Raises:
        FormatError: it is none, or of another version.
    """
    return check_known(document, name=FORMAT, version=FORMAT_VERSION, where=where)


def plain(value: object, *, depth: int = 0) -> object:
    """Return ``value`` as JSON can hold it: tuples become lists.

    Raises:
        TypeError: it is not plain data, nested too deeply, or holds itself.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"it is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError("JSON has no such number")
        return value
    if type(value) in (list, tuple) and isinstance(value, Sequence):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): plain(item, depth=depth + 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not plain data")
