"""Where does Megatron's DistributedOptimizer put each parameter? Its flat buffers, as arithmetic.

One buffer holds the parameters of one model chunk that share (parameter dtype, gradient dtype).
The walk goes over the parameters in *reverse* module order:

1. each parameter starts at a multiple of 64 elements;
2. a bucket closes after the parameter that fills it to ``bucket_size``, and before and after an
   embedding that another pipeline stage shares (the rules differ by variant, see below);
3. each bucket is padded to a multiple of ``lcm(dp, 128)`` elements, so that every data-parallel
   rank owns an equal contiguous piece of it.

``distrib_optim.pt`` (keys ``buckets_coalesced``) holds the buffer with the padding at bucket
*ends* taken out; gaps inside a bucket stay. Source: megatron/core/distributed/
param_and_grad_buffer.py and megatron/core/optimizer/distrib_optimizer.py of core 0.16.1, and
their history for the older variants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from ckpttools.errors import LayoutError

PARAM_ALIGNMENT = 64
"""Elements to whose multiple a parameter's start is rounded up (since 2024-07)."""

BUCKET_ALIGNMENT = 128
"""Elements to whose multiple, with the DP size, a bucket's end is rounded up (since 2024-05)."""

BUSBW_ALIGNMENT = 65536
"""The further factor of ``--ddp-pad-buckets-for-high-nccl-busbw`` (since 2025-02)."""

FIRST_BUCKET_SIZE = 40_000_000
FIRST_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class BufferParam:
    """A parameter as the buffer formula sees it: its name, size, and whether a stage shares it."""

    name: str
    numel: int
    shared_embedding: bool = False

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise LayoutError(f"{self.name}: must have at least 0 elements, got {self.numel}")


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The geometry of one buffer. All numbers are elements.

    ``starts[i]`` and ``file_starts[i]`` belong to ``params[i]`` (module order): the offset in
    the live buffer, and in the saved one with the bucket ends' padding taken out.
    ``bucket_starts``, ``bucket_stops`` and ``bucket_unpadded`` go by bucket.
    """

    params: tuple[BufferParam, ...]
    starts: tuple[int, ...]
    file_starts: tuple[int, ...]
    bucket_starts: tuple[int, ...]
    bucket_stops: tuple[int, ...]
    bucket_unpadded: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Length of the live buffer, padding included."""
        return self.bucket_stops[-1] if self.bucket_stops else 0

    @property
    def numel_unpadded(self) -> int:
        """Length of the saved buffer, as the file declares it."""
        return sum(self.bucket_unpadded)


@dataclass(frozen=True, slots=True)
class Cuts:
    """When does a bucket close? By its size, or after parameters that are known by name.

    ``size`` None means never (one bucket). ``after`` names parameters that end a bucket whatever
    its size; it is how cuts seen in a file are kept when the number that made them is unknown.
    """

    size: int | None = None
    after: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise LayoutError(f"bucket size: must be at least 1 element, got {self.size}")

    def __str__(self) -> str:
        if self.after:
            return f"{len(self.after)} cuts as in the source"
        return "one bucket" if self.size is None else f"bucket size {self.size}"

    def close_after(self, param: BufferParam, bucket_numel: int) -> bool:
        """Say whether a bucket that now ends with ``param`` closes."""
        full = self.size is not None and bucket_numel >= self.size
        return full or param.name in self.after


@dataclass(slots=True)
class _Walk:
    """The state of the walk over a buffer: position, open bucket, closed buckets."""

    divisor: int
    pos: int = 0
    bucket_start: int = 0
    open_params: int = 0
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    unpadded: list[int] = field(default_factory=list)
    padding: int = 0

    def close(self, end: int) -> int:
        """Close the open bucket at ``end`` and return where its padding ends."""
        stop = round_up(end, self.divisor)
        self.starts.append(self.bucket_start)
        self.stops.append(stop)
        self.unpadded.append(end - self.bucket_start)
        self.padding += stop - end
        self.bucket_start, self.open_params = stop, 0
        return stop


CloseBefore = Callable[[_Walk, int], None]
"""Closes the open bucket before a shared embedding, on a walk with this DP size."""


def _close_before_shared(walk: _Walk, dp: int) -> None:
    """Close the bucket where it is."""
    del dp  # the older rule needs it
    walk.pos = walk.close(walk.pos)


def _close_before_shared_until_0_12(walk: _Walk, dp: int) -> None:
    """Close the bucket by core 0.8 to 0.12 (and MegaDLMs).

    There the position is padded first (so the padding counts as content) but only if the DP size
    doesn't divide it, and it doesn't move to the padded end. Where the two differ the parameter
    would lie in two buckets, which Megatron refuses at start-up.
    """
    if walk.pos % dp:
        walk.pos = round_up(walk.pos, walk.divisor)
    stop = walk.close(walk.pos)
    if stop != walk.pos:
        raise LayoutError(
            f"shared embedding: its start must be a multiple of {walk.divisor} under this rule, "
            f"got {walk.pos}"
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """What one range of core releases does.

    ``aligned``: parameters start at multiples of :data:`PARAM_ALIGNMENT`; ``bucket_aligned``: a
    bucket's end is rounded to :data:`BUCKET_ALIGNMENT` too, not only to the DP size.
    ``close_before`` None: a shared embedding has no bucket of its own.
    """

    aligned: bool = True
    bucket_aligned: bool = True
    close_before: CloseBefore | None = _close_before_shared

    @property
    def alignment(self) -> int:
        """Elements to whose multiple a parameter's start is rounded."""
        return PARAM_ALIGNMENT if self.aligned else 1

    def divisor(self, dp: int, *, busbw: bool = False) -> int:
        """Return the number of elements to whose multiple a bucket is padded."""
        return bucket_divisor(dp, busbw=busbw) if self.bucket_aligned else dp


VARIANTS: Mapping[str, Variant] = {
    "core-0.13": Variant(),
    "core-0.12": Variant(close_before=_close_before_shared_until_0_12),
    "core-0.7": Variant(aligned=False),
    "core-0.6": Variant(aligned=False, bucket_aligned=False),
    "core-0.5": Variant(aligned=False, bucket_aligned=False, close_before=None),
}
"""The historical variants by a core release that has them, newest first.

core-0.13: since 2025-05. core-0.12: 2024-08 to 2025-05, and MegaDLMs. core-0.7: 2024-05 to
2024-07. core-0.6: 2024-01 to 2024-05. core-0.5: before.
"""


def round_up(value: int, multiple: int) -> int:
    """Round ``value`` up to a multiple.

    >>> round_up(65, 64), round_up(64, 64), round_up(0, 64)
    (128, 64, 0)
    """
    return -(-value // multiple) * multiple


def bucket_divisor(dp: int, *, busbw: bool = False) -> int:
    """Return the number of elements to whose multiple a bucket is padded.

    ``dp`` is the number of ranks that share the buffer (data x context parallel).

    >>> bucket_divisor(3)
    384

    Raises:
        LayoutError: ``dp`` is below 1.
    """
    if dp < 1:
        raise LayoutError(f"dp: must be at least 1, got {dp}")
    return lcm(dp, BUCKET_ALIGNMENT, *([BUSBW_ALIGNMENT] if busbw else []))


def default_bucket_size(dp: int) -> int:
    """Return the bucket size that Megatron takes when gradients overlap and none is given."""
    return max(FIRST_BUCKET_SIZE, FIRST_BUCKET_SIZE_PER_RANK * dp)


def find_variant(name: str) -> Variant:
    """Return a variant by name.

    Raises:
        LayoutError: there is none of that name.
    """
    if name not in VARIANTS:
        raise LayoutError(f"layout: must be one of {', '.join(VARIANTS)}, got {name!r}")
    return VARIANTS[name]


def buffer_layout(
    params: Sequence[BufferParam],
    *,
    dp: int,
    cuts: Cuts,
    variant: str = "core-0.13",
    busbw: bool = False,
) -> BufferLayout:
    """Lay out one buffer.

    ``params`` stand in module order. Guarantees: parameters don't overlap, each lies inside one
    bucket, buckets tile the buffer, and each has a multiple of ``dp`` elements.

    >>> params = [BufferParam("a", 10), BufferParam("b", 70)]
    >>> layout = buffer_layout(params, dp=2, cuts=Cuts())
    >>> layout.starts, layout.numel, layout.numel_unpadded
    ((128, 0), 256, 138)

    Raises:
        LayoutError: unknown variant, ``dp`` below 1, or the variant has no layout for these
            parameters.
    """
    rule = find_variant(variant)
    walk = _Walk(rule.divisor(dp, busbw=busbw))
    starts: list[int] = []
    file_starts: list[int] = []
    for param in reversed(params):
        walk.pos = round_up(walk.pos, rule.alignment)
        own_bucket = param.shared_embedding and rule.close_before is not None
        if own_bucket and walk.open_params and rule.close_before is not None:
            rule.close_before(walk, dp)
        starts.append(walk.pos)
        file_starts.append(walk.pos - walk.padding)
        end = walk.pos + param.numel
        walk.open_params += 1
        if own_bucket or cuts.close_after(param, end - walk.bucket_start):
            walk.pos = walk.close(end)
        else:
            walk.pos = end
    if walk.open_params:
        walk.close(walk.pos)
    return BufferLayout(
        params=tuple(params),
        starts=tuple(reversed(starts)),
        file_starts=tuple(reversed(file_starts)),
        bucket_starts=tuple(walk.starts),
        bucket_stops=tuple(walk.stops),
        bucket_unpadded=tuple(walk.unpadded),
    )


def cuts_from_starts(
    params: Sequence[BufferParam],
    starts: Sequence[int],
    *,
    dp: int,
    variant: str = "core-0.13",
    busbw: bool = False,
) -> Cuts:
    """Find the bucket cuts that show in live starts (module order, elements).

    A cut shows where the padding to the bucket's divisor moved the next parameter further than
    the parameter alignment would. Cuts beside a shared embedding follow from the rule and are
    left out. Whether the formula with these cuts gives ``starts`` again is for the caller to
    check.
    """
    rule = find_variant(variant)
    divisor = rule.divisor(dp, busbw=busbw)
    pairs = list(zip(reversed(params), reversed(starts), strict=True))
    after = set()
    for (before, start), (behind, next_start) in itertools.pairwise(pairs):
        end = start + before.numel
        if next_start == round_up(end, rule.alignment):
            continue
        beside = before.shared_embedding or behind.shared_embedding
        if next_start == round_up(end, divisor) and not (beside and rule.close_before):
            after.add(before.name)
    return Cuts(after=frozenset(after))


def layouts_by_size(
    params: Sequence[BufferParam], *, dp: int, variant: str = "core-0.13", busbw: bool = False
) -> Iterator[tuple[Cuts, BufferLayout]]:
    """Yield a layout for every bucket size that gives another one, sizes ascending.

    The pattern of cuts stays until the size exceeds the shortest bucket that it closes.

    >>> params = [BufferParam("a", 10), BufferParam("b", 70)]
    >>> [(cuts.size, layout.bucket_unpadded) for cuts, layout in layouts_by_size(params, dp=1)]
    [(1, (70, 10)), (71, (138,))]

    Raises:
        LayoutError: the variant has no layout for these parameters.
    """
    size: int | None = 1
    known: BufferLayout | None = None
    while size is not None:
        cuts = Cuts(size)
        layout = buffer_layout(params, dp=dp, cuts=cuts, variant=variant, busbw=busbw)
        if layout != known:
            yield cuts, layout
        known = layout
        closed = [numel for numel in layout.bucket_unpadded if numel >= size]
        size = min(closed) + 1 if closed else None
