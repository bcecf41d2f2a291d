"""Does the way we read the files agree with what the files show?

A reader and a writer that share a wrong formula agree with each other, so the formula is held
against evidence: each weight must be its fp32 master rounded to the weight's dtype. A wrong
offset map, a wrong order of sub-blocks or a corrupted master shows at once, since masters and
weights lie in different files under different formulas.

By which rule a trainer rounds is its own affair: a Manifest's object ``weight_rounding`` names the
rules of which one must hold for all of its weights. Where a master is made of the weight's own
bytes there is nothing to compare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpttools import codecs
from ckpttools.errors import (
    AmbiguousLayoutError,
    EvidenceError,
    LayoutError,
    ReplicaError,
    UsageError,
)
from ckpttools.executor import Buffers, Resources, run_jobs
from ckpttools.formats import Candidate, Reading, ReadOptions, decoupled_modes
from ckpttools.layout.box import Box
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    MASTER,
    NEAREST_EVEN,
    WEIGHT,
    Chunk,
    Manifest,
    TensorSpec,
    boxes_of,
)
from ckpttools.plan import Pieces, pieces, same_bytes
from ckpttools.storage.local import FilePool
from ckpttools.tiles import cut_tiles, read_tile


@dataclass(frozen=True, slots=True)
class CastFailure:
    """A weight that is not its master, rounded: how many elements differ, and the first one.

    ``rule`` is the one that fits the checkpoint best.
    """

    spec: TensorSpec
    count: int
    first: tuple[int, ...]
    rule: str = NEAREST_EVEN

    def __str__(self) -> str:
        how = "rounded half away from zero" if self.rule == HALF_AWAY else "rounded"
        return (
            f"{self.spec.name}: the weight must be its master {how} to {self.spec.dtype}, got "
            f"{self.count} of {int(np.prod(self.spec.stored_shape, dtype=np.int64))} elements "
            f"that differ, first at {list(self.first)}"
        )


@dataclass(slots=True)
class _Count:
    """Differences found in one tensor by all threads."""

    count: int = 0
    first: tuple[int, ...] | None = None

    def add(self, count: int, first: tuple[int, ...]) -> None:
        self.count += count
        if self.first is None or first < self.first:
            self.first = first


def check_casts(manifest: Manifest, resources: Resources) -> tuple[int, list[CastFailure]]:
    """Compare every weight with its rounded master, padding rows included.

    Returns the number of weights compared and the failures under the rule that fits best, in the
    manifest's order. A weight whose master is made of its own bytes is not counted; a float32 one
    that *is* its master equals it, and is not read.

    Raises:
        LayoutError: the Manifest names a rule that there isn't.
        StorageError: a file can't be read.
    """
    rules = rounding_rules(manifest)
    jobs = list(_cast_jobs(manifest)) if rules else []
    found = {rule: [_Count() for _ in jobs] for rule in rules}
    lock = threading.Lock()
    with FilePool(manifest.root, [f.path for f in manifest.files]) as pool:

        def compare(job: tuple[int, Box], buffers: Buffers) -> None:
            number, box = job
            weight, weight_pieces, master_pieces = jobs[number]
            low = buffers.tile(box, weight.dtype.itemsize)
            high = buffers.tile(box, 4, second=True)
            read_tile(pool, weight_pieces, box, low, buffers.scratch)
            read_tile(pool, master_pieces, box, high, buffers.scratch)
            for rule in rules:
                differs = codecs.cast_differs(low, high, weight.dtype, rule)
                if differs.any():
                    local = np.unravel_index(int(np.argmax(differs)), box.lengths)
                    first = tuple(int(a) + o for a, o in zip(local, box.offsets, strict=True))
                    with lock:
                        found[rule][number].add(int(np.count_nonzero(differs)), first)

        run_jobs(_cast_tiles(jobs, resources.tile_bytes), compare, resources)
    if not jobs:
        return 0, []
    best = min(rules, key=lambda rule: sum(count.count for count in found[rule]))
    return len(jobs), [
        CastFailure(job[0], count.count, count.first, best)
        for job, count in zip(jobs, found[best], strict=True)
        if count.first is not None
    ]


def rounding_rules(manifest: Manifest) -> tuple[str, ...]:
    """Return the rules of which one must have rounded the weights; none: nothing is known of it.

    Raises:
        LayoutError: a Manifest names a rule that there isn't.
    """
    rules = manifest.objects.get("weight_rounding", (NEAREST_EVEN,))
    named = tuple(rules) if isinstance(rules, (tuple, list)) else (rules,)
    for rule in named:
        if rule not in codecs.ROUNDINGS:
            raise LayoutError(
                f"{manifest.root}: weight_rounding must be of {', '.join(codecs.ROUNDINGS)}, got "
                f"{rule!r}"
            )
    return named


_CastJob = tuple[TensorSpec, Pieces, Pieces]


def _cast_jobs(manifest: Manifest) -> Iterator[_CastJob]:
    """Yield each weight with an fp32 master of other bytes: its spec, its pieces, the master's."""
    index, chunks = manifest.index(), manifest.by_tensor()

    def primaries(i: int) -> Pieces:
        spec = manifest.tensors[i]
        return pieces([c for c in chunks[i] if c.replica_id == 0], ndim=len(spec.shape))

    for (name, slot), i in index.items():
        master = index.get((name, MASTER))
        if slot != WEIGHT or master is None:
            continue
        if manifest.tensors[master].dtype.name != "float32":
            continue
        if manifest.tensors[i].dtype.name in codecs.ROUNDED:
            low, high = primaries(i), primaries(master)
            if high.codec == IDENTITY or not same_bytes(low, high):
                yield manifest.tensors[i], low, high


def _cast_tiles(jobs: Sequence[_CastJob], tile_bytes: int) -> Iterator[tuple[int, Box]]:
    for number, (spec, low, high) in enumerate(jobs):
        if low.codec == high.codec == IDENTITY and same_bytes(low, high):
            continue
        for box in cut_tiles(Box.whole(spec.stored_shape), 4, tile_bytes):
            yield number, box


def as_told(reading: Reading, options: ReadOptions | None) -> Reading:
    """Return a reading with what the user tells of it: how weight decay was done.

    Raises:
        UsageError: the files' parameter groups tell the opposite.
    """
    mode = None if options is None else options.adam_w_mode
    if mode is None:
        return reading
    told: list[Candidate] = []
    for one in reading.candidates:
        objects = one.manifest.objects
        if not decoupled_modes({"param_groups": objects.get("param_groups")}) <= {mode}:
            raise UsageError(
                f"--{'adam-w' if mode else 'l2'}-mode: must agree with the parameter groups, got "
                f"decoupled_weight_decay {not mode}"
            )
        manifest = replace(one.manifest, objects={**objects, "adam_w_mode": mode})
        told.append(replace(one, manifest=manifest))
    return replace(reading, candidates=tuple(told))


def choose(reading: Reading, resources: Resources, *, cross_check: bool) -> tuple[Candidate, int]:
    """Return the one candidate that the evidence allows, and how many weights speak for it.

    With ``cross_check`` off, only what the files declare is held against the formula.

    Raises:
        EvidenceError: no candidate remains.
        AmbiguousLayoutError: several do.
    """
    refused = list(reading.refused)
    passed: list[tuple[Candidate, int]] = []
    for candidate in reading.candidates:
        compared, failures = check_casts(candidate.manifest, resources) if cross_check else (0, [])
        if failures:
            refused.append(f"layout {'/'.join(candidate.layouts)}: {failures[0]}")
        else:
            passed.append((candidate, compared))
    if len(passed) == 1:
        return passed[0]
    if not passed:
        raise EvidenceError(
            "layout: exactly one must agree with the files, got none: " + "; ".join(refused)
        )
    names = " and ".join("/".join(c.layouts) for c, _ in passed)
    raise AmbiguousLayoutError(
        f"layout: exactly one must agree with the files, got {names}",
        hint="name it with --layout NAME",
    )


def check_replicas(manifest: Manifest, resources: Resources) -> int:
    """Compare every copy of a region with the first one; return how many copies there are.

    Raises:
        ReplicaError: a copy differs in some bit.
    """
    copies = list(_copies(manifest))
    found: dict[int, _Gap] = {}
    lock = threading.Lock()
    with FilePool(manifest.root, [f.path for f in manifest.files]) as pool:

        def compare(job: tuple[int, Box], buffers: Buffers) -> None:
            number, box = job
            copy = copies[number]
            itemsize = copy.spec.dtype.itemsize
            a = buffers.tile(box, itemsize)
            b = buffers.tile(box, itemsize, second=True)
            read_tile(pool, copy.first_pieces, box, a, buffers.scratch)
            read_tile(pool, copy.pieces, box, b, buffers.scratch)
            if (a != b).any():
                with lock:
                    found.setdefault(number, _Gap()).add(a, b, copy.spec)

        def jobs() -> Iterator[tuple[int, Box]]:
            for number, copy in enumerate(copies):
                for region in boxes_of(copy.chunk.region):
                    itemsize = copy.spec.dtype.itemsize
                    for box in cut_tiles(region, itemsize, resources.tile_bytes):
                        yield number, box

        run_jobs(jobs(), compare, resources)
    if found:
        number = min(found)
        raise ReplicaError(_replica_message(manifest, copies[number], found[number]))
    return len(copies)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A chunk that must equal the first copy of its region."""

    spec: TensorSpec
    chunk: Chunk
    first_pieces: Pieces
    pieces: Pieces
    first_files: tuple[int, ...]


def _copies(manifest: Manifest) -> Iterator[_Copy]:
    for spec, chunks in zip(manifest.tensors, manifest.by_tensor(), strict=True):
        firsts = [chunk for chunk in chunks if not chunk.replica_id]
        if len(firsts) == len(chunks):
            continue
        first_pieces = pieces(firsts, ndim=len(spec.shape))
        for chunk in chunks:
            if chunk.replica_id:
                files = {c.parts[0].extent.file for c in firsts if _overlap(c, chunk)}
                mine = pieces([chunk], ndim=len(spec.shape))
                yield _Copy(spec, chunk, first_pieces, mine, tuple(sorted(files)))


def _overlap(a: Chunk, b: Chunk) -> bool:
    return any(x & y is not None for x in boxes_of(a.region) for y in boxes_of(b.region))


@dataclass(slots=True)
class _Gap:
    """How far a copy is from the first: elements that differ, and by how much at most."""

    count: int = 0
    largest: float = 0.0

    def add(self, a: codecs.Bits, b: codecs.Bits, spec: TensorSpec) -> None:
        """Take in a tile; a difference from or to NaN is NaN, and stays."""
        self.count += int(np.count_nonzero(a != b))
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = (_as_float(bits[a != b], spec) for bits in (a, b))
            largest = float(np.max(np.abs(x - y)))
        self.largest = float(np.maximum(self.largest, largest))


def _replica_message(manifest: Manifest, copy: _Copy, gap: _Gap) -> str:
    """Name the tensor, the files of both copies, and how far they are apart."""
    firsts = ", ".join(manifest.files[file].path for file in copy.first_files)
    return (
        f"{copy.spec}: copies must be equal, got {gap.count} elements with a largest difference "
        f"of {gap.largest:g} between {firsts} and "
        f"{manifest.files[copy.chunk.parts[0].extent.file].path}"
    )


def _as_float(bits: codecs.Bits, spec: TensorSpec) -> np.ndarray:
    if spec.dtype.name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(spec.dtype.carrier).astype(np.float64)
