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
from ckpttools.formats import Draft, Finish, NewFile, ParamGroup, Patch, Target, Written
from ckpttools.formats.consolidated.state import (
    FORMAT,
    FORMAT_VERSION,
    STATE_FILE,
    plain,
    serialize,
    sha256,
)
from ckpttools.layout.box import Box
from ckpttools.manifest import WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.inert import Inert
from ckpttools.storage.safetensors_header import build_header

MAX_FILE_BYTES = 5_000_000_000
"""Tensor bytes in one file, as Hugging Face splits; a larger tensor has a file of its own."""

_OBJECTS = ("args", "opt_param_scheduler", "grad_scaler")
_COUNTERS = ("iteration", "num_floating_point_operations_so_far")


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
    if target != Target():
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
    objects, carried, lost = _objects(source)
    return Draft(
        manifest=Manifest("safetensors", root, tuple(files), tuple(specs), tuple(chunks)),
        patches=tuple(patches),
        finish=_finisher(source, volumes, objects, carried, lost),
        wants_digests=True,
        carried=tuple(carried),
        lost=tuple(lost),
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


def _objects(source: Manifest) -> tuple[list[NewFile], list[str], list[str]]:
    """Return files for what is plain, and what is carried and what is not."""
    files, carried, lost = [], [], []
    if "param_groups" in source.objects:
        carried.append("optimizer: parameter groups with their settings, members and step")
    for key in _COUNTERS:
        if key in source.objects:
            carried.append(key)
    for key in _OBJECTS:
        value = source.objects.get(key)
        if value is None:
            continue
        table = value.state if isinstance(value, Inert) else value
        if not isinstance(table, Mapping):
            lost.append(f"{key}: it is not plain data")
            continue
        kept: dict[str, object] = {}
        for name, setting in table.items():
            try:
                kept[str(name)] = plain(setting)
            except TypeError:
                lost.append(f"{key}.{name}: it is not plain data")
        carried.append(f"{key}, in objects/{key}.json")
        data = (json.dumps(kept, indent=1) + "\n").encode()
        files.append(NewFile(f"objects/{key}.json", data))
    per_rank = source.objects.get("per_rank")
    for key in per_rank if isinstance(per_rank, tuple) else ():
        lost.append(f"{key}: it belongs to ranks, which whole tensors have not")
    return files, carried, lost


def _finisher(
    source: Manifest,
    volumes: Sequence[_Volume],
    objects: Sequence[NewFile],
    carried: Sequence[str],
    lost: Sequence[str],
) -> Callable[[Written], Finish]:
    """Return the function that writes ``state.json`` once the digests are known."""

    def finish(written: Written) -> Finish:
        others = [*_index_files(volumes), *objects]
        document: dict[str, object] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "source": {
                "format": source.format,
                "topology": source.objects.get("topology"),
            },
            **{key: source.objects[key] for key in _COUNTERS if key in source.objects},
            "step": source.objects.get("step"),
            "param_groups": _groups(source.objects.get("param_groups")),
            "tensors": {
                key_of(spec): {
                    "name": spec.name,
                    "slot": spec.slot,
                    "dtype": spec.dtype.name,
                    "shape": list(spec.shape),
                    "file": volume.path,
                    "crc32c": f"{written.digests[spec.key]:08x}",
                }
                for volume in volumes
                for spec in volume.specs
            },
            "headers": {v.path: sha256(v.header) for v in volumes},
            "files": {f.path: sha256(f.data) for f in others},
            "carried": list(carried),
            "not_carried": list(lost),
        }
        return Finish(new_files=[*others, NewFile(STATE_FILE, serialize(document))])

    return finish


def _groups(groups: object) -> list[object] | None:
    """Return parameter groups as plain data; what isn't plain becomes its text."""
    if not isinstance(groups, tuple):
        return None
    result: list[object] = []
    for group in groups:
        if isinstance(group, ParamGroup):
            members = None if group.members is None else list(group.members)
            result.append({"settings": _settings(group.settings), "params": members})
    return result


def _settings(settings: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in settings.items():
        try:
            kept[name] = plain(value)
        except TypeError:
            kept[name] = repr(value)
    return kept
