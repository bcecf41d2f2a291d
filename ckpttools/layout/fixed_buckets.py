"""Where does a fused ZeRO-2 optimizer put each parameter? Buckets of one size, as arithmetic.

Parameters are placed one after the other in the order in which they are *filled*, by default the
reverse of module order, which is that of a backward pass:

1. each starts at a multiple of ``alignment`` elements;
2. every ``bucket_numel`` elements a bucket ends, in the middle of a parameter or not;
3. each data-parallel rank owns an equal contiguous piece of every bucket, a multiple of
   ``alignment`` elements long.

A parameter is contiguous over the buckets laid end to end, since the next bucket begins where a
full one ends. A *group* of parameters begins a bucket of its own, and its last bucket is cut short
to a multiple of ``alignment`` times the number of ranks.

Source: ``_init_param_state`` of apex/contrib/optimizers/distributed_fused_adam.py, which keeps
every bucket at its full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.errors import LayoutError
from ckpttools.layout.megatron import BufferLayout, BufferParam, round_up

ALIGNMENT_BYTES = 128
"""Bytes of gradients to whose multiple a parameter's start and a rank's piece are rounded."""


@dataclass(frozen=True, slots=True)
class FixedBuckets:
    """How large buckets are, whatever the number of ranks. Both numbers are elements.

    ``cap_numel`` is the most that a bucket may hold; ``alignment`` that to whose multiple starts
    and pieces are rounded.
    """

    cap_numel: int
    alignment: int

    def __post_init__(self) -> None:
        for name in ("cap_numel", "alignment"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LayoutError(f"buckets: {name} must be at least 1, got {value!r}")

    @classmethod
    def of_bytes(cls, cap_bytes: float, itemsize: int) -> FixedBuckets:
        """Return the rule for buckets of at most ``cap_bytes`` of gradients of ``itemsize`` bytes.

        >>> FixedBuckets.of_bytes(100 * 2**20, 2)
        FixedBuckets(cap_numel=52428800, alignment=64)
        """
        return cls(max(1, int(cap_bytes / itemsize)), ALIGNMENT_BYTES // itemsize)

    def shard_numel(self, dp: int) -> int:
        """Return how many elements of a full bucket each of ``dp`` ranks owns.

        >>> FixedBuckets(600, 32).shard_numel(2)
        288

        Raises:
            LayoutError: ``dp`` is below 1.
        """
        if dp < 1:
            raise LayoutError(f"dp: must be at least 1, got {dp}")
        return max(self.alignment, self.cap_numel // dp // self.alignment * self.alignment)

    def bucket_numel(self, dp: int) -> int:
        """Return how many elements a full bucket has."""
        return self.shard_numel(dp) * dp


def fill_buckets(
    params: Sequence[BufferParam],
    groups: Sequence[Sequence[int]],
    rule: FixedBuckets,
    *,
    dp: int,
) -> BufferLayout:
    """Lay out one buffer.

    ``params`` stand in module order; ``groups`` hold their indices in the order in which buckets
    are filled, and each group begins a bucket. Guarantees: parameters don't overlap, buckets tile
    the buffer, and each has a multiple of ``dp`` times the alignment.

    >>> params = [BufferParam("a", 10), BufferParam("b", 70)]
    >>> layout = fill_buckets(params, [(1, 0)], FixedBuckets(64, 32), dp=1)
    >>> layout.starts, layout.bucket_stops
    ((96, 0), (64, 128))

    Raises:
        LayoutError: the groups don't hold each parameter once.
    """
    placed = [index for group in groups for index in group]
    if sorted(placed) != list(range(len(params))):
        raise LayoutError(
            f"buckets: must be filled with each of {len(params)} parameters once, got "
            f"{placed!r:.80}"
        )
    full, step = rule.bucket_numel(dp), rule.alignment * dp
    starts = [0] * len(params)
    file_starts = [0] * len(params)
    bucket_starts: list[int] = []
    bucket_stops: list[int] = []
    unpadded: list[int] = []
    base = 0
    for group in groups:
        end = base
        for index in group:
            starts[index] = round_up(end - base, rule.alignment) + base
            file_starts[index] = starts[index] - (base - sum(unpadded))
            end = starts[index] + params[index].numel
        for low in range(base, end, full):
            bucket_starts.append(low)
            bucket_stops.append(min(low + full, low + round_up(end - low, step)))
            unpadded.append(min(end, low + full) - low)
        base = bucket_stops[-1] if bucket_stops else 0
    return BufferLayout(
        params=tuple(params),
        starts=tuple(starts),
        file_starts=tuple(file_starts),
        bucket_starts=tuple(bucket_starts),
        bucket_stops=tuple(bucket_stops),
        bucket_unpadded=tuple(unpadded),
    )
