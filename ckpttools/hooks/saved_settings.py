"""What of a checkpoint beside tensors does a live optimizer take? Steps, and settings of groups.

Groups are found by their members. How Adam is done (decoupled decay, bias correction) is never
taken over: it is the run's own, and must be what the checkpoint says where that says it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.errors import MismatchError
from ckpttools.formats import ParamGroup, decoupled_modes
from ckpttools.manifest import Manifest
from ckpttools.optimizer import ShardedOptimizer

BIAS_CORRECTION = "bias_correction"


class SavedSettings:
    """The steps and groups of a checkpoint as this rank takes them.

    ``canonical`` maps the names of this rank's parameters to those of the checkpoint's tensors.
    """

    def __init__(
        self, manifest: Manifest, optimizer: ShardedOptimizer, canonical: Mapping[str, str]
    ) -> None:
        self.manifest = manifest
        self.optimizer = optimizer
        self._canonical = canonical

    def check(self) -> None:
        """Check that steps and groups fit this run, before anything is changed.

        Raises:
            MismatchError: they don't.
        """
        self.steps()
        self._check_adam()
        self.groups()

    def without_a_place(self) -> list[str]:
        """Return the settings of saved groups that this run's groups don't have."""
        groups = self.groups()
        saved = self._saved_groups() if groups else []
        known = {BIAS_CORRECTION, "step", *(key for live, _ in groups for key in live)}
        return sorted({key for group in saved for key in group.settings} - known)

    def steps(self) -> dict[str, int]:
        """Return the step of each parameter of this rank.

        Raises:
            MismatchError: the checkpoint has none, or no whole number.
        """
        stated = self.manifest.objects.get("step")
        steps = {}
        for name in self.optimizer.steps:
            step = stated.get(self._canonical[name]) if isinstance(stated, Mapping) else stated
            if isinstance(step, float) and step.is_integer():
                step = int(step)
            if type(step) is not int or step < 0:
                raise MismatchError(
                    f"{self.manifest.root}: {name}: step must be a whole number, got {step!r}"
                )
            steps[name] = step
        return steps

    def groups(self) -> list[tuple[dict[str, object], dict[str, object]]]:
        """Return (live group, settings to take) for each parameter group of this rank.

        Settings are found by members: all of a live group's parameters must have been in one
        saved group. Where a checkpoint names no members, the live settings stay.

        Raises:
            MismatchError: a live group's members were in several groups.
        """
        groups = self._saved_groups()
        if not groups or any(group.members is None for group in groups):
            return []
        of: dict[str, int] = {}
        for i, group in enumerate(groups):
            for name in group.members or ():
                if of.setdefault(name, i) != i:
                    raise MismatchError(
                        f"{self.manifest.root}: {name}: must be in one parameter group of the "
                        f"checkpoint, got it in {of[name]} and {i}"
                    )
        names = {id(managed.param): managed.name for managed in self.optimizer.managed}
        taken = []
        for live in self.optimizer.param_groups:
            params = [names[id(param)] for param in live["params"]]
            found = {of.get(self._canonical[name]) for name in params}
            alone = [
                name
                for name in params
                if name in self.optimizer.trains and self._canonical[name] not in of
            ]
            if alone and len(found) > 1:
                raise MismatchError(
                    f"{self.manifest.root}: {alone[0]}: must be in the parameter group of "
                    f"the checkpoint that others of its group are in, got none",
                    hint="build the optimizer with the groups of the run that saved",
                )
            found.discard(None)
            if len(found) > 1:
                raise MismatchError(
                    f"{self.manifest.root}: {params[0]}…: parameters of one group must be in one "
                    f"group of the checkpoint, got {len(found)}",
                    hint="build the optimizer with the groups of the run that saved",
                )
            if found:
                taken.append((live, _torch_settings(groups[found.pop() or 0].settings, live)))
        return taken

    def _check_adam(self) -> None:
        """Check that the run does Adam as the checkpoint's did, where that tells it."""
        config, root = self.optimizer.config, self.manifest.root
        mine = config.decoupled_weight_decay
        if not decoupled_modes(self.manifest.objects) <= {mine}:
            raise MismatchError(
                f"{root}: adam_w_mode must be {mine} as in this run, got {not mine}",
                hint="build the optimizer with the weight decay of the run that saved",
            )
        live = {
            bool(group.get(BIAS_CORRECTION, config.bias_correction))
            for group in self.optimizer.param_groups
        }
        for group in self._saved_groups():
            value = group.settings.get(BIAS_CORRECTION)
            if value is not None and live != {bool(value)}:
                in_run = " and ".join(map(str, sorted(live)))
                raise MismatchError(
                    f"{root}: {BIAS_CORRECTION} must be {in_run} as in this run, got {value}",
                    hint="build the optimizer with the bias correction of the run that saved",
                )

    def _saved_groups(self) -> list[ParamGroup]:
        saved = self.manifest.objects.get("param_groups")
        return [g for g in saved if isinstance(g, ParamGroup)] if isinstance(saved, tuple) else []


def _torch_settings(saved: Mapping[str, object], live: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a saved group that the live one has too, as torch has them."""
    taken = {key: saved[key] for key in live if key in saved and key not in ("params", "step")}
    if isinstance(taken.get("betas"), (list, tuple)):
        taken["betas"] = tuple(taken["betas"])  # type: ignore[arg-type]  # a list in JSON
    return taken
