"""The public functions: open, plan, reshard, gather, verify, diff, digest.

The only place that joins formats, plans, execution and proof. Every function is typed, raises
:class:`ckpttools.errors.CkptError` for what it refuses, and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpttools import comparison, conversion, description, digests, evidence, job, verification
from ckpttools.comparison import Comparison
from ckpttools.conversion import Opened, Stage
from ckpttools.errors import (
    AmbiguousLayoutError,
    CkptError,
    EvidenceError,
    FormatError,
    LayoutError,
    ReplicaError,
    RuleError,
    UsageError,
    system_errors,
)
from ckpttools.executor import Resources
from ckpttools.formats import (
    ACCEPTABLE_LOSSES,
    DescribesParts,
    ReadOptions,
    Target,
)
from ckpttools.formats.known import (
    detect_format,
    format_names,
    formats_table,
    options_of_each,
    target_format,
)
from ckpttools.manifest import WEIGHT, Manifest
from ckpttools.plan import Plan
from ckpttools.report import Report
from ckpttools.selection import Selection
from ckpttools.storage.commit import Staging, check_apart, check_destination, check_not_written
from ckpttools.verification import Verification

__all__ = [
    "ACCEPTABLE_LOSSES",
    "Comparison",
    "Opened",
    "ReadOptions",
    "Report",
    "Resources",
    "Selection",
    "Target",
    "Verification",
    "detect_format",
    "diff",
    "digest",
    "format_names",
    "formats_table",
    "gather",
    "inspect",
    "open_checkpoint",
    "plan_reshard",
    "read_manifest",
    "reshard",
    "strip",
    "verify",
]


@system_errors()
def open_checkpoint(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    cross_check: bool = True,
) -> Opened:
    """Open a checkpoint: read its structure and choose the layout that the evidence allows.

    Raises:
        FormatError: the files are damaged, incomplete or not supported.
        EvidenceError: no layout, or more than one, agrees with the files.
    """
    fmt = detect_format(path, format)
    (told,) = options_of_each([fmt], options or ReadOptions())
    reading = evidence.as_told(fmt.read(Path(path), told), told)
    files = reading.candidates[:1]  # all candidates are of the same files
    stamps = job.stamp_of(files[0].manifest) if files else ()
    chosen, compared = evidence.choose(reading, resources or Resources(), cross_check=cross_check)
    return Opened(chosen.manifest, fmt, chosen.layouts, reading.notes, compared, stamps)


def read_manifest(path: str | Path, **options: object) -> Manifest:
    """Return a checkpoint's Manifest; takes the options of :func:`open_checkpoint`."""
    return open_checkpoint(path, **options).manifest  # type: ignore[arg-type]  # passed through


def plan_reshard(source: Manifest, target: Target, *, to: str | None = None) -> Plan:
    """Plan the files of ``source`` on ``target``; nothing is written.

    Raises:
        UsageError: the target can't hold the source.
        PlanError: an element would be lost, doubled or invented.
    """
    draft = target_format(to or source.format).lay_out(source, target, "")
    return conversion.plan_of(source, draft)


@system_errors()
def reshard(
    source: str | Path,
    destination: str | Path,
    *,
    target: Target | None = None,
    to: str | None = None,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    selection: Selection | None = None,
    cross_check: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    stage: Stage | None = None,
) -> Report:
    """Take a checkpoint to another topology or format, prove it, and publish it atomically.

    Nothing of the destination is visible before all of it is written, synced and compared with
    the source.

    Raises:
        CkptError: the source, the target or the result is not right; nothing was written.
    """
    resources, options = resources or Resources(), options or ReadOptions()
    started = time.perf_counter()
    paths = str(source), str(destination)
    if not dry_run:
        check_destination(Path(destination).absolute(), overwrite=overwrite)
        check_not_written(Path(destination).absolute())
        check_apart(Path(source), Path(destination))
    opened = open_checkpoint(
        source, format=format, options=options, resources=resources, cross_check=cross_check
    )
    copies = evidence.check_replicas(opened.manifest, resources)
    fmt = target_format(to or opened.format.name)
    opened, lost = conversion.choose(opened, selection or Selection())
    target = target or Target()
    target = replace(target, accept_loss=target.accept_loss | options.accept_loss)
    draft, plan = conversion.lay_out(fmt, opened.manifest, target, "", resources)
    if dry_run:
        return conversion.report_of(opened, draft, plan, resources, paths, dry_run=True, lost=lost)
    job_id = job.job_of(opened.stamps, draft, plan, resources)
    with (
        Staging(destination, job=job_id, overwrite=overwrite, resume=resume) as staging,
        system_errors(),
    ):
        draft, plan = conversion.under(draft, plan, staging.path)
        conversion.check_room(draft, staging.path)
        reused = conversion.write(draft, plan, resources, staging.journal, stage)
        staging.begin_sync()
        proof = conversion.prove(
            fmt, opened, draft, plan, options, resources, stage, resumed=bool(reused)
        )
        job.check_unchanged(opened.manifest, opened.stamps)
        others = staging.others
        staging.publish()
    notes = (*proof.notes, *job.staging_notes(reused, others, resume=resume))
    return conversion.report_of(
        opened,
        draft,
        plan,
        resources,
        paths,
        seconds=time.perf_counter() - started,
        proof=(
            *conversion.source_proof(opened, copies),
            *proof.lines,
            f"published as {destination} by one rename after everything was synced to disk",
        ),
        notes=notes,
        lost=lost,
        skipped=() if cross_check else ("weights against masters (--no-cross-check)",),
    )


def gather(
    source: str | Path, destination: str | Path, *, to: str = "safetensors", **options: object
) -> Report:
    """Write the consolidated form of a checkpoint; takes the options of :func:`reshard`."""
    if to not in ("safetensors", "zarr"):
        raise UsageError(f"--to: must be safetensors or zarr, got {to!r}")
    return reshard(source, destination, to=to, **options)  # type: ignore[arg-type]  # passed on


def strip(
    source: str | Path, destination: str | Path, *, slots: Sequence[str] = (), **options: object
) -> Report:
    """Write a checkpoint without its optimizer state, or without the named slots of it.

    Takes the options of :func:`reshard`.
    """
    selection = (
        Selection(exclude=tuple(f"*:{slot}" for slot in slots))
        if slots
        else Selection(include=(f"*:{WEIGHT}",))
    )
    return reshard(source, destination, selection=selection, **options)  # type: ignore[arg-type]  # passed on


@system_errors()
def verify(
    path: str | Path,
    *,
    against: str | Path | None = None,
    require: frozenset[str] = frozenset(),
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    cross_check: bool = True,
    stage: Stage | None = None,
) -> Verification:
    """Check a checkpoint: stored checksums, structure, cover, evidence, copies.

    With ``against``, the content of another checkpoint must be equal too.
    ``require`` may hold ``optimizer``: then a side without optimizer state is a difference.

    Raises:
        StorageError: there is no such path.
        UnknownFormatError: its format isn't known.
        CkptError: ``against`` can't be read.
    """
    options, resources = options or ReadOptions(), resources or Resources()
    if unknown := require - {"optimizer"}:
        raise UsageError(f"--require: must be optimizer, got {min(unknown)}")
    fmt = detect_format(path, format)
    others = [detect_format(against)] if against is not None else []
    mine, *theirs = options_of_each([fmt, *others], options)
    problems = fmt.check(Path(path))
    damage = [str(problem) for problem in problems]
    checked: list[str] = []
    try:
        opened = open_checkpoint(
            path, format=fmt.name, options=mine, resources=resources, cross_check=cross_check
        )
        copies = evidence.check_replicas(opened.manifest, resources)
        damage += conversion.check_stored_digests(opened.manifest, resources)
    except AmbiguousLayoutError as error:
        return Verification(tuple(checked), tuple(damage), (), (str(error),), ())
    except (FormatError, LayoutError, EvidenceError, ReplicaError) as error:
        if isinstance(error, RuleError) and not damage:
            raise
        # Damage that is named already needs no second line.
        return Verification(tuple(checked), tuple(damage or [str(error)]), (), (), ())
    except CkptError:
        if not damage:  # sound as far as one can see, but not covered
            raise
        return Verification(tuple(checked), tuple(damage), (), (), ())
    checked += [] if damage else ["stored checksums and fixed bytes"]
    checked += [f"{len(opened.manifest.tensors)} tensors covered exactly once"]
    checked += conversion.source_proof(opened, copies)
    unchecked = conversion.not_checked(opened, cross_check=cross_check)
    differences: list[str] = []
    notes: list[str] = []
    sides = [(opened.manifest, "it")]
    if against is not None:
        other = open_checkpoint(against, options=theirs[0], resources=resources, cross_check=False)
        sides.append((other.manifest, str(against)))
        differences, notes = verification.against(
            opened.manifest,
            other.manifest,
            str(against),
            need_optimizer="optimizer" in require,
            resources=resources,
            stage=stage,
        )
    if "optimizer" in require:
        differences += verification.without_optimizer(sides)
    if against is not None and not differences:
        checked.append(f"content equals {against}")
    return Verification(
        tuple(checked),
        tuple(damage),
        tuple(differences),
        tuple(unchecked),
        (*opened.notes, *notes),
    )


@system_errors()
def diff(
    a: str | Path,
    b: str | Path,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    stage: Stage | None = None,
) -> Comparison:
    """Compare the content of two checkpoints of any formats and layouts.

    ``format`` and ``options`` tell of both.

    Raises:
        CkptError: one of them can't be read.
    """
    resources = resources or Resources()
    formats = [detect_format(path, format) for path in (a, b)]
    told = options_of_each(formats, options or ReadOptions())
    opened = [
        open_checkpoint(path, format=format, options=one, resources=resources)
        for path, one in zip((a, b), told, strict=True)
    ]
    total = comparison.total_bytes(opened[0].manifest, opened[1].manifest)
    progress = stage("compare", total) if stage else None
    return comparison.compare(opened[0].manifest, opened[1].manifest, resources, progress)


@system_errors()
def digest(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    stage: Stage | None = None,
) -> tuple[str, tuple[digests.TensorDigest, ...]]:
    """Return the digest of a checkpoint, and of each of its tensors.

    Raises:
        CkptError: it can't be read.
    """
    resources = resources or Resources()
    opened = open_checkpoint(path, format=format, options=options, resources=resources)
    progress = stage("digest", opened.manifest.state_bytes) if stage else None
    result = digests.digest_manifest(opened.manifest, resources, progress)
    return digests.checkpoint_digest(result), result


@system_errors()
def inspect(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
) -> dict[str, object]:
    """Describe a checkpoint from its structure alone, as plain data; no tensor byte is read.

    A file that is a part of one, such as a single rank's state, is described as such.

    Raises:
        CkptError: it can't be read.
    """
    fmt = detect_format(path, format)
    if isinstance(fmt, DescribesParts) and (part := fmt.describe_part(Path(path))) is not None:
        return part
    (told,) = options_of_each([fmt], options or ReadOptions())
    reading = fmt.read(Path(path), told)
    if not reading.candidates:
        raise EvidenceError("layout: must agree with the files, got: " + "; ".join(reading.refused))
    return description.describe(str(path), fmt.name, reading)
