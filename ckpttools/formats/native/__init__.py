"""The native sharded form: one file a rank, as ckpttools' own optimizers write them."""

from __future__ import annotations

import re
from pathlib import Path

from ckpttools.errors import StorageError
from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.native.manifest_file import MANIFEST_FILE
from ckpttools.formats.native.rank_state import (
    check_rank_file,
    describe_rank_file,
    refuse_rank_file,
)
from ckpttools.formats.native.read import check_directory, read_directory
from ckpttools.formats.native.write import lay_out_native
from ckpttools.manifest import Manifest

_HEAD_BYTES = 1 << 16
_MARKS = re.compile(rb"ckpttools-(?:sharded|rank-state).{0,120}?kind.{0,40}?(zero[0-9])", re.DOTALL)
_MARK = re.compile(rb"ckpttools-rank-state")


class Zero1Format:
    """Reader and writer of state sharded as ZeRO-1 has it."""

    name = "zero1"
    about = "one file a rank, as the sharded optimizer saves them: read, write"

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` has a ``manifest.json`` of this kind, or is a rank's own file."""
        place = path / MANIFEST_FILE if path.is_dir() else path
        if not place.is_file():
            return False
        head = _head(place)
        if path.is_file() and not _MARK.search(head):
            return False
        found = _MARKS.search(head)
        return found is None or found[1].decode() == self.name

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a directory; no option applies to it."""
        del options
        if path.is_file():
            refuse_rank_file(path)
        return read_directory(path, self.name)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the files of all ranks on a topology."""
        return lay_out_native(source, target, root, kind="zero1")

    def check(self, path: Path) -> list[Problem]:
        """Check every byte: SHA-256 of manifest and headers, CRC-32 of every key."""
        return check_rank_file(path) if path.is_file() else check_directory(path, self.name)

    def describe_part(self, path: Path) -> dict[str, object] | None:
        """Describe one rank's file; None for a directory."""
        return describe_rank_file(path) if path.is_file() else None


def _head(place: Path) -> bytes:
    """Return the first bytes of a file."""
    try:
        with place.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
