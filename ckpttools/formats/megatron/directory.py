"""Where do the rank files of a Megatron ``torch`` checkpoint lie? Names only, nothing is opened.

::

    <save>/latest_checkpointed_iteration.txt      "3" or "release"
    <save>/iter_0000003/mp_rank_TT/               one pipeline stage
    <save>/iter_0000003/mp_rank_TT_PPP/           several stages
        model_optim_rng.pt                        weights, arguments, groups, RNG
        distrib_optim.pt                          masters and moments, gathered to DP rank zero

Source: megatron/training/checkpointing.py (``get_checkpoint_name``) of core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError, StorageError, UnsupportedError
from ckpttools.storage.local import read_small_file

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"

_ITERATION = re.compile(r"iter_([0-9]{7,})|release")
_RANK = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")


@dataclass(frozen=True, slots=True)
class IterationDirectory:
    """One iteration: its directory, the root above it, and the rank directories in it.

    ``ranks`` maps (tp, pp) to the directory's name.
    """

    root: Path
    path: Path
    ranks: dict[tuple[int, int], str]

    @property
    def name(self) -> str:
        """``iter_0000003`` or ``release``."""
        return self.path.name


def looks_like_megatron(path: Path) -> bool:
    """Say whether the names under ``path`` are those of a Megatron ``torch`` checkpoint."""
    if not path.is_dir():
        return False
    if any(True for name in _rank_names(path) for _ in (path / name).glob("*.ckpt")):
        return False  # NeMo's rank directories have the same names
    if _ITERATION.fullmatch(path.name) and any(True for _ in _rank_names(path)):
        return True
    if any(True for _ in _rank_names(path)):
        return True
    return any(
        True
        for child in path.iterdir()
        if _ITERATION.fullmatch(child.name) and any(True for _ in _rank_names(child))
    )


def find_iteration(path: Path) -> IterationDirectory:
    """Find the iteration that ``path`` names: itself one, or the one that its tracker names.

    Raises:
        FormatError: the tracker is missing or names nothing that is there.
    """
    if any(True for _ in _rank_names(path)):
        return IterationDirectory(path.parent, path, _ranks(path))
    tracker = path / TRACKER
    if not tracker.is_file():
        raise FormatError(
            f"{tracker}: a checkpoint directory must have it, got none",
            hint="name one iteration, such as iter_0000003, in place of the directory",
        )
    try:
        data = read_small_file(tracker, limit_bytes=64)
    except StorageError as error:
        if error.__cause__ is not None:  # the system refused; a file that is too long has no cause
            raise
        raise FormatError(f"{tracker}: must hold an iteration number or 'release'") from error
    text = data.strip()
    if text == b"release":
        name = "release"
    elif re.fullmatch(rb"[0-9]{1,18}", text):
        name = f"iter_{int(text):07d}"
    else:
        raise FormatError(f"{tracker}: must hold an iteration number or 'release', got {data!r}")
    iteration = path / name
    if not any(True for _ in _rank_names(iteration)):
        raise FormatError(f"{iteration}: must hold rank directories, as {tracker.name} says")
    return IterationDirectory(path, iteration, _ranks(iteration))


def check_grid(iteration: IterationDirectory, tp: int, pp: int) -> None:
    """Refuse missing and stray rank directories.

    Raises:
        FormatError: the directories are not exactly the grid of ``tp`` x ``pp``.
    """
    for p in range(pp):
        for t in range(tp):
            if iteration.ranks.get((t, p)) != rank_name(t, p, pp):
                raise FormatError(
                    f"{iteration.path / rank_name(t, p, pp)}: must be there for TP {tp} x PP {pp} "
                    f"as the arguments say, got none"
                )
    stray = [n for (t, p), n in iteration.ranks.items() if t >= tp or p >= pp]
    if stray:
        raise FormatError(
            f"{iteration.path / stray[0]}: must not be there for TP {tp} x PP {pp} as the "
            f"arguments say, got a directory of another save",
            hint="move it away",
        )


def rank_name(tp: int, pp: int, pp_size: int) -> str:
    """Return the directory of a rank.

    >>> rank_name(1, 0, 1), rank_name(1, 2, 4)
    ('mp_rank_01', 'mp_rank_01_002')
    """
    return f"mp_rank_{tp:02d}" if pp_size == 1 else f"mp_rank_{tp:02d}_{pp:03d}"


def _rank_names(path: Path) -> Iterator[str]:
    if path.is_dir():
        for child in path.iterdir():
            if _RANK.fullmatch(child.name):
                yield child.name


def _ranks(path: Path) -> dict[tuple[int, int], str]:
    """Read the rank of each directory from its name."""
    ranks: dict[tuple[int, int], str] = {}
    for name in sorted(_rank_names(path)):
        match = _RANK.fullmatch(name)
        if match is None:
            continue
        if match[3] is not None:
            raise UnsupportedError(
                f"{path / name}: a rank directory must name tensor and pipeline rank, got an "
                f"expert-parallel one, which is not supported"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in ranks:
            raise FormatError(
                f"{path / name}: each rank must be there once, got {ranks[rank]} too",
                hint="move the directory of the other save away",
            )
        ranks[rank] = name
    return ranks
