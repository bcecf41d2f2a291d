"""An optimizer knows of gradients that no step has used: from a backward pass to a step."""

from __future__ import annotations

import pytest
import torch
from training_runs import KINDS, Run

from ckpttools.optimizer import ShardedOptimizer


def backward(run: Run) -> None:
    run.model(torch.ones(2, 13)).sum().backward()


def told(optimizer: ShardedOptimizer) -> tuple[bool, bool]:
    return optimizer.in_no_sync, optimizer.has_pending_gradients


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_pending_from_a_backward_pass_to_a_step_or_to_zero_grad(kind: str) -> None:
    run = Run(kind)
    optimizer = run.optimizer
    assert told(optimizer) == (False, False)
    with optimizer.no_sync():
        assert told(optimizer) == (True, False)
        backward(run)
        assert told(optimizer) == (True, True)
    assert told(optimizer) == (False, True)
    backward(run)
    optimizer.step()
    assert told(optimizer) == (False, False)
    optimizer.zero_grad()
    backward(run)
    assert told(optimizer) == (False, True)
    optimizer.zero_grad()
    assert told(optimizer) == (False, False)
    next(iter(run.model.parameters())).grad = torch.ones(29, 13)
    assert told(optimizer) == (False, False)
    optimizer.finish_grad_sync()
    assert told(optimizer) == (False, True)
