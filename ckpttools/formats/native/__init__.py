"""The native sharded form: one file a rank, as ckpttools' own optimizers write them."""

from __future__ import annotations

import re
from pathlib import Path

from ckpttools.errors import StorageError
from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.native.chunked import lists_chunks
from ckpttools.formats.native.manifest_file import MANIFEST_FILE
from ckpttools.formats.native.rank_state import (
    check_rank_file,
    describe_rank_file,
    refuse_rank_file,
)
from ckpttools.formats.native.read import check_directory, read_directory
from ckpttools.formats.native.write import lay_out_native
from ckpttools.layout.sharded import KINDS, Kind
from ckpttools.manifest import Manifest

_HEAD_BYTES = 1 << 16
_MARKS = re.compile(rb"ckpttools-(?:sharded|rank-state).{0,120}?kind.{0,40}?(zero[0-9])", re.DOTALL)
_MARK = re.compile(rb"ckpttools-rank-state")


class _NativeFormat:
    """Reader and writer of one kind of the native form."""

    kind: Kind
    name: str
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` has a ``manifest.json`` of this kind, or is a rank's own file."""
        place = path / MANIFEST_FILE if path.is_dir() else path
        if not place.is_file() or lists_chunks(path):
            return False
        head = _head(place)
        if path.is_file() and not _MARK.search(head):
            return False
        found = _MARKS.search(head)
        kind = KINDS[0] if found is None else found[1].decode()
        return kind == self.kind

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a directory; no option applies to it."""
        del options
        if path.is_file():
            refuse_rank_file(path)
        return read_directory(path, self.kind)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the files of all ranks on a topology."""
        return lay_out_native(source, target, root, kind=self.kind)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte: SHA-256 of manifest and headers, CRC-32 of every key."""
        return check_rank_file(path) if path.is_file() else check_directory(path, self.kind)

    def describe_part(self, path: Path) -> dict[str, object] | None:
        """Describe one rank's file; None for a directory."""
        return describe_rank_file(path) if path.is_file() else None


class Zero1Format(_NativeFormat):
    """State sharded as ZeRO-1 has it, in Megatron's buckets."""

    kind = "zero1"
    name = "zero1"
    about = "one file a rank, as the sharded optimizer saves them: read, write"


class Zero2Format(_NativeFormat):
    """State sharded as fused ZeRO-2 has it, in buckets of one size."""

    kind = "zero2"
    name = "zero2"
    about = "one file a rank, as the fused ZeRO-2 optimizer saves them: read, write"


def _head(place: Path) -> bytes:
    """Return the first bytes of a file."""
    try:
        with place.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
