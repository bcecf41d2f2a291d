"""Is this a moment at which a run can be saved? Gradients are in no checkpoint.

Between the micro-batches of one step the sums so far would be lost without a word. Inside
``no_sync()`` that is certain, so a save is refused; where there are gradients that no step has
used (a step that was skipped leaves such too), the checkpoint says so and a restore tells it.
"""

from __future__ import annotations

import torch

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import ShardedOptimizer


def has_pending_gradients(optimizer: torch.optim.Optimizer | None) -> bool:
    """Say whether there are gradients that no step has used, as far as the optimizer knows.

    Optimizers of torch don't know: False.

    Raises:
        OptimizerError: called inside ``no_sync()``.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        return False
    if optimizer.in_no_sync:
        raise OptimizerError(
            "save: must be called outside no_sync(), got a call inside",
            hint="save after step(): the gradients of a step that isn't finished can't be saved",
        )
    return optimizer.has_pending_gradients
