"""Which files will hold a source as chunks, byte for byte? So many, each as long as the others.

The tensors are laid end to end in their order and the line is cut in equal parts, between rows.
Once the payload is written, ``manifest.json`` gets the CRC-32 of every key and the digest of every
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckpttools.formats import Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.native.chunked.dealing import deal
from ckpttools.formats.native.chunked.document import chunk_document
from ckpttools.formats.native.chunked.files import ChunkFile, pack_files
from ckpttools.formats.native.chunked.read import chunk_manifest, describe_chunks
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, StatedFile
from ckpttools.formats.native.objects import carried_documents, kept_objects
from ckpttools.layout.box import Box
from ckpttools.manifest import Extent, Manifest, TensorSpec
from ckpttools.storage.sealed_json import sha256


def lay_out_chunks(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the chunks of ``source`` on so many ranks.

    Raises:
        UsageError: the target asks for what chunks don't have.
    """
    world_size = target.rank_count(source, "chunks")
    specs = source.tensors
    boxes = [(Box.whole(spec.stored_shape), spec.dtype.itemsize) for spec in specs]
    files = pack_files(specs, deal(boxes, world_size))
    manifest = chunk_manifest(specs, files, root, describe_chunks(world_size))
    documents = carried_documents(source.objects)
    objects, carried, lost = kept_objects(source, documents, world_size=world_size)
    objects["sharded_layout"] = source.objects.get("sharded_layout")
    return Draft(
        manifest=manifest,
        patches=tuple(Patch(i, 0, file.header) for i, file in enumerate(files)),
        seals=tuple(
            Extent(i, chunk.offset, chunk.length)
            for i, file in enumerate(files)
            for chunk in file.chunks
        ),
        finish=_finisher(specs, files, objects, documents, world_size),
        wants_digests=True,
        carried=carried,
        lost=lost,
        plan=(f"chunks: rows dealt evenly to {world_size} ranks",),
    )


def _finisher(
    specs: Sequence[TensorSpec],
    files: Sequence[ChunkFile],
    objects: Mapping[str, object],
    documents: Mapping[str, object],
    world_size: int,
) -> Callable[[Written], Finish]:
    """Return the function that writes ``manifest.json`` once the CRCs are known."""

    def finish(written: Written) -> Finish:
        rest = iter(written.crcs)
        stated = [
            StatedFile(
                file.path, sha256(file.header), {chunk.key: next(rest) for chunk in file.chunks}
            )
            for file in files
        ]
        data = chunk_document(
            specs,
            files,
            stated,
            objects,
            documents,
            world_size=world_size,
            digests=written.digests,
        )
        return Finish(new_files=[NewFile(MANIFEST_FILE, data)])

    return finish
