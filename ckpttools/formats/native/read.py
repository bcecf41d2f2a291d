"""How is a native directory read back? Every file must be the one that the layout gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpttools.errors import CkptError, FormatError, LayoutError, StorageError
from ckpttools.formats import Candidate, Problem, Reading
from ckpttools.formats.native.files import RankFile, rank_files
from ckpttools.formats.native.manifest_file import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Document,
    StatedFile,
    parse_manifest,
)
from ckpttools.formats.native.objects import read_carried, read_objects
from ckpttools.formats.native.places import build_manifest
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.slots import REMAINDER_SLOT
from ckpttools.manifest import HALF_AWAY, TensorSpec
from ckpttools.storage.crc import crc32
from ckpttools.storage.digest_table import Digests
from ckpttools.storage.local import read_small_file
from ckpttools.storage.safetensors_header import read_header
from ckpttools.storage.sealed_json import sha256

_BLOCK_BYTES = 4 << 20


def read_directory(path: Path, kind: str) -> Reading:
    """Read a directory of the native form.

    Raises:
        FormatError: a file is missing, one too many, changed, or not what the layout gives.
    """
    document, files = _open(path, kind)
    for file in files:
        _check_header(path, file, document.files[file.path])
    where = f"{path / MANIFEST_FILE}: objects"
    objects = {
        **_rounding(document.layout),
        **read_objects(document.objects, where=where),
        **describe_layout(document.layout),
        **({} if document.digests is None else {"digests": document.digests}),
        "carried": read_carried(document.carried),
    }
    try:
        manifest = build_manifest(document.layout, files, str(path), objects, with_aliases=True)
    except LayoutError as error:
        raise FormatError(f"{path / MANIFEST_FILE}: {error}") from error
    check_digests(document.digests, manifest.tensors, str(path / MANIFEST_FILE))
    return Reading((Candidate((layout_name(document.layout),), manifest),))


def check_digests(digests: Digests | None, tensors: Sequence[TensorSpec], where: str) -> None:
    """Check that digests are stated for all tensors, or for none.

    Raises:
        FormatError: one is missing, or one too many.
    """
    if digests is None:
        return
    if odd := sorted({spec.key for spec in tensors} ^ set(digests)):
        name, slot = odd[0]
        raise FormatError(
            f"{where}: digests must be there for each tensor, got a difference: "
            f"{name:.80} ({slot:.40})"
        )


def describe_layout(layout: ShardedLayout) -> dict[str, object]:
    """Return what a Manifest's objects tell of the layout."""
    topology = layout.topology
    sizes = {"tp": topology.tp, "pp": topology.pp, "dp": topology.dp}
    stages = layout.stages()
    return {
        "topology": sizes | ({"vpp": topology.vpp} if topology.vpp > 1 else {}),
        "layout": (layout_name(layout),),
        "layers": None if stages is None else str(stages),
        "buckets": _buckets(layout),
        "sharded_layout": layout,
    }


def _rounding(layout: ShardedLayout) -> dict[str, object]:
    """Say how weights are rounded, where their masters are made of them and of remainders."""
    parts = any(REMAINDER_SLOT in slots for slots in layout.slots.values())
    return {"weight_rounding": (HALF_AWAY,)} if parts else {}


def layout_name(layout: ShardedLayout) -> str:
    """Return the name of the formula by which buckets are laid out."""
    return layout.variant if layout.kind == "zero1" else "fixed-buckets"


def _buckets(layout: ShardedLayout) -> str:
    if layout.kind == "zero2":
        sizes = {rule.bucket_numel(layout.topology.dp) for rule in layout.fixed.values()}
        return f"at most {' and '.join(map(str, sorted(sizes)))} elements"
    return ", ".join(dict.fromkeys(map(str, layout.cuts.values()))) or "one bucket"


def check_directory(path: Path, kind: str) -> list[Problem]:
    """Check the SHA-256 of the manifest and of every header, and the CRC-32 of every key."""
    try:
        document, files = _open(path, kind)
    except CkptError as error:
        return [Problem(str(path), str(error))]
    problems: list[Problem] = []
    for file in files:
        try:
            _check_header(path, file, document.files[file.path])
            problems += _check_payload(path, file, document.files[file.path])
        except CkptError as error:
            problems.append(Problem(str(path / file.path), str(error)))
    return problems


def _open(path: Path, kind: str) -> tuple[Document, list[RankFile]]:
    """Read ``manifest.json`` and derive what every file must be.

    Raises:
        FormatError: the manifest is damaged, or the files are not those of the layout.
    """
    place = path / MANIFEST_FILE
    data = read_small_file(place, limit_bytes=MAX_MANIFEST_BYTES)
    document = parse_manifest(data, kind=kind, where=str(place))
    ranks = document.layout.topology.world_size
    if ranks > len(document.files):  # before anything is made for each rank
        raise FormatError(
            f"{place}: must list a file of each of {ranks} ranks, got {len(document.files)}"
        )
    try:
        files = [file for rank in range(ranks) for file in rank_files(document.layout, rank)]
    except LayoutError as error:
        raise FormatError(f"{place}: {error}") from error
    expected = {file.path for file in files}
    if odd := sorted(expected ^ set(document.files)):
        state = "not listed" if odd[0] in expected else "listed"
        raise FormatError(
            f"{place}: must list the {len(expected)} files that the layout gives, got "
            f"{odd[0]!r:.80} {state}"
        )
    for found in sorted(path.glob("rank-*.safetensors")):
        if found.name not in expected:
            raise FormatError(f"{found}: must not be there, got a file of another layout")
    for file in files:
        if set(document.files[file.path].crcs) != {entry.key for entry in file.entries}:
            raise FormatError(f"{place}: {file.path}: crc32 must be there for each key, got others")
    return document, files


def _check_header(path: Path, file: RankFile, stated: StatedFile) -> None:
    """Check that a file's header is the stated one, and holds the keys of the layout."""
    place = path / file.path
    if not place.is_file():
        raise FormatError(f"{place}: every rank's file must be there, got none")
    header = read_header(place)
    if sha256(header.raw) != stated.header_sha256:
        raise FormatError(f"{place}: the header must have the SHA-256 {stated.header_sha256}")
    expected = [(e.key, e.dtype, e.shape, e.offset) for e in file.entries]
    got = [(t.key, t.dtype, t.shape, t.offset) for t in header.tensors]
    if got != expected:
        pairs = zip(expected, got, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        shown = f"{len(got)} keys" if first is None else _shown(*first[1])
        rule = f"{len(expected)} keys" if first is None else _shown(*first[0])
        raise FormatError(f"{place}: must hold {rule} by the layout, got {shown}")


def _shown(key: str, kind: object, shape: tuple[int, ...], offset: int) -> str:
    return f"{key} {kind} {list(shape)} at byte {offset}"


def _check_payload(path: Path, file: RankFile, stated: StatedFile) -> Iterator[Problem]:
    """Compare the CRC-32 of every key's bytes."""
    place = path / file.path
    try:
        with place.open("rb") as opened:
            for entry in file.entries:
                opened.seek(entry.offset)
                crc, left = 0, entry.length
                while left and (block := opened.read(min(left, _BLOCK_BYTES))):
                    crc, left = crc32(block, crc), left - len(block)
                wanted = stated.crcs[entry.key]
                if left or crc != wanted:
                    text = f"{entry.key}: CRC-32 must be {wanted:08x}, got {crc:08x}"
                    yield Problem(str(place), text)
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
