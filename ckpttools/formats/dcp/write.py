"""Which files will hold a source as torch's distributed checkpoint, byte for byte?

One file a rank. A tensor of some size is cut along its first dimension as FSDP2 cuts it, all pieces
of ceil(rows / ranks) rows but the last; a small one goes whole to the file that has least. Steps
and objects are in the first. ``.metadata`` and ``ckpttools.json`` are written last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ckpttools.formats import Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.dcp.contents import Contents, Item, contents_of, key_of
from ckpttools.formats.dcp.read import LAYOUT
from ckpttools.formats.dcp.sidecar import SIDECAR, padding_of, sidecar_document
from ckpttools.formats.dcp.state import FORMAT, state_of
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.dcp_metadata import METADATA_FILE
from ckpttools.storage.dcp_writer import DcpDraft, NewChunk, lay_out_dcp

LEAST_CUT_BYTES = 1 << 16
"""A tensor of fewer bytes is never cut: each piece costs 1.5 KB and a read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor with index ``tensor``, and the item that stores it."""

    tensor: int
    box: Box
    chunk: NewChunk


def lay_out_directory(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out a directory of ``source`` on so many ranks.

    Raises:
        UsageError: the target asks for what these files don't have.
    """
    world_size = target.rank_count(source, "dcp")
    specs = source.tensors
    contents = contents_of(
        specs, source.objects, state_of(source.objects), padding_of(specs), world_size=world_size
    )
    pieces = [
        [Piece(i, box, new_chunk(contents, specs[i], box)) for i, box in part]
        for part in deal(specs, world_size)
    ]
    files: dict[str, list[Item]] = {
        file_name(rank): [piece.chunk for piece in part] for rank, part in enumerate(pieces)
    }
    files[file_name(0)] += contents.items
    draft = lay_out_dcp(files, paths=contents.paths)
    return Draft(
        manifest=_manifest(specs, pieces, draft, root, world_size),
        patches=tuple(Patch(*piece) for piece in draft.pieces()),
        seals=tuple(Extent(*storage) for storage in draft.storages()),
        finish=_finisher(draft, contents),
        wants_digests=True,
        carried=contents.carried,
        lost=contents.lost,
        plan=(f"chunks: rows as FSDP2 cuts them for {world_size} ranks",),
    )


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def new_chunk(contents: Contents, spec: TensorSpec, box: Box) -> NewChunk:
    """Return the item that stores a box of a tensor."""
    key = key_of(contents.naming, *spec.key)
    return NewChunk(key, spec.dtype, spec.stored_shape, box.offsets, box.lengths)


def deal(
    specs: Sequence[TensorSpec], parts: int, *, least_cut_bytes: int = LEAST_CUT_BYTES
) -> list[list[tuple[int, Box]]]:
    """Return which boxes of which tensors each rank's file holds; every element once."""
    dealt: list[list[tuple[int, Box]]] = [[] for _ in range(parts)]
    load = [0] * parts
    for index, spec in enumerate(specs):
        whole = Box.whole(spec.stored_shape)
        size = whole.numel * spec.dtype.itemsize
        if not (whole.ndim and size) or size < least_cut_bytes:
            rank = load.index(min(load))
            dealt[rank].append((index, whole))
            load[rank] += size
            continue
        rows = whole.lengths[0]
        step = -(-rows // parts)
        for rank, start in enumerate(range(0, rows, step)):
            lengths = (min(step, rows - start), *whole.lengths[1:])
            dealt[rank].append((index, Box((start, *whole.offsets[1:]), lengths)))
            load[rank] += prod(lengths) * spec.dtype.itemsize
    return dealt


def _manifest(
    specs: Sequence[TensorSpec],
    pieces: Sequence[Sequence[Piece]],
    draft: DcpDraft,
    root: str,
    world_size: int,
) -> Manifest:
    """Return the Manifest of the new files."""
    places = {id(item.item): item.payload for file in draft.files for item in file.items}
    chunks = []
    for number, part in enumerate(pieces):
        for piece in part:
            start = places[id(piece.chunk)]
            if start is None:
                continue  # without elements
            kind = specs[piece.tensor].dtype
            extent = Extent(number, start, piece.box.numel * kind.itemsize)
            chunks.append(Chunk(piece.tensor, piece.box, (Part(extent, kind),)))
    listed = tuple(File(file.path, file.size) for file in draft.files)
    objects = {"topology": {"dp": world_size}, "layout": (LAYOUT,)}
    return Manifest(FORMAT, root, listed, tuple(specs), tuple(chunks), objects)


def _finisher(draft: DcpDraft, contents: Contents) -> Callable[[Written], Finish]:
    """Return the function that writes the checksums and the small files."""

    def finish(written: Written) -> Finish:
        rest = iter(written.crcs)
        patches: list[Patch] = []
        for i, file in enumerate(draft.files):
            crcs = {
                item.offset + offset: next(rest)
                for item in file.items
                for _, offset, _ in item.draft.storages
            }
            patches += [Patch(i, offset, data) for offset, data in file.seal(crcs)]
        told = replace(contents.sidecar, digests=written.digests)
        sidecar = sidecar_document(told, draft.metadata)
        return Finish(
            patches=patches,
            new_files=[NewFile(SIDECAR, sidecar), NewFile(METADATA_FILE, draft.metadata)],
        )

    return finish
