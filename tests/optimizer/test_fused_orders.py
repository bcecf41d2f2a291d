"""In which order are buckets filled, and do parameters of all kinds and orders train alike?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankFailedError, run_ranks
from torch import nn
from torch_reference import (
    SHAPES,
    assert_same_bits,
    exact_grads,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import DistributedFusedAdam
from ckpttools.optimizer.fused_building import FillOrder

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 2**20
SMALL = 600 * 4 / MIB


def _names(optimizer: DistributedFusedAdam) -> list[list[str]]:
    return [[slot.name[0] for slot in bucket.slots] for bucket in optimizer.buffers[0].buckets]


def test_buckets_are_filled_against_module_order_unless_told_otherwise() -> None:
    shapes = ((70,), (30,), (40,), (64,), (10,))
    cap = 96 * 4 / MIB
    model = weights(shapes)
    params = list(model.parameters())
    optimizer = DistributedFusedAdam(model, bucket_cap_mb=cap)
    assert _names(optimizer) == [["4", "3"], ["2", "1"], ["0"]]
    optimizer.init_params(params[:2])
    assert _names(optimizer) == [["0"], ["1", "4", "3"], ["3", "2"]]
    optimizer.init_params_bucket(params[3])
    assert _names(optimizer) == [["0"], ["1"], ["3"], ["4", "2"]]
    optimizer.init_params()
    assert _names(optimizer) == [["0"], ["1"], ["3"], ["2", "4"]]
    layout = optimizer.describe()
    assert layout.fills == {(0, 0, "float32"): ((0, 1), (3,), (2, 4))}
    model(exact_grads(model, 0, 0)).backward()
    with pytest.raises(OptimizerError, match="laid out before the first gradient, got it after"):
        optimizer.init_params(params)
    with pytest.raises(OptimizerError, match=r"that this optimizer trains, got Parameter of shape"):
        optimizer.init_params(nn.Parameter(torch.zeros(3)))


def test_a_closed_bucket_closes_those_of_every_dtype() -> None:
    order = FillOrder([])
    order.add(["a", "x"], own_bucket=False)
    order.add(["b"], own_bucket=True)
    order.add(["c", "a"], own_bucket=False)
    order.add(["y"], own_bucket=False)
    assert order.segments() == [["a", "x"], ["b"], ["c", "y"]]
    assert order.places() == {"a": 0, "x": 1, "b": 2, "c": 3, "y": 4}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_order_of_buckets_trains_to_the_bits_of_torch(ranks: int) -> None:
    layouts = run_ranks(_ordered, ranks)
    assert all(layout == layouts[0] for layout in layouts)


def _ordered() -> list[Any]:
    found = []
    for contiguous in (False, True):
        model, alone = weights(), weights()
        optimizer = DistributedFusedAdam(
            model,
            lr=0.01,
            weight_decay=0.1,
            bucket_cap_mb=SMALL,
            contiguous_param_buffer=contiguous,
            overlap_param_sync=contiguous,
        )
        params = list(model.parameters())
        optimizer.init_params(params[4:6])
        optimizer.init_params_bucket(params[1:3])
        optimizer.init_params([params[8]])
        optimizer.init_params_bucket([params[6]])
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            model(exact_grads(model, step, dist.get_rank())).backward()
            optimizer.step()
            set_mean(alone, [exact_grads(alone, step, r) for r in range(dist.get_world_size())])
            reference.step()
        optimizer.param_sync()
        assert_same_bits("ordered", snapshot(model), snapshot(alone))
        found.append(optimizer.describe())
    return found


def test_ranks_that_order_their_buckets_otherwise_are_refused() -> None:
    with pytest.raises(RankFailedError, match="init_params: all ranks must list the same names"):
        run_ranks(_unlike_orders, 2)
    with pytest.raises(RankFailedError, match="setting pipeline_size must be the same on all"):
        run_ranks(_unlike_options, 2)


def _unlike_orders() -> None:
    model = weights()
    optimizer = DistributedFusedAdam(model)
    optimizer.init_params(list(model.parameters())[dist.get_rank()])


def _unlike_options() -> None:
    DistributedFusedAdam(weights(), pipeline_size=1 + dist.get_rank())


def test_models_of_several_dtypes_chunks_and_groups_train_to_the_bits_of_torch() -> None:
    run_ranks(_mixed, 2)


def _mixed() -> None:
    rank = dist.get_rank()
    for options in ({}, {"overlap_param_sync": True, "pipeline_size": 1}):
        chunks = [weights(SHAPES[4:7]), weights(SHAPES[6:])]
        alone = [weights(SHAPES[4:7]), weights(SHAPES[6:])]
        for models in (chunks, alone):
            models[1].get_submodule("0").bfloat16()
        named = [(f"{i}.{n}", p) for i, c in enumerate(chunks) for n, p in c.named_parameters()]
        optimizer = DistributedFusedAdam(
            [
                {"params": named[::2], "lr": 0.02},
                {"params": named[1::2], "weight_decay": 0.3},
            ],
            lr=0.01,
            modules=chunks,
            bucket_cap_mb=SMALL,
            **options,
        )
        assert [(b.chunk, b.param_dtype) for b in optimizer.buffers] == [
            (0, FP32),
            (1, BF16),
            (1, FP32),
        ]
        flat = [p for c in alone for p in c.parameters()]
        masters = [nn.Parameter(p.detach().float()) for p in flat]
        reference = torch.optim.AdamW(
            [
                {"params": masters[::2], "lr": 0.02, "weight_decay": 0.0},
                {"params": masters[1::2], "weight_decay": 0.3},
            ],
            lr=0.01,
            fused=True,
        )
        for step in range(3):
            optimizer.zero_grad()
            for chunk in chunks:
                chunk(exact_grads(chunk, step, rank)).backward()
            optimizer.step()
            grads = [
                torch.stack([exact_grads(c, step, r)[n] for r in range(2)]).sum(0) / 2
                for c in alone
                for n, _ in c.named_parameters()
            ]
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad
            reference.step()
        optimizer.param_sync()
        for (name, param), master in zip(named, masters, strict=True):
            assert torch.equal(param.detach(), master.detach().to(param.dtype)), name
        optimizer.describe()


def test_a_parameter_in_another_memory_order_becomes_row_major_and_trains_alike() -> None:
    values = torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last)
    for contiguous in (False, True):
        mine, alone = nn.Parameter(values.clone()), nn.Parameter(values.contiguous())
        optimizer = DistributedFusedAdam(
            [("w", mine)], lr=0.01, contiguous_param_buffer=contiguous, bucket_cap_mb=SMALL
        )
        reference = torch.optim.AdamW([alone], lr=0.01, weight_decay=0.0, fused=True)
        for param in (mine, alone):
            (param * values).sum().backward()
        optimizer.step()
        reference.step()
        assert mine.is_contiguous()
        assert torch.equal(mine, alone)
