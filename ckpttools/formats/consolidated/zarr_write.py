"""How is the zarr form written? Our executor writes the chunks, zarr-python the metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import Draft, Finish, NewFile, Target, Written
from ckpttools.formats.consolidated.document import (
    Objects,
    carried_objects,
    describe,
    describe_tensor,
)
from ckpttools.formats.consolidated.zarr_store import (
    DTYPE_ATTRIBUTE,
    ROOT,
    ArrayLayout,
    array_layout,
)
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.sealed_json import sealed, sha256


def lay_out_store(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the zarr form of ``source``.

    Raises:
        UsageError: a topology was named, a name can't be a path, or zarr is not installed.
    """
    if target != Target(accept_loss=target.accept_loss):
        raise UsageError("--to zarr: whole tensors have no topology, got sizes for one")
    specs = [TensorSpec(s.name, s.slot, s.dtype, s.shape) for s in source.tensors]
    arrays = [array_layout(spec) for spec in specs]
    files: list[File] = []
    chunks: list[Chunk] = []
    for i, array in enumerate(arrays):
        for path, box in array.chunks():
            size = box.numel * array.spec.dtype.itemsize
            part = Part(Extent(len(files), 0, size), array.spec.dtype)
            files.append(File(path, array.chunk_bytes))
            chunks.append(Chunk(i, box, (part,)))
    objects = carried_objects(source)
    write_metadata(arrays[:1], {})  # fail now, not after hours, where zarr is missing
    return Draft(
        manifest=Manifest("zarr", root, tuple(files), tuple(specs), tuple(chunks)),
        patches=(),
        finish=_finisher(source, arrays, objects),
        wants_digests=True,
        carried=objects.carried,
        lost=objects.lost,
    )


def write_metadata(
    arrays: Sequence[ArrayLayout],
    attributes: Mapping[str, object],
    objects: Sequence[NewFile] = (),
) -> dict[str, bytes]:
    """Return every ``zarr.json`` of the group by path, as zarr-python writes them.

    An object ``objects/<name>.json`` becomes a group of that name with the object as attributes,
    since a store holds nothing but nodes.

    Raises:
        UsageError: zarr is not installed.
    """
    try:
        import zarr
        from zarr.abc.buffer import Buffer
        from zarr.storage import MemoryStore
    except ImportError as error:
        raise UsageError(
            f"--to zarr: needs the package zarr, got {error}",
            hint="pip install 'ckpttools[zarr]'",
        ) from error
    nodes: dict[str, Buffer] = {}
    given: dict[str, Any] = {**attributes}
    group = zarr.open_group(MemoryStore(nodes), mode="w", zarr_format=3, attributes=given)
    for array in arrays:
        group.create_array(
            array.path,
            shape=array.spec.shape,
            chunks=array.chunk_shape,
            dtype=array.zarr_dtype,
            compressors=None,
            filters=None,
            fill_value=0,
            attributes={DTYPE_ATTRIBUTE: array.spec.dtype.name},
        )
    for file in objects:
        group.create_group(file.path.removesuffix(".json"), attributes=json.loads(file.data))
    return {path: node.to_bytes() for path, node in nodes.items()}


def _finisher(
    source: Manifest, arrays: Sequence[ArrayLayout], objects: Objects
) -> Callable[[Written], Finish]:
    """Return the function that writes the metadata once the digests are known."""

    def finish(written: Written) -> Finish:
        nodes = write_metadata(arrays, {}, objects.files)
        del nodes[ROOT]  # its attributes vouch for all the others
        document = sealed(
            {
                **describe(source, objects),
                "tensors": {
                    array.path: {
                        **describe_tensor(array.spec, array.path, written),
                        "chunk_rows": array.rows,
                    }
                    for array in arrays
                },
                "files": {path: sha256(data) for path, data in nodes.items()},
            }
        )
        root = write_metadata((), document)[ROOT]
        if root != serialize_root(json.loads(root)):
            raise FormatError(f"{ROOT}: must be JSON as zarr 3.1 writes it, got another form")
        new = [NewFile(path, data) for path, data in nodes.items()]
        return Finish(new_files=[*new, NewFile(ROOT, root)])

    return finish


def serialize_root(node: Mapping[str, object]) -> bytes:
    """Return the bytes of the root's ``zarr.json``: the one form that is accepted."""
    return json.dumps(node, indent=2).encode()
