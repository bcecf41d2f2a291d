"""What does a ``v2`` file hold? Whole tensors by number, the same on every rank that saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpttools.errors import FormatError
from ckpttools.formats.apex.model import StoredTensor, stored_tensor
from ckpttools.formats.apex.saved import SavedState, read_state
from ckpttools.manifest import MASTER
from ckpttools.storage.torchzip import TensorRef, TorchFile

SLOTS: Mapping[str, str] = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Slots by Apex's names, in the order of its files."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A ``v2`` state: the slots of each parameter by number."""

    saved: SavedState
    params: tuple[Mapping[str, StoredTensor], ...]

    def fits(self, index: int, weight: StoredTensor) -> bool:
        """Say whether a weight has the shape of a parameter."""
        return weight.shape == self.params[index][MASTER].shape


def read_whole(torch_file: TorchFile, file: int) -> Whole:
    """Read a ``v2`` file, which the Manifest has as ``file``.

    Raises:
        FormatError: a parameter is missing, or one of its tensors.
    """
    where = str(torch_file.path)
    saved = read_state(torch_file, where)
    numbers = set(range(saved.count))
    if odd := [key for key in saved.state if not (type(key) is int and key in numbers)]:
        raise FormatError(
            f"{where}: state must be of the {saved.count} members of the groups, got {odd[0]!r:.40}"
        )
    return Whole(saved, tuple(_param(saved, i, torch_file, file) for i in range(saved.count)))


def _param(
    saved: SavedState, index: int, torch_file: TorchFile, file: int
) -> Mapping[str, StoredTensor]:
    """Return the slots of a parameter, which must be like each other."""
    where = f"{saved.where}: parameter {index}"
    entry = saved.state.get(index)
    if not isinstance(entry, dict) or set(entry) != set(SLOTS):
        got = list(entry) if isinstance(entry, dict) else entry
        raise FormatError(f"{where}: must have {', '.join(SLOTS)}, got {got!r:.80}")
    slots: dict[str, StoredTensor] = {}
    for name, slot in SLOTS.items():
        tensor = entry[name]
        if not isinstance(tensor, TensorRef):
            raise FormatError(f"{where}: {name} must be a tensor, got {tensor!r:.60}")
        slots[slot] = stored_tensor(torch_file, tensor, file)
        if tensor.shape != slots[MASTER].shape:
            raise FormatError(
                f"{where}: {name} must have the shape of its param {list(slots[MASTER].shape)}, "
                f"got {list(tensor.shape)}"
            )
    return slots
