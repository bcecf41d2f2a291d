"""Does ZeRO-2 come to the same bits as torch's optimizer in one process? In all settings."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor
from torch_reference import (
    Reference,
    assert_same_bits,
    exact_grads,
    read_reference,
    require_vector_kernels,
    same_bits,
    snapshot,
    weights,
)

from ckpttools.optimizer import DistributedFusedAdam, DistributedOptimizer, OptimizerConfig

STEPS = 3
RANKS = (1, 2, 3, 4)
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MIB = 2**20
SMALL = 600 * 4 / MIB  # 600 elements: parameters are cut, over up to three buckets
LEAST = 1 / MIB  # 32 elements a rank: a parameter lies in dozens of buckets


@pytest.fixture(autouse=True)
def _vector_kernels() -> None:
    require_vector_kernels()


@dataclass(frozen=True)
class Kind:
    """What the reference depends on."""

    kernel: str = "fused"
    decoupled: bool = True
    bias_correction: bool = True
    micro_batches: int = 1
    mean: bool = True


@dataclass(frozen=True)
class Case:
    """``sync`` says which micro-batches but the last are synced: all, or none (no_sync)."""

    kind: Kind = Kind()
    options: dict[str, Any] = field(default_factory=dict)
    sync: bool = True


def _cases() -> list[Case]:
    every = {
        "overlap_param_sync": True,
        "contiguous_param_buffer": True,
        "contiguous_grad_buffer": True,
    }
    alone = [
        {},
        {"overlap_grad_sync": False},
        *({name: True} for name in every),
        every,
        {"pipeline_size": 1},
        {"pipeline_size": 1, "overlap_param_sync": True},
        {"pipeline_size": 5, "overlap_param_sync": True},
        {"grad_sync_dtype": torch.float32, "param_sync_dtype": torch.int32},
        {"unused_parameters": "skip", "store_params": False},
    ]
    cases = [Case(options={"bucket_cap_mb": SMALL} | options) for options in alone]
    cases.append(Case(options={"bucket_cap_mb": 100.0}))
    cases.append(Case(options={"bucket_cap_mb": LEAST, "pipeline_size": 1} | every))
    for kind in (
        Kind("foreach"),
        Kind(decoupled=False),
        Kind("foreach", decoupled=False),
        Kind(bias_correction=False),
        Kind(mean=False),
    ):
        cases.append(Case(kind, {"bucket_cap_mb": SMALL}))
    for options in ({}, {"overlap_grad_sync": False}, every):
        for sync in (True, False):
            cases.append(Case(Kind(micro_batches=2), {"bucket_cap_mb": SMALL} | options, sync))
    return cases


@pytest.mark.parametrize("ranks", RANKS)
def test_parameters_and_moments_have_the_bits_of_torch_in_one_process(ranks: int) -> None:
    cases = _cases()
    for case, *parts in zip(
        cases, *run_ranks(_run_cases, ranks, cases, timeout_s=240), strict=True
    ):
        # A rank compared its own parts of the moments: together they must be everything.
        for name, param in weights().named_parameters():
            edges = sorted(edge for part in parts for edge in part.get(name, ()))
            stops, starts = [0, *(edge[1] for edge in edges)], [edge[0] for edge in edges]
            assert stops == [*starts, param.numel()], (case, name)


def _run_cases(cases: list[Case]) -> list[dict[str, list[tuple[int, int]]]]:
    return [_run_case(case) for case in cases]


@functools.cache
def _grads(rank: int, batches: int) -> list[dict[str, Tensor]]:
    model = weights()
    return [exact_grads(model, step, rank) for step in range(batches)]


@functools.cache
def _reference(kind: Kind, ranks: int) -> Reference:
    model = weights()
    make = torch.optim.AdamW if kind.decoupled else torch.optim.Adam
    optimizer = make(model.parameters(), **SETTINGS, **{kind.kernel: True})
    params = [snapshot(model)]
    number = kind.micro_batches
    for step in range(STEPS):
        for name, param in model.named_parameters():
            every = [
                _grads(rank, STEPS * number)[step * number + k][name]
                for rank in range(ranks)
                for k in range(number)
            ]
            param.grad = torch.stack(every).sum(0) / (ranks if kind.mean else 1)
        if kind.bias_correction:
            optimizer.step()
        else:
            _uncorrected_step(model, optimizer)
        params.append(snapshot(model))
    return (
        read_reference(model, optimizer, params)
        if kind.bias_correction
        else Reference(
            params,
            *(
                {n: optimizer.state[p][slot] for n, p in model.named_parameters()}
                for slot in MOMENTS
            ),
            dict.fromkeys(params[0], STEPS),
        )
    )


MOMENTS = ("exp_avg", "exp_avg_sq")


def _uncorrected_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Call torch's kernel with an infinite step, which makes both corrections 1."""
    for param in model.parameters():
        state = optimizer.state[param]
        for slot in MOMENTS:
            state.setdefault(slot, torch.zeros_like(param))
        if param.numel():
            torch._fused_adamw_(
                [param.data],
                [param.grad],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [torch.tensor(math.inf)],
                lr=SETTINGS["lr"],
                beta1=SETTINGS["betas"][0],
                beta2=SETTINGS["betas"][1],
                weight_decay=SETTINGS["weight_decay"],
                eps=SETTINGS["eps"],
                amsgrad=False,
                maximize=False,
            )


def _run_case(case: Case) -> dict[str, list[tuple[int, int]]]:
    kind, rank = case.kind, dist.get_rank()
    reference = _reference(kind, dist.get_world_size())
    model = weights()
    optimizer = DistributedFusedAdam(
        model,
        **SETTINGS,
        adam_w_mode=kind.decoupled,
        bias_correction=kind.bias_correction,
        kernel=kind.kernel,
        average_grad_sync=kind.mean,
        **case.options,
    )
    number = kind.micro_batches
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(number):
            context: AbstractContextManager[None] = nullcontext()
            if k < number - 1 and not case.sync:
                context = optimizer.no_sync()
            with context:
                model(_grads(rank, STEPS * number)[step * number + k]).backward()
            assert all(param.grad is None for param in model.parameters())
        assert_same_bits(f"{case}, forward {step}", model.seen(), reference.params[step])
        optimizer.step()
    optimizer.param_sync()
    assert_same_bits(f"{case}, end", snapshot(model), reference.params[STEPS])
    assert optimizer.steps == reference.steps | {"3.weight": STEPS}
    parts: dict[str, list[tuple[int, int]]] = {}
    for piece in optimizer.pieces:
        start, stop = piece.range.param.start, piece.range.param.end
        parts.setdefault(piece.name, []).append((start, stop))
        for slot in MOMENTS:
            expected = getattr(reference, slot)[piece.name].reshape(-1)[start:stop]
            where = f"{case}: {piece.name} ({slot}), {start}:{stop}"
            assert same_bits(piece.values(slot), expected), where
    return parts


@pytest.mark.parametrize("ranks", [1, 3])
def test_state_gathered_in_torchs_form_is_that_of_zero1(ranks: int) -> None:
    for left, right, wide, narrow in run_ranks(_both_kinds, ranks):
        if left is None:
            assert right is None
            continue
        assert left["state"].keys() == right["state"].keys()
        for index, state in left["state"].items():
            assert_same_bits(f"state of {index}", state, right["state"][index])
        (mine,), (theirs,) = left["param_groups"], right["param_groups"]
        assert mine | {"bias_correction": True} == theirs
        assert_same_bits("weights", wide, narrow)


def _both_kinds() -> tuple[Any, Any, dict[str, Tensor], dict[str, Tensor]]:
    betas = SETTINGS["betas"]
    left, right = weights(dtype=torch.bfloat16), weights(dtype=torch.bfloat16)
    config = OptimizerConfig(
        lr=0.01,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        clip_grad=0.0,
        weight_decay=0.1,
        grad_reduce_in_fp32=True,
        bucket_size=300,
        overlap_grad_reduce=True,
    )
    one = DistributedOptimizer(left, config)
    two = DistributedFusedAdam(right, **SETTINGS, bucket_cap_mb=SMALL)
    for step in range(STEPS):
        grads = exact_grads(left, step, dist.get_rank())
        for model, optimizer in ((left, one), (right, two)):
            optimizer.zero_grad()
            model(grads).backward()
            optimizer.step()
    found = one.gather_torch_state_dict(), two.gather_torch_state_dict()
    return *found, snapshot(left), snapshot(right)
