"""How is a model's training state cut over the ranks of a sharded optimizer? The description.

A :class:`ShardedLayout` is everything that fixes which element lies where: parameters with their
tensor-parallel cuts, the model chunks of each pipeline stage, and flat buffers, of whose every
bucket a data-parallel rank owns an equal contiguous piece: Megatron's
(:mod:`ckpttools.layout.megatron`) for ``zero1``, buckets of one size
(:mod:`ckpttools.layout.fixed_buckets`) for ``zero2``. The training optimizer describes itself
with it and the native sharded form stores it, so both get every place from
:mod:`ckpttools.layout.sharded_pieces`.

Ranks are numbered tensor ranks first, then data, then pipeline ranks:
``tp + TP * dp + TP * DP * pp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import LayoutError
from ckpttools.layout import pipeline
from ckpttools.layout.blocks import local_shape, shard_boxes
from ckpttools.layout.box import Box
from ckpttools.layout.fixed_buckets import FixedBuckets, fill_buckets
from ckpttools.layout.megatron import (
    BufferLayout,
    BufferParam,
    Cuts,
    buffer_layout,
    find_variant,
    round_up,
)
from ckpttools.layout.rules import STAGES, Split
from ckpttools.layout.slots import check_slots, whole_slots

MAX_DIMS = 32

Kind = Literal["zero1", "zero2"]
KINDS: tuple[Kind, ...] = ("zero1", "zero2")

ChunkKey = tuple[int, int]
"""Pipeline stage and model chunk in it."""

CutsKey = tuple[int, int, int, str]
"""Tensor rank, pipeline rank, model chunk and parameter dtype."""

FillKey = tuple[int, int, str]
"""Pipeline stage, model chunk and parameter dtype."""


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """A parameter of the whole model.

    ``shape`` is over all tensor ranks, padding rows of a vocabulary included; ``vocab_rows`` are
    the true rows where it is a vocabulary tensor and they are known. ``split`` None: every tensor
    rank holds an equal copy. ``stage`` is ``first``, ``last``, ``layer`` (then ``layer`` is the
    layer's number) or None where nobody knows, and pipeline parallelism can't change.
    ``tied_to`` names the tensor of which this one is a copy on another pipeline stage. A
    parameter that isn't ``trainable`` lies in no buffer and has a weight only. ``vocabulary``
    says that rows are padded by the family's rule.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: Split | None = None
    vocab_rows: int | None = None
    stage: str | None = None
    layer: int | None = None
    tied_to: str = ""
    trainable: bool = True
    vocabulary: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("parameter: must have a name, got none")
        if min(self.shape, default=0) < 0:
            raise LayoutError(f"{self.name}: sizes must be at least 0, got {self.shape}")
        if len(self.shape) > MAX_DIMS:
            raise LayoutError(
                f"{self.name}: must have at most {MAX_DIMS} dimensions, got {len(self.shape)}"
            )
        if self.dtype not in BY_NAME:
            raise LayoutError(
                f"{self.name}: dtype must be one of {', '.join(BY_NAME)}, got {self.dtype!r}"
            )
        if self.stage not in (None, *STAGES) or (self.stage == "layer") != (self.layer is not None):
            raise LayoutError(
                f"{self.name}: stage must be one of {', '.join(STAGES)} or unknown, and a layer "
                f"number be there exactly with 'layer', got {self.stage!r} and {self.layer}"
            )
        if self.layer is not None and self.layer < 0:
            raise LayoutError(f"{self.name}: layer must be at least 0, got {self.layer}")
        if self.vocab_rows is not None and not (
            self.vocabulary and self.shape and 0 <= self.vocab_rows <= self.shape[0]
        ):
            raise LayoutError(
                f"{self.name}: vocab_rows must be rows of a vocabulary tensor of shape "
                f"{self.shape}, got {self.vocab_rows}"
            )

    @property
    def canonical(self) -> str:
        """The name of the logical tensor: a tied copy has that of its original."""
        return self.tied_to or self.name

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape on one of ``tp_size`` tensor ranks.

        Raises:
            LayoutError: ``tp_size`` doesn't divide the dimension that is cut.
        """
        return (
            self.shape if self.split is None else local_shape(self.shape, self.split.dim, tp_size)
        )

    def boxes(self, tp_size: int, tp: int) -> tuple[tuple[Box, Box], ...]:
        """Return (box of the rank's tensor, box of the whole tensor) for each sub-block.

        Raises:
            LayoutError: ``tp_size`` doesn't divide every sub-block.
        """
        if self.split is None:
            whole = Box.whole(self.shape)
            return ((whole, whole),)
        return shard_boxes(self.shape, self.split.dim, self.split.blocks, tp_size, tp)


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel dimensions; ``dp`` counts the ranks that share a buffer."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "dp"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise LayoutError(f"topology: {name} must be at least 1, got {size!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def rank_of(self, *, tp: int, dp: int, pp: int) -> int:
        """Return the number of a rank.

        >>> Topology(tp=2, dp=3, pp=2).rank_of(tp=1, dp=2, pp=1)
        11
        """
        return tp + self.tp * (dp + self.dp * pp)

    def place_of(self, rank: int) -> Place:
        """Return where a rank stands in each dimension; undoes `rank_of`.

        Raises:
            LayoutError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank: must be in 0..{self.world_size - 1}, got {rank}")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Place(tp=tp, dp=dp, pp=pp)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank by its number in each parallel dimension."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a change of topology must know of the model beside its parameters.

    A vocabulary is padded to a multiple of ``vocab_divisor`` times TP (None: TP must divide the
    rows); TP must divide ``heads``; ``pipeline`` is how layers are split where stages change.
    """

    vocab_divisor: int | None = None
    heads: int | None = None
    pipeline: pipeline.Split = field(default_factory=pipeline.Split)

    def __post_init__(self) -> None:
        for name in ("vocab_divisor", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"model: {name} must be at least 1, got {value}")

    def padded_rows(self, rows: int, tp: int) -> int:
        """Return how many rows a vocabulary of ``rows`` has at TP ``tp``.

        >>> ModelFacts(vocab_divisor=16).padded_rows(100, 2)
        128
        """
        return rows if self.vocab_divisor is None else round_up(rows, self.vocab_divisor * tp)


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """Which element of which tensor lies on which rank, for every rank.

    ``params`` are those of the whole model in module order; ``chunks`` the indices of those in
    each model chunk, in module order. A tied copy may be in no chunk (one pipeline stage needs
    none). ``cuts`` that are missing mean one bucket. ``slots`` map, for each parameter dtype, the
    slots to the dtypes they are kept in. The master of a float32 parameter is its weight: it is
    no slot of its own.

    A ``zero2`` layout has no cuts: ``fixed`` holds the size of buckets for each parameter dtype,
    ``fills`` the order in which the buckets of a buffer are filled, where it isn't the reverse of
    module order: groups of indices of ``params``, each of which begins a bucket.

    Raises:
        LayoutError: it contradicts itself.
    """

    kind: Kind
    topology: Topology
    params: tuple[ShardedParam, ...]
    chunks: Mapping[ChunkKey, tuple[int, ...]]
    slots: Mapping[str, Mapping[str, str]]
    variant: str = "core-0.13"
    busbw: bool = False
    cuts: Mapping[CutsKey, Cuts] = field(default_factory=dict)
    grad_dtypes: Mapping[str, str] = field(default_factory=dict)
    facts: ModelFacts = field(default_factory=ModelFacts)
    fixed: Mapping[str, FixedBuckets] = field(default_factory=dict)
    fills: Mapping[FillKey, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"layout: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        find_variant(self.variant)
        self._check_params()
        self._check_chunks()
        self._check_cuts()
        self._check_slots()
        self._check_fills()

    def buffer_params(self, pp: int, vpp: int, dtype: str) -> tuple[int, ...]:
        """Return the indices of the parameters of one buffer, in module order."""
        mine = self.chunks[pp, vpp]
        return tuple(i for i in mine if self.params[i].trainable and self.params[i].dtype == dtype)

    def buffers(self, tp: int, pp: int, vpp: int) -> dict[str, BufferLayout]:
        """Return the buffer of each parameter dtype of a model chunk, in first-seen order.

        Raises:
            LayoutError: the variant has no layout for these parameters.
        """
        mine = [self.params[i] for i in self.chunks[pp, vpp] if self.params[i].trainable]
        kinds = dict.fromkeys(param.dtype for param in mine)
        return {dtype: self._buffer(tp, pp, vpp, dtype) for dtype in kinds}

    def _buffer(self, tp: int, pp: int, vpp: int, dtype: str) -> BufferLayout:
        """Return the buffer of one dtype of a model chunk."""
        shared = self._shared_names()
        indices = self.buffer_params(pp, vpp, dtype)
        params = [
            BufferParam(p.name, prod(p.local_shape(self.topology.tp)), p.name in shared)
            for p in (self.params[i] for i in indices)
        ]
        dp = self.topology.dp
        if self.kind == "zero2":
            places = {index: place for place, index in enumerate(indices)}
            fill = self.fills.get((pp, vpp, dtype), (tuple(reversed(indices)),))
            groups = [[places[index] for index in group] for group in fill]
            return fill_buckets(params, groups, self.fixed[dtype], dp=dp)
        cuts = self.cuts.get((tp, pp, vpp, dtype), Cuts())
        return buffer_layout(params, dp=dp, cuts=cuts, variant=self.variant, busbw=self.busbw)

    def stages(self) -> pipeline.Pipeline | None:
        """Return how many layers each model chunk has; None where stages are not known."""
        if any(param.stage is None for param in self.params):
            return None
        counts = {
            key: len({self.params[i].layer for i in chunk} - {None})
            for key, chunk in self.chunks.items()
        }
        sizes = self.topology
        return pipeline.Pipeline(
            tuple(tuple(counts[p, v] for v in range(sizes.vpp)) for p in range(sizes.pp))
        )

    def replica_of(self, index: int, tp: int) -> int:
        """Return the number of a tensor rank's copy of a parameter; 0 is the one that is read."""
        param = self.params[index]
        copies = self.topology.tp if param.split is None else 1
        mine = tp if param.split is None else 0
        if not param.tied_to:
            return mine
        twins = [i for i, p in enumerate(self.params) if p.tied_to == param.tied_to]
        return copies * (1 + twins.index(index)) + mine

    def stored_slots(self, dtype: str) -> tuple[str, ...]:
        """Return the slots that are stored for parameters of ``dtype``, in the order of files."""
        return tuple(sorted(self.slots.get(dtype, {})))

    def master_is_weight(self, dtype: str) -> bool:
        """Say whether parameters of ``dtype`` have optimizer state whose master is the weight."""
        return dtype == "float32" and len(self.slots.get(dtype, {})) > 1

    def as_zero1(self) -> ShardedLayout:
        """Return it with Megatron's buffers: one bucket each, where it was ``zero2``."""
        if self.kind == "zero1":
            return self
        slots = {dtype: whole_slots(mine) for dtype, mine in self.slots.items()}
        return replace(self, kind="zero1", slots=slots, fixed={}, fills={})

    def _shared_names(self) -> frozenset[str]:
        """Return the parameters that lie on two stages: tied ones, where there are several."""
        if self.topology.pp == 1:
            return frozenset()
        return frozenset(n for p in self.params if p.tied_to for n in (p.name, p.tied_to))

    def _check_params(self) -> None:
        by_name = {param.name: param for param in self.params}
        if len(by_name) != len(self.params):
            raise LayoutError("layout: parameters must have names of their own, got one twice")
        for param in self.params:
            param.boxes(self.topology.tp, 0)
            if not param.tied_to:
                continue
            original = by_name.get(param.tied_to)
            if original is None or original.tied_to or _content(original) != _content(param):
                raise LayoutError(
                    f"{param.name}: a tied copy must be like its original {param.tied_to!r} in "
                    f"shape, dtype and cut, got {'none' if original is None else 'another'}"
                )

    def _check_chunks(self) -> None:
        stages, each = self.topology.pp, self.topology.vpp
        if stages * each != len(self.chunks) or any(
            (p, v) not in self.chunks for p in range(stages) for v in range(each)
        ):
            raise LayoutError(
                f"layout: must have a model chunk for each of {stages} stages x {each}, got "
                f"{len(self.chunks)}"
            )
        placed = [i for chunk in self.chunks.values() for i in chunk]
        if any(type(i) is not int or not 0 <= i < len(self.params) for i in placed):
            raise LayoutError(f"layout: chunks must hold indices below {len(self.params)}")
        if len(set(placed)) != len(placed):
            raise LayoutError("layout: a parameter must be in one model chunk, got one in two")
        for i in set(range(len(self.params))) - set(placed):
            if not self.params[i].tied_to:
                raise LayoutError(f"{self.params[i].name}: must be in a model chunk, got none")

    def _check_cuts(self) -> None:
        topology = self.topology
        for tp, pp, vpp, dtype in self.cuts:
            if not (0 <= tp < topology.tp and (pp, vpp) in self.chunks and dtype in self.slots):
                raise LayoutError(
                    f"layout: cuts must be of a buffer, got tp {tp}, pp {pp}, vpp {vpp}, {dtype}"
                )

    def _check_slots(self) -> None:
        for dtype, slots in self.slots.items():
            check_slots(dtype, slots, parts=self.kind == "zero2")
        for param in self.params:
            if param.trainable and param.dtype not in self.slots:
                raise LayoutError(f"{param.name}: slots must be known for {param.dtype}, got none")

    def _check_fills(self) -> None:
        if self.kind != "zero2":
            if self.fixed or self.fills:
                raise LayoutError("layout: zero1 has no buckets of one size, got a zero2 layout's")
            return
        if self.cuts or self.busbw:
            raise LayoutError("layout: zero2 has buckets of one size, got a zero1 layout's cuts")
        for param in self.params:
            if param.trainable and param.dtype not in self.fixed:
                raise LayoutError(
                    f"{param.name}: the size of buckets must be known for {param.dtype}, got none"
                )
        for (pp, vpp, dtype), groups in self.fills.items():
            filled = sorted(index for group in groups for index in group)
            if (pp, vpp) not in self.chunks or filled != sorted(self.buffer_params(pp, vpp, dtype)):
                raise LayoutError(
                    f"layout: pp {pp}, vpp {vpp}, {dtype}: buckets must be filled with each "
                    f"parameter of the buffer once, got {filled!r:.60}"
                )


def _content(param: ShardedParam) -> tuple[object, ...]:
    """Return what a tied copy has in common with its original."""
    return param.shape, param.dtype, param.split, param.vocab_rows, param.trainable
