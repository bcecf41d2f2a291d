"""Which elements lie where in one rank's ``v1`` state? Buckets and their fragments, checked.

A bucket is a flat run of elements, of which rank *r* owns ``[r * shard, (r + 1) * shard)``. A
*fragment* says which elements of a parameter are which of a bucket, and, where some of them are
the rank's own, which of its shard. What each field must be follows from Apex's placement:

1. parameters are placed one after the other; in a bucket each fragment starts where the one
   before it ends, rounded up to the alignment (128 bytes of gradients);
2. a parameter that a bucket has no room for goes on at the start of another one;
3. a fragment without elements only makes a bucket wait for a parameter, and is passed over.

The rule is held against every file, so a table that was damaged or put together is found. Older
files lack fields: then sizes are those of the tensors. Field names and placement:
``StateBucket``, ``ParameterFragment`` and ``_init_param_state`` of
apex/contrib/optimizers/distributed_fused_adam.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError
from ckpttools.storage.inert import Inert, qualified_name
from ckpttools.storage.torchzip import TensorRef

_MODULE = "apex.contrib.optimizers.distributed_fused_adam"
_BUCKET = f"{_MODULE}.DistributedFusedAdam.StateBucket"
_FRAGMENT = f"{_MODULE}.DistributedFusedAdam.ParameterFragment"
_ALIGNMENTS = (16, 32, 64, 128)
"""128 bytes of float64, float32, float16 and 8-bit gradients."""

PARAMS, REMAINDERS = "params_shard", "param_remainders_shard"
MOMENTS = ("exp_avg_shard", "exp_avg_sq_shard")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements ``param_range`` of a flat parameter are ``bucket_range`` of a bucket.

    ``local`` are the ranges in the rank's shard, in the bucket and in the parameter of what the
    rank owns of them; None where that is nothing.
    """

    group: int
    member: int
    bucket: int
    param_range: Range
    bucket_range: Range
    local: tuple[Range, Range, Range] | None

    @property
    def place(self) -> tuple[object, ...]:
        """What every rank must say alike."""
        return self.group, self.member, self.bucket, self.param_range, self.bucket_range

    def owned_by(self, rank: int, shard_numel: int) -> tuple[Range, Range, Range] | None:
        """Return what ``local`` must be on a rank."""
        low = max(self.bucket_range[0], rank * shard_numel)
        high = min(self.bucket_range[1], (rank + 1) * shard_numel)
        if low >= high:
            return None
        shift = self.param_range[0] - self.bucket_range[0]
        base = rank * shard_numel
        return (low - base, high - base), (low, high), (low + shift, high + shift)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of a rank. ``numel`` is None in files that don't tell it.

    ``fragments`` are those with elements, in the bucket's order; ``shards`` the rank's tensors by
    the name of their field.
    """

    shard_numel: int
    numel: int | None
    fragments: tuple[Fragment, ...]
    shards: Mapping[str, TensorRef]


def read_buckets(value: object, where: str) -> tuple[Bucket, ...]:
    """Read the buckets of one rank.

    Raises:
        FormatError: one is not what Apex's placement gives.
    """
    if not isinstance(value, list):
        raise FormatError(f"{where}: buckets must be a list, got {value!r:.60}")
    buckets = tuple(_bucket(bucket, i, f"{where}: buckets[{i}]") for i, bucket in enumerate(value))
    _check_sizes(buckets, where)
    _check_alignment(buckets, where)
    return buckets


def read_fragments(value: object, where: str) -> tuple[Fragment, ...]:
    """Read a list of fragments; those without elements are left out.

    Raises:
        FormatError: one contradicts itself.
    """
    if not isinstance(value, list):
        raise FormatError(f"{where}: fragments must be a list, got {value!r:.60}")
    found = [_fragment(item, f"{where}: fragments[{i}]") for i, item in enumerate(value)]
    return tuple(f for f in found if f.param_range[0] < f.param_range[1])


def _bucket(value: object, number: int, where: str) -> Bucket:
    fields = _fields(value, _BUCKET, where)
    shards = {
        name: shard
        for name in (PARAMS, REMAINDERS, *MOMENTS)
        if (shard := _shard(fields.get(name), f"{where}: {name}")) is not None
    }
    if missing := [name for name in MOMENTS if name not in shards]:
        raise FormatError(f"{where}: {missing[0]} must be a tensor, got none")
    size = _size(fields, "shard_size", where)
    shard_numel = shards[MOMENTS[0]].numel if size is None else size
    if not shard_numel:
        raise FormatError(f"{where}: a shard must have at least one element, got none")
    for name, shard in shards.items():
        if shard.numel != shard_numel:
            raise FormatError(
                f"{where}: {name} must have the {shard_numel} elements of a shard, got "
                f"{shard.numel}"
            )
    fragments = read_fragments(fields.get("fragments"), where)
    numel = _size(fields, "bucket_size", where)
    _check_places(fragments, number, numel, _size(fields, "filled_size", where), where)
    return Bucket(shard_numel, numel, fragments, shards)


def _fields(value: object, kind: str, where: str) -> Mapping[object, object]:
    """Return the attributes of an instance of a class of Apex's."""
    name = qualified_name(value)
    if not isinstance(value, Inert) or name != kind or not isinstance(value.state, dict):
        got = name or type(value).__name__
        raise FormatError(f"{where}: must be a {kind.rpartition('.')[2]} of Apex, got {got:.100}")
    return value.state


def _shard(value: object, where: str) -> TensorRef | None:
    if value is None:
        return None
    if not isinstance(value, TensorRef) or len(value.shape) != 1 or not value.is_dense:
        raise FormatError(f"{where}: must be a flat tensor, got {value!r:.60}")
    return value


def _size(fields: Mapping[object, object], name: str, where: str) -> int | None:
    """Return a size; None in files of the time before it was a field."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 62):
        raise FormatError(f"{where}: {name} must be a natural number, got {value!r:.40}")
    return value


def _fragment(value: object, where: str) -> Fragment:
    fields = _fields(value, _FRAGMENT, where)
    numbers = [fields.get(name) for name in ("param_group_id", "param_id", "bucket_id")]
    group, member, bucket = (n if type(n) is int and n >= 0 else -1 for n in numbers)
    if min(group, member, bucket) < 0:
        raise FormatError(f"{where}: its numbers must be natural, got {numbers!r:.60}")
    param, place = (_range(fields, name, where) for name in ("param_range", "bucket_range"))
    if param is None or place is None or param[1] - param[0] != place[1] - place[0]:
        raise FormatError(
            f"{where}: param_range and bucket_range must be equally long, got {param} and {place}"
        )
    names = ("shard_range", "shard_bucket_range", "shard_param_range")
    parts = [_range(fields, name, where) for name in names]
    shard, in_bucket, in_param = parts
    is_local = fields.get("in_local_shard")
    if type(is_local) is not bool:
        raise FormatError(f"{where}: in_local_shard must be true or false, got {is_local!r:.40}")
    if not is_local:
        return Fragment(group, member, bucket, param, place, None)
    if shard is None or in_bucket is None or in_param is None:
        raise FormatError(f"{where}: a local fragment must have its ranges, got {parts}")
    return Fragment(group, member, bucket, param, place, (shard, in_bucket, in_param))


def _range(fields: Mapping[object, object], name: str, where: str) -> Range | None:
    match fields.get(name):
        case None:
            return None
        case (int(start), int(stop)) if 0 <= start <= stop < 1 << 62:
            return start, stop
        case value:
            raise FormatError(f"{where}: {name} must be two ascending numbers, got {value!r:.60}")


def _check_places(
    fragments: Sequence[Fragment], number: int, numel: int | None, filled: int | None, where: str
) -> None:
    """Check that fragments follow each other inside their bucket."""
    end = 0
    for fragment in fragments:
        if fragment.bucket != number:
            raise FormatError(f"{where}: its fragments must name it, got bucket {fragment.bucket}")
        if fragment.bucket_range[0] < end:
            raise FormatError(
                f"{where}: fragments must follow each other without overlap, got one at "
                f"{fragment.bucket_range[0]} where the last ends at {end}"
            )
        end = fragment.bucket_range[1]
    if numel is not None and end > numel:
        raise FormatError(f"{where}: fragments must lie in its {numel} elements, got {end}")
    if filled is not None and end != filled:
        raise FormatError(f"{where}: fragments must end at filled_size {filled}, got {end}")


def _check_sizes(buckets: Sequence[Bucket], where: str) -> None:
    """Check that a bucket is as many shards everywhere, so that it is as many ranks' buckets."""
    ranks = {b.numel / b.shard_numel for b in buckets if b.numel is not None}
    if len(ranks) > 1 or not all(count.is_integer() for count in ranks):
        raise FormatError(
            f"{where}: bucket_size must be the same multiple of shard_size in all buckets, got "
            f"{sorted(ranks)}"
        )


def _check_alignment(buckets: Sequence[Bucket], where: str) -> None:
    """Check that one alignment explains where every fragment starts and a shard ends."""
    for alignment in _ALIGNMENTS:
        if all(_is_aligned(bucket, alignment) for bucket in buckets):
            return
    raise FormatError(
        f"{where}: fragments must start where the one before ends, rounded up to one of "
        f"{', '.join(map(str, _ALIGNMENTS))} elements, got others"
    )


def _is_aligned(bucket: Bucket, alignment: int) -> bool:
    end = 0
    for fragment in bucket.fragments:
        if fragment.bucket_range[0] != -(-end // alignment) * alignment:
            return False
        end = fragment.bucket_range[1]
    return bucket.shard_numel % alignment == 0
