"""What of a Megatron checkpoint is not tensors, kept for a writer of the same format.

It rides in the Manifest's ``objects`` under ``megatron``; no other format looks into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpttools.errors import RuleError
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.groups import GroupParam, Groups
from ckpttools.layout.megatron import BufferLayout, Cuts
from ckpttools.layout.pipeline import Pipeline
from ckpttools.layout.rules import Rule, Rules
from ckpttools.storage.inert import Inert

OUTPUT_WEIGHT = "output_layer.weight"

RankId = tuple[int, int]
"""Tensor rank and pipeline rank."""

ChunkId = tuple[int, int]
"""Pipeline stage and model chunk in it."""

BufferId = tuple[int, int, int, str]
"""Tensor rank, pipeline rank, model chunk and parameter dtype."""

Buffers = Mapping[BufferId, tuple[Cuts, BufferLayout]]
"""For each buffer the cuts taken and the geometry."""


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter of the whole model.

    ``name`` is its global name in a stage's file (a tied output layer keeps its own), ``shape``
    the shape over all tensor ranks, padding rows of a vocabulary included; ``vocab_rows`` are the
    true rows where they are known. ``location`` and ``requires_grad`` are as the source's file
    has them.
    """

    name: str
    rule: Rule
    shape: tuple[int, ...]
    dtype: str
    vocab_rows: int | None = None
    location: str = "cpu"
    requires_grad: bool = False

    @property
    def canonical(self) -> str:
        """The name of the logical tensor: a tied copy has that of the embedding."""
        return self.rule.tied_to or self.name

    @property
    def group_param(self) -> GroupParam:
        """The parameter as the grouping rule sees it."""
        return GroupParam(self.name, len(self.shape), self.rule.kind)


@dataclass(frozen=True, slots=True, eq=False)
class MegatronState:
    """Everything that a Megatron writer needs beside the tensors.

    ``chunks`` are the parameters of each model chunk in module order. ``entries`` are the names
    of all entries of ``model`` with global layer numbers, in module order, ``_extra_state`` among
    them; ``modules`` those of its ``_metadata``. ``trees`` are the rank files' top-level dicts,
    with None in place of the model. ``extra_states`` are by tensor rank and global entry name.
    """

    iteration_name: str
    layouts: tuple[str, ...]
    version: str
    run: Run
    pipeline: Pipeline
    rules: Rules
    chunks: Mapping[ChunkId, tuple[ParamInfo, ...]]
    entries: tuple[str, ...]
    modules: Mapping[str, object] | None
    trees: Mapping[RankId, Mapping[str, object]]
    args: Mapping[RankId, Inert]
    groups: Groups | None
    buffer_keys: Mapping[str, object]
    slots: tuple[str, ...]
    buffers: Buffers
    cuts_from: str
    optimizer_location: str
    extra_states: Mapping[tuple[int, str], object]
    accept_loss: frozenset[str]

    @property
    def params(self) -> tuple[ParamInfo, ...]:
        """The parameters of the whole model in module order, a tied copy included."""
        order = self.pipeline.in_layer_order()
        return tuple(info for chunk in order for info in self.chunks[chunk])


def optimizer_chunks(run: Run) -> tuple[range, ...]:
    """Return which model chunks each chained optimizer of a rank has.

    Megatron makes two optimizers where the parameter gather overlaps with the step: one for chunk
    0, whose parameters are needed first, and one for the rest.
    """
    if run.chained and run.vpp > 1:
        return range(1), range(1, run.vpp)
    return (range(run.vpp),)


def tied_output(state: MegatronState, run: Run, infos: Mapping[str, ParamInfo]) -> ParamInfo:
    """Return the output layer of a run that ties it, as its embedding is.

    Raises:
        RuleError: the rules have none that is tied.
    """
    rule = state.rules.find(OUTPUT_WEIGHT, run.facts)
    if rule.tied_to not in infos:
        raise RuleError(
            f"{OUTPUT_WEIGHT}: must be tied to a parameter of the model, got {rule.tied_to!r}"
        )
    return replace(infos[rule.tied_to], name=OUTPUT_WEIGHT, rule=rule)
