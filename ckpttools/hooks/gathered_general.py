"""How do the chunks of a run with any optimizer become whole tensors? By way of the disk.

1. Every rank writes its own chunks to a hidden directory, copies once, as in a sharded save.
2. Rank 0 converts that directory in bounded memory, and proves the result equal to it, element by
   element, before it is published.
3. The hidden directory goes.

No rank needs memory for a whole tensor; for as long as it takes the disk holds the run twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ckpttools import api
from ckpttools.errors import StorageError, UsageError
from ckpttools.executor import Resources
from ckpttools.hooks.general import plan_general
from ckpttools.hooks.ranks import Ranks
from ckpttools.hooks.step_directory import remove_tree
from ckpttools.hooks.write_files import write_live
from ckpttools.storage.commit import check_destination
from ckpttools.storage.local import write_new_file

_BUDGET_BYTES = 64 << 20


def gather_general(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    to: str = "safetensors",
    iteration: int | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save whole tensors of a run with any of torch's optimizers, as ``safetensors`` or ``zarr``.

    A collective call of all ranks of the default group, which must see one filesystem. The
    arguments are those of ``plan_general``. Returns the directory.

    Raises:
        UsageError: the optimizer has no state yet; whole tensors would lose its groups.
        CkptError: any rank could not write, or the result isn't equal; raised on every rank, and
            nothing was published.
    """
    ranks = Ranks()
    place = Path(directory).absolute()
    plan = plan_general(model, optimizer, iteration=iteration, carry=carry, extra=extra)
    mine: list[Path] = []

    def enter() -> str:
        if ranks.rank != 0:
            return ""
        if optimizer is not None and not any(optimizer.state.values()):
            raise UsageError(
                "optimizer: must have state to be saved with whole tensors, got none yet",
                hint="save in format sharded, or after a step, or the weights with optimizer=None",
            )
        check_destination(place, overwrite=overwrite)
        hidden = place.parent / f".{place.name}.chunks-{secrets.token_hex(6)}"
        try:
            hidden.mkdir()
        except OSError as error:
            raise StorageError(f"{hidden}: can't make it: {error.strerror or error}") from error
        mine.append(hidden)
        return str(hidden)

    try:
        root = Path(ranks.together(enter)[0])
        written = ranks.together(lambda: write_live(root, plan))

        def convert() -> bool:
            for hidden in mine:
                for path, data in plan.finish([one for many in written for one in many]).items():
                    write_new_file(hidden / path, data)
                resources = Resources(budget_bytes=_BUDGET_BYTES)
                api.gather(hidden, place, to=to, overwrite=overwrite, resources=resources)
            return True

        ranks.together(convert)
    finally:
        for hidden in mine:
            remove_tree(hidden)
    return place
