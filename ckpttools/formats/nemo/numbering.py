"""Which parameter does each number of a legacy file stand for? Rules of groups, or the user.

Every rule of `ckpttools.formats.nemo.grouping` is tried on every rank: groups, their lengths and
every shape must fit. Rules that give the same numbering are one. What several numberings fit is
for the weights to tell, which must be their masters rounded; or for the user: a JSON file with the
names in the order of numbers, by number, or by group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpttools.errors import FormatError, UsageError
from ckpttools.formats.nemo.grouping import RULES, Member, assign, roles
from ckpttools.formats.nemo.legacy_files import RankId
from ckpttools.formats.nemo.names import split_prefix
from ckpttools.formats.nemo.optimizer_state import OptimizerState, Settings
from ckpttools.storage.local import read_small_file
from ckpttools.storage.sealed_json import parse_json

NAMES = "names"
_MAX_NAMES_BYTES = 64 << 20

Groups = Mapping[str, tuple[Member, ...]]
"""The members of each of a rank's groups, by what tells the group apart from rank to rank."""


@dataclass(frozen=True, slots=True)
class RankMembers:
    """A rank's optimizer and its parameters in module order."""

    where: str
    optimizer: OptimizerState
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Numbering:
    """One way to name the numbers: the rules that agree on it, names by rank, groups by role.

    ``settings`` and ``members`` are of the whole model, by what tells groups apart.
    """

    rules: tuple[str, ...]
    names: Mapping[RankId, Mapping[int, str]]
    settings: Mapping[str, Settings]
    members: Mapping[str, tuple[str, ...]]


def find_numberings(
    ranks: Mapping[RankId, RankMembers], *, rule: str | None, names_path: str | None
) -> tuple[list[Numbering], list[str]]:
    """Return the numberings that fit every rank, and why others don't.

    Raises:
        FormatError: the user's names don't fit.
        UsageError: the user's file isn't what it must be.
    """
    if names_path is not None:
        names = read_names(names_path)
        given = {rank: _given(names, r, names_path) for rank, r in ranks.items()}
        return [_numbering(NAMES, ranks, given)], []
    found: list[Numbering] = []
    refused: list[str] = []
    for name in [rule] if rule is not None else RULES:
        try:
            mine = _numbering(name, ranks, {k: roles(name, r.members) for k, r in ranks.items()})
        except FormatError as error:
            refused.append(f"layout {name}: {error}")
            continue
        same = next((i for i, other in enumerate(found) if other.names == mine.names), None)
        if same is None:
            found.append(mine)
        else:
            found[same] = Numbering(
                (*found[same].rules, name), mine.names, found[same].settings, found[same].members
            )
    return found, refused


def read_names(path: str) -> list[str] | dict[int, str] | list[list[str]]:
    """Read names from a JSON file; wrapper prefixes are taken off.

    Raises:
        UsageError: it is no list of names, no table of names by number and no list of lists.
    """
    document = parse_json(read_small_file(path, limit_bytes=_MAX_NAMES_BYTES), path)
    if isinstance(document, dict) and all(
        key.isdigit() and isinstance(name, str) for key, name in document.items()
    ):
        return {int(key): split_prefix(name)[1] for key, name in document.items()}
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return [split_prefix(name)[1] for name in document]
    if isinstance(document, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group)
        for group in document
    ):
        return [[split_prefix(name)[1] for name in group] for group in document]
    raise UsageError(
        f"{path}: must be a list of names, a table of them by number or a list of lists, got "
        f"{type(document).__name__}"
    )


def _given(
    names: list[str] | dict[int, str] | list[list[str]], rank: RankMembers, path: str
) -> Groups:
    """Return a rank's groups as the user's names give them.

    Names that the rank doesn't have are passed over, so one file serves all stages.
    """
    members = {member.name: member for member in rank.members}
    numbers = sorted(number for group in rank.optimizer.numbers for number in group)
    by_number: dict[int, str]
    if isinstance(names, dict) and names.keys() == set(numbers):
        by_number = names
    else:
        listed: list[str] = []
        for item in [names[k] for k in sorted(names)] if isinstance(names, dict) else names:
            listed += [item] if isinstance(item, str) else item
        mine = [name for name in listed if name in members]
        _check_lists(names, members, rank, path)
        if not isinstance(names, dict) and any(isinstance(item, list) for item in names):
            numbers = [number for group in rank.optimizer.numbers for number in group]
        by_number = dict(zip(numbers, mine, strict=False))
        if len(mine) != len(numbers):
            by_number = {}
    if set(by_number.values()) != members.keys():
        raise FormatError(
            f"{path}: must name each of the {len(numbers)} numbered parameters of {rank.where} "
            f"once, got {len(set(by_number.values()) & members.keys())} that are there"
        )
    return {
        f"group {i}": tuple(members[by_number[number]] for number in group)
        for i, group in enumerate(rank.optimizer.numbers)
    }


def _check_lists(
    names: list[str] | dict[int, str] | list[list[str]],
    members: Collection[str],
    rank: RankMembers,
    path: str,
) -> None:
    """Check that lists of names for groups are as long as a rank's groups.

    Raises:
        FormatError: they aren't.
    """
    lists = [item for item in names if isinstance(item, list)] if isinstance(names, list) else []
    mine = [count for item in lists if (count := sum(name in members for name in item))]
    sizes = [len(numbers) for numbers in rank.optimizer.numbers if numbers]
    if lists and mine != sizes:
        raise FormatError(
            f"{path}: must have lists of {sizes} names for the groups of {rank.where}, got {mine}"
        )


def _numbering(
    name: str, ranks: Mapping[RankId, RankMembers], groups: Mapping[RankId, Groups]
) -> Numbering:
    """Return the numbering of all ranks, their groups joined."""
    names: dict[RankId, Mapping[int, str]] = {}
    settings: dict[str, Settings] = {}
    members: dict[str, list[str]] = {}
    for key, rank in ranks.items():
        mine, optimizer = groups[key], rank.optimizer
        shapes = {n: _shape(tensors, rank.where) for n, tensors in optimizer.tensors.items()}
        names[key] = assign(list(mine.values()), optimizer.numbers, shapes, where=rank.where)
        for (role, group), listed in zip(mine.items(), optimizer.groups, strict=True):
            if settings.setdefault(role, listed) != listed:
                raise FormatError(
                    f"{rank.where}: settings of a parameter group must be the same in all files, "
                    f"got another {_first_difference(settings[role], listed)}"
                )
            known = members.setdefault(role, [])
            known += [m.name for m in group if m.name not in known]
    ordered = _ordered(settings)
    return Numbering(
        (name,), names, {r: settings[r] for r in ordered}, {r: tuple(members[r]) for r in ordered}
    )


def _ordered(settings: Mapping[str, Settings]) -> list[str]:
    """Return the groups in NeMo's order: ``decay`` comes before ``no decay``."""
    return sorted(settings)


def _shape(tensors: Mapping[str, object], where: str) -> tuple[int, ...]:
    """Return the shape that all tensors of a number have."""
    shapes = {getattr(tensor, "shape", None) for tensor in tensors.values()}
    if len(shapes) != 1:
        raise FormatError(f"{where}: tensors of a parameter must have one shape, got {shapes}")
    found: tuple[int, ...] = shapes.pop() or ()
    return found


def _first_difference(a: Settings, b: Settings) -> str:
    return next((k for k in (*a, *b) if a.get(k) != b.get(k)), "order")
