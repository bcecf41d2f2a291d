"""What does one state dict of Apex's optimizer say beside its tensors? Step, groups, its kind.

Apex has written three kinds of dicts, told apart by their content:

==========  =====================================================================================
``v2``      whole tensors by number: ``{"state": {"step", 0: {"param", "exp_avg", …}, …}, …}``
``v1``      one rank's live state: ``{"state": {"buckets", "step", 0: {"fragments"}, …}, …}``
gathered    ``{"gathered_states": [...]}``: the bytes of a torch file for each rank, each a ``v1``
==========  =====================================================================================

``format`` (2 or 1) came with the second week of ``v2``, and stands in no file from before. A
capturable optimizer keeps step and learning rate as tensors of one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.storage.torchzip import TensorRef, TorchFile, load_small_payloads

Kind = Literal["v2", "v1", "v1-gathered"]

GATHERED = "gathered_states"
_FORMATS: Mapping[Kind, int] = {"v2": 2, "v1": 1, "v1-gathered": 1}
_NUMBERS = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A parameter group: its settings, its members' numbers, their names where it has them."""

    settings: Mapping[str, object]
    indices: tuple[int, ...]
    names: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class SavedState:
    """A ``v1`` or ``v2`` dict. ``state`` is as in the file, without the step."""

    where: str
    state: Mapping[object, object]
    groups: tuple[SavedGroup, ...]
    step: int

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(len(group.indices) for group in self.groups)


def kind_of(tree: object) -> Kind | None:
    """Return the kind of a file's tree; None where it is no state of this optimizer."""
    if not isinstance(tree, dict):
        return None
    if GATHERED in tree:
        return "v1-gathered"
    state = tree.get("state")
    if not isinstance(state, dict) or "param_groups" not in tree:
        return None
    if "buckets" in state:
        return "v1"
    return "v2" if "step" in state else None


def check_format(tree: Mapping[object, object], kind: Kind, where: str) -> None:
    """Check that the number under ``format`` is that of the content.

    Raises:
        UnsupportedError: Apex has a newer format by now.
        FormatError: it is another one.
    """
    stated = tree.get("format")
    if stated is None:
        return
    if type(stated) is int and stated > max(_FORMATS.values()):
        raise UnsupportedError(f"{where}: format must be 1 or 2, got {stated}")
    if type(stated) is not int or stated != _FORMATS[kind]:
        raise FormatError(
            f"{where}: format must be {_FORMATS[kind]} for what it holds, got {stated!r:.40}"
        )


def read_state(torch_file: TorchFile, where: str) -> SavedState:
    """Read a ``v1`` or ``v2`` dict.

    Raises:
        FormatError: it isn't what Apex writes.
    """
    tree = torch_file.tree
    kind = kind_of(tree)
    if not isinstance(tree, dict) or kind not in ("v1", "v2"):
        raise FormatError(f"{where}: must be a state dict of DistributedFusedAdam, got another")
    check_format(tree, kind, where)
    state = dict(tree["state"])
    step = _number(state.pop("step", None), torch_file, f"{where}: step")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise FormatError(f"{where}: step must be a natural number, got {step!r:.40}")
    return SavedState(where, state, _groups(tree["param_groups"], torch_file, where), step)


def _groups(value: object, torch_file: TorchFile, where: str) -> tuple[SavedGroup, ...]:
    """Read the parameter groups, whose members must be numbered in their order."""
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where}: param_groups must be a list, got {value!r:.60}")
    groups = tuple(
        _group(group, torch_file, f"{where}: param_groups[{i}]") for i, group in enumerate(value)
    )
    numbers = [index for group in groups for index in group.indices]
    if numbers != list(range(len(numbers))):
        raise FormatError(
            f"{where}: members of the groups must be numbered from 0 on, got {numbers!r:.60}"
        )
    return groups


def _group(value: object, torch_file: TorchFile, where: str) -> SavedGroup:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise FormatError(f"{where}: must be a dict of settings, got {value!r:.60}")
    members, names = value.get("params"), value.get("param_names")
    if not isinstance(members, list) or not all(type(m) is int for m in members):
        raise FormatError(f"{where}: params must be numbers, got {members!r:.60}")
    if names is not None and not (
        isinstance(names, list)
        and len(names) == len(members)
        and all(isinstance(name, str) for name in names)
    ):
        raise FormatError(
            f"{where}: param_names must be a name for each of {len(members)} members, got "
            f"{names!r:.60}"
        )
    settings = {
        key: _number(setting, torch_file, f"{where}: {key}")
        for key, setting in value.items()
        if key not in ("params", "param_names")
    }
    return SavedGroup(settings, tuple(members), None if names is None else tuple(names))


def _number(value: object, torch_file: TorchFile, where: str) -> object:
    """Return the number in a tensor of one element; anything else as it is."""
    if not isinstance(value, TensorRef):
        return value
    if value.numel != 1 or value.dtype.name not in _NUMBERS:
        raise FormatError(
            f"{where}: a tensor must be one number, got {value.dtype} of shape {list(value.shape)}"
        )
    load_small_payloads(torch_file, value)
    start = value.offset * value.dtype.itemsize
    data = (value.storage.payload or b"")[start : start + value.dtype.itemsize]
    number: object = np.frombuffer(data, value.dtype.carrier)[0].item()
    return number
