"""Do all ranks mean the same, and do all of them know when one has failed?

Ranks that disagree about a shape or a setting would mix up each other's numbers, and a rank that
raises alone leaves the others waiting in a collective. Both functions are collectives themselves:
every rank of the group calls them, and all of them return or all of them raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.collectives import Collectives


class RemoteError(OptimizerError):
    """Another rank of the group raised; the message holds its number and text."""


def check_same(collectives: Collectives, where: str, items: Sequence[tuple[str, str]]) -> None:
    """Refuse to go on unless every rank passes the same (name, value) pairs in the same order.

    Ranks exchange a SHA-256 of the pairs; only where two differ do rank 0 and the first rank
    that differs from it send the pairs themselves.

    Raises:
        OptimizerError: some rank passes other pairs. The message, the same on every rank, names
            the first pair that differs and both values.
    """
    digests = collectives.all_gather_object(_digest(items))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    mine = list(items) if collectives.rank in {0, other} else None
    gathered = collectives.all_gather_object(mine)
    raise OptimizerError(_difference(where, _pairs(gathered[0]), other, _pairs(gathered[other])))


def _digest(items: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, value in items:
        for text in (name.encode(), value.encode()):
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _pairs(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list):
        raise OptimizerError(f"check_same: a rank must send a list of pairs, got {value!r}")
    return value


def _difference(
    where: str, first: list[tuple[str, str]], rank: int, second: list[tuple[str, str]]
) -> str:
    for (name, value), (other_name, other_value) in zip(first, second, strict=False):
        if name != other_name:
            return (
                f"{where}: all ranks must list the same names in the same order, "
                f"got {name} on rank 0 and {other_name} on rank {rank}"
            )
        if value != other_value:
            return (
                f"{where}: {name} must be the same on all ranks, "
                f"got {value} on rank 0 and {other_value} on rank {rank}"
            )
    longer = first if len(first) > len(second) else second
    only, without = (0, rank) if longer is first else (rank, 0)
    name, value = longer[min(len(first), len(second))]
    return (
        f"{where}: all ranks must list the same names, "
        f"got {name} ({value}) on rank {only} and none on rank {without}"
    )


def raise_together(collectives: Collectives, error: Exception | None) -> None:
    """Raise on every rank if any rank passes an error; else return on every rank.

    Raises:
        Exception: the rank's own error, as it is.
        RemoteError: other ranks passed errors and this one didn't; it names the first of them.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    texts = collectives.all_gather_object(text)
    if error is not None:
        raise error
    for rank, message in enumerate(texts):
        if message is not None:
            raise RemoteError(f"rank {rank}: every rank must succeed, got {message}")
