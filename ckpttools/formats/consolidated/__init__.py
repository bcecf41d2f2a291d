"""The consolidated form: whole tensors by name in safetensors files, the rest as JSON."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.consolidated.read import check_directory, read_directory
from ckpttools.formats.consolidated.state import STATE_FILE
from ckpttools.formats.consolidated.write import lay_out_directory
from ckpttools.manifest import Manifest


class ConsolidatedFormat:
    """Reader and writer of what ``ckpttools gather`` makes."""

    name = "safetensors"
    about = "whole tensors by name, as `ckpttools gather` writes them: read, write"

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` is a directory with a ``state.json``."""
        return (path / STATE_FILE).is_file()

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a consolidated directory; no option applies to it."""
        del options
        return read_directory(path)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the consolidated form of any source."""
        return lay_out_directory(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte outside tensor data; the tensors have digests of their own."""
        return check_directory(path)
