"""How is a checkpoint seen as another state needs it? Views: the same bytes under other codecs.

A view lists tensors of the same files that are rounded or widened as they are read. It is a
Manifest like any other, so it is planned, copied and compared as all are, and nothing is written
between. Pure: no file is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import LayoutError
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    MASTER,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    WEIGHT,
    WIDEN,
    Chunk,
    Manifest,
    TensorSpec,
)

_FLOAT16S = frozenset({"bfloat16", "float16"})

_ROUNDED_BY = {
    HALF_AWAY: {IDENTITY: HALF_AWAY},
    NEAREST_EVEN: {IDENTITY: NEAREST_EVEN, REMAINDER: REMAINDER_NEAREST_EVEN},
}
"""For each rule and codec of a master: the codec that makes the weight of the master's parts."""

_KEPT = {HALF_AWAY: (REMAINDER, WIDEN), NEAREST_EVEN: (WIDEN,)}
"""Under these codecs of its master a weight is already what the rule gives: a part of it."""


def with_half_away_weights(manifest: Manifest) -> Manifest:
    """Return a view in which bfloat16 weights are their masters rounded half away from zero.

    That is what a run with ``store_param_remainders`` must find beside its remainders. A weight
    without a master stays, as does one that is a part of its master.

    Raises:
        LayoutError: a master is stored in a way that can't be rounded, such as scaled.
    """
    return _with_rounded_weights(manifest, HALF_AWAY)


def with_nearest_even_weights(manifest: Manifest) -> Manifest:
    """Return a view in which bfloat16 weights are their masters rounded to nearest even.

    That is what every run without remainders holds. A weight without a master stays.

    Raises:
        LayoutError: a master is stored in a way that can't be rounded, such as scaled.
    """
    return _with_rounded_weights(manifest, NEAREST_EVEN)


def widened(manifest: Manifest, slots: Collection[str]) -> Manifest:
    """Return a view in which the 16-bit floats of these slots are float32, exactly.

    Tensors of other dtypes stay.

    Raises:
        LayoutError: one of them is already made by another codec.
    """
    made: dict[int, list[Chunk]] = {}
    tensors, by_tensor = list(manifest.tensors), manifest.by_tensor()
    for i, spec in enumerate(manifest.tensors):
        if spec.slot not in slots or spec.dtype.name not in _FLOAT16S:
            continue
        if odd := [chunk.codec for chunk in by_tensor[i] if chunk.codec != IDENTITY]:
            raise LayoutError(
                f"{spec}: must be stored under the codec {IDENTITY} to be widened, got {odd[0]}"
            )
        made[i] = [replace(chunk, codec=WIDEN) for chunk in by_tensor[i]]
        tensors[i] = replace(spec, dtype=BY_NAME["float32"])
    return _with_chunks(manifest, tensors, made)


def with_masters_of_weights(manifest: Manifest) -> Manifest:
    """Return a view in which a float32 weight with state and no master is its own master.

    That is what it is to a run that trains float32: an optimizer of torch's updates the weight
    itself, where Megatron and Apex keep a copy of it beside.
    """
    index, by_tensor = manifest.index(), manifest.by_tensor()
    trained = {spec.name for spec in manifest.tensors if spec.slot != WEIGHT}
    tensors, made = list(manifest.tensors), list(manifest.chunks)
    for i, spec in enumerate(manifest.tensors):
        if spec.slot != WEIGHT or spec.name not in trained or (spec.name, MASTER) in index:
            continue
        if spec.dtype.name == "float32":
            made += [replace(chunk, tensor=len(tensors)) for chunk in by_tensor[i]]
            tensors.append(replace(spec, slot=MASTER))
    if len(tensors) == len(manifest.tensors):
        return manifest
    return replace(manifest, tensors=tuple(tensors), chunks=tuple(made))


def _with_rounded_weights(manifest: Manifest, rule: str) -> Manifest:
    index, by_tensor = manifest.index(), manifest.by_tensor()
    made: dict[int, list[Chunk]] = {}
    for i, spec in enumerate(manifest.tensors):
        master = index.get((spec.name, MASTER))
        if spec.slot != WEIGHT or spec.dtype.name != "bfloat16" or master is None:
            continue
        if manifest.tensors[master].dtype.name != "float32":
            continue
        firsts = [chunk for chunk in by_tensor[master] if not chunk.replica_id]
        found = {chunk.codec for chunk in firsts}
        if found <= set(_KEPT[rule]):
            continue
        if odd := found - _ROUNDED_BY[rule].keys():
            raise LayoutError(
                f"{spec}: must have a master that can be rounded, got one under the codec "
                f"{min(odd)}"
            )
        made[i] = [replace(c, tensor=i, codec=_ROUNDED_BY[rule][c.codec]) for c in firsts]
    return _with_chunks(manifest, manifest.tensors, made)


def _with_chunks(
    manifest: Manifest, tensors: Sequence[TensorSpec], made: Mapping[int, Sequence[Chunk]]
) -> Manifest:
    """Return a Manifest in which some tensors have other chunks."""
    if not made:
        return manifest
    kept = [chunk for chunk in manifest.chunks if chunk.tensor not in made]
    new = [chunk for chunks in made.values() for chunk in chunks]
    return replace(manifest, tensors=tuple(tensors), chunks=(*kept, *new))
