"""Where do the files of NeMo's legacy form lie? Names only, nothing is opened.

::

    <dir>/NAME.ckpt                          one model-parallel rank
    <dir>/mp_rank_TT/NAME.ckpt               tensor parallelism alone
    <dir>/tp_rank_TT_pp_rank_PPP/NAME.ckpt   several pipeline stages

Source: ``inject_model_parallel_rank`` of nemo/utils/model_utils.py, NeMo 1.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError

SUFFIX = ".ckpt"
_RANK = re.compile(r"mp_rank_([0-9]{2,})|tp_rank_([0-9]{2,})_pp_rank_([0-9]{3,})")

RankId = tuple[int, int]
"""Tensor rank and pipeline rank."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one checkpoint by rank, relative to ``root``; ``name`` is NAME.ckpt."""

    root: Path
    name: str
    files: Mapping[RankId, str]
    tp: int
    pp: int


def rank_directory(tp: int, pp: int, tp_size: int, pp_size: int) -> str:
    """Return the directory of a rank, with a slash behind it; "" where there is one rank.

    >>> rank_directory(1, 0, 2, 1), rank_directory(1, 2, 2, 4), rank_directory(0, 0, 1, 1)
    ('mp_rank_01/', 'tp_rank_01_pp_rank_002/', '')
    """
    if pp_size > 1:
        return f"tp_rank_{tp:02d}_pp_rank_{pp:03d}/"
    return f"mp_rank_{tp:02d}/" if tp_size > 1 else ""


def looks_legacy(path: Path) -> bool:
    """Say whether the names under ``path`` are those of the legacy form."""
    if path.is_file():
        return path.name.endswith(SUFFIX)
    if not path.is_dir():
        return False
    return any(_files(path)) or any(any(_files(child)) for _, child in _ranks(path))


def find_ranks(path: Path) -> RankFiles:
    """Find the files of a checkpoint: its directory, or the file of any of its ranks.

    Raises:
        FormatError: a rank's file is missing, or the directory holds several checkpoints.
    """
    if path.is_file():
        parent = path.parent
        if _RANK.fullmatch(parent.name):
            return _of_ranks(parent.parent, path.name)
        return RankFiles(parent, path.name, {(0, 0): path.name}, 1, 1)
    names = {file.name for _, child in _ranks(path) for file in _files(child)}
    plain = {file.name for file in _files(path)}
    if len(names | plain) != 1 or (names and plain):
        listed = sorted(names | plain)
        raise FormatError(
            f"{path}: must hold one checkpoint, got {', '.join(listed[:3]) or 'none'}",
            hint="name the file of one rank in place of the directory" if listed else "",
        )
    if plain:
        name = next(iter(plain))
        return RankFiles(path, name, {(0, 0): name}, 1, 1)
    return _of_ranks(path, next(iter(names)))


def _of_ranks(root: Path, name: str) -> RankFiles:
    """Return the files of all ranks, which must be a full grid."""
    found: dict[RankId, str] = {}
    directories = dict(_ranks(root))
    tp = max(t for t, _ in directories) + 1
    pp = max(p for _, p in directories) + 1
    stages = {child.name.startswith("tp_") for child in directories.values()}
    if len(stages) > 1:
        raise FormatError(f"{root}: must have mp_rank or tp_rank directories, got both")
    for p in range(pp):
        for t in range(tp):
            directory = directories.get((t, p))
            if directory is None or not (directory / name).is_file():
                expected = (
                    f"tp_rank_{t:02d}_pp_rank_{p:03d}" if True in stages else f"mp_rank_{t:02d}"
                )
                raise FormatError(
                    f"{root / expected / name}: every rank of TP {tp} x PP {pp} must have its "
                    f"file, got none"
                )
            found[t, p] = f"{directory.name}/{name}"
    return RankFiles(root, name, found, tp, pp)


def _ranks(path: Path) -> Iterator[tuple[RankId, Path]]:
    """Yield the rank directories of a directory."""
    for child in sorted(path.iterdir()):
        match = _RANK.fullmatch(child.name)
        if match is None or not child.is_dir():
            continue
        if match[1] is not None:
            yield (int(match[1]), 0), child
        else:
            yield (int(match[2]), int(match[3])), child


def _files(path: Path) -> Iterator[Path]:
    """Yield the checkpoint files of a directory."""
    return (child for child in path.iterdir() if child.name.endswith(SUFFIX) and child.is_file())
