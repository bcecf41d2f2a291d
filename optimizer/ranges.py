"""Which part of a buffer, a bucket and a parameter does one data-parallel rank own?

Each bucket is cut in ``dp`` equal contiguous pieces; rank r owns the r-th. Parameter borders are
ignored, so a parameter may be cut between ranks. Names and meanings are those of Megatron-LM's
``_build_model_gbuf_param_range_map`` (megatron/core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttools.layout.megatron import BufferLayout
from ckpttools.layout.sharded_pieces import buffer_pieces


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start`` to ``end``, the end excluded."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ParamRange:
    """The part of one parameter that a rank owns.

    ``index`` is the parameter's place in the layout, ``bucket`` its bucket. ``gbuf_world`` counts
    from the buffer's start, ``gbuf_world_in_bucket`` from the bucket's, ``gbuf_local`` from the
    rank's piece of the bucket, ``param`` from the start of the flattened parameter.
    """

    index: int
    bucket: int
    gbuf_world: Range
    gbuf_world_in_bucket: Range
    gbuf_local: Range
    param: Range


def param_ranges(layout: BufferLayout, dp: int, rank: int) -> Iterator[ParamRange]:
    """Yield what ``rank`` of ``dp`` owns, bucket by bucket in the order of the buffer.

    A parameter of which the rank owns nothing doesn't occur; one without elements never does.
    """
    indices = range(len(layout.params))
    for piece in buffer_pieces(layout, indices, vpp=0, dtype="", dp=rank, dp_size=dp):
        bucket_start = layout.bucket_starts[piece.bucket]
        for part in piece.slices:
            low, size = piece.start + part.at, part.stop - part.start
            yield ParamRange(
                index=part.param,
                bucket=piece.bucket,
                gbuf_world=Range(low, low + size),
                gbuf_world_in_bucket=Range(low - bucket_start, low - bucket_start + size),
                gbuf_local=Range(part.at, part.at + size),
                param=Range(part.start, part.stop),
            )


def bucket_members(layout: BufferLayout) -> list[list[int]]:
    """Return the parameters' indices of each bucket, in the order of the buffer."""
    members: list[list[int]] = [[] for _ in layout.bucket_starts]
    bucket = 0
    for index in reversed(range(len(layout.params))):  # the buffer is in reverse module order
        start = layout.starts[index]
        # A parameter without elements may stand at the border: it belongs to the bucket before.
        while start >= layout.bucket_stops[bucket] and layout.params[index].numel:
            bucket += 1
        members[bucket].append(index)
    return members
