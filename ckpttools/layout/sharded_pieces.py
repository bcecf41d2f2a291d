"""Which elements does a rank of a sharded optimizer own? From flat pieces to whole tensors.

1. A rank owns ``[r * n / dp, (r + 1) * n / dp)`` of every bucket of ``n`` elements of its buffers:
   a *flat piece*, which is stored and communicated as one run.
2. A piece holds slices of the row-major flattening of parameters' local tensors; between them lie
   gaps and padding.
3. A slice of a local tensor goes through the sub-blocks of the tensor-parallel cut to regions of
   the whole tensor.

Guarantee: the regions of replica 0 over all ranks cover each trainable parameter exactly once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.flat import FlatRange, flat_range_of
from ckpttools.layout.megatron import BufferLayout
from ckpttools.layout.sharded import ShardedLayout, ShardedParam


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Elements ``[start, stop)`` of the flattened local tensor of a parameter.

    ``param`` is the index in the layout's ``params``, ``at`` the element of the flat piece where
    the slice starts.
    """

    param: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """What a rank owns of one bucket: elements ``[start, start + numel)`` of the live buffer."""

    vpp: int
    dtype: str
    bucket: int
    start: int
    numel: int
    slices: tuple[ParamSlice, ...]


@dataclass(frozen=True, slots=True)
class WholeRegion:
    """A region of a whole tensor whose elements lie in a slice of a rank's local tensor.

    ``at`` is the element of the slice where its first element lies; ``strides`` are in elements,
    None means dense row-major order.
    """

    region: Box | FlatRange
    at: int
    strides: tuple[int, ...] | None = None


def flat_pieces(layout: ShardedLayout, rank: int) -> tuple[FlatPiece, ...]:
    """Return what a rank owns: by model chunk, then dtype in first-seen order, then bucket.

    Raises:
        LayoutError: there is no such rank, or the variant has no layout for the parameters.
    """
    place = layout.topology.place_of(rank)
    pieces: list[FlatPiece] = []
    for vpp in range(layout.topology.vpp):
        for dtype, buffer in layout.buffers(place.tp, place.pp, vpp).items():
            params = layout.buffer_params(place.pp, vpp, dtype)
            pieces += buffer_pieces(
                buffer, params, vpp=vpp, dtype=dtype, dp=place.dp, dp_size=layout.topology.dp
            )
    return tuple(pieces)


def buffer_pieces(
    buffer: BufferLayout,
    params: Sequence[int],
    *,
    vpp: int,
    dtype: str,
    dp: int,
    dp_size: int,
) -> Iterator[FlatPiece]:
    """Yield what data-parallel rank ``dp`` owns of each bucket of one buffer.

    ``params`` are the indices of the buffer's parameters in the layout, in module order.
    """

    def place(i: int) -> tuple[int, int]:
        return buffer.starts[i], buffer.params[i].numel  # empty ones first: they share a start

    order = sorted(range(len(params)), key=place)
    starts = [buffer.starts[i] for i in order]
    for bucket, (low, high) in enumerate(
        zip(buffer.bucket_starts, buffer.bucket_stops, strict=True)
    ):
        numel = (high - low) // dp_size
        start = low + dp * numel
        slices: list[ParamSlice] = []
        for k in range(max(0, bisect_right(starts, start) - 1), len(order)):
            if starts[k] >= start + numel:
                break
            i = order[k]
            first = max(start, starts[k])
            last = min(start + numel, starts[k] + buffer.params[i].numel)
            if first < last:
                slices.append(
                    ParamSlice(params[i], first - starts[k], last - starts[k], first - start)
                )
        yield FlatPiece(vpp, dtype, bucket, start, numel, tuple(slices))


def whole_regions(
    param: ShardedParam, *, tp: int, tp_size: int, start: int, stop: int
) -> tuple[WholeRegion, ...]:
    """Map elements ``[start, stop)`` of a flattened local tensor to regions of the whole tensor.

    The regions are disjoint and hold all of the slice. Where a sub-block is one run of the local
    tensor (any cut of the first dimension) there is one flat range for it, else boxes.

    >>> from ckpttools.layout.blocks import Blocks
    >>> from ckpttools.layout.rules import Split
    >>> fc1 = ShardedParam("fc1", (8, 3), "float32", Split(0, Blocks((1, 1))))
    >>> for found in whole_regions(fc1, tp=1, tp_size=2, start=4, stop=9):
    ...     print(found.at, found.region.start, found.region.stop, found.region.within)
    0 4 6 [2:4, 0:3]
    2 0 3 [6:8, 0:3]

    Raises:
        LayoutError: the slice is not inside the tensor, or ``tp_size`` doesn't cut it.
    """
    local = Box.whole(param.local_shape(tp_size))
    asked = FlatRange(start, stop, local)
    found: list[WholeRegion] = []
    for mine, whole in param.boxes(tp_size, tp):
        run = flat_range_of(mine, local)
        if run is None:
            found += _strided(asked, mine, whole)
            continue
        first, last = max(start, run.start), min(stop, run.stop)
        if first < last:
            flat = FlatRange(first - run.start, last - run.start, whole)
            found.append(WholeRegion(flat, first - start))
    return tuple(found)


def _strided(asked: FlatRange, mine: Box, whole: Box) -> Iterator[WholeRegion]:
    """Yield the parts of a slice that lie in a sub-block which is no run of the local tensor."""
    done = 0
    for box in asked.boxes():
        shared = box & mine
        if shared is not None:
            strides = row_major_strides(box.lengths)
            inner = shared.relative_to(box).offsets
            at = done + sum(o * s for o, s in zip(inner, strides, strict=True))
            region = shared.relative_to(mine).shift(whole.offsets)
            yield WholeRegion(region, at, strides)
        done += box.numel
