"""Which groups and which step stand in Apex's file? One step, and settings with Apex's names.

Apex needs ``lr``, ``bias_correction``, ``betas``, ``eps`` and ``weight_decay`` of each group and
keeps every other setting that a group has. Whether weight decay is decoupled is no setting of a
group: it is told to the optimizer's constructor, once for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import UsageError
from ckpttools.formats import DECOUPLED, ParamGroup, decoupled_modes
from ckpttools.manifest import Manifest

NEEDED = ("lr", "betas", "eps", "weight_decay")
_REFUSED = ("amsgrad", "maximize")
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """What stands in Apex's file beside tensors: groups with their members by name, and the step.

    ``lost`` are settings that are not plain data; ``notes`` what should be known.
    """

    groups: tuple[ParamGroup, ...]
    step: int
    adam_w_mode: bool | None
    lost: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters by their number."""
        return tuple(name for group in self.groups for name in group.members or ())


def settings_of(source: Manifest) -> Settings:
    """Return the groups and the step of a source as Apex has them.

    Raises:
        UsageError: a setting is missing, or means what Apex can't do.
    """
    groups = source.objects.get("param_groups")
    if not isinstance(groups, Sequence) or not groups:
        raise UsageError("--to apex: needs parameter groups, got a source without them")
    made: list[ParamGroup] = []
    lost: list[str] = []
    notes: list[str] = []
    known: dict[str, object] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, ParamGroup) or group.members is None:
            raise UsageError(
                f"--to apex: param_groups[{number}]: its members must be known, since Apex numbers "
                f"parameters in their order, got a source that doesn't tell them"
            )
        settings, odd = _plain(group.settings)
        _check(settings, f"--to apex: param_groups[{number}]")
        lost += [f"param_groups: {name}: it is not plain data" for name in odd]
        if "bias_correction" not in settings:
            settings["bias_correction"] = True
            notes.append("bias_correction: true, since the source has no setting to turn it off")
        settings = {key: _shared(value, known) for key, value in settings.items()}
        made.append(ParamGroup(settings, group.members))
    objects = {**source.objects, "param_groups": made}
    if len(decoupled_modes({"param_groups": made})) > 1:
        raise UsageError(
            f"--to apex: {DECOUPLED}: must be the same in all parameter groups, since Apex has one "
            f"adam_w_mode, got true and false"
        )
    return Settings(
        tuple(made),
        _step(source.objects.get("step")),
        decoupled(objects),
        tuple(dict.fromkeys(lost)),
        tuple(dict.fromkeys(notes)),
    )


def decoupled(objects: Mapping[str, object]) -> bool | None:
    """Say whether weight decay is decoupled, where the objects or all groups tell it."""
    found = decoupled_modes(objects)
    return next(iter(found)) if len(found) == 1 else None


def _check(settings: Mapping[str, object], where: str) -> None:
    if missing := [name for name in NEEDED if name not in settings]:
        raise UsageError(f"{where}: must have {missing[0]}, got {', '.join(settings) or 'nothing'}")
    if odd := [name for name in _REFUSED if settings.get(name)]:
        raise UsageError(f"{where}: {odd[0]} must be off, since Apex can't do it, got it on")


def _step(step: object) -> int:
    """Return the one number of steps.

    Raises:
        UsageError: there is none, or parameters differ in it.
    """
    if isinstance(step, Mapping):
        found = dict.fromkeys(step.values())
        if len(found) != 1:
            shown = ", ".join(map(str, list(found)[:4])) or "none"
            raise UsageError(
                f"--to apex: step must be one number for all parameters, got {shown}",
                hint="Apex counts steps once for the whole optimizer",
            )
        (step,) = found
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step < 0 or step % 1:
        raise UsageError(f"--to apex: step must be a natural number, got {step!r:.40}")
    return int(step)


def _plain(settings: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the settings that are plain data, and the names of the others."""
    kept = {sys.intern(name): value for name, value in settings.items() if _is_plain(value)}
    return kept, [name for name in settings if name not in kept]


def _is_plain(value: object, depth: int = 0) -> bool:
    """Say whether a value is plain data; one that holds itself is not."""
    inner: Iterable[object] = ()
    if type(value) in (list, tuple) and isinstance(value, (list, tuple)):
        inner = value
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        inner = value.values()
    elif value is not None and type(value) not in (bool, int, float, str):
        return False
    return depth <= _MAX_DEPTH and all(_is_plain(item, depth + 1) for item in inner)


def _shared(value: object, known: dict[str, object]) -> object:
    """Return an equal value in which equal texts and tuples are one object.

    A pickle tells these apart. So a file depends on what is in it alone, and is Apex's own, where
    groups that name no betas have those of the constructor.
    """
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, tuple):
        return known.setdefault(repr(value), tuple(_shared(item, known) for item in value))
    if isinstance(value, list):
        return [_shared(item, known) for item in value]
    if isinstance(value, dict):
        return {sys.intern(key): _shared(item, known) for key, item in value.items()}
    return value
