"""What did a verification find, and does another checkpoint hold the same?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpttools import comparison
from ckpttools.conversion import Stage
from ckpttools.executor import Resources
from ckpttools.manifest import WEIGHT, Manifest


@dataclass(frozen=True, slots=True)
class Verification:
    """What :func:`verify` found. ``damage`` and ``differences`` make it fail.

    ``unchecked`` lists what was asked for but couldn't be checked.
    """

    checked: tuple[str, ...]
    damage: tuple[str, ...]
    differences: tuple[str, ...]
    unchecked: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether neither damage nor a difference was found."""
        return not self.damage and not self.differences


def against(
    manifest: Manifest,
    other: Manifest,
    other_name: str,
    *,
    need_optimizer: bool,
    resources: Resources,
    stage: Stage | None,
) -> tuple[list[str], list[str]]:
    """Compare with another checkpoint; return differences and remarks.

    Optimizer state that one side lacks is a remark, and a difference where it is needed.
    """
    total = comparison.total_bytes(manifest, other)
    progress = stage("compare", total) if stage else None
    result = comparison.compare(manifest, other, resources, progress)
    differences = [str(difference) for difference in result.differences]
    notes: list[str] = []
    for keys, where in ((result.only_a, "it"), (result.only_b, other_name)):
        weights = [key for key in keys if key[1] == WEIGHT]
        differences += [f"{name} ({slot}): only in {where}" for name, slot in weights]
        if rest := len(keys) - len(weights):
            line = f"{rest} optimizer tensors are only in {where}"
            (differences if need_optimizer else notes).append(line)
    sides = (manifest.objects, other.objects)
    for (a, b), where in ((sides, "it"), (sides[::-1], other_name)):
        if only := comparison.settings_lost(a, b):
            notes.append(
                f"settings of parameter groups that are only in {where}: {', '.join(only)}"
            )
    if result.padding:
        notes.append(f"padding rows differ in {len(result.padding)} tensors, which is allowed")
    return differences, notes


def without_optimizer(sides: Iterable[tuple[Manifest, str]]) -> list[str]:
    """Return a line for each side that has no optimizer state."""
    return [
        f"optimizer state: must be there, got none in {where}"
        for manifest, where in sides
        if not any(spec.slot != WEIGHT for spec in manifest.tensors)
    ]
