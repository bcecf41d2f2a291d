"""How does a model family cut each parameter over ranks? Rules, read from a TOML file as data.

A parameter matches exactly one rule or is refused by name; a rule that cuts a dimension must
declare the sub-blocks of that dimension, so a fused tensor is never split evenly by default.
The keys of a rule are explained at the top of ``ckpttools/rules/megatron_gpt.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ckpttools.errors import RuleError
from ckpttools.layout.blocks import Blocks

STAGES = ("first", "last", "layer")
_KEYS = {"name", "stage", "dim", "blocks", "vocabulary", "tied_to", "kind", "when"}
_NAME = re.compile(r"(?:[^{}]|\{[^{},]+(?:,[^{},]+)*\})+")


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor parallelism cuts ``dim``, each sub-block of it evenly."""

    dim: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``split`` None means that every tensor-parallel rank holds an equal copy."""

    name: str
    stage: str
    split: Split | None = None
    vocabulary: bool = False
    tied_to: str = ""
    kind: str = ""
    when: Mapping[str, bool] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        """Say whether the rule's pattern fits ``name``."""
        return re.fullmatch(_pattern(self.name), name) is not None

    def holds(self, facts: Mapping[str, bool]) -> bool:
        """Say whether the facts of a run meet the rule's condition.

        Raises:
            RuleError: the rule depends on a fact that the run doesn't tell.
        """
        for fact, wanted in self.when.items():
            if fact not in facts:
                raise RuleError(
                    f"rule {self.name}: depends on the fact {fact!r}, got a run that only tells "
                    f"{', '.join(facts) or 'nothing'}"
                )
            if facts[fact] != wanted:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one model family."""

    family: str
    where: str
    rules: tuple[Rule, ...]

    def find(self, name: str, facts: Mapping[str, bool]) -> Rule:
        """Return the one rule for ``name``.

        Raises:
            RuleError: no rule matches, or several do.
        """
        found = [rule for rule in self.rules if rule.matches(name) and rule.holds(facts)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise RuleError(
                f"{name}: must match exactly one rule of {self.where}, got none",
                hint="describe the parameter in a rules file and give it with --rules FILE",
            )
        names = " and ".join(rule.name for rule in found)
        raise RuleError(f"{name}: must match exactly one rule of {self.where}, got {names}")


def _pattern(name: str) -> str:
    r"""Translate a rule's name to a regular expression.

    >>> _pattern("a.{layer}.{weight,bias}")
    'a\\.(?P<layer>[0-9]+)\\.(?:weight|bias)'
    """
    pieces = []
    for text, braced in re.findall(r"([^{]*)(?:\{([^}]*)\})?", name):
        pieces.append(re.escape(text))
        if braced == "layer":
            pieces.append("(?P<layer>[0-9]+)")
        elif braced:
            pieces.append("(?:" + "|".join(re.escape(a) for a in braced.split(",")) + ")")
    return "".join(pieces)


def builtin_rules(family: str) -> Rules:
    """Read the rules that ship with ckpttools for a model family."""
    name = family.replace("-", "_") + ".toml"
    text = (resources.files("ckpttools") / "rules" / name).read_text("utf-8")
    return parse_rules(text, where=f"the built-in rules {name}")


def read_rules(path: str | Path) -> Rules:
    """Read a rules file.

    Raises:
        RuleError: it can't be read, isn't TOML, or a rule isn't what a rule must be.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"{path}: a rules file must be readable text, got {error}") from error
    return parse_rules(text, where=str(path))


def parse_rules(text: str, *, where: str) -> Rules:
    """Parse the text of a rules file; ``where`` names it in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"{where}: a rules file must be TOML, got {error}") from error
    return rules_of_table(table, where=where)


def rules_of_table(table: Mapping[str, object], *, where: str) -> Rules:
    """Build the rules of a rules file's content.

    Raises:
        RuleError: a rule isn't what a rule must be.
    """
    unknown = set(table) - {"family", "rule"}
    entries, family = table.get("rule"), table.get("family")
    if unknown or not isinstance(entries, list) or not isinstance(family, str):
        raise RuleError(
            f"{where}: a rules file must have a family and a list of [[rule]], got keys "
            f"{', '.join(sorted(table)) or 'none'}"
        )
    rules = tuple(_rule(entry, f"{where}: rule {i + 1}") for i, entry in enumerate(entries))
    for rule in rules:
        if rule.tied_to and not any(other.matches(rule.tied_to) for other in rules):
            raise RuleError(
                f"{where}: {rule.name}: tied_to must be a parameter of another rule, got "
                f"{rule.tied_to!r}"
            )
    return Rules(family=family, where=where, rules=rules)


def rules_table(rules: Rules) -> dict[str, object]:
    """Return rules as the plain data that a rules file holds; `rules_of_table` undoes it."""
    return {"family": rules.family, "rule": [_entry(rule) for rule in rules.rules]}


def _entry(rule: Rule) -> dict[str, object]:
    """Return a rule as a table of a rules file."""
    entry: dict[str, object] = {"name": rule.name, "stage": rule.stage}
    if rule.split is not None:
        entry |= {"dim": rule.split.dim, "blocks": list(rule.split.blocks.weights)}
    if rule.vocabulary:
        entry["vocabulary"] = True
    for key in ("tied_to", "kind"):
        if value := getattr(rule, key):
            entry[key] = value
    return {**entry, "when": dict(rule.when)} if rule.when else entry


def _rule(entry: object, where: str) -> Rule:
    """Check and build one rule."""
    if not isinstance(entry, dict):
        raise RuleError(f"{where}: must be a table, got {entry!r}")
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise RuleError(f"{where}: keys must be {', '.join(sorted(_KEYS))}, got {unknown[0]}")
    name, stage = entry.get("name"), entry.get("stage")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or name.count("{layer}") > 1:
        raise RuleError(
            f"{where}: name must be text with at most one {{layer}} and {{a,b}} for alternatives, "
            f"got {name!r}"
        )
    if stage not in STAGES or (stage == "layer") != ("{layer}" in name):
        raise RuleError(
            f"{where}: {name}: stage must be one of {', '.join(STAGES)}, and 'layer' exactly "
            f"where the name has {{layer}}, got {stage!r}"
        )
    vocabulary, tied_to, kind = (entry.get(key) for key in ("vocabulary", "tied_to", "kind"))
    if not isinstance(vocabulary, (bool, type(None))):
        raise RuleError(f"{where}: {name}: vocabulary must be true or false, got {vocabulary!r}")
    if not isinstance(tied_to, (str, type(None))) or not isinstance(kind, (str, type(None))):
        raise RuleError(
            f"{where}: {name}: tied_to and kind must be text, got {tied_to!r} and {kind!r}"
        )
    when = entry.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(v, bool) for v in when.values()):
        raise RuleError(f"{where}: {name}: when must map facts to true or false, got {when!r}")
    rule = Rule(
        name=name,
        stage=stage,
        split=_split(entry, f"{where}: {name}"),
        vocabulary=vocabulary is True,
        tied_to=tied_to or "",
        kind=kind or "",
        when=when,
    )
    if rule.vocabulary and (rule.split is None or rule.split.dim != 0):
        raise RuleError(f"{where}: {name}: a vocabulary tensor must be cut in dim 0, got {entry}")
    return rule


def _split(entry: Mapping[str, object], where: str) -> Split | None:
    """Build the split of a rule, refusing a cut without declared sub-blocks."""
    dim, blocks = entry.get("dim"), entry.get("blocks")
    if dim is None and blocks is None:
        return None
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise RuleError(f"{where}: dim must be a dimension number, got {dim!r}")
    if blocks is None:
        raise RuleError(
            f"{where}: a rule that cuts a dimension must declare its sub-blocks, got none",
            hint="blocks = [1] for an unfused tensor, [1, 1] for [gate; up]",
        )
    if not isinstance(blocks, list) or not _positive(blocks):
        raise RuleError(f"{where}: blocks must be a list of positive numbers, got {blocks!r}")
    return Split(dim=dim, blocks=Blocks(tuple(blocks)))


def _positive(values: Sequence[object]) -> bool:
    return bool(values) and all(type(v) is int and v > 0 for v in values)
