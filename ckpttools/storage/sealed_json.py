"""How does a JSON document vouch for itself? By a last entry, the SHA-256 of all before it.

The sum is of the bytes themselves, which are *the* serialization of the document
(:func:`serialize`): not even a space can change unseen, and a check makes no serialization anew.
What else such a document lists by SHA-256 or CRC is covered with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from ckpttools.errors import FormatError

SELF = "sha256"


def sealed(document: Mapping[str, object]) -> dict[str, object]:
    """Return a document with its own SHA-256 as the last entry."""
    body = {key: value for key, value in document.items() if key != SELF}
    return {**body, SELF: sha256(_dumps(body))}


def serialize(document: Mapping[str, object]) -> bytes:
    """Return the bytes of a document, sealed."""
    return _dumps(sealed(document))


def parse_json(data: bytes, where: str) -> object:
    """Parse JSON.

    Raises:
        FormatError: it is none.
    """
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: must be JSON, got {error}") from error


def check_known(document: object, *, name: str, version: int, where: str) -> dict[str, object]:
    """Return a document of the format ``name`` in a known version.

    Raises:
        FormatError: it is none, or of another version.
    """
    if not isinstance(document, dict) or document.get("format") != name:
        raise FormatError(f"{where}: format must be {name!r}, got another")
    stated = document.get("format_version")
    if type(stated) is not int or stated != version:
        raise FormatError(
            f"{where}: format_version must be {version}, got {stated!r:.40}",
            hint="a newer ckpttools wrote it" if isinstance(stated, int) else "",
        )
    return document


def check_seal(document: Mapping[str, object], data: bytes, where: str) -> None:
    """Check that ``data``, of which ``document`` was parsed, has the SHA-256 that it states.

    Raises:
        FormatError: it has not, so some byte has changed.
    """
    stated = document.get(SELF)
    last = f',\n "{SELF}": "{stated}"\n}}\n'.encode()
    body = data[: -len(last)] + b"\n}\n"
    if not data.endswith(last) or sha256(body) != stated:
        raise FormatError(f"{where}: must have the SHA-256 that it states, got changed bytes")


def sha256(data: bytes) -> str:
    """Return the SHA-256 as hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _dumps(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()
