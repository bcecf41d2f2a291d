"""How does one conversion run, from a plan to files that are proven equal to their source?

1. Every file of the draft is created in full size; headers are written.
2. The plan is executed; checksums are folded from the pieces as they pass, and written.
3. The new files are read back by the format's own reader, as a stranger would, and every byte of
   every tensor is compared with the source. Where work was resumed, every other byte is checked
   against its checksum too.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttools import comparison, digests, evidence, findings
from ckpttools.errors import MismatchError, PlanError, StorageError
from ckpttools.executor import Progress, Resources, execute
from ckpttools.formats import Draft, Format, Patch, ReadOptions, Target, Written
from ckpttools.job import Stamps, bytes_of, is_whole, make_files, new_place, proven
from ckpttools.manifest import MASTER, REMAINDER, WEIGHT, Manifest, summary_by_slot
from ckpttools.plan import Plan, make_plan
from ckpttools.report import Report, size_text
from ckpttools.selection import Selection, select
from ckpttools.storage.journal import Journal
from ckpttools.storage.local import FilePool, write_new_file

Stage = Callable[[str, int], Progress | None]
"""Told the name and the number of bytes of each long step; returns what to tell of progress."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint as one Manifest: its format, the layout variants that it fits, remarks.

    ``weights_compared`` counts the weights that were held against their masters; ``stamps`` are
    the files' sizes and times of change from before anything of them was compared.
    """

    manifest: Manifest
    format: Format
    layouts: tuple[str, ...]
    notes: tuple[str, ...]
    weights_compared: int
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven of a result, and what of the source it turned out not to hold."""

    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()


def lay_out(
    fmt: Format, source: Manifest, target: Target, root: str, resources: Resources
) -> tuple[Draft, Plan]:
    """Lay out the destination's files and plan the copies into them.

    The plan is made from the draft's view of the source, where it has one. The draft's notes say
    what that changes and what becomes of rows of vocabulary padding; where elements are rounded
    anew, or rows have no room, the source is read for them.

    Raises:
        UsageError: the target can't hold the source.
        PlanError: an element would be lost, doubled or invented.
        StorageError: the source can't be read.
    """
    draft = fmt.lay_out(source, target, root)
    plan = plan_of(source, draft)
    notes = (
        *draft.notes,
        *findings.view_notes(source, plan.src, resources),
        *findings.padding_notes(plan, resources),
    )
    finish = digests.compared(draft.finish, digests.stated(source, plan), source.root)
    return replace(draft, notes=notes, finish=finish), plan


def plan_of(source: Manifest, draft: Draft) -> Plan:
    """Plan the copies into a draft's files, from its view of the source where it has one.

    Raises:
        PlanError: an element would be lost, doubled or invented, or the view is of something else.
    """
    view = draft.source or source
    if (view.root, view.files) != (source.root, source.files):
        raise PlanError(f"{source.root}: a view must be of the source's files, got {view.root}")
    hidden = source.index().keys() - view.index().keys() - set(draft.left_out)
    if hidden:
        name, slot = min(hidden)
        raise PlanError(f"{name} ({slot}): must be in the view or left out, got neither")
    return make_plan(view, draft.manifest, left_out=(*draft.left_out, *draft.aliases))


def choose(source: Opened, selection: Selection) -> tuple[Opened, tuple[str, ...]]:
    """Return the source with only the wanted tensors, and lines about those that are left out.

    Raises:
        UsageError: a pattern fits nothing, or nothing is left.
    """
    if not selection:
        return source, ()
    manifest, dropped = select(source.manifest, selection)
    lines = tuple(
        f"{slot}: {count} tensors of {size_text(size)} are left out as asked"
        for slot, (count, size) in summary_by_slot(dropped).items()
    )
    return replace(source, manifest=manifest), lines


def under(draft: Draft, plan: Plan, root: Path) -> tuple[Draft, Plan]:
    """Return a draft and its plan with the files under ``root``."""
    manifest = replace(draft.manifest, root=str(root))
    return replace(draft, manifest=manifest), replace(plan, dst=manifest)


def check_room(draft: Draft, place: Path) -> None:
    """Refuse to start where the files can't fit on the disk; those that are there need no room.

    Raises:
        StorageError: too little is free.
    """
    need = sum(f.size_bytes for f in draft.manifest.files if not is_whole(place, f))
    free = shutil.disk_usage(place).free
    if need > free:
        raise StorageError(
            f"{place.parent}: must have {size_text(need)} free, got {size_text(free)}",
            hint="free some room, or choose another disk",
        )


def write(
    draft: Draft, plan: Plan, resources: Resources, journal: Journal, stage: Stage | None
) -> int:
    """Write all files of a draft: headers, payload, checksums.

    Tiles that ``journal`` knows and whose bytes are still right are not written again. Returns
    how many those are.

    Raises:
        StorageError: a file can't be read or written.
    """
    root = Path(draft.manifest.root)
    make_files(draft.manifest)
    known = journal.known
    progress = stage("check", bytes_of(known)) if stage and known else None
    right = proven(draft.manifest, known, resources, progress)
    finished = {done.number: done for done in right}
    patch(draft, draft.patches)
    log = digests.DigestLog() if draft.wants_digests else None
    progress = stage("write", plan.stored_bytes) if stage else None
    pieces = execute(
        plan,
        resources=resources,
        digest=log,
        journal=journal,
        finished=finished,
        progress=progress,
    )
    sums = {(d.name, d.slot): d.crc32c for d in log.result(plan.dst.tensors)} if log else {}
    finish = draft.finish(Written(pieces.crc32(draft.seals), sums))
    patch(draft, finish.patches)
    for new in finish.new_files:
        write_new_file(new_place(root / new.path), new.data)
    return len(finished)


def patch(draft: Draft, patches: Sequence[Patch]) -> None:
    """Write small pieces of bytes into the draft's files."""
    paths = [file.path for file in draft.manifest.files]
    with FilePool(draft.manifest.root, paths, writable=True) as pool:
        for patch in patches:
            pool.write_at(patch.file, patch.offset, patch.data)


def prove(
    fmt: Format,
    source: Opened,
    draft: Draft,
    plan: Plan,
    options: ReadOptions,
    resources: Resources,
    stage: Stage | None,
    *,
    resumed: bool = False,
) -> Proof:
    """Read the new files back and compare them with the source; return what was proven.

    Bytes that are no tensor's were just made by this process; where an earlier one made some of
    the files, they are held against their checksums too.

    Raises:
        MismatchError: something differs.
        ReplicaError: a copy differs from the first one.
    """
    root, aliases = Path(plan.dst.root), frozenset(draft.aliases)
    if resumed and (problems := fmt.check(root)):
        raise MismatchError(f"{root}: must be sound after work was resumed, got {problems[0]}")
    reading = fmt.read(root, _for_result(options, same=fmt.name == source.format.name))
    found = [c.manifest for c in reading.candidates]
    again = [m for m in found if _places(m, aliases) == _places(plan.dst)]
    if len(again) != 1:
        raise MismatchError(
            f"{root}: its reader must find every tensor where it was written, got other places"
        )
    total = comparison.total_bytes(plan.src, again[0])
    progress = stage("compare", total) if stage else None
    result = comparison.compare(plan.src, again[0], resources, progress)
    only_b = [key for key in result.only_b if key not in aliases]
    if not result.equal or only_b or result.padding or result.fresh_nonzero:
        first = [*map(str, result.differences), *map(str, result.padding), *map(str, only_b)]
        shared = any((d.name, d.slot) in aliases for d in result.differences)
        raise MismatchError(
            f"{root}: must equal its source, got {(first or ['padding that is not zero'])[0]}",
            hint="a float32 master is stored as its weight, which it must equal" if shared else "",
        )
    unexpected = set(result.only_a) - (set(plan.left_out) - set(aliases))
    if unexpected:
        raise MismatchError(f"{root}: must hold every tensor, got none of {min(unexpected)}")
    evidence.check_replicas(again[0], resources)  # compare() reads the first copy of each
    lost = comparison.settings_lost(source.manifest.objects, again[0].objects)
    if lost and source.format.name == fmt.name:
        raise MismatchError(f"{root}: parameter groups must keep {lost[0]}, got none")
    size = size_text(result.compared_bytes)
    line = f"read back: {result.compared} tensors, {size}, equal the source bit for bit"
    if changed := len(findings.changed(source.manifest, plan.src)):
        line += f", {changed} of them once rounded or widened"
    lines = [line]
    if draft.wants_digests and (known := digests.stated(source.manifest, plan)):
        lines.append(f"content of {len(known)} tensors equals the digests taken when it was saved")
    rows = []
    if lost:
        verb = "has" if len(lost) == 1 else "have"
        rows.append(f"parameter groups: {', '.join(lost)} {verb} no place in it")
    rows += _not_there(source.manifest, again[0], draft)
    return Proof(tuple(lines), tuple(rows))


_TOLD = (
    "iteration",
    "step",
    "num_floating_point_operations_so_far",
    "opt_param_scheduler",
    "grad_scaler",
    "args",
    "adam_w_mode",
    "state_values",
    "training",
    "per_rank_state",
    "param_groups",
)
"""Objects of which a report says if the result hasn't got them."""

_TOLD_OF_WEIGHTS = ("iteration", "num_floating_point_operations_so_far", "args", "training")
"""Those of a result without state of an optimizer."""


def _not_there(source: Manifest, result: Manifest, draft: Draft) -> Iterator[str]:
    """Say which of the source's objects the result lacks, unless its format has said so."""
    has_state = any(spec.slot != WEIGHT for spec in result.tensors)
    for key in _TOLD if has_state else _TOLD_OF_WEIGHTS:
        word = re.compile(rf"(?<![\w.]){key}(?![\w])")  # not the ``step`` of ``global_step``
        told = any(word.search(line) for line in (*draft.lost, *draft.carried, *draft.notes))
        if source.objects.get(key) and result.objects.get(key) is None and not told:
            yield f"{key}: the source has it, and the result has no place for it"


def _for_result(options: ReadOptions, *, same: bool) -> ReadOptions:
    """Return what a user told of the source that is true of the result too.

    Its names and weights lie in its own files; a layout is that of one format.
    """
    layout = options.layout if same else None
    return replace(options, layout=layout, names_path=None, model_path=None)


def _places(manifest: Manifest, without: Collection[tuple[str, str]] = ()) -> set[object]:
    """Return at which byte each element of each tensor lies, some tensors left out."""
    return {
        (
            manifest.tensors[c.tensor],
            c.region,
            c.codec,
            tuple(
                (manifest.files[p.extent.file].path, p.extent.offset, p.extent.length, p.strides)
                for p in c.parts
            ),
        )
        for c in manifest.chunks
        if manifest.tensors[c.tensor].key not in without
    }


def source_proof(opened: Opened, copies: int) -> list[str]:
    """Return a line for each check that the source has passed."""
    lines = []
    if opened.weights_compared:
        lines.append(
            f"layout {'/'.join(opened.layouts)}: {opened.weights_compared} weights equal their "
            f"masters, rounded"
        )
    if copies:
        lines.append(f"{copies} copies (norms and other replicas) equal the first bit for bit")
    return lines


def not_checked(opened: Opened, *, cross_check: bool) -> list[str]:
    """Return what a verification should have checked and couldn't."""
    manifest = opened.manifest
    joined = {c.tensor for c in manifest.chunks if c.codec == REMAINDER}  # made of the weights
    masters = [i for i, spec in enumerate(manifest.tensors) if spec.slot == MASTER]
    if (
        cross_check
        and not opened.weights_compared
        and len(manifest.slots()) > 1
        and "digests" not in manifest.objects
        and not (masters and joined.issuperset(masters))
    ):
        return ["weights against masters: the checkpoint has no pair of them"]
    return []


def check_stored_digests(manifest: Manifest, resources: Resources) -> list[str]:
    """Compare every tensor with the digest that the checkpoint states, if it does."""
    return digests.differences(manifest, resources) if "digests" in manifest.objects else []


def report_of(
    opened: Opened,
    draft: Draft,
    plan: Plan,
    resources: Resources,
    paths: tuple[str, str],
    *,
    seconds: float = 0.0,
    dry_run: bool = False,
    proof: tuple[str, ...] = (),
    skipped: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
) -> Report:
    """Put together what was planned, done and proven."""
    src, dst = opened.manifest, draft.manifest
    sizes = sum(file.size_bytes for file in dst.files)
    return Report(
        source=paths[0],
        destination=paths[1],
        src_format=src.format,
        dst_format=dst.format,
        src_topology=_topology(src),
        dst_topology=_topology(dst),
        tensors=len(dst.tensors),
        state_bytes=dst.state_bytes,
        ops=plan.op_count,
        read_bytes=plan.read_bytes,
        write_bytes=plan.write_bytes,
        buffer_bytes=resources.buffer_bytes,
        files=len(dst.files),
        paths=tuple((file.path, file.size_bytes) for file in dst.files),
        seconds=seconds,
        dry_run=dry_run,
        plan=(*_plan_lines(plan, resources, sizes), *(f"plan: {line}" for line in draft.plan)),
        proof=proof,
        skipped=skipped,
        carried=draft.carried,
        lost=(*lost, *draft.lost),
        findings=(*notes, *opened.notes, *draft.notes),
    )


def _plan_lines(plan: Plan, resources: Resources, file_bytes: int) -> tuple[str, str]:
    """Describe the work and what it takes."""
    copies = f"plan: {plan.op_count} copies, reads {size_text(plan.read_bytes)}, writes "
    buffers = size_text(resources.buffer_bytes)
    return (
        f"{copies}{size_text(plan.write_bytes)} of tensors in {size_text(file_bytes)} of files",
        f"plan: {resources.workers} workers with {buffers} of buffers in all",
    )


def _topology(manifest: Manifest) -> dict[str, int]:
    value = manifest.objects.get("topology")
    return {str(k): int(v) for k, v in value.items()} if isinstance(value, dict) else {}
