"""How do Apex's files become one Manifest?

1. The optimizer's files are found, and the model's beside them or as ``--model``.
2. Step and groups are read; numbers get names (:mod:`ckpttools.formats.apex.names`).
3. ``v2`` holds whole tensors. Of ``v1`` the fragments of all ranks are walked: shapes come from
   the model's weights, since the table only has lengths, and so does the order of elements of a
   4-D parameter, which is N, H, W, C where it was channels-last.
4. The master of a parameter is the stored one; or int16 remainders beside the bfloat16 weight; or
   the weight itself, where nothing is stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpttools.errors import FormatError, LayoutError
from ckpttools.formats import Candidate, CarriedDocument, ParamGroup, Reading, ReadOptions
from ckpttools.formats.apex.chunks import Builder, add_ranks, add_whole
from ckpttools.formats.apex.directory import Found, find_files
from ckpttools.formats.apex.gathered import read_windows
from ckpttools.formats.apex.model import read_model
from ckpttools.formats.apex.names import names_of
from ckpttools.formats.apex.ranks import Ranks, join_ranks, read_rank
from ckpttools.formats.apex.saved import SavedState
from ckpttools.formats.apex.settings import decoupled
from ckpttools.formats.apex.sidecar import SIDECAR, Sidecar, read_sidecar
from ckpttools.formats.apex.whole import Whole, read_whole
from ckpttools.manifest import File, Manifest

ROUNDING = ("nearest_even", "half_away")
"""How weights may be rounded from their masters: as torch does, or as remainders need it."""


def read_checkpoint(path: Path, options: ReadOptions) -> Reading:
    """Read a file or directory of Apex's optimizer.

    Raises:
        FormatError: files are damaged, incomplete or don't belong together.
        UsageError: what no file tells must be given: names, or the model's weights.
    """
    found = find_files(path)
    files = [_file(file.path, found.root) for file in found.files]
    sidecar = None if found.sidecar is None else read_sidecar(found.sidecar)
    notes = [f"{name} is not read" for name in found.others]
    if sidecar is not None:  # what we wrote speaks for itself; the options are of the source
        notes += _unused(options)
        options = replace(options, names_path=None, model_path=None)
    place = found.model if options.model_path is None else Path(options.model_path)
    model = None
    if place is not None:
        model = read_model(place, len(files))
        files.append(_file(place, found.root))
    padding = {} if sidecar is None else sidecar.padding
    state: Whole | Ranks = read_whole(found.files[0], 0) if found.kind == "v2" else _ranks(found)
    names = names_of(state.saved, sidecar, options.names_path, model, state.fits)
    builder = Builder(model, names, padding)
    if isinstance(state, Whole):
        add_whole(builder, state, names)
    else:
        add_ranks(builder, state, names)
    objects = {
        **_objects(state.saved, names, sidecar, options),
        "buckets": _buckets_text(state) if isinstance(state, Ranks) else None,
    }
    try:
        manifest = Manifest(
            "apex", str(found.root), tuple(files), *builder.content(), objects=objects
        )
    except LayoutError as error:
        raise FormatError(f"{path}: {error}") from error
    return Reading((Candidate((found.kind,), manifest),), notes=(*_mode_note(objects), *notes))


def _ranks(found: Found) -> Ranks:
    """Read the ``v1`` states of all ranks, from a file each or gathered in one."""
    where = str(found.root if len(found.files) > 1 else found.files[0].path)
    if found.kind == "v1":
        states = [read_rank(t, i, str(t.path)) for i, t in enumerate(found.files)]
        return join_ranks(states, where)
    inner = read_windows(found.files[0])
    states = [read_rank(t, 0, f"{where}: gathered_states[{i}]") for i, t in enumerate(inner)]
    for number, state in enumerate(states):
        if state.rank not in (None, number):
            raise FormatError(
                f"{state.saved.where}: must be the state of rank {number}, got rank {state.rank}"
            )
    return join_ranks(states, where, size=len(states))


def _unused(options: ReadOptions) -> list[str]:
    given = {"--names": options.names_path, "--model": options.model_path}
    return [f"{name}: not used, {SIDECAR} tells it" for name, path in given.items() if path]


def _file(place: Path, root: Path) -> File:
    """Return a file by its path below the root; one elsewhere by its absolute path."""
    inside = place.parent == root
    path = place.name if inside else os.path.abspath(place)
    return File(path, place.stat().st_size)


def _objects(
    saved: SavedState, names: tuple[str, ...], sidecar: Sidecar | None, options: ReadOptions
) -> dict[str, object]:
    """Return what is not tensors; what the user tells goes before what stands beside the file."""
    groups = tuple(
        ParamGroup(group.settings, tuple(names[index] for index in group.indices))
        for group in saved.groups
    )
    objects: dict[str, object] = {} if sidecar is None else dict(sidecar.objects)
    objects |= {"step": saved.step, "param_groups": groups, "weight_rounding": ROUNDING}
    if sidecar is not None:
        objects["carried"] = {k: CarriedDocument(v) for k, v in sidecar.carried.items()}
        if sidecar.layout is not None:
            objects["sharded_layout"] = sidecar.layout
    mode = options.adam_w_mode if options.adam_w_mode is not None else decoupled(objects)
    return objects if mode is None else {**objects, "adam_w_mode": mode}


def _buckets_text(ranks: Ranks) -> str:
    """Say how many buckets there are, for people."""
    buckets = ranks.states[0].buckets
    over = "" if ranks.size is None else f" over {ranks.size} ranks"
    copies = len(ranks.states) - len({state.rank for state in ranks.states})
    return f"{len(buckets)} buckets{over}" + (f", {copies} copies" if copies else "")


def _mode_note(objects: Mapping[str, object]) -> list[str]:
    if "adam_w_mode" in objects:
        return []
    return ["adam_w_mode: no Apex file tells it; name it with --adam-w-mode or --l2-mode"]
