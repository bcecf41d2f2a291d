"""Which parameter group does each parameter belong to, and in which order do files list groups?

Megatron's files name no members, so membership follows from Megatron's own rule: biases and 1-D
parameters have ``wd_mult`` 0, the rest 1 (``_get_param_groups``, megatron/core/optimizer/
__init__.py). How a loader finds its group depends on the version:

* by key (core 0.14 and later): every rank lists the same groups, empty ones too, and the list is
  carried as it is;
* by position (core up to 0.13, MegaDLMs): a rank lists only the groups that its own parameters
  use, in first-seen order. Copying another stage's list would swap their settings silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.megatron.trees import same

Settings = dict[str, object]
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_DEFAULTS: Mapping[str, object] = {"lr_mult": 1.0, "is_expert_parallel": False}
BY_KEY_MARKS = ("default_config",)
"""Settings of a group that only writers whose loader matches by key have."""

BY_KEY_ARGUMENTS = ("dist_ckpt_save_pre_mcore_014",)
"""Arguments that only such writers have (added with core 0.14)."""


@dataclass(frozen=True, slots=True)
class GroupParam:
    """A parameter as the grouping rule sees it."""

    name: str
    ndim: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a run.

    ``listing`` is the order in which the first rank's file has them; ``marked_by_key`` says that
    the groups themselves show a writer whose loader goes by key.
    """

    listing: tuple[Settings, ...]
    by_key: bool
    marked_by_key: bool
    step: int | float | None
    decay_qk_layernorm: bool

    def for_stage(self, params: Sequence[GroupParam]) -> list[Settings]:
        """Return the list that the file of a stage with ``params`` (module order) must have.

        Raises:
            UsageError: the writer's loader goes by position, and membership is unknown.
        """
        if self.by_key:
            return [dict(group) for group in self.listing]
        order: list[int] = []
        for param in params:
            index = self.group_of(param)
            if index is None:
                raise UsageError(
                    f"{param.name}: its parameter group must be known, since this checkpoint's "
                    f"Megatron finds groups by position, got groups that no rule tells apart"
                )
            if index not in order:
                order.append(index)
        return [dict(self.listing[index]) for index in order]

    def group_of(self, param: GroupParam) -> int | None:
        """Return the index in ``listing`` of a parameter's group; None where no rule tells."""
        if any(g.get("lr_mult", 1.0) != 1.0 for g in self.listing):
            return None
        decays = not (param.name.endswith(".bias") or param.ndim == 1)
        if param.kind == "qk_layernorm" and self.decay_qk_layernorm:
            decays = True
        decoupled = param.kind == "embedding" and any(
            g.get("is_decoupled_lr") for g in self.listing
        )
        found = [
            i
            for i, g in enumerate(self.listing)
            if g.get("wd_mult") == (1.0 if decays else 0.0)
            and bool(g.get("is_decoupled_lr")) == decoupled
        ]
        return found[0] if len(found) == 1 else None

    def by_name(self, params: Sequence[GroupParam]) -> tuple[ParamGroup, ...]:
        """Return the groups with their members' names."""
        members = [self.group_of(param) for param in params]
        known = None not in members
        return tuple(
            ParamGroup(
                settings=_without_step(group),
                members=tuple(p.name for p, m in zip(params, members, strict=True) if m == index)
                if known
                else None,
            )
            for index, group in enumerate(self.listing)
        )


def read_groups(
    stages: Sequence[tuple[str, Sequence[Settings], Sequence[GroupParam]]],
    *,
    arguments: Mapping[str, object],
    decay_qk_layernorm: bool,
) -> Groups:
    """Join the groups of all rank files: (file, its groups, its parameters), stage by stage.

    Raises:
        FormatError: files disagree, a group is there twice, or a step is not a whole number.
    """
    known: list[tuple[str, Settings]] = []
    marked = any(mark in g for _, groups, _ in stages for g in groups for mark in BY_KEY_MARKS)
    by_key = marked or any(key in arguments for key in BY_KEY_ARGUMENTS)
    step = _common_step(stages)
    for where, groups, _ in stages:
        mine = [_with_step(group, step) for group in groups]
        for i, group in enumerate(mine):
            if any(_identity(group) == _identity(other) for other in mine[:i]):
                raise FormatError(f"{where}: parameter groups must differ, got two of {group}")
            _merge(known, group, where)
        if by_key and not _same_order([group for _, group in known], mine):
            raise FormatError(
                f"{where}: every rank must list the same parameter groups in the same order, got "
                f"{[_identity(g) for g in mine]}"
            )
    listing = tuple(group for _, group in known)
    result = Groups(listing, by_key, marked, step, decay_qk_layernorm)
    if not by_key:
        _check_positions(result, stages)
    return result


def _check_positions(
    groups: Groups, stages: Sequence[tuple[str, Sequence[Settings], Sequence[GroupParam]]]
) -> None:
    """Check that each file lists what the rule for files matched by position gives."""
    for where, listed, params in stages:
        if any(groups.group_of(param) is None for param in params):
            continue
        expected = [_identity(group) for group in groups.for_stage(params)]
        if [_identity(group) for group in listed] != expected:
            raise FormatError(
                f"{where}: parameter groups must be in first-seen order {expected}, got "
                f"{[_identity(group) for group in listed]}"
            )


def _identity(group: Mapping[str, object]) -> tuple[object, ...]:
    """Return what Megatron tells groups apart by; later versions add the learning rates."""
    names = (*_IDENTITY, "max_lr", "min_lr")
    return tuple(group.get(name, _DEFAULTS.get(name)) for name in names)


def _merge(known: list[tuple[str, Settings]], group: Settings, where: str) -> None:
    """Add a group to those known, or check it against the same group of another file."""
    for first, other in known:
        if _identity(other) != _identity(group):
            continue
        mine, theirs = _without_step(group), _without_step(other)
        for key in [*theirs, *(key for key in mine if key not in theirs)]:
            if key not in mine or key not in theirs or not same(mine[key], theirs[key]):
                raise FormatError(
                    f"{where}: {key} of the parameter group with wd_mult {group.get('wd_mult')} "
                    f"must be that of {first}, got {_shown(mine, key)} and {_shown(theirs, key)}"
                )
        if list(mine) != list(theirs):
            raise FormatError(
                f"{where}: settings of a parameter group must be in the order of {first}, got "
                f"{list(mine)}"
            )
        return
    known.append((where, group))


def _shown(group: Settings, key: str) -> str:
    return f"{group[key]!r:.80}" if key in group else "none"


def _without_step(group: Mapping[str, object]) -> Settings:
    return {key: value for key, value in group.items() if key != "step"}


def _same_order(listing: Sequence[Settings], groups: Sequence[Settings]) -> bool:
    return [_identity(g) for g in listing] == [_identity(g) for g in groups]


def _common_step(
    stages: Sequence[tuple[str, Sequence[Settings], Sequence[GroupParam]]],
) -> int | float | None:
    """Return the step that all groups share; None where no group has one."""
    first: tuple[str, int | float] | None = None
    for where, groups, _ in stages:
        for group in groups:
            step = group.get("step")
            if step is None:
                continue
            if isinstance(step, bool) or not isinstance(step, (int, float)):
                raise FormatError(f"{where}: step must be a number, got {step!r}")
            if (isinstance(step, float) and not step.is_integer()) or step < 0:
                raise FormatError(f"{where}: step must be a whole number, got {step!r:.80}")
            if first is None:
                first = where, step
            elif first[1] != step:
                raise FormatError(
                    f"{where}: step must be the same in all groups, got {step} and {first[1]} in "
                    f"{first[0]}"
                )
    return None if first is None else first[1]


def _with_step(group: Mapping[str, object], step: int | float | None) -> Settings:
    """Return the group with its step; an empty group may lack it."""
    filled = dict(group)
    if step is not None and filled.get("step") is None:
        filled["step"] = step
    return filled
