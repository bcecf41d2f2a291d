"""What does ``optimizer_states`` of a NeMo file hold? Apex's format 2, and nothing else.

``{"state": {"step": n, 0: {"param", "exp_avg", "exp_avg_sq"}, …}, "param_groups": […], "format":
2}``. The distributed form has neither tensors nor ``params`` in it. Format 1 is bytes of ranks and
belongs to the format ``apex``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.nemo.settings import plain_number
from ckpttools.manifest import MASTER
from ckpttools.storage.torchzip import TensorRef

OPTIMIZER = "optimizer_states"
PARAM = "param"
FORMAT = 2

Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One optimizer: its step, the settings of its groups, the numbers in them, its tensors.

    ``numbers`` are empty tuples where groups have no ``params``; ``tensors`` are by number and
    slot, the master under its slot's name.
    """

    step: int
    groups: tuple[Settings, ...]
    numbers: tuple[tuple[int, ...], ...]
    tensors: Mapping[int, Mapping[str, TensorRef]]

    def template(self) -> list[object]:
        """Return the entry of a file's dict without tensors and numbers."""
        return template_of(self.step, self.groups)

    @property
    def has_experts(self) -> bool:
        """Whether a group is of experts."""
        return any(group.get("is_expert") is True for group in self.groups)


def template_of(step: int, groups: Sequence[Settings]) -> list[object]:
    """Return ``optimizer_states`` as the distributed form has it."""
    return [
        {
            "state": {"step": step},
            "param_groups": [dict(group) for group in groups],
            "format": FORMAT,
        }
    ]


def read_optimizer(tree: Mapping[str, object], where: str) -> OptimizerState | None:
    """Read ``optimizer_states`` of a file's dict; None where it has none.

    Raises:
        FormatError: it isn't what format 2 is.
        UnsupportedError: it is of another optimizer, or of Apex's format 1.
    """
    listed = tree.get(OPTIMIZER)
    if listed is None or listed == []:
        return None
    if not isinstance(listed, list):
        raise FormatError(f"{where}: {OPTIMIZER} must be a list, got {type(listed).__name__}")
    if len(listed) != 1:
        raise UnsupportedError(f"{where}: must have one optimizer, got {len(listed)}")
    where = f"{where}: {OPTIMIZER}[0]"
    state = listed[0]
    if not isinstance(state, Mapping):
        raise FormatError(f"{where}: must be a dict, got {type(state).__name__}")
    _check_kind(state, where)
    inner, groups = state.get("state"), state.get("param_groups")
    if not isinstance(inner, Mapping) or not isinstance(groups, list):
        raise FormatError(
            f"{where}: must have state and param_groups, got {', '.join(map(str, state))}"
        )
    step = plain_number(inner.get("step"), f"{where}: step")
    if type(step) is not int or step < 0:
        raise FormatError(f"{where}: step must be a whole number, got {step!r:.60}")
    if odd := [key for key in inner if key != "step" and type(key) is not int]:
        raise FormatError(f"{where}: state must be of numbered parameters, got {odd[0]!r:.60}")
    return OptimizerState(
        step,
        tuple(_settings(group, f"{where}: param_groups[{i}]") for i, group in enumerate(groups)),
        tuple(_numbers(group, f"{where}: param_groups[{i}]") for i, group in enumerate(groups)),
        {
            int(number): _tensors(entry, f"{where}: state[{number}]")
            for number, entry in inner.items()
            if type(number) is int
        },
    )


def _check_kind(state: Mapping[object, object], where: str) -> None:
    """Refuse what isn't Apex's format 2."""
    inner = state.get("state")
    old = "gathered_states" in state or (isinstance(inner, Mapping) and "buckets" in inner)
    if old or state.get("format", FORMAT) != FORMAT:
        raise UnsupportedError(
            f"{where}: must be Apex's format 2, got its format 1, which holds the bytes of ranks",
            hint="read the optimizer's state by itself as --format apex",
        )
    if "fp32_from_fp16_params" in state or "optimizer" in state or "param_groups" not in state:
        raise UnsupportedError(
            f"{where}: must be of distributed_fused_adam, got another optimizer with "
            f"{', '.join(map(str, state)):.80}"
        )


def _settings(group: object, where: str) -> Settings:
    if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
        raise FormatError(f"{where}: must be a dict with names, got {type(group).__name__}")
    return {
        str(key): plain_number(value, f"{where}: {key}")
        for key, value in group.items()
        if key != "params"
    }


def _numbers(group: Mapping[object, object], where: str) -> tuple[int, ...]:
    numbers = group.get("params", [])
    if not isinstance(numbers, (list, tuple)) or not all(type(n) is int for n in numbers):
        raise FormatError(f"{where}: params must be numbers, got {type(numbers).__name__}")
    return tuple(numbers)


def _tensors(entry: object, where: str) -> dict[str, TensorRef]:
    if not isinstance(entry, Mapping):
        raise FormatError(f"{where}: must be a dict of tensors, got {type(entry).__name__}")
    found: dict[str, TensorRef] = {}
    for key, value in entry.items():
        if not isinstance(key, str) or not isinstance(value, TensorRef):
            raise FormatError(f"{where}: {key}: must be a tensor, got {type(value).__name__}")
        found[MASTER if key == PARAM else key] = value
    return found
