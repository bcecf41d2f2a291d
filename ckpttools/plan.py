"""Which bytes go where? Two Manifests in, a list of n-dimensional strided copies out.

Pure integer arithmetic: no I/O, no torch, no clock. A plan proves before anything moves that

1. every destination tensor has a source of the same name, slot, dtype and logical shape, read
   by a codec or not, and is written without one;
2. every destination element is written exactly once, and comes from exactly one source element
   (rows of vocabulary padding that the source doesn't have are zero, and counted);
3. every source tensor is used, or named by the caller as left out (rows of padding that the
   destination has no room for are counted).

The columns are numpy arrays, so that a plan of a million copies stays small; :meth:`Plan.ops`
shows them one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from ckpttools.dtypes import DType
from ckpttools.errors import PlanError
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.manifest import IDENTITY, SCALED, Chunk, Manifest, TensorSpec, boxes_of

Ints = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 20
"""How many candidate pairs are intersected in one numpy step: bounds the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The boxes of one tensor's chunks on one side, as columns (n pieces, d dims, p parts).

    ``start_bytes`` is where a piece's first element lies in its file, ``strides_bytes`` how far
    the next element along each dimension lies from it. ``dtypes`` are those of the parts, of which
    ``codec`` makes an element.
    """

    offsets: Ints  # (n, d)
    lengths: Ints  # (n, d)
    replica: Ints  # (n,) replica id of the chunk that the piece belongs to
    file: Ints  # (n, p)
    start_bytes: Ints  # (n, p)
    strides_bytes: Ints  # (n, p, d)
    dtypes: tuple[DType, ...]  # (p,)
    codec: str = IDENTITY

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def itemsizes(self) -> tuple[int, ...]:
        """The bytes of one value of each part."""
        return tuple(dtype.itemsize for dtype in self.dtypes)

    def box(self, i: int) -> Box:
        """Return piece ``i`` as a box in the tensor's index space."""
        return Box(tuple(self.offsets[i].tolist()), tuple(self.lengths[i].tolist()))

    def overlapping(self, box: Box) -> Ints:
        """Return the indices of the pieces that share an element with ``box``."""
        low = np.maximum(self.offsets, box.offsets)
        high = np.minimum(self.offsets + self.lengths, box.stops)
        return np.flatnonzero((low < high).all(axis=1))


@dataclass(frozen=True, slots=True)
class Strided:
    """Bytes of one file seen as an n-dimensional array: where it starts, and its strides."""

    file: int
    start_bytes: int
    strides_bytes: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Copy one box of one tensor: all that an executor ever does.

    Several ``srcs`` are the parts of one value, which ``codec`` makes of them.
    """

    tensor: tuple[str, str]
    box: Box
    srcs: tuple[Strided, ...]
    dsts: tuple[Strided, ...]
    codec: str = IDENTITY

    @property
    def cost_bytes(self) -> int:
        """Bytes that the copy writes."""
        return self.box.numel * sum(dst.itemsize for dst in self.dsts)


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """The copies of one tensor. ``pairs`` (n, 2) joins source and destination pieces."""

    src_spec: TensorSpec
    dst_spec: TensorSpec
    src: Pieces
    dst: Pieces
    pairs: Ints  # (n, 2)

    @property
    def fresh_rows(self) -> int:
        """Rows of padding that the destination has and the source has not."""
        return max(0, self.dst_spec.padding_rows - self.src_spec.padding_rows)

    @property
    def dropped_rows(self) -> int:
        """Rows of padding that the source has and the destination has no room for."""
        return max(0, self.src_spec.padding_rows - self.dst_spec.padding_rows)

    def ops(self) -> Iterator[CopyOp]:
        """Yield the copies, by destination piece."""
        for i, j in self.pairs.tolist():
            overlap = self.src.box(i) & self.dst.box(j)
            if overlap is not None:
                yield CopyOp(
                    tensor=self.dst_spec.key,
                    box=overlap,
                    srcs=_strided(self.src, i, overlap),
                    dsts=_strided(self.dst, j, overlap),
                    codec=self.src.codec,
                )


@dataclass(frozen=True, eq=False)
class Plan:
    """All copies that turn the source's files into the destination's payload."""

    src: Manifest
    dst: Manifest
    tensors: tuple[TensorPlan, ...]
    left_out: tuple[tuple[str, str], ...]

    def ops(self) -> Iterator[CopyOp]:
        """Yield every copy."""
        for tensor in self.tensors:
            yield from tensor.ops()

    @cached_property
    def op_count(self) -> int:
        """Number of copies."""
        return sum(len(tensor.pairs) for tensor in self.tensors)

    @cached_property
    def read_bytes(self) -> int:
        """Bytes that are read: each source element that the destination takes, once."""
        return sum(_shared_bytes(t) for t in self.tensors)

    @cached_property
    def write_bytes(self) -> int:
        """Bytes of payload that are written, replicas and padding included."""
        return sum(
            int(t.dst.lengths.prod(axis=1).sum()) * sum(t.dst.itemsizes) for t in self.tensors
        )

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the destination's tensors with their padding, each replica counted once."""
        specs = [tensor.dst_spec for tensor in self.tensors]
        return sum(prod(s.stored_shape) * s.dtype.itemsize for s in specs)

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain data: files on both sides, and every copy."""
        return {
            "src_files": [f.path for f in self.src.files],
            "dst_files": [f.path for f in self.dst.files],
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "ops": [_op_json(op) for op in self.ops()],
        }


def make_plan(src: Manifest, dst: Manifest, *, left_out: Collection[tuple[str, str]] = ()) -> Plan:
    """Plan the copies from ``src`` to ``dst``.

    ``left_out`` names the (name, slot) of source tensors that the destination has on purpose no
    place for.

    Raises:
        PlanError: one of the three promises of this module can't be kept.
    """
    src_chunks, dst_chunks = src.by_tensor(), dst.by_tensor()
    src_index, dst_index = src.index(), dst.index()
    lost = [k for k in src_index if k not in dst_index and k not in set(left_out)]
    if lost:
        raise PlanError(
            f"{lost[0][0]} ({lost[0][1]}): a source tensor must be used or named as left out, "
            f"got {len(lost)} with no place in the destination"
        )
    plans = []
    for key, j in dst_index.items():
        if key not in src_index:
            raise PlanError(f"{key[0]} ({key[1]}): must have a source, got none")
        i = src_index[key]
        _check_kept(src.tensors[i], dst.tensors[j], dst_chunks[j])
        primaries = [c for c in src_chunks[i] if c.replica_id == 0]
        plans.append(
            _plan_tensor(
                src.tensors[i],
                dst.tensors[j],
                pieces(primaries, ndim=len(src.tensors[i].shape)),
                pieces(dst_chunks[j], ndim=len(dst.tensors[j].shape)),
            )
        )
    return Plan(src, dst, tuple(plans), tuple(k for k in src_index if k not in dst_index))


def _check_kept(src_spec: TensorSpec, dst_spec: TensorSpec, dst_chunks: Collection[Chunk]) -> None:
    """Check that both sides are one tensor, and that its elements are written as they are."""
    if (src_spec.dtype, src_spec.shape) != (dst_spec.dtype, dst_spec.shape):
        raise PlanError(
            f"{dst_spec}: must keep dtype and shape, got {src_spec.dtype} {src_spec.shape} to "
            f"{dst_spec.dtype} {dst_spec.shape}"
        )
    for chunk in dst_chunks:
        if chunk.codec != IDENTITY:
            raise PlanError(
                f"{dst_spec}: must be written under the codec {IDENTITY}, got {chunk.codec}"
            )


def _plan_tensor(
    src_spec: TensorSpec, dst_spec: TensorSpec, src: Pieces, dst: Pieces
) -> TensorPlan:
    """Plan one tensor and prove that each of its destination pieces is filled exactly once."""
    pairs, counts = _intersect(src, dst)
    stored_rows = src_spec.stored_shape[0] if src_spec.shape else 0
    for j in range(len(dst)):
        box = dst.box(j)
        if src_spec.shape and box.stops[0] > stored_rows:  # rows of fresh padding have no source
            above = max(0, stored_rows - box.offsets[0])
            box = Box(box.offsets, (above, *box.lengths[1:]))
        if counts[j] != box.numel:
            raise PlanError(
                f"{dst_spec}: {box.numel} elements of {box} must be written once each, got "
                f"{int(counts[j])}"
            )
    return TensorPlan(src_spec, dst_spec, src, dst, pairs)


def _intersect(src: Pieces, dst: Pieces) -> tuple[Ints, Ints]:
    """Return the overlapping (source, destination) pairs and how many elements reach each dst."""
    order, first, counts = _candidates(src, dst)
    found: list[Ints] = [np.zeros((0, 2), dtype=np.int64)]
    filled = np.zeros(len(dst), dtype=np.int64)
    ends = np.cumsum(counts)
    start = 0
    while start < len(dst):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, "right")))
        mine = counts[start:stop]
        j = np.repeat(np.arange(start, stop), mine)
        place = np.arange(len(j)) - np.repeat(np.cumsum(mine) - mine - first[start:stop], mine)
        i = order[place]
        low = np.maximum(src.offsets[i], dst.offsets[j])
        high = np.minimum(src.offsets[i] + src.lengths[i], dst.offsets[j] + dst.lengths[j])
        numel = np.maximum(high - low, 0).prod(axis=1)  # 0-d boxes: the empty product, 1
        np.add.at(filled, j, numel)
        found.append(np.stack([i, j], axis=1)[numel > 0])
        start = stop
    pairs = np.concatenate(found)
    return pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))], filled


def _candidates(src: Pieces, dst: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return an order of the sources, and which run of it may overlap each destination.

    The run is (first, count) per destination: along one dimension, the one that leaves the fewest
    candidates, sources are sorted by their starts, and stops are made ascending by their running
    maximum, so both ends of the run are found by bisection.
    """
    order = np.arange(len(src))
    first = np.zeros(len(dst), dtype=np.int64)
    counts = np.full(len(dst), len(src), dtype=np.int64)
    for dim in range(src.offsets.shape[1]):
        by_start = np.argsort(src.offsets[:, dim], kind="stable")
        starts = src.offsets[by_start, dim]
        stops = np.maximum.accumulate(starts + src.lengths[by_start, dim])
        low = np.searchsorted(stops, dst.offsets[:, dim], "right")
        high = np.searchsorted(starts, dst.offsets[:, dim] + dst.lengths[:, dim], "left")
        width = np.maximum(high - low, 0)
        if width.sum() < counts.sum():
            order, first, counts = by_start, low, width
    return order, first, counts


def pieces(chunks: Collection[Chunk], *, ndim: int) -> Pieces:
    """Turn chunks of one tensor into columns, cutting flat ranges into boxes.

    Raises:
        PlanError: chunks differ in their codec or the dtypes of their parts.
    """
    ways = dict.fromkeys((c.codec, tuple(part.dtype for part in c.parts)) for c in chunks)
    if len(ways) > 1:
        texts = [" ".join((codec, *map(str, kinds))) for codec, kinds in ways]
        raise PlanError(
            f"{next(iter(chunks)).region}: the chunks of a tensor must be stored in one way, got "
            f"{' and '.join(texts)}"
        )
    codec, dtypes = next(iter(ways), (IDENTITY, ()))
    rows = [row for chunk in chunks for row in _piece_rows(chunk)]
    n, p = len(rows), len(dtypes)
    return Pieces(
        offsets=np.array([r[0].offsets for r in rows], dtype=np.int64).reshape(n, ndim),
        lengths=np.array([r[0].lengths for r in rows], dtype=np.int64).reshape(n, ndim),
        replica=np.array([r[4] for r in rows], dtype=np.int64).reshape(n),
        file=np.array([r[1] for r in rows], dtype=np.int64).reshape(n, p),
        start_bytes=np.array([r[2] for r in rows], dtype=np.int64).reshape(n, p),
        strides_bytes=np.array([r[3] for r in rows], dtype=np.int64).reshape(n, p, ndim),
        dtypes=dtypes,
        codec=codec,
    )


_Row = tuple[Box, list[int], list[int], list[tuple[int, ...]], int]


def _piece_rows(chunk: Chunk) -> Iterator[_Row]:
    """Yield a row per box of a chunk: box, file, start, strides (bytes), replica."""
    done = 0
    for box in boxes_of(chunk.region):
        starts, strides = [], []
        for part in chunk.parts:
            steps = part.strides if part.strides is not None else row_major_strides(box.lengths)
            starts.append(part.extent.offset + done * part.dtype.itemsize)
            strides.append(tuple(s * part.dtype.itemsize for s in steps))
        done += box.numel
        if box.numel:
            files = [part.extent.file for part in chunk.parts]
            yield box, files, starts, strides, chunk.replica_id


def same_bytes(a: Pieces, b: Pieces) -> bool:
    """Say whether the first part of both sides is the same bytes, where both hold an element."""
    if not len(a) or not len(b) or a.dtypes[0] != b.dtypes[0]:
        return False
    pairs, _ = _intersect(a, b)
    i, j = pairs[:, 0], pairs[:, 1]
    low = np.maximum(a.offsets[i], b.offsets[j])
    high = np.minimum(a.offsets[i] + a.lengths[i], b.offsets[j] + b.lengths[j])
    a_strides, b_strides = a.strides_bytes[i, 0], b.strides_bytes[j, 0]
    a_starts = a.start_bytes[i, 0] + ((low - a.offsets[i]) * a_strides).sum(axis=1)
    b_starts = b.start_bytes[j, 0] + ((low - b.offsets[j]) * b_strides).sum(axis=1)
    return bool(
        (a.file[i, 0] == b.file[j, 0]).all()
        and (a_starts == b_starts).all()
        and ((a_strides == b_strides) | (high - low == 1)).all()
    )


def _strided(side: Pieces, i: int, box: Box) -> tuple[Strided, ...]:
    """Return the bytes of ``box`` in piece ``i``, one view a part."""
    shift = np.array(box.offsets, dtype=np.int64) - side.offsets[i]
    return tuple(
        Strided(
            file=int(side.file[i, part]),
            start_bytes=int(side.start_bytes[i, part] + shift @ side.strides_bytes[i, part]),
            strides_bytes=tuple(side.strides_bytes[i, part].tolist()),
            itemsize=itemsize,
        )
        for part, itemsize in enumerate(side.itemsizes)
    )


def _shared_bytes(tensor: TensorPlan) -> int:
    """Bytes of the stored elements that source and destination share."""
    spec = tensor.src_spec
    numel = spec.numel
    rows = min(spec.padding_rows, tensor.dst_spec.padding_rows)
    if rows:
        numel += rows * prod(spec.shape[1:])
    if tensor.src.codec == SCALED:  # a scale for each piece
        value, scale = tensor.src.itemsizes
        return numel * value + len(tensor.src) * scale
    return numel * sum(tensor.src.itemsizes or (spec.dtype.itemsize,))


def _op_json(op: CopyOp) -> dict[str, object]:
    """Return one copy as plain data."""
    document: dict[str, object] = {
        "tensor": list(op.tensor),
        "offsets": list(op.box.offsets),
        "lengths": list(op.box.lengths),
        "srcs": [[s.file, s.start_bytes, list(s.strides_bytes)] for s in op.srcs],
        "dsts": [[d.file, d.start_bytes, list(d.strides_bytes)] for d in op.dsts],
    }
    return document if op.codec == IDENTITY else {**document, "codec": op.codec}
