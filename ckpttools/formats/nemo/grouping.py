"""Which parameter group is each parameter in, and which number has it there?

NeMo makes at most three groups of a model, in this order and without empty ones: parameters with
weight decay, experts with it, parameters without. Each is in module order, and numbers run on from
group to group. Which parameters have none is a rule, and NeMo has had several; a file of the
distributed form doesn't tell which, a legacy file holds numbers and shapes that must fit.

==============  ====================================================================
rule            no weight decay
==============  ====================================================================
one-dimensional biases, and whatever has at most one dimension (fused norms included)
norm-modules    biases, and norms that are modules of their own
biases          biases
all             nothing: one group
==============  ====================================================================

Source: ``get_params_for_weight_decay_optimization`` and ``get_all_params_for_…`` of
nemo/collections/nlp/modules/common/megatron/utils.py: a norm counts there if it is of one of
Apex's classes, which Transformer Engine's are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.errors import FormatError


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter as the rules see it."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_bias(self) -> bool:
        """Whether its name says that it is a bias."""
        return self.name.endswith("bias")


Decays = Callable[[Member], bool]


def _is_norm_module(member: Member) -> bool:
    module = member.name.rpartition(".")[0].rpartition(".")[2]
    return "norm" in module


RULES: Mapping[str, Decays] = {
    "one-dimensional": lambda m: not m.is_bias and len(m.shape) > 1,
    "norm-modules": lambda m: not m.is_bias and not _is_norm_module(m),
    "biases": lambda m: not m.is_bias,
    "all": lambda _: True,
}
"""Whether a parameter has weight decay, by rule."""

DEFAULT_RULE = "one-dimensional"

DECAY, NO_DECAY = "decay", "no decay"


def roles(rule: str, members: Sequence[Member]) -> dict[str, tuple[Member, ...]]:
    """Return the members of each group that isn't empty, in the order of groups.

    >>> shapes = {"norm.weight": (3,), "fc.weight": (2, 3), "fc.bias": (2,)}
    >>> members = [Member(name, shape) for name, shape in shapes.items()]
    >>> {k: [m.name for m in v] for k, v in roles("norm-modules", members).items()}
    {'decay': ['fc.weight'], 'no decay': ['norm.weight', 'fc.bias']}
    """
    decays = RULES[rule]
    parted = {
        DECAY: tuple(m for m in members if decays(m)),
        NO_DECAY: tuple(m for m in members if not decays(m)),
    }
    return {role: mine for role, mine in parted.items() if mine}


def assign(
    groups: Sequence[Sequence[Member]],
    numbers: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...]],
    *,
    where: str,
) -> dict[int, str]:
    """Return the name of each number, where the k-th number of a group is its k-th member's.

    Raises:
        FormatError: groups, their lengths or a shape don't fit.
    """
    if [len(g) for g in groups] != [len(n) for n in numbers]:
        raise FormatError(
            f"{where}: parameter groups must have {[len(g) for g in groups]} parameters, got "
            f"{[len(n) for n in numbers]}"
        )
    names: dict[int, str] = {}
    for group, mine in zip(groups, numbers, strict=True):
        for member, number in zip(group, mine, strict=True):
            if number in names or shapes.get(number) != member.shape:
                got = "it twice" if number in names else f"{shapes.get(number)}"
                raise FormatError(
                    f"{where}: parameter {number} must be {member.name} of shape {member.shape}, "
                    f"got {got}"
                )
            names[number] = member.name
    if odd := sorted(shapes.keys() - names.keys()):
        raise FormatError(f"{where}: every parameter must be in a group, got {odd[0]} in none")
    return names
