"""What stands in ``state.json``, and how does it vouch for every byte of its directory?

The document holds the SHA-256 of every other file's non-tensor bytes and the CRC-32C of every
tensor, and ends with the SHA-256 of itself without that entry. The file's bytes are *the*
serialization of the document (:func:`serialize`), so not even a space can change unseen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from ckpttools.errors import FormatError

STATE_FILE = "state.json"
FORMAT = "ckpttools-consolidated"
FORMAT_VERSION = 1
SELF = "sha256"
MAX_STATE_BYTES = 256 << 20
OBJECTS = ("args", "opt_param_scheduler", "grad_scaler")
"""What has a JSON file of its own under :data:`OBJECTS_DIRECTORY`."""

OBJECTS_DIRECTORY = "objects"


def sealed(document: Mapping[str, object]) -> dict[str, object]:
    """Return a document with its own SHA-256 as the last entry."""
    body = {key: value for key, value in document.items() if key != SELF}
    return {**body, SELF: sha256(_dumps(body))}


def serialize(document: Mapping[str, object]) -> bytes:
    """Return the bytes of a document, sealed."""
    return _dumps(sealed(document))


def parse(data: bytes, where: str) -> dict[str, object]:
    """Parse and check the bytes of a ``state.json``.

    Raises:
        FormatError: they are not what :func:`serialize` wrote, or of a newer version.
    """
    document = check(parse_json(data, where), where)
    if serialize(document) != data:
        raise FormatError(f"{where}: must have the SHA-256 that it states, got changed bytes")
    return document


def parse_json(data: bytes, where: str) -> object:
    """Parse JSON.

    Raises:
        FormatError: it is none.
    """
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: must be JSON, got {error}") from error


def check(document: object, where: str) -> dict[str, object]:
    """Return a document of a known version.

    Raises:
        FormatError: it is none, or of another version.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{where}: format must be {FORMAT!r}, got another")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{where}: format_version must be {FORMAT_VERSION}, got {version!r}",
            hint="a newer ckpttools wrote it" if isinstance(version, int) else "",
        )
    return document


def sha256(data: bytes) -> str:
    """Return the SHA-256 as hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _dumps(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()


def plain(value: object) -> object:
    """Return ``value`` as JSON can hold it: tuples become lists.

    Raises:
        TypeError: it is not plain data.
    """
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError("JSON has no such number")
        return value
    if type(value) in (list, tuple) and isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not plain data")
