"""What do all ranks hold together, and who writes which of it? Agreed once, the same everywhere.

1. Every rank tells which boxes of which tensors it holds; boxes that several hold are equal copies.
2. Each box is written once. Those that one set of ranks holds are dealt evenly among them.
3. What is written must hold each element of each tensor exactly once, or nothing is.

A tensor that no device mesh cuts must be equal on all ranks that have it. A few of its elements are
compared, so a tensor that was cut by hand, of which each rank has another part, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ckpttools.dtypes import dtype
from ckpttools.errors import UnsupportedError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.native.chunked.dealing import deal
from ckpttools.formats.native.chunked.files import ChunkFile, pack_files
from ckpttools.formats.native.chunked.read import chunk_manifest
from ckpttools.hooks.capture import Captured, LiveTensor
from ckpttools.layout.box import Box
from ckpttools.manifest import TensorSpec
from ckpttools.storage.inert_encoder import encode

Key = tuple[str, str]
T = TypeVar("T")

_SAMPLED = 16
"""So many elements of a tensor are compared."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor as one rank tells of it to the others."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank tells of itself; ``samples`` are bytes of some elements of whole tensors."""

    tensors: tuple[HeldTensor, ...]
    samples: Mapping[Key, bytes]
    steps: Mapping[str, int | float]
    values: Mapping[str, Mapping[str, object]]
    groups: tuple[ParamGroup, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """All tensors, the files of all ranks, and what is no tensor."""

    tensors: tuple[TensorSpec, ...]
    files: tuple[ChunkFile, ...]
    steps: Mapping[str, int | float]
    values: Mapping[str, Mapping[str, object]]
    groups: tuple[ParamGroup, ...]


def tell(captured: Captured, *, alone: bool) -> RankState:
    """Return what a rank tells the others; samples are not needed where it is alone."""
    return RankState(
        tuple(map(_held, captured.tensors)),
        {} if alone else _samples(captured),
        captured.steps,
        captured.values,
        captured.groups,
    )


def join(states: Sequence[RankState]) -> Joint:
    """Join what all ranks told; a pure function.

    Raises:
        UsageError: they disagree about a tensor, or on a parameter's step.
        LayoutError: together they don't hold each element of a tensor exactly once.
    """
    tensors, files = _placed(tuple(state.tensors for state in states))
    _check_samples([state.samples for state in states])
    return Joint(
        tensors,
        files,
        _joined("step", [state.steps for state in states]),
        _joined("state", [state.values for state in states]),
        tuple(_merged(states)),
    )


@lru_cache(maxsize=4)  # a run saves the same tensors again and again
def _placed(
    ranks: tuple[tuple[HeldTensor, ...], ...],
) -> tuple[tuple[TensorSpec, ...], tuple[ChunkFile, ...]]:
    """Return all tensors and the files of all ranks."""
    specs: dict[Key, TensorSpec] = {}
    holders: dict[tuple[Key, Box], list[int]] = {}
    for rank, tensors in enumerate(ranks):
        for held in tensors:
            spec = TensorSpec(*held.key, dtype(held.dtype), held.shape)
            _check_same(specs.setdefault(held.key, spec), spec, rank)
            for box in held.boxes:
                mine = holders.setdefault((held.key, box), [])
                if not (held.is_buffer and mine):
                    mine.append(rank)
    listed = tuple(specs.values())
    files = pack_files(listed, _deal(specs, holders, len(ranks)))
    chunk_manifest(listed, files, "model", {})  # proves the cover
    return listed, files


def _held(one: LiveTensor) -> HeldTensor:
    local = one.local
    boxes = tuple(held.box for held in local.boxes)
    return HeldTensor((one.name, one.slot), local.dtype, local.shape, boxes, one.is_buffer)


def _samples(captured: Captured) -> dict[Key, bytes]:
    """Return a few elements of each tensor that must be equal on all ranks that have it."""
    return {
        (one.name, one.slot): _sample(one.local.data)
        for one in captured.tensors
        if not (one.local.is_cut or one.is_buffer)
    }


def _sample(data: Tensor) -> bytes:
    """Return the bytes of some elements, spread over a tensor."""
    if not data.numel() or not data.is_contiguous():
        return b""
    flat = data.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]
    return few.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _deal(
    specs: Mapping[Key, TensorSpec],
    holders: Mapping[tuple[Key, Box], list[int]],
    world_size: int,
) -> list[list[tuple[int, Box]]]:
    """Return which (tensor, box) each rank writes."""
    index = {key: i for i, key in enumerate(specs)}
    shared: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for (key, box), mine in holders.items():
        shared.setdefault(tuple(mine), []).append((index[key], box))
    sizes = [spec.dtype.itemsize for spec in specs.values()]
    dealt: list[list[tuple[int, Box]]] = [[] for _ in range(world_size)]
    for ranks, boxes in shared.items():
        parts = deal([(box, sizes[tensor]) for tensor, box in boxes], len(ranks))
        for rank, part in zip(ranks, parts, strict=True):
            dealt[rank] += [(boxes[i][0], piece) for i, piece in part]
    return dealt


def _check_same(first: TensorSpec, mine: TensorSpec, rank: int) -> None:
    if (first.dtype, first.shape) != (mine.dtype, mine.shape):
        raise UsageError(
            f"{mine}: must be {first.dtype} {first.shape} on every rank, got {mine.dtype} "
            f"{mine.shape} on rank {rank}"
        )


def _check_samples(by_rank: Sequence[Mapping[Key, bytes]]) -> None:
    first: dict[Key, tuple[int, bytes]] = {}
    for rank, samples in enumerate(by_rank):
        for key, sample in samples.items():
            other, expected = first.setdefault(key, (rank, sample))
            if sample != expected:
                raise UnsupportedError(
                    f"{key[0]} ({key[1]}): must be equal on all ranks that hold it whole, got "
                    f"other values on rank {rank} than on rank {other}",
                    hint="make a DTensor of what is cut over ranks",
                )


def _joined(what: str, by_rank: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Join values by name, which must be equal on all ranks that have one.

    Raises:
        UsageError: they are not.
    """
    joined: dict[str, T] = {}
    for rank, mine in enumerate(by_rank):
        for name, value in mine.items():
            first = joined.setdefault(name, value)
            # As they will be stored: a number that is none equals itself there.
            if first != value and encode(first, where=name) != encode(value, where=name):
                raise UsageError(
                    f"{name}: {what} must be {joined[name]!r:.60} on every rank, got {value!r:.60} "
                    f"on rank {rank}"
                )
    return joined


def _merged(states: Sequence[RankState]) -> Iterator[ParamGroup]:
    """Yield the groups; those of equal place and settings are one, over pipeline stages."""
    found: list[tuple[int, dict[str, object], dict[str, None]]] = []
    for state in states:
        for place, group in enumerate(state.groups):
            settings, members = dict(group.settings), dict.fromkeys(group.members or ())
            same = (g for g in found if g[:2] == (place, settings))
            known = next(same, None)
            if known is None:
                found.append((place, settings, members))
            else:
                known[2].update(members)
    for _, settings, members in sorted(found, key=lambda group: group[0]):
        yield ParamGroup(settings, tuple(members))
