"""Which files hold a checkpoint as whole tensors by name?

::

    model.safetensors        (or model-00001-of-00002.safetensors … and an index)
    optimizer.safetensors    keys state.<name>.<slot>
    objects/*.json           arguments, scheduler
    state.json               names, groups, step, digests, what was carried and what was not
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import UsageError
from ckpttools.formats import Draft, Finish, NewFile, Patch, Target, Written
from ckpttools.formats.consolidated.document import (
    Objects,
    carried_objects,
    describe,
    describe_tensor,
)
from ckpttools.formats.consolidated.state import STATE_FILE
from ckpttools.layout.box import Box
from ckpttools.manifest import WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.safetensors_header import build_header
from ckpttools.storage.sealed_json import serialize, sha256

MAX_FILE_BYTES = 5_000_000_000
"""Tensor bytes in one file, as Hugging Face splits; a larger tensor has a file of its own."""


@dataclass(frozen=True, slots=True)
class _Volume:
    """One safetensors file: its name, header, and the specs in it."""

    path: str
    header: bytes
    specs: tuple[TensorSpec, ...]
    offsets: Mapping[str, int]


def key_of(spec: TensorSpec) -> str:
    """Return a tensor's key: its name, or ``state.<name>.<slot>``."""
    return spec.name if spec.slot == WEIGHT else f"state.{spec.name}.{spec.slot}"


def lay_out_directory(source: Manifest, target: Target, root: str) -> Draft:
    """Lay out the consolidated form of ``source``.

    Raises:
        UsageError: a topology was named, which this form has not, or two tensors have one key.
    """
    if target != Target(accept_loss=target.accept_loss):
        raise UsageError("--to safetensors: whole tensors have no topology, got sizes for one")
    specs = [TensorSpec(s.name, s.slot, s.dtype, s.shape) for s in source.tensors]
    by_key: dict[str, TensorSpec] = {}
    for spec in specs:
        other = by_key.setdefault(key_of(spec), spec)
        if other is not spec:
            raise UsageError(
                f"--to safetensors: keys must be unique, got {key_of(spec)} for {other} and {spec}"
            )
    volumes = [
        *_volumes("model", [s for s in specs if s.slot == WEIGHT]),
        *_volumes("optimizer", [s for s in specs if s.slot != WEIGHT]),
    ]
    files: list[File] = []
    patches: list[Patch] = []
    chunks: list[Chunk] = []
    index = {spec.key: i for i, spec in enumerate(specs)}
    for number, volume in enumerate(volumes):
        size = len(volume.header) + sum(spec.size_bytes for spec in volume.specs)
        files.append(File(volume.path, size))
        patches.append(Patch(number, 0, volume.header))
        for spec in volume.specs:
            extent = Extent(number, volume.offsets[key_of(spec)], spec.size_bytes)
            part = Part(extent, spec.dtype)
            chunks.append(Chunk(index[spec.key], Box.whole(spec.shape), (part,)))
    objects = carried_objects(source)
    return Draft(
        manifest=Manifest("safetensors", root, tuple(files), tuple(specs), tuple(chunks)),
        patches=tuple(patches),
        finish=_finisher(source, volumes, objects),
        wants_digests=True,
        carried=objects.carried,
        lost=objects.lost,
    )


def _volumes(stem: str, specs: Sequence[TensorSpec]) -> list[_Volume]:
    """Cut tensors into files: wide elements first, so that every tensor is aligned, then by key.

    So equal content gives equal files, whatever the order in which a source lists it.
    """
    parts: list[list[TensorSpec]] = []
    room = 0
    for spec in sorted(specs, key=lambda s: (-s.dtype.itemsize, key_of(s))):
        if not parts or spec.size_bytes > room:
            parts.append([])
            room = MAX_FILE_BYTES
        parts[-1].append(spec)
        room -= spec.size_bytes
    volumes = []
    for i, part in enumerate(parts):
        name = stem if len(parts) == 1 else f"{stem}-{i + 1:05d}-of-{len(parts):05d}"
        header, offsets = build_header(
            [(key_of(spec), spec.dtype, spec.shape) for spec in part], {"format": "pt"}
        )
        volumes.append(_Volume(f"{name}.safetensors", header, tuple(part), offsets))
    return volumes


def _index_files(volumes: Sequence[_Volume]) -> list[NewFile]:
    """Return Hugging Face's index for each set of several files."""
    files = []
    for stem in ("model", "optimizer"):
        mine = [v for v in volumes if v.path.startswith(f"{stem}-")]
        if mine:
            index = {
                "metadata": {"total_size": sum(s.size_bytes for v in mine for s in v.specs)},
                "weight_map": {key_of(s): v.path for v in mine for s in v.specs},
            }
            data = (json.dumps(index, indent=1) + "\n").encode()
            files.append(NewFile(f"{stem}.safetensors.index.json", data))
    return files


def _finisher(
    source: Manifest, volumes: Sequence[_Volume], objects: Objects
) -> Callable[[Written], Finish]:
    """Return the function that writes ``state.json`` once the digests are known."""

    def finish(written: Written) -> Finish:
        others = [*_index_files(volumes), *objects.files]
        document: dict[str, object] = {
            **describe(source, objects),
            "tensors": {
                key_of(spec): describe_tensor(spec, volume.path, written)
                for volume in volumes
                for spec in volume.specs
            },
            "headers": {v.path: sha256(v.header) for v in volumes},
            "files": {f.path: sha256(f.data) for f in others},
        }
        return Finish(new_files=[*others, NewFile(STATE_FILE, serialize(document))])

    return finish
