"""Apex's ``DistributedFusedAdam``: state dicts of both formats read, the second one written."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.apex.check import check_files
from ckpttools.formats.apex.directory import looks_like_apex
from ckpttools.formats.apex.read import read_checkpoint
from ckpttools.formats.apex.write import lay_out_checkpoint
from ckpttools.manifest import Manifest


class ApexFormat:
    """Reader and writer of what ``state_dict()`` of Apex's ZeRO-2 optimizer gives."""

    name = "apex"
    about = "state dicts of Apex's DistributedFusedAdam, v1 and v2: read, write v2"
    takes: frozenset[str] = frozenset({"names_path", "model_path"})

    def detect(self, path: Path) -> bool:
        """Say whether a file, or one in a directory, begins as Apex's state dicts do."""
        return looks_like_apex(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read one file, or a directory of files that belong together."""
        return read_checkpoint(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out a directory with Apex's own file, the weights, and what Apex has no place for."""
        return lay_out_checkpoint(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte: records of torch files, those nested in them, and the sealed names."""
        return check_files(path)
