"""The consolidated form: whole tensors by name, in safetensors files or as a zarr group."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.consolidated.read import check_directory, read_directory
from ckpttools.formats.consolidated.state import STATE_FILE
from ckpttools.formats.consolidated.write import lay_out_directory
from ckpttools.formats.consolidated.zarr_read import check_store, read_store
from ckpttools.formats.consolidated.zarr_store import ROOT
from ckpttools.formats.consolidated.zarr_write import lay_out_store
from ckpttools.manifest import Manifest


class ConsolidatedFormat:
    """Reader and writer of what ``ckpttools gather`` makes."""

    name = "safetensors"
    about = "whole tensors by name, as `ckpttools gather` writes them: read, write"
    takes: frozenset[str] = frozenset()

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


class ZarrFormat:
    """Reader and writer of the zarr v3 group that ``ckpttools gather --to zarr`` makes."""

    name = "zarr"
    about = "whole tensors by name in a zarr v3 group, as `ckpttools gather` writes it: read, write"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` is a directory with a ``zarr.json``."""
        return (path / ROOT).is_file()

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a group that we wrote; no option applies to it."""
        del options
        return read_store(path)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the zarr form of any source."""
        return lay_out_store(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte outside tensor data; the tensors have digests of their own."""
        return check_store(path)
