"""Is every stored byte of NeMo's files as it was written?"""

from __future__ import annotations

from pathlib import Path

from ckpttools.errors import CkptError, FormatError
from ckpttools.formats import Problem
from ckpttools.formats.nemo.legacy_files import find_ranks
from ckpttools.formats.nemo.stored import COMMON_FILE, read_backend, read_stored
from ckpttools.storage.dcp_items import check_items
from ckpttools.storage.dcp_metadata import read_metadata
from ckpttools.storage.torchzip_check import check_torch_file


def check_distributed(path: Path) -> list[Problem]:
    """Check ``common.pt`` and every item; a ``zarr`` container has sizes only, no checksums."""
    problems: list[Problem] = []
    common = path / COMMON_FILE
    if common.is_file():
        problems += [Problem(str(common), str(p)) for p in check_torch_file(common)]
    try:
        if read_backend(path) == "torch_dist":
            problems += [Problem(*found) for found in check_items(path, read_metadata(path))]
        else:
            read_stored(path)
    except CkptError as error:
        problems.append(Problem(str(path), str(error)))
    return problems


def check_legacy(path: Path) -> list[Problem]:
    """Check the torch files of all ranks."""
    try:
        ranks = find_ranks(path)
    except FormatError as error:
        return [Problem(str(path), str(error))]
    return [
        Problem(str(ranks.root / file), str(problem))
        for file in sorted(ranks.files.values())
        for problem in check_torch_file(ranks.root / file)
    ]
