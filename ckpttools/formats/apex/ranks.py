"""Which ranks do ``v1`` states belong to, and do they make up the whole? By their own tables.

A state doesn't name its rank: its local fragments do, by the place of its shard in the buckets.
All ranks must have one table of fragments and differ only in what is local. Several states of one
rank are copies, as a redundant process group has them, whatever their values. Every element of
every parameter must lie in the shard of a rank that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpttools.errors import FormatError
from ckpttools.formats.apex.buckets import Bucket, Fragment, Range, read_buckets, read_fragments
from ckpttools.formats.apex.model import StoredTensor
from ckpttools.formats.apex.saved import SavedState, read_state
from ckpttools.storage.torchzip import TensorRef, TorchFile

MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank, in the Manifest's file ``file``; ``rank`` None: it owns nothing."""

    torch_file: TorchFile
    file: int
    saved: SavedState
    buckets: tuple[Bucket, ...]
    rank: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``param_range`` of a flat parameter are ``shard_range`` of a state's shard.

    ``copy`` numbers the states of one rank.
    """

    state: RankState
    bucket: int
    copy: int
    param_range: Range
    shard_range: Range

    @property
    def shards(self) -> Mapping[str, TensorRef]:
        """The tensors of the bucket, by the names of their fields."""
        return self.state.buckets[self.bucket].shards


@dataclass(frozen=True, slots=True)
class Ranks:
    """The states of all ranks; ``fragments`` are those of each parameter, in its own order.

    ``size`` is the number of ranks that the buckets are cut for, None where no file tells.
    """

    states: tuple[RankState, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    size: int | None

    @property
    def saved(self) -> SavedState:
        """Step and groups, which all ranks have alike."""
        return self.states[0].saved

    def numel(self, index: int) -> int:
        """Return the number of elements of a parameter."""
        return self.fragments[index][-1].param_range[1] if self.fragments[index] else 0

    def fits(self, index: int, weight: StoredTensor) -> bool:
        """Say whether a weight has as many elements as a parameter."""
        return weight.numel == self.numel(index)

    def pieces(self, index: int) -> Iterator[Piece]:
        """Yield where the elements of a parameter are, copies among them."""
        for fragment in self.fragments[index]:
            for state, copy in self._copies():
                mine = state.buckets[fragment.bucket]
                local = None
                if state.rank is not None:
                    local = fragment.owned_by(state.rank, mine.shard_numel)
                if local is not None:
                    yield Piece(state, fragment.bucket, copy, local[2], local[0])

    def _copies(self) -> Iterator[tuple[RankState, int]]:
        seen: dict[int | None, int] = {}
        for state in self.states:
            copy = seen.get(state.rank, 0)
            seen[state.rank] = copy + 1
            yield state, copy


def read_rank(torch_file: TorchFile, file: int, where: str) -> RankState:
    """Read the state of one rank and find out whose it is.

    Raises:
        FormatError: it isn't what Apex writes.
    """
    saved = read_state(torch_file, where)
    buckets = read_buckets(saved.state.get("buckets"), where)
    rank = _rank_of(buckets, where)
    for number, bucket in enumerate(buckets):
        for fragment in bucket.fragments:
            expected = None if rank is None else fragment.owned_by(rank, bucket.shard_numel)
            if fragment.local != expected:
                raise FormatError(
                    f"{where}: buckets[{number}]: ranges of a fragment must be those of rank "
                    f"{rank}, {expected}, got {fragment.local}"
                )
    return RankState(torch_file, file, saved, buckets, rank)


def join_ranks(states: Sequence[RankState], where: str, *, size: int | None = None) -> Ranks:
    """Join the states of all ranks; ``size`` is their number where the file lists them.

    Raises:
        FormatError: they are not of one moment, one is missing, or elements are doubled or lost.
    """
    first = states[0]
    for other in states[1:]:
        _check_same(first, other)
    fragments = _fragments(first)
    _check_listed(first, fragments)
    told = next((b.numel // b.shard_numel for b in first.buckets if b.numel), None)
    if None not in (told, size) and told != size:
        raise FormatError(f"{where}: must have a state for each of {told} ranks, got {size}")
    ranks = Ranks(tuple(states), fragments, told if size is None else size)
    _check_complete(ranks, where)
    return ranks


def _rank_of(buckets: Sequence[Bucket], where: str) -> int | None:
    """Return the rank whose shards the local fragments lie in."""
    found = {
        fragment.local[1][0] // bucket.shard_numel
        for bucket in buckets
        for fragment in bucket.fragments
        if fragment.local is not None
    }
    if len(found) > 1:
        raise FormatError(
            f"{where}: local fragments must be in the shards of one rank, got those of ranks "
            f"{sorted(found)}"
        )
    return found.pop() if found else None


def _check_same(first: RankState, other: RankState) -> None:
    """Check that two ranks are of one moment and have one table."""
    where = other.saved.where
    mine, theirs = other.saved, first.saved
    for what, a, b in (
        ("step", mine.step, theirs.step),
        ("parameter groups", mine.groups, theirs.groups),
        ("the number of buckets", len(other.buckets), len(first.buckets)),
    ):
        if a != b:
            raise FormatError(
                f"{where}: {what} must be as in {theirs.where}, got {a!r:.60} and {b!r:.60}"
            )
    for number, pair in enumerate(zip(other.buckets, first.buckets, strict=True)):
        if _table(pair[0]) != _table(pair[1]):
            raise FormatError(
                f"{where}: buckets[{number}] must have the sizes and fragments that it has in "
                f"{theirs.where}, got others"
            )


def _table(bucket: Bucket) -> tuple[object, ...]:
    """Return what all ranks must say of a bucket alike."""
    shards = tuple((name, shard.dtype) for name, shard in bucket.shards.items())
    places = tuple(fragment.place for fragment in bucket.fragments)
    return bucket.shard_numel, bucket.numel, shards, places


def _fragments(state: RankState) -> tuple[tuple[Fragment, ...], ...]:
    """Return the fragments of each parameter, which must follow each other from its start."""
    where = state.saved.where
    members = [
        (group, member)
        for group, listed in enumerate(state.saved.groups)
        for member in range(len(listed.indices))
    ]
    found: dict[tuple[int, int], list[Fragment]] = {key: [] for key in members}
    for bucket in state.buckets:
        for fragment in bucket.fragments:
            own = found.get((fragment.group, fragment.member))
            if own is None:
                raise FormatError(
                    f"{where}: a fragment must be of a member of a group, got member "
                    f"{fragment.member} of group {fragment.group}"
                )
            own.append(fragment)
    for index, own in enumerate(found.values()):
        own.sort(key=lambda fragment: fragment.param_range)
        _check_chain(state, index, own)
    return tuple(tuple(own) for own in found.values())


def _check_chain(state: RankState, index: int, fragments: Sequence[Fragment]) -> None:
    """Check that a parameter is there once, and goes on only where a bucket is full."""
    where, end = state.saved.where, 0
    for fragment in fragments:
        if fragment.param_range[0] != end:
            raise FormatError(
                f"{where}: fragments of parameter {index} must cover each element once, got one "
                f"from {fragment.param_range[0]} where {end} is next"
            )
        end = fragment.param_range[1]
    for before, after in pairwise(fragments):
        full = state.buckets[before.bucket].numel or before.bucket_range[1]
        if after.bucket_range[0] or before.bucket_range[1] != full:
            raise FormatError(
                f"{where}: parameter {index} must go on at the start of another bucket when one "
                f"is full, got places {before.bucket_range} and {after.bucket_range}"
            )


def _check_listed(state: RankState, fragments: Sequence[tuple[Fragment, ...]]) -> None:
    """Check that each parameter lists the fragments that the buckets have of it."""
    where = state.saved.where
    table: Mapping[object, object] = state.saved.state
    for index, own in enumerate(fragments):
        entry = table.get(index)
        if not isinstance(entry, dict) or "fragments" not in entry:
            raise FormatError(f"{where}: parameter {index} must have its fragments, got none")
        listed = read_fragments(entry["fragments"], f"{where}: parameter {index}")
        if sorted(f.place for f in listed) != sorted(f.place for f in own):
            raise FormatError(
                f"{where}: parameter {index} must list the fragments that the buckets have of it, "
                f"got others"
            )


def _check_complete(ranks: Ranks, where: str) -> None:
    """Check that every rank that owns an element is there."""
    first = ranks.states[0]
    needed: set[int] = set()
    for bucket in first.buckets:
        for fragment in bucket.fragments:
            low, high = fragment.bucket_range
            if high > MAX_RANKS * bucket.shard_numel:
                raise FormatError(
                    f"{where}: must be of at most {MAX_RANKS} ranks, got a bucket of {high} "
                    f"elements in shards of {bucket.shard_numel}"
                )
            needed |= set(range(low // bucket.shard_numel, -(-high // bucket.shard_numel)))
    there = {state.rank for state in ranks.states}
    if missing := sorted(needed - there):
        size = ranks.size if ranks.size is not None else max(needed) + 1
        names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        raise FormatError(
            f"{where}: must have the states of all {size} ranks, got none of rank {names}",
            hint="Apex's ranks saved one file each: put all of them into one directory",
        )
