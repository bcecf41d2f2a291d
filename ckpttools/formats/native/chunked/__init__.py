"""The general sharded form: one file a rank, and a list of which box of which tensor is where.

Any training run can be saved so, whatever optimizer it has and however its tensors are cut; what
ckpttools' own optimizers know by formula is written out here.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpttools.errors import StorageError
from ckpttools.formats import Draft, Problem, Reading, ReadOptions, Target
from ckpttools.formats.native.chunked.files import FORMAT
from ckpttools.formats.native.chunked.read import NAME, check_chunks, read_chunks
from ckpttools.formats.native.chunked.write import lay_out_chunks
from ckpttools.formats.native.manifest_file import MANIFEST_FILE
from ckpttools.manifest import Manifest

_HEAD_BYTES = 1 << 10
_MARK = re.compile(rb'"format": *"' + FORMAT.encode())


class ShardedFormat:
    """Reader and writer of chunks that are listed one by one."""

    name = NAME
    about = "one file a rank and a list of its chunks, of any training run: read, write"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        """Say whether ``path`` has a ``manifest.json`` that says so in its first lines."""
        return lists_chunks(path)

    def read(self, path: Path, options: ReadOptions) -> Reading:
        """Read a directory; no option applies to it."""
        del options
        return read_chunks(path)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        """Lay out the files of so many ranks."""
        return lay_out_chunks(source, target, root)

    def check(self, path: Path) -> list[Problem]:
        """Check every byte: SHA-256 of manifest and headers, CRC-32 of every key."""
        return check_chunks(path)


def lists_chunks(path: Path) -> bool:
    """Say whether a directory is of this form, damaged or not."""
    place = path / MANIFEST_FILE
    if not place.is_file():
        return False
    try:
        with place.open("rb") as file:
            return _MARK.search(file.read(_HEAD_BYTES)) is not None
    except OSError as error:
        raise StorageError(f"{place}: can't read it: {error.strerror or error}") from error
