"""Conversions that tests stop: what they make when nothing disturbs them, and what they leave."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest

from ckpttools import api
from ckpttools.api import Report, Resources, Target
from ckpttools.errors import StorageError
from ckpttools.storage import journal as journal_module
from ckpttools.storage.journal import Done, Journal

SMALL = Resources(budget_bytes=1 << 20, workers=1)
TILES = 60  # one for each tensor: none is larger than a tile
FULL = f"disk: can't write it: {os.strerror(errno.ENOSPC)}"

JOBS: dict[str, dict[str, Any]] = {
    "reshard": {"target": Target(tp=2, dp=3)},
    "gather": {"to": "safetensors"},
    "zarr": {"to": "zarr"},
}


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def convert(source: Path, out: Path, job: str, **options: Any) -> Report:
    return api.reshard(source, out, **{"resources": SMALL, **JOBS[job], **options})


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a job makes when nothing disturbs it: its files, and their order in the plan."""

    files: dict[str, bytes]
    order: tuple[str, ...]


Expected = dict[str, Undisturbed]


def undisturbed(place: Path) -> Expected:
    """Run every job under ``place``."""
    source = oracle.case("gqa_tp1_pp1_dp1").directory
    manifest = api.read_manifest(source)
    found: Expected = {}
    for job, options in JOBS.items():
        convert(source, place / job, job)
        target, to = options.get("target", Target()), options.get("to")
        files = api.plan_reshard(manifest, target, to=to).dst.files
        found[job] = Undisturbed(listing(place / job), tuple(f.path for f in files))
    return found


def partial(out: Path) -> Path:
    """Return the one staging directory beside the destination."""
    (path,) = (p for p in out.parent.glob(f".{out.name}.partial-*") if p.is_dir())
    return path


def journal_of(out: Path) -> Path:
    path = partial(out)
    return path.with_name(f"{path.name}.journal")


def known(out: Path) -> list[Done]:
    """Return the tiles in the journal, which must all be sound."""
    found = [
        journal_module._parse(line)
        for line in journal_of(out).read_bytes().splitlines(keepends=True)[1:]
    ]
    assert None not in found
    return [done for done in found if done is not None]


def stop_after(
    count: int, source: Path, out: Path, job: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> StorageError:
    """Convert until ``count`` tiles are finished and the disk is full; return the error."""
    add = Journal.add

    def full(self: Journal, done: Done) -> None:
        if self.count == count:
            raise StorageError(FULL)
        add(self, done)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", full)
        with pytest.raises(StorageError, match=re.escape(FULL)) as caught:
            convert(source, out, job, **options)
    return caught.value
