"""How does a fused ZeRO-2 optimizer fill buckets of one size? A walk, one fragment at a time.

The oracle of ``layout/fixed_buckets``, of which it imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fragment:
    """Elements ``start`` to ``stop`` of a parameter, at element ``at`` of their bucket."""

    param: int
    start: int
    stop: int
    at: int


@dataclass
class Bucket:
    """A bucket: how far it is filled, and what lies in it."""

    filled: int = 0
    fragments: list[Fragment] = field(default_factory=list)


def walk(
    numels: Sequence[int], groups: Sequence[Sequence[int]], size: int, alignment: int
) -> list[list[Bucket]]:
    """Return the buckets of each group: the last one takes what it can, then there is a new one."""
    all_buckets = []
    for group in groups:
        buckets: list[Bucket] = []
        for index in group:
            done = 0
            while done < numels[index]:
                last = buckets[-1] if buckets else None
                at = -(-last.filled // alignment) * alignment if last else size
                if last is None or at >= size:
                    buckets.append(Bucket())
                    continue
                take = min(numels[index] - done, size - at)
                last.fragments.append(Fragment(index, done, done + take, at))
                last.filled = at + take
                done += take
        all_buckets.append(buckets)
    return all_buckets


def shares(
    buckets: Sequence[Bucket], size: int, alignment: int, ranks: int
) -> Iterator[tuple[int, int, int, list[Fragment]]]:
    """Yield (bucket, rank, elements of its share, fragments in it, counted from its start).

    The last bucket is cut short to a multiple of the alignment for each rank.
    """
    for number, bucket in enumerate(buckets):
        step = alignment * ranks
        numel = size
        if number == len(buckets) - 1:
            numel = min(size, -(-bucket.filled // step) * step)
        for rank in range(ranks):
            low, high = rank * numel // ranks, (rank + 1) * numel // ranks
            mine = []
            for f in bucket.fragments:
                first, last = max(f.at, low), min(f.at + f.stop - f.start, high)
                if first < last:
                    start = f.start + first - f.at
                    mine.append(Fragment(f.param, start, start + last - first, first - low))
            yield number, rank, numel // ranks, mine
