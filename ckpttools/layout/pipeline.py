"""Which layers does each pipeline stage hold? Counts per model chunk, numbered as Megatron does.

With interleaved stages a rank holds several model chunks. Layers are numbered chunk by chunk:
first the chunks 0 of all stages in order, then the chunks 1, and so on. So counts alone fix the
numbering, for even and uneven stages alike. Source: ``get_transformer_layer_offset``
(megatron/core/transformer/transformer_layer.py), ``get_num_layers_to_build``
(transformer_block.py) and pipeline_parallel_layer_layout.py of core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttools.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Layers per stage and model chunk: ``counts[p][v]``; every stage has as many chunks.

    >>> pipeline = Pipeline(((2, 2), (2, 2)))
    >>> [pipeline.first_layer(p, v) for p, v in pipeline.chunks()]
    [0, 4, 2, 6]
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(stage) for stage in self.counts}
        if len(sizes) != 1 or 0 in sizes or min(min(stage) for stage in self.counts) < 0:
            raise LayoutError(
                f"pipeline: every stage must have the same number of model chunks with at least 0 "
                f"layers, got {self.counts}"
            )

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.counts)

    @property
    def vpp(self) -> int:
        """Number of model chunks of a stage."""
        return len(self.counts[0])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(map(sum, self.counts))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (stage, chunk), stage by stage."""
        return ((p, v) for p in range(self.pp) for v in range(self.vpp))

    def in_layer_order(self) -> Iterator[tuple[int, int]]:
        """Yield (stage, chunk) in the order of the layers that they hold."""
        return ((p, v) for v in range(self.vpp) for p in range(self.pp))

    def first_layer(self, p: int, v: int) -> int:
        """Return the global number of the first layer of a chunk."""
        before = sum(sum(stage[:v]) for stage in self.counts)
        return before + sum(stage[v] for stage in self.counts[:p])

    def is_first(self, p: int, v: int) -> bool:
        """Say whether a chunk holds the embeddings."""
        return (p, v) == (0, 0)

    def is_last(self, p: int, v: int) -> bool:
        """Say whether a chunk holds the final norm and the output layer."""
        return (p, v) == (self.pp - 1, self.vpp - 1)

    def __str__(self) -> str:
        if len({n for stage in self.counts for n in stage}) == 1:
            return f"{self.counts[0][0]} layers a chunk"
        return " ".join("+".join(map(str, stage)) for stage in self.counts)


@dataclass(frozen=True, slots=True)
class Split:
    """How Megatron is told to split layers over stages.

    ``first`` and ``last`` are the layers of the first and last stage where they differ from the
    rest; ``embedding`` and ``loss`` count as a layer of their stage where set.
    """

    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False

    @property
    def uneven(self) -> bool:
        """Whether the first or the last stage has a number of layers of its own."""
        return self.first is not None or self.last is not None


def split_layers(num_layers: int, pp: int, vpp: int, split: Split) -> Pipeline:
    """Split layers over ``pp`` stages of ``vpp`` chunks each.

    >>> split_layers(7, 3, 1, Split(first=1)).counts
    ((1,), (3,), (3,))
    >>> split_layers(6, 2, 2, Split(embedding=True, loss=True)).counts
    ((1, 2), (2, 1))

    Raises:
        LayoutError: the numbers don't divide, or Megatron refuses or can't number such stages.
    """
    if split.uneven and (split.embedding or split.loss):
        raise LayoutError("pipeline: uneven stages can't also count embedding or loss as layers")
    left = num_layers - (split.first or 0) - (split.last or 0)
    if not split.uneven:
        left += split.embedding + split.loss
    stages = pp - (split.first is not None) - (split.last is not None)
    each, rest = divmod(left, stages) if stages > 0 else (0, left)
    if rest or left < 0 or stages < 0 or (split.uneven and stages > 0 and not left):
        raise LayoutError(
            f"pipeline: {left} layers must divide over {max(stages, 0)} stages, got a rest "
            f"or nothing for them"
        )
    if split.uneven and vpp > 1 and not stages:
        raise LayoutError(
            f"pipeline: interleaved stages must have others between an uneven first and last one, "
            f"got {pp} stages"
        )
    totals = [each] * pp
    if split.first is not None:
        totals[0] = split.first
    if split.last is not None:
        totals[-1] = split.last
    if any(total % vpp for total in totals):
        raise LayoutError(
            f"pipeline: layers of each stage must divide over {vpp} model chunks, got {totals}"
        )
    counts = [[total // vpp] * vpp for total in totals]
    counts[0][0] -= split.embedding
    counts[-1][-1] -= split.loss
    if min(map(min, counts)) < 0:
        raise LayoutError(f"pipeline: a chunk must have at least 0 layers, got {counts}")
    return Pipeline(tuple(tuple(stage) for stage in counts))
