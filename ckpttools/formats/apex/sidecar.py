"""What stands in ``ckpttools.json`` beside the files that we write for Apex?

Apex's own file has no place for names, iteration, scheduler or the way tensors are cut. They
stand here, sealed; Apex itself doesn't look at it.

::

    format, format_version
    names       of the parameters, by number
    padding     name → rows of vocabulary padding at the end of its tensors
    layout      the ShardedLayout as of one rank, where it is known
    objects     iteration, scheduler, gradient scaler, arguments, adam_w_mode
    carried     what other formats need to write the checkpoint again, by format
    sha256      of all of the above
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError, LayoutError
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import SELF, check_known, check_seal, parse_json, serialize

SIDECAR = "ckpttools.json"
FORMAT = "ckpttools-apex"
FORMAT_VERSION = 1
MAX_BYTES = 1 << 30
ENTRIES = (
    "iteration",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
    "grad_scaler",
    "args",
    "adam_w_mode",
)
"""Entries of a Manifest's objects that the document keeps; step and groups are in Apex's file."""

_KEYS = {"format", "format_version", "names", "padding", "layout", "objects", "carried", SELF}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A ``ckpttools.json`` as read; ``carried`` is still plain data."""

    where: str
    names: tuple[str, ...]
    padding: Mapping[str, int]
    layout: ShardedLayout | None
    objects: Mapping[str, object]
    carried: Mapping[str, object]


def sidecar_document(
    names: tuple[str, ...],
    padding: Mapping[str, int],
    layout: ShardedLayout | None,
    objects: Mapping[str, object],
    carried: Mapping[str, object],
) -> bytes:
    """Return the bytes of the document.

    Raises:
        FormatError: an object holds something else than plain and inert data.
    """
    return serialize(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "names": list(names),
            "padding": dict(padding),
            "layout": None if layout is None else to_document(layout),
            "objects": {key: encode(value, where=key) for key, value in objects.items()},
            "carried": dict(carried),
        }
    )


def read_sidecar(path: Path) -> Sidecar:
    """Read and check a ``ckpttools.json``.

    Raises:
        FormatError: a byte has changed, or an entry is not what it must be.
    """
    where = str(path)
    data = read_small_file(path, limit_bytes=MAX_BYTES)
    document = check_known(
        parse_json(data, where), name=FORMAT, version=FORMAT_VERSION, where=where
    )
    check_seal(document, data, where)
    if set(document) != _KEYS:
        odd = sorted(set(document) ^ _KEYS)
        raise FormatError(f"{where}: must have {', '.join(sorted(_KEYS))}, got a difference: {odd}")
    names, padding = document["names"], document["padding"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(f"{where}: names must be a list of texts, got {names!r:.60}")
    if not isinstance(padding, dict) or not all(
        type(rows) is int and rows > 0 for rows in padding.values()
    ):
        raise FormatError(f"{where}: padding must map names to rows, got {padding!r:.60}")
    objects, carried = document["objects"], document["carried"]
    if not isinstance(objects, dict) or not isinstance(carried, dict):
        raise FormatError(f"{where}: objects and carried must be objects, got others")
    if unknown := sorted(set(objects) - set(ENTRIES)):
        raise FormatError(f"{where}: objects must be {', '.join(ENTRIES)}, got {unknown[0]!r:.60}")
    return Sidecar(
        where,
        tuple(names),
        padding,
        _layout(document["layout"], where),
        {key: decode(value, where=f"{where}: {key}") for key, value in objects.items()},
        carried,
    )


def _layout(value: object, where: str) -> ShardedLayout | None:
    if value is None:
        return None
    try:
        return from_document(value, where=f"{where}: layout")
    except LayoutError as error:
        raise FormatError(f"{where}: {error}" if where not in str(error) else str(error)) from error
