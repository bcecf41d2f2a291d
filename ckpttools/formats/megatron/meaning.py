"""What of another optimizer's state means something else in Megatron, or can't be said there?"""

from __future__ import annotations

from collections.abc import Mapping

from ckpttools.derived import with_masters_of_weights, with_nearest_even_weights
from ckpttools.errors import UsageError
from ckpttools.formats import ParamGroup, Target, decoupled_modes
from ckpttools.manifest import NEAREST_EVEN, Manifest


def check_settings(objects: Mapping[str, object], target: Target) -> tuple[str, ...]:
    """Check that Megatron does what the source did; return remarks on what it must be told.

    Megatron corrects the bias of moments always. Whether decay is decoupled is an argument of the
    run and stands in no file.

    Raises:
        UsageError: a group has no bias correction, and nobody accepted that; or remainders are
            asked for, which Megatron has not.
    """
    if target.masters == "remainders":
        raise UsageError(
            "--masters: must be stored for Megatron, which keeps them whole, got remainders"
        )
    groups = objects.get("param_groups")
    off = [
        group
        for group in (groups if isinstance(groups, tuple) else ())
        if isinstance(group, ParamGroup) and group.settings.get("bias_correction") in (False, 0)
    ]
    notes = []
    if off and "bias_correction" not in target.accept_loss:
        raise UsageError(
            "--to megatron: bias_correction must be on, as it is in Megatron always, got a "
            "parameter group without it",
            hint="to go on with it, give --accept-loss bias_correction",
        )
    if off:
        notes.append("bias_correction was off in the source; Megatron corrects the bias of moments")
    if False in decoupled_modes(objects):
        notes.append(
            "weight decay was added to gradients in the source (L2): the run must be started so"
        )
    return tuple(notes)


def seen_as_megatron(source: Manifest) -> Manifest:
    """Return the source with weights that are their masters rounded to nearest even.

    A source that rounds by another rule, or doesn't tell by which, is seen so through its masters.
    A float32 weight that has none is its own: Megatron keeps a copy of it.
    """
    rules = source.objects.get("weight_rounding", (NEAREST_EVEN,))
    told = tuple(rules) if isinstance(rules, (tuple, list)) else (rules,)
    rounded = source if told == (NEAREST_EVEN,) else with_nearest_even_weights(source)
    return with_masters_of_weights(rounded)
