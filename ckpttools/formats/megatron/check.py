"""Is every stored byte of the rank files as it was written?"""

from __future__ import annotations

from pathlib import Path

from ckpttools.errors import FormatError
from ckpttools.formats import Problem
from ckpttools.formats.megatron.directory import MODEL_FILE, OPTIMIZER_FILE, find_iteration
from ckpttools.storage.torchzip_check import check_torch_file


def check_files(path: Path) -> list[Problem]:
    """Check the torch files of the iteration that ``path`` names; one problem per fault.

    Raises:
        UnsupportedError: its directories are of a kind that isn't covered.
    """
    try:
        iteration = find_iteration(path)
    except FormatError as error:
        return [Problem(str(path), str(error))]
    problems: list[Problem] = []
    for name in sorted(iteration.ranks.values()):
        for file in (MODEL_FILE, OPTIMIZER_FILE):
            place = iteration.path / name / file
            if place.is_file():
                problems += [Problem(str(place), str(p)) for p in check_torch_file(place)]
    return problems
