"""NeMo's GPT with ``distributed_fused_adam``: the distributed form and the legacy one."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.nemo.check import check_distributed, check_legacy
from ckpttools.formats.nemo.legacy_files import looks_legacy
from ckpttools.formats.nemo.legacy_read import read_legacy
from ckpttools.formats.nemo.legacy_write import lay_out_legacy
from ckpttools.formats.nemo.read import read_directory
from ckpttools.formats.nemo.stored import looks_distributed
from ckpttools.formats.nemo.write import lay_out_distributed
from ckpttools.manifest import Manifest


class NemoFormat:
    """Reader and writer of NeMo's distributed checkpoints."""

    name = "nemo"
    about = "NeMo distributed checkpoint, distributed_fused_adam, GPT: read, write"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` is a directory with NeMo's ``common.pt`` and ``metadata.json``."""
        return looks_distributed(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a directory, ``torch_dist`` or ``zarr``."""
        return read_directory(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out a ``torch_dist`` directory."""
        return lay_out_distributed(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte of every torch archive, and that chunks are there in full."""
        return check_distributed(path)


class NemoLegacyFormat:
    """Reader and writer of NeMo's ``.ckpt`` files, one for each model-parallel rank."""

    name = "nemo-legacy"
    about = "NeMo .ckpt files by rank, distributed_fused_adam, GPT: read, write"
    takes: frozenset[str] = frozenset({"names_path"})

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` is a ``.ckpt`` file, or a directory of such files by rank."""
        return looks_legacy(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a file, or the files of all ranks."""
        return read_legacy(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out a file for each tensor and pipeline rank."""
        return lay_out_legacy(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte of every file."""
        return check_legacy(path)
