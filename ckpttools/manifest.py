"""What does a checkpoint hold, and where are its bytes? The hub type of ckpttools.

A format turns files into a :class:`Manifest`, or a Manifest into files; nothing else is ever
exchanged between formats. A Manifest lists the logical tensors, the chunks that hold their
elements and the objects beside them. Two promises hold once one exists:

* every extent lies inside its file, every region inside its tensor;
* the chunks with ``replica_id`` 0 hold each element of each tensor exactly once.

How the hard cases are expressed is written down in ``docs/architecture.md``, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpttools.dtypes import DType
from ckpttools.errors import LayoutError
from ckpttools.layout.box import Box
from ckpttools.layout.cover import check_cover
from ckpttools.layout.flat import FlatRange

WEIGHT = "weight"
"""The slot of a model weight; every other slot belongs to the optimizer."""

MASTER = "fp32_param"
"""The slot of the optimizer's own fp32 copy of a weight."""

IDENTITY = "identity"
"""The codec of a chunk whose one part holds the elements themselves, in the tensor's dtype."""

REMAINDER = "bf16_remainder"
"""Codec: a bfloat16 part ``hi`` and an int16 part ``lo`` make the float32 whose bits are
``(hi << 16) + lo``, modulo 2**32. ``hi`` is that float32 rounded by :data:`HALF_AWAY`."""

SCALED = "scaled"
"""Codec: a 16-bit float part times a float32 part, which is one number for the region (strides 0),
in one float32 multiplication."""

WIDEN = "widened"
"""Codec: one 16-bit float part, as float32; exact."""

HALF_AWAY = "half_away"
"""Codec: one float32 part rounded to bfloat16, ties away from zero: ``(bits + 0x8000) >> 16``."""

NEAREST_EVEN = "nearest_even"
"""Codec: one float32 part rounded to bfloat16, ties to even, as torch's ``copy_`` does."""

REMAINDER_NEAREST_EVEN = "bf16_remainder_nearest_even"
"""Codec: :data:`REMAINDER`, then :data:`NEAREST_EVEN`: bfloat16 again, another one in ties."""

_FLOAT16S = frozenset({"bfloat16", "float16"})
_BFLOAT16 = frozenset({"bfloat16"})
_FLOAT32 = frozenset({"float32"})
_INT16 = frozenset({"int16"})

CODECS: Mapping[str, tuple[tuple[frozenset[str], ...], frozenset[str]]] = {
    REMAINDER: ((_BFLOAT16, _INT16), _FLOAT32),
    SCALED: ((_FLOAT16S, _FLOAT32), _FLOAT32),
    WIDEN: ((_FLOAT16S,), _FLOAT32),
    HALF_AWAY: ((_FLOAT32,), _BFLOAT16),
    NEAREST_EVEN: ((_FLOAT32,), _BFLOAT16),
    REMAINDER_NEAREST_EVEN: ((_BFLOAT16, _INT16), _BFLOAT16),
}
"""Which dtypes the parts of each codec but the identity have, and which the elements they make."""

Region = Box | FlatRange


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor: a weight, or one slot of a parameter's optimizer state.

    ``shape`` is the logical shape. ``padding_rows`` further rows stand behind it in files that
    pad a vocabulary: they are stored and carried, but are not part of the content.
    """

    name: str
    slot: str
    dtype: DType
    shape: tuple[int, ...]
    padding_rows: int = 0

    def __post_init__(self) -> None:
        if self.padding_rows < 0 or (self.padding_rows and not self.shape):
            raise LayoutError(
                f"{self}: padding rows must be at least 0 and need a dimension, "
                f"got {self.padding_rows} for shape {self.shape}"
            )

    def __str__(self) -> str:
        return f"{self.name} ({self.slot})"

    @property
    def key(self) -> tuple[str, str]:
        """Name and slot, which together identify a tensor."""
        return self.name, self.slot

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape with the padding rows."""
        if not self.padding_rows:
            return self.shape
        return (self.shape[0] + self.padding_rows, *self.shape[1:])

    @property
    def numel(self) -> int:
        """Logical elements, padding excluded."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the logical elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Extent:
    """``length`` bytes from ``offset`` in the file with index ``file`` of a Manifest."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Part:
    """Where one stored value of each element of a region lies.

    ``strides`` are in elements, one per dimension of the region; None means dense row-major
    order. A flat range is always dense.
    """

    extent: Extent
    dtype: DType
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.strides is not None and min(self.strides, default=0) < 0:
            raise LayoutError(f"Part: strides must be at least 0, got {self.strides}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of the tensor with index ``tensor``.

    ``codec`` names the elementwise rule that makes one logical element of the values of
    ``parts`` (``identity``: one part, the element itself). Every other rule is for reading only:
    what is written is the element itself. Copies of the same region differ in ``replica_id``; 0 is
    the copy that is read.
    """

    tensor: int
    region: Region
    parts: tuple[Part, ...]
    codec: str = IDENTITY
    replica_id: int = 0

    def __post_init__(self) -> None:
        if not self.parts:
            raise LayoutError(f"Chunk: {self.region} must have at least one part, got none")
        if self.codec != IDENTITY:
            _check_parts(self)
        elif len(self.parts) != 1:
            raise LayoutError(
                f"Chunk: {self.region} must have 1 part under the codec {IDENTITY}, got "
                f"{len(self.parts)}"
            )
        for part in self.parts:
            if part.strides is None:
                continue
            if isinstance(self.region, FlatRange):
                raise LayoutError(
                    f"Chunk: a flat range must be dense, got strides {part.strides} for "
                    f"{self.region}"
                )
            if len(part.strides) != self.region.ndim:
                raise LayoutError(
                    f"Chunk: {self.region} must have a stride for each dimension, got "
                    f"{part.strides}"
                )


def _check_parts(chunk: Chunk) -> None:
    """Check that a chunk has the parts that its codec makes an element of."""
    if chunk.codec not in CODECS:
        raise LayoutError(
            f"Chunk: codec must be one of {', '.join((IDENTITY, *CODECS))}, got {chunk.codec}"
        )
    kinds, _ = CODECS[chunk.codec]
    where = f"Chunk: {chunk.region}"
    if len(chunk.parts) != len(kinds):
        count = f"{len(kinds)} part" + "s" * (len(kinds) > 1)
        raise LayoutError(
            f"{where} must have {count} under the codec {chunk.codec}, got {len(chunk.parts)}"
        )
    for part, allowed in zip(chunk.parts, kinds, strict=True):
        if part.dtype.name not in allowed:
            raise LayoutError(
                f"{where} must have a part of {' or '.join(sorted(allowed))} under the codec "
                f"{chunk.codec}, got {part.dtype}"
            )
    if chunk.codec == SCALED:
        strides = chunk.parts[1].strides
        if strides is None or any(strides):
            raise LayoutError(f"{where} must have one scale, of strides 0, got strides {strides}")


@dataclass(frozen=True, slots=True)
class File:
    """A file by its path relative to the checkpoint's root, and its size in bytes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A whole checkpoint.

    ``root`` is the directory that the files' paths are relative to. ``objects`` holds what is
    not a tensor, by name; values are plain or inert data, never live objects of a file.

    Raises:
        LayoutError: a promise of this module does not hold.
    """

    format: str
    root: str
    files: tuple[File, ...]
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[Chunk, ...]
    objects: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys: set[tuple[str, str]] = set()
        for spec in self.tensors:
            if spec.key in keys:
                raise LayoutError(f"{spec}: a name and slot must be there once, got it twice")
            keys.add(spec.key)
        for chunk in self.chunks:
            self._check_chunk(chunk)
        for spec, chunks in zip(self.tensors, self.by_tensor(), strict=True):
            boxes = [b for c in chunks if c.replica_id == 0 for b in boxes_of(c.region)]
            check_cover(Box.whole(spec.stored_shape), boxes, where=str(spec))

    def by_tensor(self) -> list[list[Chunk]]:
        """Return the chunks of each tensor, in the order of ``tensors``."""
        lists: list[list[Chunk]] = [[] for _ in self.tensors]
        for chunk in self.chunks:
            lists[chunk.tensor].append(chunk)
        return lists

    def index(self) -> dict[tuple[str, str], int]:
        """Return the position of each tensor by (name, slot)."""
        return {spec.key: i for i, spec in enumerate(self.tensors)}

    def slots(self) -> tuple[str, ...]:
        """Return the slots that occur, in first-seen order."""
        return tuple(dict.fromkeys(spec.slot for spec in self.tensors))

    @property
    def state_bytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(spec.size_bytes for spec in self.tensors)

    def _check_chunk(self, chunk: Chunk) -> None:
        if not 0 <= chunk.tensor < len(self.tensors):
            raise LayoutError(
                f"{self.root}: a chunk must be of one of {len(self.tensors)} tensors, got "
                f"{chunk.tensor}"
            )
        spec = self.tensors[chunk.tensor]
        region = chunk.region
        whole = Box.whole(spec.stored_shape)
        outer = region if isinstance(region, Box) else region.within
        if outer.ndim != whole.ndim or not whole.covers(outer):
            raise LayoutError(f"{spec}: a chunk must lie inside {whole}, got {outer}")
        if chunk.codec != IDENTITY and spec.dtype.name not in CODECS[chunk.codec][1]:
            made = " or ".join(sorted(CODECS[chunk.codec][1]))
            raise LayoutError(f"{spec}: the codec {chunk.codec} makes {made}, got {spec.dtype}")
        for part in chunk.parts:
            if not 0 <= part.extent.file < len(self.files):
                raise LayoutError(
                    f"{spec}: an extent must lie in one of {len(self.files)} files, got "
                    f"{part.extent.file}"
                )
            extent, file = part.extent, self.files[part.extent.file]
            if chunk.codec == IDENTITY and part.dtype != spec.dtype:
                raise LayoutError(
                    f"{file.path}: {spec}: must be stored as {spec.dtype} under the codec "
                    f"{IDENTITY}, got {part.dtype}"
                )
            need = part_bytes(region, part)
            if extent.length != need:
                raise LayoutError(
                    f"{file.path}: {spec}: a chunk of {region} in {part.dtype} must take "
                    f"{need} bytes, got {extent.length}"
                )
            if extent.offset < 0 or extent.offset + extent.length > file.size_bytes:
                raise LayoutError(
                    f"{file.path}: {spec}: bytes {extent.offset} to "
                    f"{extent.offset + extent.length} must lie inside the file, got a file of "
                    f"{file.size_bytes} bytes"
                )


def boxes_of(region: Region) -> tuple[Box, ...]:
    """Return the boxes that make up a region, in the order of its elements."""
    return (region,) if isinstance(region, Box) else region.boxes()


def part_bytes(region: Region, part: Part) -> int:
    """Return how many bytes a part spans, from its first element to its last."""
    itemsize = part.dtype.itemsize
    if part.strides is None or isinstance(region, FlatRange):
        return region.numel * itemsize
    if not region.numel:
        return 0
    spans = zip(region.lengths, part.strides, strict=True)
    return (sum((n - 1) * s for n, s in spans) + 1) * itemsize


def summary_by_slot(specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
    """Return (number of tensors, bytes) for each slot, in first-seen order."""
    totals: dict[str, tuple[int, int]] = {}
    for spec in specs:
        count, size = totals.get(spec.slot, (0, 0))
        totals[spec.slot] = (count + 1, size + spec.size_bytes)
    return totals
