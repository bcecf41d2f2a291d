"""Megatron-LM's ``torch`` format with ``--use-distributed-optimizer`` (core 0.7 and later)."""

from __future__ import annotations

from pathlib import Path

from ckpttools.errors import UsageError
from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.megatron.check import check_files
from ckpttools.formats.megatron.directory import looks_like_megatron
from ckpttools.formats.megatron.read import read_checkpoint
from ckpttools.formats.megatron.write import lay_out_checkpoint
from ckpttools.layout.megatron import VARIANTS
from ckpttools.manifest import Manifest


class MegatronFormat:
    """Reader and writer of ``model_optim_rng.pt`` and ``distrib_optim.pt``."""

    name = "megatron"
    about = "Megatron-LM `torch` with the distributed optimizer, dense GPT: read, write"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` has Megatron's directory names."""
        return looks_like_megatron(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a checkpoint directory or one iteration of it."""
        if options.layout not in (None, *VARIANTS):
            raise UsageError(
                f"--layout: must be one of {', '.join(VARIANTS)}, got {options.layout!r}"
            )
        return read_checkpoint(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the files of a Megatron run on another topology."""
        return lay_out_checkpoint(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte of every torch file of the iteration."""
        return check_files(path)
