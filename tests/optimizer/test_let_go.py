"""An optimizer that nobody holds any more goes, with its buffers, and leaves the model alone."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from training_runs import KINDS, give_gradients, model_of, optimizer_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_and_its_model_are_let_go(kind: str, precision: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = model_of(dtype)
    optimizer = optimizer_of(model, kind, precision)
    x = torch.ones(2, 13, dtype=dtype)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = [ref(optimizer), ref(optimizer._reduction), ref(model)]
    kept += [ref(param) for param in model.parameters()]
    kept += [ref(value) for shard in optimizer.shards for value in shard.slots().values()]
    del optimizer, model
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_on_without_the_optimizer_that_was_let_go(kind: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, kind)
    give_gradients(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    kept = ref(optimizer)
    expected = [param.detach().clone() for param in model.parameters()]
    del optimizer
    gc.collect()
    assert kept() is None
    assert all(map(torch.equal, model.parameters(), expected))
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 13)).sum().backward()
    gradients = [param.grad for param in model.parameters() if param.requires_grad]
    assert all(gradient is not None for gradient in gradients)
    plain.step()
    changed = [param for param in model.parameters() if param.requires_grad]
    before = [e for e, p in zip(expected, model.parameters(), strict=True) if p.requires_grad]
    for param, value, gradient in zip(changed, before, gradients, strict=True):
        assert gradient is not None
        assert torch.equal(param, value - gradient)
