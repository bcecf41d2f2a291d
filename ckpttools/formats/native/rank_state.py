"""What does one rank's own ``torch.save(optimizer.state_dict())`` hold? Read as inert data.

Such a file is a part: which rank of how many it is of, and for each parameter that the rank owns
elements of, the flat range ``[start, stop)`` of the local tensor and its slots as 1-D tensors.
Under ``zero2``, where a parameter may lie in several buckets, there is a list of such ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

from ckpttools.errors import CkptError, FormatError, UnsupportedError
from ckpttools.formats import Problem
from ckpttools.storage.torchzip import TensorRef, read_torch_file
from ckpttools.storage.torchzip_check import check_torch_file

RANK_FORMAT = "ckpttools-rank-state"
RANK_VERSION = 1
_SIZES = ("tp", "pp", "dp")


@dataclass(frozen=True, slots=True)
class RankSlot:
    """One slot of a parameter's piece."""

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RankState:
    """The file of one rank, checked in structure."""

    path: Path
    kind: str
    rank: int
    world_size: int
    places: Mapping[str, tuple[int, int]]
    slots: tuple[RankSlot, ...]
    itemsizes: Mapping[str, int]
    params: int
    step: int | None

    @property
    def missing(self) -> str:
        """The ranks whose state is not in the file, as text."""
        runs = [(0, self.rank), (self.rank + 1, self.world_size)]
        texts = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs if a < b]
        return ", ".join(texts) or "none"


def read_rank_file(path: Path) -> RankState:
    """Read a rank's file; no tensor byte is read and none of its code runs.

    Raises:
        FormatError: it is damaged, hostile or not what such a file must be.
    """
    tree = read_torch_file(path).tree
    if not isinstance(tree, dict) or tree.get("format") != RANK_FORMAT:
        raise FormatError(f"{path}: format must be {RANK_FORMAT!r}, got another")
    version = tree.get("format_version")
    if type(version) is not int or version != RANK_VERSION:
        raise FormatError(
            f"{path}: format_version must be {RANK_VERSION}, got {version!r:.40}",
            hint="a newer ckpttools wrote it" if isinstance(version, int) else "",
        )
    kind, names, state = (tree.get(key) for key in ("kind", "names", "state"))
    if not isinstance(kind, str) or not isinstance(state, dict) or not isinstance(names, list):
        raise FormatError(f"{path}: must have kind, names and state, got others")
    places = {name: _place(tree, f"{name}_rank", f"{name}_size", path) for name in _SIZES}
    rank, world_size = _place(tree, "rank", "world_size", path)
    tp, dp, pp = places["tp"], places["dp"], places["pp"]
    if (rank, world_size) != (tp[0] + tp[1] * (dp[0] + dp[1] * pp[0]), tp[1] * dp[1] * pp[1]):
        raise FormatError(f"{path}: rank must follow from its places {places}, got {rank}")
    itemsizes: dict[str, int] = {}
    slots = [slot for name, entry in state.items() for slot in _slots(name, entry, path, itemsizes)]
    step = _step(tree.get("steps"))
    return RankState(
        path, kind, rank, world_size, places, tuple(slots), itemsizes, len(names), step
    )


def _step(steps: object) -> int | None:
    """Return the step of all parameters; None where they differ or aren't told."""
    counts = list(steps.values()) if isinstance(steps, dict) else []
    first = counts[0] if counts else None
    same = all(type(count) is int and count == first for count in counts)
    return first if type(first) is int and same else None


def describe_rank_file(path: Path) -> dict[str, object]:
    """Describe a rank's file as `ckpttools.inspect` describes a checkpoint.

    Raises:
        FormatError: as :func:`read_rank_file`.
    """
    state = read_rank_file(path)
    places = ", ".join(f"{name} {at} of {size}" for name, (at, size) in state.places.items())
    by_slot: dict[str, dict[str, int]] = {}
    for slot in state.slots:
        totals = by_slot.setdefault(slot.slot, {"tensors": 0, "bytes": 0})
        totals["tensors"] += 1
        totals["bytes"] += (slot.stop - slot.start) * state.itemsizes[slot.dtype]
    alone = f"the state of rank {state.rank} of {state.world_size} alone"
    held = len({slot.name for slot in state.slots})
    return {
        "path": str(path),
        "format": state.kind,
        "layouts": [f"the state of one rank, pieces of {held} of {state.params} parameters"],
        "buckets": None,
        "topology": {name: size for name, (_, size) in state.places.items()},
        "layers": None,
        "iteration": None,
        "step": state.step,
        "rank": state.rank,
        "world_size": state.world_size,
        "files": [{"path": path.name, "size_bytes": path.stat().st_size}],
        "slots": by_slot,
        "tensors": [
            {
                "name": slot.name,
                "slot": slot.slot,
                "dtype": slot.dtype,
                "shape": list(slot.shape),
                "padding_rows": 0,
                "start": slot.start,
                "stop": slot.stop,
                "chunks": 1,
            }
            for slot in state.slots
        ],
        "notes": [f"{alone} ({places}); missing ranks: {state.missing}"],
    }


def refuse_rank_file(path: Path) -> NoReturn:
    """Refuse a rank's file where a whole checkpoint is needed.

    Raises:
        UnsupportedError: always, naming the ranks that are missing.
        FormatError: the file isn't even that.
    """
    state = read_rank_file(path)
    raise UnsupportedError(
        f"{path}: must be the state of all {state.world_size} ranks, got rank {state.rank} alone; "
        f"missing ranks: {state.missing}",
        hint="give the directory that all ranks of the run have saved together",
    )


def check_rank_file(path: Path) -> list[Problem]:
    """Check every byte of a rank's file; one problem per fault."""
    try:
        return [Problem(str(path), str(problem)) for problem in check_torch_file(path)]
    except CkptError as error:
        return [Problem(str(path), str(error))]


def _place(tree: Mapping[object, object], key: str, size_key: str, path: Path) -> tuple[int, int]:
    """Return a number and the size of the dimension that it is in."""
    at, size = tree.get(key), tree.get(size_key)
    if type(at) is not int or type(size) is not int or not 0 <= at < size:
        raise FormatError(
            f"{path}: {key} must be below {size_key}, got {at!r:.40} and {size!r:.40}"
        )
    return at, size


def _slots(name: object, entry: object, path: Path, itemsizes: dict[str, int]) -> list[RankSlot]:
    """Check the state of one parameter, in one part or several, and return its slots."""
    if isinstance(entry, list):  # zero2: a part for each bucket
        return [slot for part in entry for slot in _slots(name, part, path, itemsizes)]
    where = f"{path}: state: {name!r:.80}"
    if not isinstance(name, str) or not isinstance(entry, dict):
        raise FormatError(f"{where}: must be a dict by name, got {type(entry).__name__}")
    shape, start, stop = (entry.get(key) for key in ("shape", "start", "stop"))
    if (
        not isinstance(shape, (list, tuple))
        or not all(type(n) is int and n >= 0 for n in shape)
        or type(start) is not int
        or type(stop) is not int
        or not 0 <= start <= stop <= prod(shape)
    ):
        raise FormatError(
            f"{where}: start and stop must be elements of shape {shape!r:.60}, got {start!r:.40} "
            f"and {stop!r:.40}"
        )
    found = []
    for slot, tensor in entry.items():
        if not isinstance(tensor, TensorRef):
            continue
        if tensor.shape != (stop - start,):
            raise FormatError(
                f"{where}: {slot!r:.40} must be 1-D of {stop - start} elements, got {tensor.shape}"
            )
        itemsizes[tensor.dtype.name] = tensor.dtype.itemsize
        found.append(RankSlot(name, str(slot), tensor.dtype.name, tuple(shape), start, stop))
    return found
