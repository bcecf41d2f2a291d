"""What stands in ``ckpttools.json`` beside the files that we write for torch?

torch's own files have places for tensors and for what an optimizer keeps. The rest stands here,
sealed, and torch doesn't look at it. It is of one ``.metadata``: a script that saves into the same
directory again makes it void, and it is refused then.

::

    format, format_version
    metadata    SHA-256 of .metadata
    ranks       how many have saved
    padding     [name, slot, rows] of vocabulary padding at the end of a tensor
    digests     CRC-32C of each tensor's content; not there where nobody took them
    layout      what is known of how the model can be cut, or null
    objects     iteration, training state, state of each rank …
    carried     what other formats need to write the checkpoint again, by format
    sha256      of all of the above
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpttools.errors import FormatError, LayoutError
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.manifest import TensorSpec
from ckpttools.storage.dcp_metadata import METADATA_FILE
from ckpttools.storage.digest_table import ENTRY as DIGESTS
from ckpttools.storage.digest_table import Digests, digest_entry, read_digests
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import (
    SELF,
    check_known,
    check_seal,
    parse_json,
    serialize,
    sha256,
)

SIDECAR = "ckpttools.json"
FORMAT = "ckpttools-dcp"
FORMAT_VERSION = 1
MAX_BYTES = 1 << 30
MAX_METADATA_BYTES = 1 << 30
ENTRIES = (
    "iteration",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
    "grad_scaler",
    "args",
    "adam_w_mode",
    "weight_rounding",
    "training",
    "per_rank_state",
)
"""Entries of a Manifest's objects that the document keeps; step and groups are in torch's files."""

_KEYS = {
    "format",
    "format_version",
    "metadata",
    "ranks",
    "padding",
    "layout",
    "objects",
    "carried",
    SELF,
}

Padding = Mapping[tuple[str, str], int]
"""Rows of padding by name and slot."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A ``ckpttools.json`` as read; ``carried`` is still plain data."""

    padding: Padding = field(default_factory=dict)
    layout: ShardedLayout | None = None
    objects: Mapping[str, object] = field(default_factory=dict)
    carried: Mapping[str, object] = field(default_factory=dict)
    ranks: int | None = None
    digests: Digests | None = None


def padding_of(specs: Sequence[TensorSpec]) -> Padding:
    """Return the rows of padding of some tensors."""
    return {spec.key: spec.padding_rows for spec in specs if spec.padding_rows}


def sidecar_document(sidecar: Sidecar, metadata: bytes) -> bytes:
    """Return the bytes of the document, for a directory whose ``.metadata`` is ``metadata``.

    Raises:
        FormatError: an object holds something else than plain and inert data.
    """
    layout = sidecar.layout
    return serialize(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "metadata": sha256(metadata),
            "ranks": sidecar.ranks,
            "padding": [[name, slot, rows] for (name, slot), rows in sidecar.padding.items()],
            **digest_entry(sidecar.digests),
            "layout": None if layout is None else to_document(layout),
            "objects": {k: encode(value, where=k) for k, value in sidecar.objects.items()},
            "carried": dict(sidecar.carried),
        }
    )


def read_sidecar(directory: Path) -> Sidecar:
    """Read and check a directory's ``ckpttools.json``; an empty one where there is none.

    Raises:
        FormatError: a byte has changed, an entry is not what it must be, or it is of another save.
    """
    place = directory / SIDECAR
    if not place.is_file():
        return Sidecar()
    where = str(place)
    data = read_small_file(place, limit_bytes=MAX_BYTES)
    document = check_known(
        parse_json(data, where), name=FORMAT, version=FORMAT_VERSION, where=where
    )
    check_seal(document, data, where)
    if odd := sorted(set(document) - {DIGESTS} ^ _KEYS):
        raise FormatError(f"{where}: must have {', '.join(sorted(_KEYS))}, got a difference: {odd}")
    metadata = read_small_file(directory / METADATA_FILE, limit_bytes=MAX_METADATA_BYTES)
    if document["metadata"] != sha256(metadata):
        raise FormatError(
            f"{where}: must be of the {METADATA_FILE} beside it, got that of another save",
            hint=f"if something has saved into this directory since, remove {SIDECAR}",
        )
    objects, carried = document["objects"], document["carried"]
    if not isinstance(objects, dict) or not isinstance(carried, dict):
        raise FormatError(f"{where}: objects and carried must be objects, got others")
    if unknown := sorted(set(objects) - set(ENTRIES)):
        raise FormatError(f"{where}: objects must be {', '.join(ENTRIES)}, got {unknown[0]!r:.60}")
    ranks = document["ranks"]
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise FormatError(f"{where}: ranks must be a number of at least 1, got {ranks!r:.40}")
    return Sidecar(
        _padding(document["padding"], where),
        _layout(document["layout"], where),
        {key: decode(value, where=f"{where}: {key}") for key, value in objects.items()},
        carried,
        ranks,
        read_digests(document, where),
    )


def _padding(value: object, where: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case [str(name), str(slot), int(rows)] if rows > 0 and rows is not True:
                found[name, slot] = rows
            case _:
                raise FormatError(
                    f"{where}: padding must be name, slot and rows, got {entry!r:.60}"
                )
    return found


def _layout(value: object, where: str) -> ShardedLayout | None:
    if value is None:
        return None
    try:
        return from_document(value, where=f"{where}: layout")
    except LayoutError as error:
        raise FormatError(f"{where}: {error}" if where not in str(error) else str(error)) from error
