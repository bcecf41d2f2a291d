"""Does the sharded optimizer come to the same bits as torch's in one process? In all settings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch_reference import (
    LARGE_SHAPE,
    SHAPES,
    Reference,
    assert_same_bits,
    exact_grads,
    mean_grads,
    read_reference,
    require_vector_kernels,
    same_bits,
    snapshot,
    weights,
)

from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

STEPS = 20
RANKS = (1, 2, 3, 4)
BUCKET_SIZES = (None, 1, 500)
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OVERLAPS = list(itertools.product((False, True), repeat=3))


@pytest.fixture(autouse=True)
def _vector_kernels() -> None:
    require_vector_kernels()


@dataclass(frozen=True)
class Kind:
    """What the reference depends on."""

    kernel: str
    decoupled: bool
    threads: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return SHAPES if self.threads == 1 else (*SHAPES, LARGE_SHAPE)


@dataclass(frozen=True)
class Case:
    kind: Kind
    bucket_size: int | None
    overlap: tuple[bool, bool, bool]


KINDS = [Kind(kernel, adamw) for kernel in ("fused", "foreach") for adamw in (True, False)]


def _cases(shift: int) -> list[Case]:
    """Pair every bucket size with every kind; ``shift`` says which overlap each pair gets.

    5 and 8 have no common divisor, so all settings of overlap are among them.
    """
    pairs = itertools.product(BUCKET_SIZES, KINDS)
    return [
        Case(kind, bucket_size, OVERLAPS[(5 * index + shift) % len(OVERLAPS)])
        for index, (bucket_size, kind) in enumerate(pairs)
    ]


# Two threads matter to parameters that are large enough to be shared between them.
THREADED_CASES = [
    Case(Kind(kind.kernel, kind.decoupled, threads=2), bucket_size, overlap)
    for kind, bucket_size, overlap in zip(
        KINDS, (None, 1, 500, None), (OVERLAPS[0], OVERLAPS[-1]) * 2, strict=True
    )
]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_cases_meet_every_bucket_size_kind_and_overlap(ranks: int) -> None:
    cases = _cases(ranks)
    assert {(c.bucket_size, c.kind) for c in cases} == set(itertools.product(BUCKET_SIZES, KINDS))
    assert {case.overlap for case in cases} == set(OVERLAPS)


@pytest.mark.parametrize("ranks", RANKS)
def test_parameters_moments_and_steps_equal_those_of_torch_bit_for_bit(ranks: int) -> None:
    _check_cases(ranks, _cases(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_they_do_with_two_threads_that_share_a_parameter(ranks: int) -> None:
    _check_cases(ranks, THREADED_CASES)


def _check_cases(ranks: int, cases: list[Case]) -> None:
    parts_by_rank = run_ranks(_run_cases, ranks, cases, timeout_s=240)
    # A rank compared its own part of the moments: together the parts must be everything.
    for case, *parts in zip(cases, *parts_by_rank, strict=True):
        for name, param in weights(case.kind.shapes).named_parameters():
            edges = sorted(part[name] for part in parts if name in part)
            stops, starts = [0, *(edge[1] for edge in edges)], [edge[0] for edge in edges]
            assert stops == [*starts, param.numel()], name


def test_the_test_notices_one_wrong_bit() -> None:
    model = weights(SHAPES)
    wrong = snapshot(model)
    wrong["4.weight"].view(-1).view(torch.int32)[100] ^= 1
    with pytest.raises(AssertionError, match="4.weight differs at 1 of 221 elements"):
        assert_same_bits("here", wrong, snapshot(model))


def _run_cases(cases: list[Case]) -> list[dict[str, tuple[int, int]]]:
    references: dict[Kind, Reference] = {}
    parts = []
    for case in cases:
        if case.kind not in references:
            references[case.kind] = _reference(case.kind, dist.get_world_size())
        parts.append(_run_case(case, references[case.kind]))
    return parts


@functools.cache
def _grads(rank: int, shapes: tuple[tuple[int, ...], ...]) -> list[dict[str, torch.Tensor]]:
    model = weights(shapes)
    return [exact_grads(model, step, rank) for step in range(STEPS)]


@functools.cache
def _mean_grads(ranks: int, shapes: tuple[tuple[int, ...], ...]) -> list[dict[str, torch.Tensor]]:
    model = weights(shapes)
    return [mean_grads(model, step, ranks) for step in range(STEPS)]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let the update alone use more threads than one: all else would wait for cores."""
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(1)


def _reference(kind: Kind, ranks: int) -> Reference:
    model = weights(kind.shapes)
    make = torch.optim.AdamW if kind.decoupled else torch.optim.Adam
    optimizer = make(model.parameters(), **SETTINGS, **{kind.kernel: True})
    params = [snapshot(model)]
    for grads in _mean_grads(ranks, kind.shapes):
        for name, param in model.named_parameters():
            param.grad = grads[name]
        with _threads(kind.threads):
            optimizer.step()
        params.append(snapshot(model))
    return read_reference(model, optimizer, params)


def _run_case(case: Case, reference: Reference) -> dict[str, tuple[int, int]]:
    model = weights(case.kind.shapes)
    optimizer = DistributedOptimizer(model, _config(case))
    for step, grads in enumerate(_grads(dist.get_rank(), case.kind.shapes)):
        optimizer.zero_grad()
        model(grads).backward()
        assert_same_bits(f"{case}, forward {step}", model.seen(), reference.params[step])
        with _threads(case.kind.threads):
            optimizer.step()
    optimizer.finish_param_sync()
    assert_same_bits(f"{case}, end", snapshot(model), reference.params[STEPS])
    assert optimizer.steps == reference.steps | {"3.weight": STEPS}
    parts = {}
    for piece in optimizer.pieces:
        start, stop = piece.range.param.start, piece.range.param.end
        parts[piece.name] = (start, stop)
        for slot in ("exp_avg", "exp_avg_sq"):
            expected = getattr(reference, slot)[piece.name].reshape(-1)[start:stop]
            got = getattr(piece, slot)
            assert same_bits(got, expected), f"{case}: {piece.name} ({slot}), {start}:{stop}"
    return parts


def _config(case: Case) -> OptimizerConfig:
    beta1, beta2 = SETTINGS["betas"]
    grads, params, eager = case.overlap
    return OptimizerConfig(
        lr=SETTINGS["lr"],
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=SETTINGS["eps"],
        weight_decay=SETTINGS["weight_decay"],
        clip_grad=0.0,
        decoupled_weight_decay=case.kind.decoupled,
        kernel=case.kind.kernel,
        bucket_size=case.bucket_size,
        overlap_grad_reduce=grads,
        overlap_param_gather=params,
        overlap_param_gather_with_optimizer_step=eager,
    )
