"""torch.distributed.checkpoint: what FSDP2, tensor-parallel and plain torch scripts save."""

from __future__ import annotations

from pathlib import Path

from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.dcp.check import check_directory
from ckpttools.formats.dcp.read import read_directory
from ckpttools.formats.dcp.stored import looks_like_dcp
from ckpttools.formats.dcp.write import lay_out_directory
from ckpttools.manifest import Manifest


class DcpFormat:
    """Reader and writer of directories with ``.metadata`` and ``.distcp`` files."""

    name = "dcp"
    about = "torch.distributed.checkpoint, as state dict APIs name things: read, write"
    takes: frozenset[str] = frozenset({"names_path"})

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` has torch's ``.metadata``, or files of its Hugging Face writer."""
        return looks_like_dcp(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a directory."""
        return read_directory(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out a directory with a file for each rank."""
        return lay_out_directory(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte of every archive; safetensors files have no checksums."""
        return check_directory(path)
