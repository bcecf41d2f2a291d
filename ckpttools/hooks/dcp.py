"""How does a run save what ``torch.distributed.checkpoint`` loads? Each rank a file of its own.

Names are those of torch's state dict APIs (`ckpttools.formats.dcp`), of any optimizer of torch's
and of ours. What torch has no place for stands in ``ckpttools.json`` beside its files. The list of
all files, without which the directory is no checkpoint, is written last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpttools.errors import UsageError
from ckpttools.formats.dcp.contents import Contents, Item, contents_of
from ckpttools.formats.dcp.sidecar import SIDECAR, padding_of, sidecar_document
from ckpttools.formats.dcp.state import NUMBERS, PLAIN_STEP, DcpState, state_of
from ckpttools.formats.dcp.write import file_name, new_chunk
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.capture import STEP, Captured, capture
from ckpttools.hooks.carried_layout import fitting_layout
from ckpttools.hooks.dcp_files import check_stated, held_in, plan_file
from ckpttools.hooks.dcp_pieces import live_boxes, rank_boxes, sharded_specs
from ckpttools.hooks.file_content import joined_digests
from ckpttools.hooks.general import general_objects
from ckpttools.hooks.joint import RankState, join, tell
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.run_state import known_layout, run_objects
from ckpttools.hooks.save_plan import SavePlan
from ckpttools.hooks.together import rank_of
from ckpttools.layout.box import Box
from ckpttools.layout.cover import check_cover
from ckpttools.manifest import TensorSpec
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.optimizer.describe import dtype_name
from ckpttools.storage.dcp_metadata import METADATA_FILE
from ckpttools.storage.dcp_writer import DcpDraft, NewChunk, lay_out_dcp, lay_out_files

Key = tuple[str, str]
Boxes = list[tuple[Key, Box]]


def plan_dcp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> SavePlan:
    """Plan a save for torch's loader.

    A collective call of all ranks: those of the optimizer if it is one of ours, else those of
    ``group``. The arguments are those of ``plan_native`` and ``plan_general``. Keys are
    ``model.<name>`` and ``optimizer.state.<name>.<slot>``, or as in the checkpoint of torch's that
    the run began with.

    Raises:
        CkptError: some of the run has no place in a checkpoint, or ranks disagree.
    """
    state = state_of(carry or {})
    if isinstance(optimizer, ShardedOptimizer):
        if group is not None:
            raise UsageError("group: must not be given, since the optimizer has its own")
        optimizer.finish_param_sync()
        layout = known_layout(optimizer.describe(), carry)
        objects = run_objects(optimizer, iteration=iteration, scheduler=scheduler, carry=carry)
        objects |= {**(extra or {}), "sharded_layout": layout}
        rank, world_size = rank_of(optimizer), layout.topology.world_size
        boxes = [rank_boxes(layout, number) for number in range(world_size)]
        live = live_boxes(layout, rank, optimizer)
        return _plan(sharded_specs(layout), boxes, live, rank, objects, state)
    ranks_of_run = Ranks(group)
    captured: list[Captured] = []

    def look() -> RankState:
        captured.append(capture(model, optimizer))
        return tell(captured[0], alone=ranks_of_run.size == 1)

    joint = join(ranks_of_run.together(look))
    objects = general_objects(
        joint, optimizer, iteration=iteration, scheduler=scheduler, carry=carry
    )
    objects |= {**(extra or {}), "sharded_layout": fitting_layout(joint.tensors, carry)}
    held: list[Boxes] = [[] for _ in range(ranks_of_run.size)]
    for file in joint.files:
        held[file.rank] += [(joint.tensors[one.tensor].key, one.box) for one in file.chunks]
    local = {(one.name, one.slot): one.local for one in captured[0].tensors}
    mine = {(key, box): local[key].view(box) for key, box in held[ranks_of_run.rank]}
    if (kind := _step_kind(optimizer)) is not None:
        state = replace(state, naming=replace(state.naming, step=kind))
    return _plan(joint.tensors, held, mine, ranks_of_run.rank, objects, state)


def _step_kind(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return in which form an optimizer counts steps; None where it doesn't, or not yet."""
    for entry in optimizer.state.values() if optimizer is not None else ():
        step = entry.get(STEP)
        if isinstance(step, Tensor):
            kind = dtype_name(step.dtype)
            return kind if kind in NUMBERS else None
        if step is not None:
            return PLAIN_STEP
    return None


def _plan(
    specs: Sequence[TensorSpec],
    ranks: Sequence[Boxes],
    live: Mapping[tuple[Key, Box], Tensor],
    rank: int,
    objects: Mapping[str, object],
    state: DcpState,
) -> SavePlan:
    """Plan the files of all ranks; ``ranks`` is what each writes, ``live`` this one's elements."""
    contents = contents_of(
        specs,
        objects,
        state,
        padding_of(specs),
        world_size=len(ranks),
        stateless="param_groups" in objects,
    )
    by_key = {spec.key: spec for spec in specs}
    chunks = [new_chunk(contents, by_key[key], box) for key, box in ranks[rank]]
    tensors = {id(chunk): live[held] for chunk, held in zip(chunks, ranks[rank], strict=True)}
    items = _items(contents, specs, chunks, rank)
    files = lay_out_files({file_name(rank): items} if items else {})
    held = {
        id(chunk): (by_key[key], box) for chunk, (key, box) in zip(chunks, ranks[rank], strict=True)
    }

    def finish(stated: Sequence[StatedFile]) -> Mapping[str, bytes]:
        draft = _whole(contents, specs, ranks)
        by_path = {one.path: one for one in stated}
        for written in draft.files:
            check_stated(written, by_path[written.path])
        told = replace(contents.sidecar, digests=joined_digests(stated, specs))
        return {
            SIDECAR: sidecar_document(told, draft.metadata),
            METADATA_FILE: draft.metadata,
        }

    return SavePlan(
        tuple(plan_file(file, tensors) for file in files),
        finish,
        lambda: [one for number, file in enumerate(files) for one in held_in(number, file, held)],
    )


def _whole(contents: Contents, specs: Sequence[TensorSpec], ranks: Sequence[Boxes]) -> DcpDraft:
    """Lay out the files of all ranks.

    Raises:
        LayoutError: they don't hold each element of each tensor once.
    """
    by_key = {spec.key: spec for spec in specs}
    held: dict[Key, list[Box]] = {spec.key: [] for spec in specs}
    files = {}
    for rank, boxes in enumerate(ranks):
        for key, box in boxes:
            held[key].append(box)
        chunks = [new_chunk(contents, by_key[key], box) for key, box in boxes]
        if items := _items(contents, specs, chunks, rank):
            files[file_name(rank)] = items
    for spec in specs:
        check_cover(Box.whole(spec.stored_shape), held[spec.key], where=str(spec))
    return lay_out_dcp(files, paths=contents.paths)


def _items(
    contents: Contents, specs: Sequence[TensorSpec], chunks: Sequence[NewChunk], rank: int
) -> list[Item]:
    """Return all items of a rank's file: the first has objects, and tensors without elements."""
    if rank:
        return list(chunks)
    wholes = ((spec, Box.whole(spec.stored_shape)) for spec in specs)
    empty = [new_chunk(contents, spec, box) for spec, box in wholes if not box.numel]
    return [*contents.items, *chunks, *empty]
