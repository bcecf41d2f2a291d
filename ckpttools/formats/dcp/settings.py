"""How do parameter groups stand in a torch checkpoint? A key a setting, of a group or a parameter.

Flattened, each parameter has all settings of its group; parameters of equal settings are one group
then, whatever groups they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttools.errors import FormatError
from ckpttools.formats import ParamGroup
from ckpttools.formats.dcp.keys import GROUPS, MEMBERS, Keys, Path
from ckpttools.formats.dcp.state import is_plain

DECOUPLED = "decoupled_weight_decay"
_NAMES = "param_names"
_ADAM_SLOTS = {"exp_avg", "exp_avg_sq"}
_ADAM: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Settings of torch's Adam that other Adams don't have, for one that computes as they do."""

Value = Callable[[str], object]
"""Reads what stands under a key."""


def read_groups(keys: Keys, value: Value, notes: list[str]) -> tuple[ParamGroup, ...]:
    """Return the parameter groups; settings that are no plain data only get a line in ``notes``.

    Raises:
        FormatError: members are something else than names of weights.
    """
    by_group: dict[str | int, dict[str, object]] = {}
    for (group, setting), key in keys.settings.items():
        mine = by_group.setdefault(group, {})
        found = value(key)
        if is_plain(found):
            mine[setting] = found
        else:
            notes.append(f"not carried: {key}: it is no plain data")
    numbered = {group: s for group, s in by_group.items() if isinstance(group, int)}
    if numbered:
        return tuple(_group(numbered[index], keys) for index in sorted(numbered))
    return tuple(_joined(by_group))


def adam_w_mode(groups: Sequence[ParamGroup]) -> bool | None:
    """Say whether weight decay was decoupled, where the groups that have any tell it."""
    told = {
        group.settings[DECOUPLED]
        for group in groups
        if DECOUPLED in group.settings and group.settings.get("weight_decay")
    }
    mode = told.pop() if len(told) == 1 else None
    return mode if isinstance(mode, bool) else None


def setting_items(
    groups: Sequence[ParamGroup], *, flat: bool
) -> Iterator[tuple[str, Path, object]]:
    """Yield key, path and value of each setting, from below the optimizer."""
    for index, group in enumerate(groups):
        members = list(group.members or ())
        if flat:
            for name in members:
                for setting, value in group.settings.items():
                    key = f"{GROUPS}.{name}.{setting}"
                    yield key, (key,), value
            continue
        settings = {**group.settings, MEMBERS: members}
        for setting, value in settings.items():
            yield f"{GROUPS}.{index}.{setting}", (GROUPS, index, setting), value


def torch_groups(
    groups: Sequence[ParamGroup], slots: set[str], decoupled: object
) -> tuple[list[ParamGroup], list[str]]:
    """Return groups as torch's optimizers have them, and a line on each that can't be written.

    Where the state is Adam's, settings that torch's own Adam has and the source doesn't name are
    added, in the way in which they change nothing.
    """
    kept: list[ParamGroup] = []
    lost: list[str] = []
    for index, group in enumerate(groups):
        if group.members is None:
            lost.append(f"param_groups[{index}]: nobody tells its members")
            continue
        settings = {key: value for key, value in group.settings.items() if key != _NAMES}
        for key, value in list(settings.items()):
            if not is_plain(value):
                lost.append(f"param_groups[{index}]: {key}: it is no plain data")
                del settings[key]
        if slots >= _ADAM_SLOTS:
            settings |= {key: value for key, value in _ADAM.items() if key not in settings}
            if isinstance(decoupled, bool):
                settings.setdefault(DECOUPLED, decoupled)
        kept.append(ParamGroup(settings, group.members))
    return kept, lost


def _group(settings: Mapping[str, object], keys: Keys) -> ParamGroup:
    """Return a group that lists its members, by name or by number."""
    listed = settings.get(MEMBERS)
    rest = {key: value for key, value in settings.items() if key not in (MEMBERS, _NAMES)}
    if listed is None:
        return ParamGroup(rest, None)
    if isinstance(listed, list) and keys.numbers and all(type(one) is int for one in listed):
        listed = [keys.numbers[one] for one in listed if 0 <= one < len(keys.numbers)]
    if not isinstance(listed, list) or not all(
        isinstance(one, str) and one in keys.weights for one in listed
    ):
        raise FormatError(f"{GROUPS}: members must be names of weights, got {listed!r:.60}")
    return ParamGroup(rest, tuple(listed))


def _joined(by_name: Mapping[str | int, Mapping[str, object]]) -> Iterator[ParamGroup]:
    """Yield one group for all parameters of equal settings."""
    found: list[tuple[Mapping[str, object], list[str]]] = []
    for name, settings in by_name.items():
        mine = next((members for known, members in found if known == settings), None)
        if mine is None:
            found.append((settings, [str(name)]))
        else:
            mine.append(str(name))
    for settings, members in found:
        yield ParamGroup(dict(settings), tuple(members))
