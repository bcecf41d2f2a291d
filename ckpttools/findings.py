"""What should the reader of a report know of a plan, which only the source's bytes can tell?

Rows of vocabulary padding come and go; a view of the source rounds or widens what it holds. Both
are counted by one pass over the tensors concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttools import comparison
from ckpttools.dtypes import DType
from ckpttools.executor import Buffers, Resources, run_jobs
from ckpttools.layout.box import Box
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    MASTER,
    NEAREST_EVEN,
    REMAINDER_NEAREST_EVEN,
    WEIGHT,
    WIDEN,
    Manifest,
    Part,
    Region,
    TensorSpec,
)
from ckpttools.plan import Plan, TensorPlan
from ckpttools.storage.local import FilePool
from ckpttools.tiles import cut_tiles, read_tile

_Key = tuple[str, str]

_RULES = {
    HALF_AWAY: "rounded half away from zero",
    NEAREST_EVEN: "rounded to nearest even",
    REMAINDER_NEAREST_EVEN: "rounded to nearest even",
}


def changed(source: Manifest, view: Manifest) -> dict[_Key, str]:
    """Return the codec of each tensor that a view has and the source reads in another way.

    One that has another name in the view, and is read in the same way, is not among them; nor is
    a master that is a weight of the source as it is.
    """
    if view is source:
        return {}
    known = {(slot, way) for (_, slot), way in _ways(source).items()}
    known |= {(MASTER, way) for slot, way in known if slot == WEIGHT}
    return {key: way[0] for key, way in _ways(view).items() if (key[1], way) not in known}


_Way = tuple[str, DType, frozenset[tuple[Region, tuple[Part, ...]]]]


def _ways(manifest: Manifest) -> dict[_Key, _Way]:
    """Return how each tensor is read: its codec, its dtype, the places of its parts."""
    ways: dict[_Key, _Way] = {}
    for spec, chunks in zip(manifest.tensors, manifest.by_tensor(), strict=True):
        firsts = [chunk for chunk in chunks if not chunk.replica_id]
        codec = firsts[0].codec if firsts else IDENTITY
        ways[spec.key] = codec, spec.dtype, frozenset((c.region, c.parts) for c in firsts)
    return ways


def view_notes(source: Manifest, view: Manifest, resources: Resources) -> tuple[str, ...]:
    """Say which slots a view rounds or widens, and how many elements of weights that changes.

    Raises:
        StorageError: the source can't be read.
    """
    by_rule: dict[str, list[_Key]] = {}
    for key, codec in changed(source, view).items():
        by_rule.setdefault(_RULES.get(codec, codec), []).append(key)
    specs = {spec.key: spec for spec in view.tensors}
    kinds = {spec.key: spec.dtype.name for spec in source.tensors}
    notes = []
    for rule, keys in by_rule.items():
        slots = ", ".join(dict.fromkeys(slot for _, slot in keys))
        line = f"{slots}: {len(keys)} tensors are "
        if rule in _RULES.values():
            differ = sum(comparison.count_differences(source, view, keys, resources).values())
            total = sum(specs[key].numel for key in keys)
            line += f"their masters {rule}; {differ} of {total} elements differ from the source's"
        elif rule == WIDEN:
            names = dict.fromkeys(kinds[key] for key in keys if key in kinds)
            line += f"widened from {' and '.join(names) or 'weights'} to float32, exactly"
        else:
            line += f"made of other bytes of the source, under the codec {rule}"
        notes.append(line)
    return tuple(notes)


def padding_notes(plan: Plan, resources: Resources) -> tuple[str, ...]:
    """Say how many rows of vocabulary padding come and go, and whether what goes was zero."""
    nonzero = _nonzero_dropped(plan, resources)
    notes = []
    for rows, specs in _by_rows([(t.fresh_rows, t.dst_spec) for t in plan.tensors]):
        notes.append(f"{rows} new rows of vocabulary padding are zero in {_listed(specs)}")
    for rows, specs in _by_rows([(t.dropped_rows, t.src_spec) for t in plan.tensors]):
        held = [spec for spec in specs if spec.key in nonzero]
        notes.append(
            f"{rows} rows of vocabulary padding have no room in {_listed(specs)}; "
            + (f"values that are not zero were in {_listed(held)}" if held else "all were zero")
        )
    return tuple(notes)


def _nonzero_dropped(plan: Plan, resources: Resources) -> set[tuple[str, str]]:
    """Return the tensors that hold a bit in a row of padding that has no room."""

    def jobs() -> Iterator[tuple[TensorPlan, Box]]:
        for tensor in plan.tensors:
            if tensor.dropped_rows:
                shape = tensor.src_spec.stored_shape
                first = tensor.dst_spec.stored_shape[0]
                rows = Box((first, *(0 for _ in shape[1:])), (tensor.dropped_rows, *shape[1:]))
                for box in cut_tiles(rows, tensor.src_spec.dtype.itemsize, resources.tile_bytes):
                    yield tensor, box

    found: set[tuple[str, str]] = set()
    with FilePool(plan.src.root, [f.path for f in plan.src.files]) as pool:

        def look(job: tuple[TensorPlan, Box], buffers: Buffers) -> None:
            tile = buffers.tile(job[1], job[0].src_spec.dtype.itemsize)
            read_tile(pool, job[0].src, job[1], tile, buffers.scratch)
            if tile.any():
                found.add(job[0].src_spec.key)

        run_jobs(jobs(), look, resources)
    return found


def _by_rows(counted: Iterable[tuple[int, TensorSpec]]) -> list[tuple[int, list[TensorSpec]]]:
    """Group tensors by a number of rows, without those of none."""
    groups: dict[int, list[TensorSpec]] = {}
    for rows, spec in counted:
        if rows:
            groups.setdefault(rows, []).append(spec)
    return list(groups.items())


def _listed(specs: Sequence[TensorSpec]) -> str:
    """List tensors by name with their slots."""
    slots: dict[str, list[str]] = {}
    for spec in specs:
        slots.setdefault(spec.name, []).append(spec.slot)
    return " and ".join(f"{name} ({', '.join(mine)})" for name, mine in slots.items())
