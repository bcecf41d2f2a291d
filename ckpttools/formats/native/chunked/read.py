"""How is a directory of chunks read back? Every file must be as ``manifest.json`` tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpttools.errors import CkptError, FormatError, LayoutError, StorageError
from ckpttools.formats import Candidate, Problem, Reading
from ckpttools.formats.native.chunked.document import (
    ChunkDocument,
    StatedChunks,
    parse_document,
)
from ckpttools.formats.native.chunked.files import ChunkFile
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, MAX_MANIFEST_BYTES
from ckpttools.formats.native.objects import read_carried, read_objects
from ckpttools.formats.native.read import check_digests
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.crc import crc32
from ckpttools.storage.local import read_small_file
from ckpttools.storage.safetensors_header import StoredTensor, read_header
from ckpttools.storage.sealed_json import sha256

NAME = "sharded"
LAYOUT = "chunks"
_BLOCK_BYTES = 4 << 20


def read_chunks(path: Path) -> Reading:
    """Read a directory.

    Raises:
        FormatError: a file is missing, one too many, changed, or not what is stated.
    """
    document = _open(path)
    where = f"{path / MANIFEST_FILE}: objects"
    objects = {
        **read_objects(document.objects, where=where),
        **describe_chunks(document.world_size),
        **({} if document.layout is None else {"sharded_layout": document.layout}),
        **({} if document.digests is None else {"digests": document.digests}),
        "carried": read_carried(document.carried),
    }
    check_digests(document.digests, document.tensors, str(path / MANIFEST_FILE))
    files, chunks = [], []
    for number, stated in enumerate(document.files):
        stored, size = _check_header(path, stated, document.tensors)
        files.append(File(stated.path, size))
        for one in stored:
            chunk = stated.keys[one.key]
            part = Part(Extent(number, one.offset, one.length), one.dtype)
            chunks.append(Chunk(chunk.tensor, chunk.box, (part,), replica_id=chunk.replica_id))
    try:
        manifest = Manifest(NAME, str(path), tuple(files), document.tensors, tuple(chunks), objects)
    except LayoutError as error:
        raise FormatError(f"{path / MANIFEST_FILE}: {error}") from error
    return Reading((Candidate((LAYOUT,), manifest),))


def chunk_manifest(
    tensors: Sequence[TensorSpec], files: Sequence[ChunkFile], root: str, objects: dict[str, object]
) -> Manifest:
    """Return the Manifest of files that needn't exist.

    Raises:
        LayoutError: the chunks don't hold each element of each tensor once.
    """
    chunks = chunks_of(tensors, files)
    listed = tuple(File(file.path, file.size_bytes) for file in files)
    return Manifest(NAME, root, listed, tuple(tensors), chunks, objects)


def chunks_of(tensors: Sequence[TensorSpec], files: Sequence[ChunkFile]) -> tuple[Chunk, ...]:
    """Return what lies in some files."""
    return tuple(
        Chunk(
            one.tensor,
            one.box,
            (Part(Extent(number, one.offset, one.length), tensors[one.tensor].dtype),),
            replica_id=one.replica_id,
        )
        for number, file in enumerate(files)
        for one in file.chunks
    )


def describe_chunks(world_size: int) -> dict[str, object]:
    """Return what a Manifest's objects tell of the files."""
    return {"topology": {"dp": world_size}, "layout": (LAYOUT,)}


def check_chunks(path: Path) -> list[Problem]:
    """Check the SHA-256 of the manifest and of every header, and the CRC-32 of every key."""
    try:
        document = _open(path)
    except CkptError as error:
        return [Problem(str(path), str(error))]
    problems: list[Problem] = []
    for stated in document.files:
        try:
            stored, _ = _check_header(path, stated, document.tensors)
            problems += _check_payload(path, stated, stored)
        except CkptError as error:
            problems.append(Problem(str(path / stated.path), str(error)))
    return problems


def _open(path: Path) -> ChunkDocument:
    """Read ``manifest.json``, and look for files that it doesn't list.

    Raises:
        FormatError: the manifest is damaged, or a file is one too many.
    """
    place = path / MANIFEST_FILE
    data = read_small_file(place, limit_bytes=MAX_MANIFEST_BYTES)
    document = parse_document(data, where=str(place))
    listed = {file.path for file in document.files}
    for found in sorted(path.glob("rank-*.safetensors")):
        if found.name not in listed:
            raise FormatError(f"{found}: must not be there, got a file that is not listed")
    return document


def _check_header(
    path: Path, stated: StatedChunks, tensors: Sequence[TensorSpec]
) -> tuple[tuple[StoredTensor, ...], int]:
    """Return a file's keys and size, once its header is the stated one and holds the stated keys.

    Raises:
        FormatError: it isn't.
    """
    place = path / stated.path
    if not place.is_file():
        raise FormatError(f"{place}: every listed file must be there, got none")
    header = read_header(place)
    if sha256(header.raw) != stated.header_sha256:
        raise FormatError(f"{place}: the header must have the SHA-256 {stated.header_sha256}")
    if odd := sorted({one.key for one in header.tensors} ^ set(stated.keys)):
        raise FormatError(f"{place}: must hold the stated keys, got a difference: {odd[0]:.80}")
    for one in header.tensors:
        chunk = stated.keys[one.key]
        kind = tensors[chunk.tensor].dtype
        if (one.dtype, one.shape) != (kind, chunk.box.lengths):
            raise FormatError(
                f"{place}: {one.key:.80}: must be {kind} {list(chunk.box.lengths)}, got "
                f"{one.dtype} {list(one.shape)}"
            )
    return header.tensors, header.size_bytes


def _check_payload(
    path: Path, stated: StatedChunks, stored: Sequence[StoredTensor]
) -> Iterator[Problem]:
    """Compare the CRC-32 of every key's bytes."""
    place = path / stated.path
    try:
        with place.open("rb") as opened:
            for one in stored:
                opened.seek(one.offset)
                crc, left = 0, one.length
                while left and (block := opened.read(min(left, _BLOCK_BYTES))):
                    crc, left = crc32(block, crc), left - len(block)
                wanted = stated.keys[one.key].crc
                if left or crc != wanted:
                    text = f"{one.key}: CRC-32 must be {wanted:08x}, got {crc:08x}"
                    yield Problem(str(place), text)
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
