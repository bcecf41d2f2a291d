"""Which files will hold a source in the native sharded form, byte for byte?

1. The source's layout is taken to the target (:mod:`ckpttools.formats.native.target`).
2. Every rank's files follow from the layout.
3. Once the payload is written, ``manifest.json`` gets the CRC-32 of every key, and the digest of
   every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckpttools.errors import UsageError
from ckpttools.formats import Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.native.files import RankFile, rank_files
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, StatedFile, manifest_document
from ckpttools.formats.native.objects import carried_documents, kept_objects
from ckpttools.formats.native.places import aliased_digests, aliases_of, build_manifest
from ckpttools.formats.native.read import describe_layout
from ckpttools.formats.native.target import retarget, source_layout
from ckpttools.layout.sharded import Kind, ShardedLayout
from ckpttools.manifest import Extent, Manifest
from ckpttools.storage.sealed_json import sha256


def lay_out_native(source: Manifest, target: Target, root: str, *, kind: Kind) -> Draft:
    """Lay out the native form of ``source`` on ``target``.

    Raises:
        UsageError: the target contradicts the model, or the source lacks what it needs.
    """
    if target.masters is not None:
        raise UsageError(
            f"--masters: must not be given for {kind}, whose runs split masters as they load them, "
            f"got {target.masters}"
        )
    old = source_layout(source, kind)
    layout = retarget(old, target, kind=kind)
    ranks = range(layout.topology.world_size)
    files = [file for rank in ranks for file in rank_files(layout, rank)]
    manifest = build_manifest(layout, files, root, describe_layout(layout), with_aliases=False)
    documents = carried_documents(source.objects)
    objects, carried, lost = kept_objects(source, documents)
    return Draft(
        manifest=manifest,
        patches=tuple(Patch(i, 0, file.header) for i, file in enumerate(files)),
        seals=tuple(
            Extent(i, entry.offset, entry.length)
            for i, file in enumerate(files)
            for entry in file.entries
        ),
        finish=_finisher(layout, files, objects, documents),
        wants_digests=True,
        carried=carried,
        lost=lost,
        plan=(_bucket_note(layout, target, kept=layout.cuts == old.cuts),),
        aliases=aliases_of(layout),
    )


def _bucket_note(layout: ShardedLayout, target: Target, *, kept: bool) -> str:
    """Say which buckets the files have, and why."""
    if layout.kind == "zero2":
        sizes = sorted({rule.bucket_numel(layout.topology.dp) for rule in layout.fixed.values()})
        return (
            f"buckets: at most {' and '.join(map(str, sizes))} elements, filled in backward order"
        )
    if target.bucket_size is not None:
        return f"buckets: {target.bucket_size} as asked"
    if kept and layout.cuts:
        return "buckets: cut as in the source"
    return "buckets: one a buffer"


def _finisher(
    layout: ShardedLayout,
    files: Sequence[RankFile],
    objects: Mapping[str, object],
    documents: Mapping[str, object],
) -> Callable[[Written], Finish]:
    """Return the function that writes ``manifest.json`` once the CRCs are known."""

    def finish(written: Written) -> Finish:
        rest = iter(written.crcs)
        stated = [
            StatedFile(
                file.path, sha256(file.header), {entry.key: next(rest) for entry in file.entries}
            )
            for file in files
        ]
        digests = aliased_digests(layout, written.digests)
        data = manifest_document(layout, stated, objects, documents, digests)
        return Finish(new_files=[NewFile(MANIFEST_FILE, data)])

    return finish
