"""Do two checkpoints hold the same content, whatever their formats and layouts?

Tensors are compared bit for bit, tile by tile, by name and slot; the rows of padding beside a
vocabulary are compared apart, since they are not content. Objects are compared where both sides
have them: the step as a number, parameter groups by their members.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ckpttools.executor import Buffers, Progress, Resources, run_jobs
from ckpttools.formats import ParamGroup
from ckpttools.layout.box import Box
from ckpttools.manifest import Manifest, TensorSpec
from ckpttools.plan import Pieces, pieces
from ckpttools.storage.local import FilePool
from ckpttools.tiles import cut_tiles, read_tile

_MAX_DEPTH = 64
"""How deep the settings of a parameter group are looked into."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: ``name`` and ``slot`` of a tensor, or an object with slot ""."""

    name: str
    slot: str
    what: str

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.slot}): {self.what}" if self.slot else f"{self.name}: {self.what}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of comparing A with B.

    ``only_a`` and ``only_b`` list tensors that one side has; ``padding`` counts tensors whose
    padding rows differ; ``fresh_nonzero`` names tensors of B with rows of padding that A lacks
    and that are not zero.
    """

    compared: int
    compared_bytes: int
    differences: tuple[Difference, ...]
    only_a: tuple[tuple[str, str], ...]
    only_b: tuple[tuple[str, str], ...]
    padding: tuple[tuple[str, str], ...]
    fresh_nonzero: tuple[tuple[str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether everything that both sides have is equal."""
        return not self.differences

    @property
    def same(self) -> bool:
        """Whether, besides, both sides have the same tensors."""
        return self.equal and not self.only_a and not self.only_b


@dataclass(frozen=True, slots=True)
class _Pair:
    """One tensor on both sides."""

    a: TensorSpec
    b: TensorSpec
    a_pieces: Pieces
    b_pieces: Pieces

    @property
    def rows(self) -> int:
        """Rows that either side stores."""
        return max(s.stored_shape[0] for s in (self.a, self.b)) if self.a.shape else 0

    @property
    def common_rows(self) -> int:
        """Rows that both sides store."""
        return min(s.stored_shape[0] for s in (self.a, self.b)) if self.a.shape else 0

    @property
    def whole(self) -> Box:
        """Everything that either side stores."""
        return Box.whole((self.rows, *self.a.shape[1:]) if self.a.shape else ())


@dataclass(slots=True)
class _Found:
    """What differs in one tensor."""

    count: int = 0
    first: tuple[int, ...] = ()
    padding: bool = False
    fresh: bool = False


def compare(
    a: Manifest, b: Manifest, resources: Resources, progress: Progress | None = None
) -> Comparison:
    """Compare the content of two checkpoints.

    Raises:
        StorageError: a file can't be read.
    """
    a_index, b_index = a.index(), b.index()
    common = [key for key in a_index if key in b_index]
    pairs, differences = _pairs(a, b, common)
    found = _compare_tiles(a, b, pairs, resources, progress)
    for pair, result in zip(pairs, found, strict=True):
        if result.count:
            what = (
                f"{result.count} of {pair.a.numel} elements differ, first at {list(result.first)}"
            )
            differences.append(Difference(*pair.a.key, what))
    return Comparison(
        compared=len(pairs),
        compared_bytes=sum(pair.a.size_bytes for pair in pairs),
        differences=(*differences, *_compare_objects(a.objects, b.objects)),
        only_a=tuple(key for key in a_index if key not in b_index),
        only_b=tuple(key for key in b_index if key not in a_index),
        padding=tuple(p.a.key for p, f in zip(pairs, found, strict=True) if f.padding),
        fresh_nonzero=tuple(p.a.key for p, f in zip(pairs, found, strict=True) if f.fresh),
    )


def count_differences(
    a: Manifest, b: Manifest, keys: Collection[tuple[str, str]], resources: Resources
) -> dict[tuple[str, str], int]:
    """Return in how many elements each of these tensors differs, padding excluded.

    Tensors that only one side has, or of another dtype or shape, are not counted.

    Raises:
        StorageError: a file can't be read.
    """
    a_index, b_index = a.index(), b.index()
    pairs, _ = _pairs(a, b, [key for key in keys if key in a_index and key in b_index])
    found = _compare_tiles(a, b, pairs, resources, None)
    return {pair.a.key: one.count for pair, one in zip(pairs, found, strict=True)}


def _pairs(
    a: Manifest, b: Manifest, keys: Iterable[tuple[str, str]]
) -> tuple[list[_Pair], list[Difference]]:
    """Pair tensors that both sides have; those of another dtype or shape are differences."""
    a_index, b_index = a.index(), b.index()
    a_chunks, b_chunks = a.by_tensor(), b.by_tensor()
    pairs: list[_Pair] = []
    differences: list[Difference] = []
    for key in keys:
        i, j = a_index[key], b_index[key]
        spec_a, spec_b = a.tensors[i], b.tensors[j]
        if (spec_a.dtype, spec_a.shape) != (spec_b.dtype, spec_b.shape):
            what = f"{spec_a.dtype} {spec_a.shape} against {spec_b.dtype} {spec_b.shape}"
            differences.append(Difference(*key, what))
            continue
        sides = [
            pieces([c for c in chunks if not c.replica_id], ndim=len(spec_a.shape))
            for chunks in (a_chunks[i], b_chunks[j])
        ]
        pairs.append(_Pair(spec_a, spec_b, sides[0], sides[1]))
    return pairs, differences


def total_bytes(a: Manifest, b: Manifest) -> int:
    """Return how many bytes :func:`compare` will tell its progress of."""
    others = {spec.key: spec for spec in b.tensors}
    total = 0
    for spec in a.tensors:
        other = others.get(spec.key)
        if other is not None and (spec.dtype, spec.shape) == (other.dtype, other.shape):
            size = max(prod(s.stored_shape) for s in (spec, other))
            total += size * spec.dtype.itemsize
    return total


def _compare_tiles(
    a: Manifest,
    b: Manifest,
    pairs: list[_Pair],
    resources: Resources,
    progress: Progress | None,
) -> list[_Found]:
    """Read every tile on both sides and compare them."""
    found = [_Found() for _ in pairs]
    lock = threading.Lock()

    def jobs() -> Iterator[tuple[int, Box]]:
        order = sorted(range(len(pairs)), key=lambda n: _position(pairs[n].b_pieces))
        for number in order:
            pair = pairs[number]
            for box in cut_tiles(pair.whole, pair.a.dtype.itemsize, resources.tile_bytes):
                yield number, box

    with (
        FilePool(a.root, [f.path for f in a.files]) as a_pool,
        FilePool(b.root, [f.path for f in b.files]) as b_pool,
    ):

        def work(job: tuple[int, Box], buffers: Buffers) -> None:
            pair, box = pairs[job[0]], job[1]
            itemsize = pair.a.dtype.itemsize
            x = buffers.tile(box, itemsize)
            y = buffers.tile(box, itemsize, second=True)
            if box.ndim and box.stops[0] > pair.common_rows:  # what one side lacks reads as zero
                x[...] = 0
                y[...] = 0
            read_tile(a_pool, pair.a_pieces, box, x, buffers.scratch)
            read_tile(b_pool, pair.b_pieces, box, y, buffers.scratch)
            if not _equal_bytes(x, y):
                with lock:
                    _note(found[job[0]], pair, box, x != y)
            if progress is not None:
                progress(x.nbytes)

        run_jobs(jobs(), work, resources)
    return found


def _equal_bytes(x: np.ndarray, y: np.ndarray) -> bool:
    """Compare two contiguous tiles, by machine words where their length allows."""
    a, b = (t.reshape(-1).view(np.uint8) for t in (x, y))
    words = len(a) // 8 * 8
    return bool(
        np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64))
        and np.array_equal(a[words:], b[words:])
    )


def _position(side: Pieces) -> tuple[int, int]:
    return (int(side.file[0, 0]), int(side.start_bytes[0, 0])) if len(side) else (0, 0)


def _note(found: _Found, pair: _Pair, box: Box, differs: np.ndarray) -> None:
    """Sort differing elements into content, common padding and padding that A lacks."""
    if not pair.a.shape:
        found.count = 1
        return
    rows = box.offsets[0] + np.arange(box.lengths[0])
    content = differs[rows < pair.a.shape[0]]
    if content.any():
        index = np.unravel_index(int(np.argmax(content)), content.shape)
        place = tuple(int(i) + o for i, o in zip(index, box.offsets, strict=True))
        found.first = min(found.first, place) if found.count else place
        found.count += int(np.count_nonzero(content))
    a_rows, b_rows = pair.a.stored_shape[0], pair.b.stored_shape[0]
    common = (rows >= pair.a.shape[0]) & (rows < min(a_rows, b_rows))
    found.padding = found.padding or bool(differs[common].any())
    found.fresh = found.fresh or bool(differs[rows >= a_rows].any())


def _compare_objects(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Difference]:
    """Compare what two Manifests say beside tensors, where both say it."""
    for key in ("step", "iteration", "adam_w_mode"):
        if key in a and key in b and _joined(a[key]) != _joined(b[key]):
            yield Difference(key, "", f"{a[key]} against {b[key]}")
    groups_a, groups_b = _settings_by_name(a), _settings_by_name(b)
    for name in sorted(groups_a.keys() & groups_b.keys()):
        x, y = groups_a[name], groups_b[name]
        if odd := sorted(key for key in x.keys() & y.keys() if x[key] != y[key]):
            yield Difference(name, "", f"its parameter group has another {', '.join(odd)}")


def _joined(value: object) -> object:
    """Return the one number of all parameters, where a number for each of them is the same."""
    values = list(value.values()) if isinstance(value, Mapping) else []
    return values[0] if values and all(other == values[0] for other in values) else value


def settings_lost(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[str, ...]:
    """Return the settings of parameter groups that ``a`` has for a parameter and ``b`` has not."""
    groups_a, groups_b = _settings_by_name(a), _settings_by_name(b)
    names = groups_a.keys() & groups_b.keys()
    return tuple(sorted({key for n in names for key in groups_a[n].keys() - groups_b[n].keys()}))


def _settings_by_name(objects: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return each parameter's group settings, each as text that is equal for equal values."""
    groups = objects.get("param_groups")
    result: dict[str, dict[str, str]] = {}
    for group in groups if isinstance(groups, tuple) else ():
        if isinstance(group, ParamGroup) and group.members is not None:
            settings = {key: _text(value) for key, value in group.settings.items()}
            result.update(dict.fromkeys(group.members, settings))
    return result


def _text(value: object, depth: int = 0) -> str:
    """Write tuples as lists: JSON has no tuples. What holds itself is cut off by ``repr``."""
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return "[" + ", ".join(_text(item, depth + 1) for item in value) + "]"
    return repr(value)
