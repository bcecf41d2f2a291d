"""Which form does a save have, and who plans and reads it? By the optimizer, and by name.

``sharded`` is one file a rank: the native form for our optimizers, the general one for any other
of torch's. ``dcp`` is the container of torch's distributed checkpoints. ``gathered`` (safetensors)
and ``gathered-zarr`` (zarr v3) are no plans: whole tensors come to be while all ranks take part,
streamed to data-parallel rank zero, or, with optimizers of torch, through the disk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpttools.errors import UsageError
from ckpttools.hooks.gathered import save_gathered
from ckpttools.hooks.gathered_general import gather_general
from ckpttools.hooks.general import load_general, plan_general
from ckpttools.hooks.restore import Restored, load_sharded
from ckpttools.hooks.save_plan import SavePlan, plan_native
from ckpttools.hooks.training_state import RNG, names_per_rank
from ckpttools.optimizer import ShardedOptimizer

SHARDED = "sharded"
GATHERED = "gathered"
GATHERED_ZARR = "gathered-zarr"
DCP = "dcp"
FORMS = (SHARDED, GATHERED, GATHERED_ZARR, DCP)
WHOLE = {GATHERED: "safetensors", GATHERED_ZARR: "zarr"}
"""The forms of whole tensors, and their formats."""


def plan_save(
    form: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    iteration: int,
    carry: Mapping[str, object] | None,
    extra: Mapping[str, object],
) -> SavePlan:
    """Plan a save in a form; a collective call.

    Raises:
        UsageError: there is no such form for this optimizer.
    """
    if form == DCP:
        planned: SavePlan = _plan_dcp()(
            model, optimizer, iteration=iteration, carry=carry, extra=extra
        )
        return planned
    if isinstance(optimizer, ShardedOptimizer):
        return plan_native(optimizer, iteration=iteration, carry=carry, extra=extra)
    return plan_general(model, optimizer, iteration=iteration, carry=carry, extra=extra)


def load_any(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool,
    allow: Collection[str],
) -> Restored:
    """Load weights and optimizer state of any format that is read here; a collective call.

    Raises:
        CkptError: it doesn't fit, or is damaged; raised on every rank, and nothing was changed.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return load_sharded(path, optimizer, strict=strict)
    return load_general(path, model, optimizer, strict=strict, allow=allow)


def gather_save(
    form: str,
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    iteration: int,
    carry: Mapping[str, object] | None,
    extra: Mapping[str, object],
    overwrite: bool,
) -> None:
    """Save whole tensors; a collective call.

    ``extra`` is equal on every rank. Random generators in it are left out.

    Raises:
        UsageError: something else differs from rank to rank, which has no place there.
        CkptError: any rank could not write; raised on every rank, and nothing was published.
    """
    if differing := sorted(names_per_rank(extra) - {RNG}):
        raise UsageError(
            f"{differing[0]}: must be equal on all ranks for format {form}, got others on some",
            hint=f"save in format {SHARDED}, which keeps each rank's own",
        )
    if isinstance(optimizer, ShardedOptimizer):
        save_gathered(
            path,
            optimizer,
            to=WHOLE[form],
            iteration=iteration,
            carry=carry,
            extra=extra,
            overwrite=overwrite,
        )
    else:
        gather_general(
            path,
            model,
            optimizer,
            to=WHOLE[form],
            iteration=iteration,
            carry=carry,
            extra=extra,
            overwrite=overwrite,
        )


def _plan_dcp() -> Callable[..., Any]:
    """Return the function that plans a save for torch's distributed checkpoints.

    Raises:
        UsageError: this version has none.
    """
    try:
        module = importlib.import_module("ckpttools.hooks.dcp")
    except ImportError as error:
        raise UsageError(f"format: must be another, got {DCP}: {error}") from error
    plan: Callable[..., Any] = module.plan_dcp
    return plan
