"""What does the rest of the package see of a sharded optimizer, whichever kind it is?

Saving, loading, gathering and describing work on these few attributes alone, so they are written
once for both kinds. Values of a piece are always seen as fp32, however they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ckpttools.layout.megatron import BufferLayout
from ckpttools.optimizer.collectives import Collectives
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.grad_scaler import GradScaler
from ckpttools.optimizer.parameters import ManagedParam
from ckpttools.optimizer.ranges import ParamRange


class LiveSlot(Protocol):
    """One parameter of a buffer, and whether it has a gradient."""

    managed: ManagedParam
    param: nn.Parameter
    used: bool

    @property
    def name(self) -> str:
        """The parameter's name."""
        ...


class LiveBucket(Protocol):
    """A stretch of a buffer that is communicated at once."""

    index: int

    @property
    def slots(self) -> Sequence[LiveSlot]:
        """The parameters that have elements in it."""
        ...

    @property
    def local_params(self) -> Tensor:
        """This rank's piece of the parameters, 1-D, padding included; only to be read."""
        ...

    @property
    def param_gather_handle(self) -> object | None:
        """A gather that is under way, or None."""
        ...

    def finish_param_sync(self) -> None:
        """Wait until every rank's piece of the parameters is there."""
        ...


class LiveBuffer(Protocol):
    """The parameters of one dtype of a model chunk."""

    chunk: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device
    layout: BufferLayout

    @property
    def slots(self) -> Sequence[LiveSlot]:
        """The parameters in module order."""
        ...

    @property
    def buckets(self) -> Sequence[LiveBucket]:
        """The buckets in the order of the buffer."""
        ...


class LivePiece(Protocol):
    """The part of one parameter that this rank owns in one bucket."""

    @property
    def slot(self) -> LiveSlot:
        """The parameter."""
        ...

    @property
    def range(self) -> ParamRange:
        """Where the part lies."""
        ...

    @property
    def grad(self) -> Tensor:
        """The reduced gradient, 1-D."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether this rank's copy is the one that norms count."""
        ...

    @property
    def name(self) -> str:
        """The parameter's name."""
        ...

    def logical_slots(self) -> tuple[str, ...]:
        """Return the slots of state: the master where it isn't the weight, and both moments."""
        ...

    def values(self, slot: str) -> Tensor:
        """Return a slot's values: fp32, 1-D; perhaps a view, so only to be read."""
        ...

    def put(self, slot: str, values: Tensor) -> None:
        """Keep fp32 values, 1-D, in whatever form the slot has."""
        ...

    def memory(self, slot: str) -> Tensor | None:
        """Return the memory, 1-D, in which a slot's fp32 values are kept as they are.

        None where they are kept in another form. Writing there is as good as `put`.
        """
        ...

    def stored(self) -> dict[str, Tensor]:
        """Return the state as it is kept, as views, for a state of this rank alone."""
        ...


class LiveShard(Protocol):
    """This rank's state of one bucket."""

    @property
    def bucket(self) -> LiveBucket:
        """The bucket."""
        ...

    def slots(self) -> dict[str, Tensor]:
        """Return the flat state by slot, as native files hold it."""
        ...

    def logical_slots(self) -> tuple[str, ...]:
        """Return the names that `logical` knows."""
        ...

    def logical(self, slot: str) -> Tensor:
        """Return a slot's values over the whole shard, fp32; zero in padding."""
        ...

    def read_params(self) -> None:
        """Make the masters anew of the parameters."""
        ...


class StateOwner(Protocol):
    """What saving, loading, gathering and describing need of an optimizer."""

    config: OptimizerConfig
    dp: Collectives
    tp: Collectives
    pp: Collectives
    managed: tuple[ManagedParam, ...]
    steps: dict[str, int]
    trains: frozenset[str]
    scaler: GradScaler | None
    param_groups: list[dict[str, Any]]

    @property
    def kind(self) -> str:
        """``zero1`` or ``zero2``."""
        ...

    @property
    def buffers(self) -> Sequence[LiveBuffer]:
        """The buffers, by model chunk and dtype."""
        ...

    @property
    def shards(self) -> Sequence[LiveShard]:
        """This rank's state of every bucket, in the order of buffers and buckets."""
        ...

    @property
    def pieces(self) -> Sequence[LivePiece]:
        """The pieces of all shards."""
        ...


Items = Sequence[tuple[str, str]]
"""Names and values that must be equal on all ranks."""

Settings = Mapping[str, object]
"""A parameter group without its members."""
