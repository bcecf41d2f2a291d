"""How does a test get files whose tensors are made of parts, and know what they must hold?

The oracle decodes whole arrays with 64-bit integers, exact double precision and torch; it shares
nothing with the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ckpttools.dtypes import DType, dtype
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    HALF_AWAY,
    IDENTITY,
    NEAREST_EVEN,
    REMAINDER,
    REMAINDER_NEAREST_EVEN,
    SCALED,
    WIDEN,
    Chunk,
    Extent,
    File,
    Manifest,
    Part,
    Region,
    TensorSpec,
)

BF16, F16, F32, I16 = (dtype(name) for name in ("bfloat16", "float16", "float32", "int16"))
PARTS: dict[str, tuple[tuple[DType, ...], DType]] = {
    "remainder": ((BF16, I16), F32),
    "scaled_bf16": ((BF16, F32), F32),
    "scaled_f16": ((F16, F32), F32),
    "widened_bf16": ((BF16,), F32),
    "widened_f16": ((F16,), F32),
    "half_away": ((F32,), BF16),
    "nearest_even": ((F32,), BF16),
    "remainder_nearest_even": ((BF16, I16), BF16),
    "identity": ((F32,), F32),
}
"""For each way to store a tensor: the dtypes of its parts, and its own."""

CODECS = {
    "remainder": REMAINDER,
    "scaled_bf16": SCALED,
    "scaled_f16": SCALED,
    "widened_bf16": WIDEN,
    "widened_f16": WIDEN,
    "half_away": HALF_AWAY,
    "nearest_even": NEAREST_EVEN,
    "remainder_nearest_even": REMAINDER_NEAREST_EVEN,
    "identity": IDENTITY,
}
UNSIGNED = {2: "<u2", 4: "<u4"}


def random_bits(shape: Sequence[int], kind: DType, random: np.random.Generator) -> np.ndarray:
    """Return random bits; NaNs, infinities, zeros of both signs and ties are among them."""
    width = UNSIGNED[kind.itemsize]
    bits = random.integers(0, 1 << 8 * kind.itemsize, tuple(shape), np.int64).astype(width)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F80, 0xFF80, 0x7C00, 0x7C01, 0xFC00]
    if kind.itemsize == 4:
        edges += [
            0x3F808000,
            0x3F818000,
            0x7F7FFFFF,
            0x7F800000,
            0x7F800001,
            0xFFFFFFFF,
            0x7FFF8000,
        ]
    chosen = random.choice(np.array(edges, width), tuple(shape))
    return np.where(random.random(tuple(shape)) < 0.3, chosen, bits).astype(width)


def expected(way: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the bits of the elements that whole arrays of parts make."""
    kinds, kind = PARTS[way]
    width = UNSIGNED[kind.itemsize]
    first = parts[0].astype(np.int64)
    if way.startswith("remainder"):
        lo = parts[1].view("<i2").astype(np.int64)
        joined = ((first - (lo < 0)) % 65536 * 65536 + lo % 65536).astype("<u4")
        return joined if way == "remainder" else _nearest_even(joined)
    if way == "half_away":
        return ((first + 0x8000) % (1 << 32) // 65536).astype(width)
    if way == "nearest_even":
        return _nearest_even(parts[0])
    if way == "identity":
        return parts[0]
    wide = _widened(parts[0], kinds[0])
    if way.startswith("widened"):
        return wide
    with np.errstate(all="ignore"):  # a product of two float32 is exact in double precision
        doubles = wide.view("<f4").astype(np.float64) * parts[1].view("<f4").astype(np.float64)
        product = doubles.astype("<f4")
    return np.where(np.isnan(doubles), np.uint32(0x7FC00000), product.view("<u4")).astype("<u4")


def _nearest_even(bits: np.ndarray) -> np.ndarray:
    floats = bits.reshape(-1).copy().view(np.float32)
    rounded = torch.from_numpy(floats).bfloat16().view(torch.uint16).numpy()
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded).reshape(bits.shape)


def _widened(bits: np.ndarray, kind: DType) -> np.ndarray:
    number = bits.astype(np.int64)
    if kind is BF16:
        return (number * 65536).astype("<u4")
    flat = torch.from_numpy(bits.reshape(-1).copy().view(np.float16))
    wide = np.asarray(flat.float().numpy()).view("<u4").reshape(bits.shape)
    nan = number % 0x8000 > 0x7C00
    quiet = number // 0x8000 * (1 << 31) | 0x7FC00000 | number % 0x400 * 0x2000
    return np.where(nan, quiet, wide).astype("<u4")


@dataclass(slots=True)
class Store:
    """Files in the making: tensors are added part by part, then written."""

    root: Path
    files: dict[str, bytearray] = field(default_factory=dict)
    specs: list[TensorSpec] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def add(
        self,
        spec: TensorSpec,
        way: str,
        parts: Sequence[np.ndarray],
        regions: Sequence[Region] | None = None,
        *,
        strides: Mapping[int, tuple[int, ...]] | None = None,
        gap: int = 1,
    ) -> None:
        """Add a tensor; whole arrays of its parts are cut into regions, dense or strided.

        The scale of a region is the first element that its array has there. ``strides`` are of the
        regions with these numbers.
        """
        number = len(self.specs)
        self.specs.append(spec)
        whole = Box.whole(spec.stored_shape)
        for i, region in enumerate(regions if regions is not None else [whole]):
            steps = (strides or {}).get(i)
            self.chunks.append(self.chunk(number, way, parts, region, strides=steps, gap=gap))

    def chunk(
        self,
        number: int,
        way: str,
        parts: Sequence[np.ndarray],
        region: Region,
        *,
        strides: tuple[int, ...] | None = None,
        replica: int = 0,
        gap: int = 1,
    ) -> Chunk:
        """Store one region's parts, each in a file of its own, and return the chunk."""
        made = []
        for p, (kind, array) in enumerate(zip(PARTS[way][0], parts, strict=True)):
            data = self.files.setdefault(f"part{p}_{replica}", bytearray(b"#" * (3 + p)))
            if isinstance(region, FlatRange):
                stored = array[region.within.slices].ravel()[region.start : region.stop]
                steps = None
            else:
                stored, steps = array[region.slices], strides
            if CODECS[way] == SCALED and p == 1:
                stored, steps = stored.ravel()[:1], (0,) * len(array.shape)
            elif steps is not None and stored.size:
                stored = spread(stored, steps)
            extent = Extent(list(self.files).index(f"part{p}_{replica}"), len(data), stored.nbytes)
            made.append(Part(extent, kind, steps))
            data += stored.tobytes() + b"\xa5" * gap
        return Chunk(number, region, tuple(made), CODECS[way], replica)

    def manifest(self, objects: Mapping[str, object] | None = None) -> Manifest:
        """Write the files and return what they hold."""
        self.root.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (self.root / name).write_bytes(data)
        files = tuple(File(name, len(data)) for name, data in self.files.items())
        told = dict(objects or {})
        return Manifest("test", str(self.root), files, tuple(self.specs), tuple(self.chunks), told)


def spread(values: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """Return the memory, from the first element to the last, of an array with these strides."""
    length = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    memory = np.full(length, 0x5A, dtype=values.dtype)
    steps = [s * values.itemsize for s in strides]
    np.lib.stride_tricks.as_strided(memory, values.shape, steps)[...] = values
    return memory


def scales(regions: Sequence[Region], shape: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Return a whole array that holds one of the numbers for each region."""
    whole = np.zeros(tuple(shape), numbers.dtype)
    for i, region in enumerate(regions):
        if isinstance(region, Box):
            whole[region.slices] = numbers[i % len(numbers)]
        else:
            raise TypeError(f"{region}: a scale is of a box")
    return whole
