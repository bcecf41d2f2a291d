"""What stands in ``manifest.json``? The layout, what vouches for every file, and the objects.

::

    format, format_version, kind
    layout      the ShardedLayout, from which every key and place follows
    files       path → SHA-256 of its header, CRC-32 of each key's bytes
    digests     CRC-32C of each tensor's content; not there where nobody took them
    objects     step, parameter groups, iteration, scheduler …
    carried     what other formats need to write the checkpoint again, by format
    sha256      of all of the above
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, LayoutError
from ckpttools.formats.native.objects import objects_document
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.storage.crcfold import Share
from ckpttools.storage.digest_table import ENTRY as DIGESTS
from ckpttools.storage.digest_table import Digests, digest_entry, read_digests
from ckpttools.storage.sealed_json import SELF, check_known, check_seal, parse_json, serialize

MANIFEST_FILE = "manifest.json"
FORMAT = "ckpttools-sharded"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30

_KEYS = {"format", "format_version", "kind", "layout", "files", "objects", "carried", SELF}
_CRC = re.compile("[0-9a-f]{8}")
_SHA = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StatedFile:
    """What vouches for a file: the SHA-256 of its header, the CRC-32 of each key's bytes.

    ``shares`` is what its elements add to the digest of each tensor, by name and slot; None where
    nobody took them.
    """

    path: str
    header_sha256: str
    crcs: Mapping[str, int]
    shares: Mapping[tuple[str, str], Share] | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A ``manifest.json`` as read; ``objects`` and ``carried`` are still plain data."""

    layout: ShardedLayout
    files: Mapping[str, StatedFile]
    objects: Mapping[str, object]
    carried: Mapping[str, object]
    digests: Digests | None = None


def manifest_document(
    layout: ShardedLayout,
    files: Sequence[StatedFile],
    objects: Mapping[str, object],
    carried: Mapping[str, object],
    digests: Digests | None = None,
) -> bytes:
    """Return the bytes of ``manifest.json``.

    ``files`` are those of all ranks; ``objects`` has entries of a Manifest's objects
    (``step``, ``iteration``, ``param_groups`` as a sequence of `ParamGroup` …), ``carried`` plain
    documents of other formats, ``digests`` that of every tensor that a reader finds, or None. Files
    are listed by path, so their order doesn't matter.

    Raises:
        FormatError: an object holds something else than plain and inert data.
    """
    return serialize(
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": layout.kind,
            "layout": to_document(layout),
            "files": {
                file.path: {
                    "header_sha256": file.header_sha256,
                    "crc32": {key: f"{crc:08x}" for key, crc in file.crcs.items()},
                }
                for file in sorted(files, key=lambda file: file.path)
            },
            **digest_entry(digests),
            "objects": objects_document(objects),
            "carried": dict(carried),
        }
    )


def parse_manifest(data: bytes, *, kind: str, where: str) -> Document:
    """Parse and check the bytes of a ``manifest.json``.

    Raises:
        FormatError: a byte has changed, an entry is not what it must be, or the version is newer.
    """
    document = check_known(
        parse_json(data, where), name=FORMAT, version=FORMAT_VERSION, where=where
    )
    check_seal(document, data, where)
    if odd := sorted(set(document) - {DIGESTS} ^ _KEYS):
        raise FormatError(f"{where}: must have {', '.join(sorted(_KEYS))}, got a difference: {odd}")
    if document["kind"] != kind:
        raise FormatError(f"{where}: kind must be {kind}, got {document['kind']!r:.40}")
    try:
        layout = from_document(document["layout"], where=f"{where}: layout")
    except LayoutError as error:
        raise FormatError(f"{where}: {error}" if where not in str(error) else str(error)) from error
    if layout.kind != kind:
        raise FormatError(f"{where}: kind of the layout must be {kind}, got {layout.kind}")
    return Document(
        layout=layout,
        files={
            path: _stated(path, entry, where) for path, entry in _table(document, "files", where)
        },
        objects=dict(_table(document, "objects", where)),
        carried=dict(_table(document, "carried", where)),
        digests=read_digests(document, where),
    )


def _table(document: Mapping[str, object], key: str, where: str) -> list[tuple[str, object]]:
    value = document[key]
    if not isinstance(value, dict):
        raise FormatError(f"{where}: {key} must be an object, got {value!r:.60}")
    return list(value.items())


def _stated(path: str, entry: object, where: str) -> StatedFile:
    """Check the entry of a file."""
    at = f"{where}: files: {path:.80}"
    if not isinstance(entry, dict) or set(entry) != {"header_sha256", "crc32"}:
        raise FormatError(f"{at}: must have header_sha256 and crc32, got {entry!r:.60}")
    sha, crcs = entry["header_sha256"], entry["crc32"]
    if not isinstance(sha, str) or _SHA.fullmatch(sha) is None:
        raise FormatError(f"{at}: header_sha256 must be 64 hexadecimal digits, got {sha!r:.80}")
    if not isinstance(crcs, dict) or not all(
        isinstance(crc, str) and _CRC.fullmatch(crc) for crc in crcs.values()
    ):
        raise FormatError(f"{at}: crc32 must map keys to eight hexadecimal digits")
    return StatedFile(path, sha, {str(key): int(crc, 16) for key, crc in crcs.items()})
