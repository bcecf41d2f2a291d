"""How do the digests of tensors stand in a document? By name and slot, in hexadecimal.

::

    digests     name → slot → CRC-32C of the tensor's logical bytes

The entry is optional: where it is not there, nobody took them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttools.errors import FormatError

ENTRY = "digests"
_CRC = re.compile("[0-9a-f]{8}")

Digests = Mapping[tuple[str, str], int]
"""The CRC-32C of tensors by name and slot."""


def digest_entry(digests: Digests | None) -> dict[str, object]:
    """Return the entry for a document; none where there are no digests.

    >>> digest_entry({("w", "weight"): 0xE3069283, ("w", "exp_avg"): 0})
    {'digests': {'w': {'weight': 'e3069283', 'exp_avg': '00000000'}}}
    """
    if digests is None:
        return {}
    table: dict[str, dict[str, str]] = {}
    for (name, slot), crc in digests.items():
        table.setdefault(name, {})[slot] = f"{crc:08x}"
    return {ENTRY: table}


def read_digests(document: Mapping[str, object], where: str) -> Digests | None:
    """Return the digests that a document states; None where it states none.

    Raises:
        FormatError: the entry is not what it must be.
    """
    if ENTRY not in document:
        return None
    found: dict[tuple[str, str], int] = {}
    for name, slots in _table(document[ENTRY], f"{where}: {ENTRY}").items():
        for slot, crc in _table(slots, f"{where}: {ENTRY}: {name:.80}").items():
            if not isinstance(crc, str) or _CRC.fullmatch(crc) is None:
                raise FormatError(
                    f"{where}: {ENTRY}: {name:.80} ({slot:.40}): must be eight hexadecimal digits, "
                    f"got {crc!r:.40}"
                )
            found[name, slot] = int(crc, 16)
    return found


def _table(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"{where}: must be an object, got {value!r:.60}")
    return value
