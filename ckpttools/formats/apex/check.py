"""Is every stored byte of the optimizer's files, and of the weights beside them, as written?"""

from __future__ import annotations

from pathlib import Path

from ckpttools.errors import CkptError
from ckpttools.formats import Problem
from ckpttools.formats.apex.directory import find_files
from ckpttools.formats.apex.gathered import rank_windows
from ckpttools.formats.apex.model import is_torch_file
from ckpttools.formats.apex.sidecar import read_sidecar
from ckpttools.storage.safetensors_header import read_header
from ckpttools.storage.torchzip_check import check_torch_file


def check_files(path: Path) -> list[Problem]:
    """Check the torch files that ``path`` stands for, nested ones too, and the sealed names.

    Weights in a safetensors file have no checksums.
    """
    problems: list[Problem] = []
    try:
        found = find_files(path)
        if found.sidecar is not None:
            read_sidecar(found.sidecar)
        for torch_file in found.files:
            problems += _problems(torch_file.path)
            if found.kind == "v1-gathered" and not problems:
                for rank, window in enumerate(rank_windows(torch_file)):
                    problems += _problems(torch_file.path, f"gathered_states[{rank}]: ", window)
        if found.model is not None and is_torch_file(found.model):
            problems += _problems(found.model)
        elif found.model is not None:
            read_header(found.model)
    except CkptError as error:
        return [*problems, Problem(str(path), str(error))]
    return problems


def _problems(
    place: Path, prefix: str = "", window: tuple[int, int] | None = None
) -> list[Problem]:
    return [Problem(str(place), f"{prefix}{p}") for p in check_torch_file(place, window=window)]
