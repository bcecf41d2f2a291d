"""How is a run saved and loaded that has any optimizer of torch? Each rank its own part.

For plain models under DistributedDataParallel, FSDP2 and other DTensor models, and their
optimizers. A save is the chunks that fall to each rank, in the format ``sharded``, which any layout
loads. A load takes every format that is read here:

1. Rank 0 opens the checkpoint and holds its formula against the evidence in its files; then all
   ranks open it.
2. Everything that this run needs must be there, and the run must have a place for everything that
   is there: every difference is found, on every rank, before a tensor is read.
3. A rank reads the boxes that it holds, into fresh memory.
4. When all ranks have, all take over. An error on any of them leaves all as they were.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ckpttools import api
from ckpttools.errors import system_errors
from ckpttools.formats import ReadOptions
from ckpttools.formats.native.chunked.document import chunk_document
from ckpttools.formats.native.chunked.files import ChunkFile
from ckpttools.formats.native.chunked.read import chunks_of
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, StatedFile
from ckpttools.formats.native.objects import carried_documents
from ckpttools.hooks.capture import Captured, capture
from ckpttools.hooks.carried_layout import fitting_layout
from ckpttools.hooks.differences import Differences
from ckpttools.hooks.file_content import Held, joined_digests
from ckpttools.hooks.joint import Joint, RankState, join, tell
from ckpttools.hooks.local_tensors import LocalTensor
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.reading import read_wanted
from ckpttools.hooks.restore import Restored
from ckpttools.hooks.run_state import LIVE
from ckpttools.hooks.save_plan import FilePlan, Item, SavePlan
from ckpttools.hooks.wanted import Wanted
from ckpttools.hooks.write_files import write_live
from ckpttools.layout.megatron import VARIANTS
from ckpttools.manifest import TensorSpec
from ckpttools.storage.commit import Staging
from ckpttools.storage.local import write_new_file


def plan_general(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> SavePlan:
    """Plan a save of a model and an optimizer of torch's kind.

    A collective call of all ranks of ``group`` (the default group). ``scheduler`` is the state of
    Megatron's kind of scheduler as plain data; ``carry`` is ``Restored.objects`` of the checkpoint
    that the run began with; ``extra`` are further objects, equal on every rank.

    Raises:
        CkptError: some of the run has no place in a checkpoint, or ranks disagree; raised on every
            rank.
    """
    ranks = Ranks(group)
    captured: list[Captured] = []

    def look() -> RankState:
        captured.append(capture(model, optimizer))
        return tell(captured[0], alone=ranks.size == 1)

    joint = join(ranks.together(look))
    objects = general_objects(
        joint, optimizer, iteration=iteration, scheduler=scheduler, carry=carry
    )
    objects |= extra or {}
    objects["sharded_layout"] = fitting_layout(joint.tensors, carry)
    live = {(one.name, one.slot): one.local for one in captured[0].tensors}
    mine = [file for file in joint.files if file.rank == ranks.rank]
    files = tuple(_file_plan(file, joint.tensors, live) for file in mine)

    def contents() -> Sequence[Held]:
        chunks = chunks_of(joint.tensors, mine)
        return [(joint.tensors[chunk.tensor], chunk) for chunk in chunks]

    def finish(stated: Sequence[StatedFile]) -> Mapping[str, bytes]:
        carried = carried_documents(objects)
        data = chunk_document(
            joint.tensors,
            joint.files,
            stated,
            objects,
            carried,
            world_size=ranks.size,
            digests=joined_digests(stated, joint.tensors),
        )
        return {MANIFEST_FILE: data}

    return SavePlan(files, finish, contents)


@system_errors()
def save_general(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a model and an optimizer of torch's kind; see :func:`plan_general`.

    A collective call of all ranks, which must see one filesystem. Returns the directory.

    Raises:
        CkptError: any rank could not write; raised on every rank, and nothing was published.
    """
    place = Path(os.path.abspath(directory))
    ranks = Ranks(group)
    plan = plan_general(
        model,
        optimizer,
        iteration=iteration,
        scheduler=scheduler,
        carry=carry,
        extra=extra,
        group=group,
    )
    mine: list[Staging] = []

    def enter() -> str:
        if ranks.rank == 0:
            mine.append(Staging(place, overwrite=overwrite).__enter__())
        return str(mine[0].path) if mine else ""

    def publish(stated: Sequence[StatedFile]) -> None:
        for staging in mine:
            for path, data in plan.finish(stated).items():
                write_new_file(staging.path / path, data)
            staging.publish()

    try:
        root = Path(ranks.together(enter)[0])
        written = ranks.together(lambda: write_live(root, plan))
        ranks.together(lambda: publish([file for files in written for file in files]))
    finally:
        for staging in mine:
            staging.__exit__(None, None, None)
    return place


@system_errors()
def load_general(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    weights_only: bool = False,
    strict: bool = True,
    allow: Collection[str] = (),
    cross_check: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Restored:
    """Load a checkpoint of any format that is read here, whatever topology wrote it.

    A collective call of all ranks of ``group`` (the default group). Weights, buffers, the
    optimizer's state, steps and the settings of parameter groups are taken. A float32 weight of
    which the checkpoint has a 16-bit one and its float32 master is taken from the master.

    ``strict`` refuses what is missing and what has no place here, but for what ``allow`` names:
    shell patterns for a name or ``name:slot``, or ``optimizer`` or ``param_groups``; other words
    are the caller's. What is missing stays as it is; a parameter of whose state a part is
    missing begins anew. No optimizer is stepped and no random number drawn.

    Raises:
        CkptError: something is missing or left over, or its shape or dtype is another, or the
            files are damaged; raised on every rank, and nothing was changed.
    """
    ranks = Ranks(group)
    opened: list[api.Opened] = []
    found: list[tuple[Wanted, tuple[str, ...], int]] = []

    def open_first() -> tuple[str, ...]:
        if ranks.rank == 0:
            opened.append(
                api.open_checkpoint(path, format=format, options=options, cross_check=cross_check)
            )
        return opened[0].layouts if opened else ()

    layouts = ranks.together(open_first)[0]

    def match() -> frozenset[str]:
        if not opened:  # the layout that the evidence allows was found by the first rank
            variant = next((name for name in layouts if name in VARIANTS), None)
            known = replace(options or ReadOptions(), layout=variant)
            opened.append(
                api.open_checkpoint(path, format=format, options=known, cross_check=False)
            )
        manifest = opened[0].manifest
        differences = Differences(str(path), strict=strict, allow=allow)
        wanted = Wanted(manifest, model, None if weights_only else optimizer, differences)
        found.append((wanted, (), 0))
        return frozenset(wanted.names)

    known = frozenset().union(*ranks.together(match))
    wanted = found[0][0]

    def read() -> int:
        unused = wanted.check_unused(known)
        wanted.differences.check()
        found[0] = wanted, unused, read_wanted(opened[0].manifest, wanted.reads)
        return 0

    ranks.together(read)
    wanted.install()
    _, unused, read_bytes = found[0]
    return Restored(
        path=str(path),
        format=opened[0].format.name,
        tensors=len(wanted.reads),
        read_bytes=read_bytes,
        unused=unused,
        notes=(*opened[0].notes, *wanted.differences.notes),
        objects=opened[0].manifest.objects,
    )


def _file_plan(
    file: ChunkFile, tensors: Sequence[TensorSpec], live: Mapping[tuple[str, str], LocalTensor]
) -> FilePlan:
    items = tuple(
        Item(chunk.key, chunk.offset, live[tensors[chunk.tensor].key].view(chunk.box))
        for chunk in file.chunks
    )
    return FilePlan(file.path, file.header, file.size_bytes, items)


def general_objects(
    joint: Joint,
    optimizer: torch.optim.Optimizer | None,
    *,
    iteration: int | None,
    scheduler: Mapping[str, object] | None,
    carry: Mapping[str, object] | None,
) -> dict[str, object]:
    """Return what goes into the checkpoint beside tensors."""
    objects = {key: value for key, value in (carry or {}).items() if key not in LIVE}
    foreign = objects.get("carried")
    for name in foreign if isinstance(foreign, Mapping) else ():
        objects.pop(name, None)  # a format's own state, of the step it was read at
    if joint.steps:
        objects["step"] = dict(joint.steps)
    if optimizer is not None:
        objects["param_groups"] = joint.groups
        decoupled = {
            group.settings["decoupled_weight_decay"]
            for group in joint.groups
            if "decoupled_weight_decay" in group.settings and group.settings.get("weight_decay")
        }
        if len(decoupled) == 1:
            objects["adam_w_mode"] = decoupled.pop()
    if joint.values:
        objects["state_values"] = {name: dict(value) for name, value in joint.values.items()}
    if iteration is not None:
        objects["iteration"] = iteration
    if scheduler is not None:
        objects["opt_param_scheduler"] = dict(scheduler)
    return objects
