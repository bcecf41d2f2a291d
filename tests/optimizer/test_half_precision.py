"""Do bf16 and fp16 parameters follow fp32 masters, and do overflows skip a step everywhere?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor
from torch_reference import (
    Weights,
    assert_same_bits,
    exact_grads,
    require_vector_kernels,
    same_bits,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

SHAPES = ((7,), (13, 17), (), (257,), (64,))
STEPS = 4
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def _vector_kernels() -> None:
    require_vector_kernels()


def config(**settings: Any) -> OptimizerConfig:
    """Return settings without clipping, in buckets of one or two parameters."""
    return OptimizerConfig(
        **{"lr": 0.01, "clip_grad": 0.0, "weight_decay": 0.1, "bucket_size": 100, **settings}
    )


def rough_grads(step: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return gradients whose sums are not exact, so that it shows where they were rounded."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        f"{index}.weight": torch.randn(shape, generator=generator).to(dtype)
        for index, shape in enumerate(SHAPES)
    }


def summed(every: list[dict[str, Tensor]], name: str, kind: torch.dtype) -> Tensor:
    """Return the sum over ranks as the buffer has it: in fp32, in order, rounded once."""
    total = every[0][name].float()
    for grads in every[1:]:
        total = total + grads[name].float()
    return total.to(kind).float()


def nearest_even(master: Tensor) -> Tensor:
    """Round fp32 to bf16 by integers alone."""
    bits = master.reshape(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    signed = torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)
    return signed.view(torch.bfloat16).view(master.shape)


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_masters_equal_torch_on_fp32_and_weights_are_the_masters_rounded_to_nearest_even(
    ranks: int, half: str, wide: bool, kernel: str
) -> None:
    run_ranks(_masters, ranks, half, wide, kernel)


def _masters(half: str, wide: bool, kernel: str) -> None:
    dtype, ranks = HALVES[half], dist.get_world_size()
    scale = 1024.0 if half == "fp16" else 1.0
    model, alone = weights(SHAPES, dtype), weights(SHAPES, dtype).float()
    own = {"fp16": {"loss_scale": scale}, "bf16": {}}[half]
    optimizer = DistributedOptimizer(
        model,
        config(**{half: True}, grad_reduce_in_fp32=wide, kernel=kernel, **own),
    )
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, **{kernel: True})
    # Sums of 16-bit numbers are rounded on the way, unless they are taken in fp32.
    kind = torch.float32 if wide else dtype
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(rough_grads(step, dist.get_rank(), dtype))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        every = [
            {name: grad * scale for name, grad in rough_grads(step, rank, dtype).items()}
            for rank in range(ranks)
        ]
        for name, param in alone.named_parameters():
            param.grad = summed(every, name, kind) / (scale * ranks)
        reference.step()
        _check_weights(model, alone, dtype)
    masters = {name: param.detach().reshape(-1) for name, param in alone.named_parameters()}
    for piece in optimizer.pieces:
        part = slice(piece.range.param.start, piece.range.param.end)
        state = reference.state[alone.get_parameter(piece.name)]
        for got, whole in (
            (piece.master, masters[piece.name]),
            (piece.exp_avg, state["exp_avg"].reshape(-1)),
            (piece.exp_avg_sq, state["exp_avg_sq"].reshape(-1)),
        ):
            assert same_bits(got, whole[part]), piece.name


def _check_weights(model: Weights, alone: Weights, dtype: torch.dtype) -> None:
    for name, master in snapshot(alone).items():
        rounded = nearest_even(master) if dtype == torch.bfloat16 else master.to(dtype)
        assert same_bits(model.get_parameter(name), rounded), name


def test_the_oracle_rounds_ties_to_even() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20])
    assert nearest_even(ties).tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_every_rank(overlap: bool) -> None:
    scales = run_ranks(_overflow, 3, overlap)
    # The first overflow is forgiven, the second halves; two good steps double.
    assert scales == [[256.0, 256.0, 128.0, 128.0, 256.0, 256.0]] * 3


def _overflow(overlap: bool) -> list[float]:
    model = weights(SHAPES, torch.float16)
    settings = {"initial_loss_scale": 256.0, "loss_scale_window": 2, "hysteresis": 2}
    flags = ("overlap_grad_reduce", "overlap_param_gather")
    optimizer = DistributedOptimizer(
        model, config(fp16=True, **settings, **dict.fromkeys(flags, overlap))
    )
    scales = []
    # (step, rank that overflows, parameter in which it does so, and how)
    faults: dict[int, tuple[int, str, float]] = {
        1: (2, "0.weight", float("inf")),
        2: (0, "4.weight", float("nan")),
    }
    for step in range(6):
        optimizer.zero_grad()
        grads = rough_grads(step, dist.get_rank(), torch.float16)
        rank, name, value = faults.get(step, (-1, "", 0.0))
        if rank == dist.get_rank():
            grads[name].view(-1)[-1] = value
        optimizer.finish_param_sync()
        before, steps = _everything(optimizer, model), dict(optimizer.steps)
        optimizer.scale_loss(model(grads)).backward()
        optimizer.step()
        optimizer.finish_param_sync()
        if step in faults:
            assert_same_bits(f"step {step}", _everything(optimizer, model), before)
            assert optimizer.steps == steps
        else:
            assert not same_bits(_everything(optimizer, model)["1.weight"], before["1.weight"])
            assert set(optimizer.steps.values()) == {steps["1.weight"] + 1}
        scales.append(float(optimizer.scaler.scale))
    return scales


def _everything(optimizer: DistributedOptimizer, model: Weights) -> dict[str, Tensor]:
    state = {
        f"{piece.name} {slot}": tensor.clone()
        for piece in optimizer.pieces
        for slot, tensor in piece.slots().items()
    }
    return {**snapshot(model), **state}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_grad_scaler_of_torch_drives_it(overlap: bool) -> None:
    scales = run_ranks(_amp, 2, overlap)
    assert scales == [[256.0, 512.0, 256.0, 256.0, 512.0]] * 2


def _amp(overlap: bool) -> list[float]:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(overlap_grad_reduce=overlap))
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        grads = exact_grads(model, step, dist.get_rank())
        if step == 2 and dist.get_rank() == 0:
            grads["0.weight"][3] = float("inf")
        before = snapshot(model)
        scaler.scale(model(grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same_bits("skipped", snapshot(model), before)
        else:
            set_mean(alone, [exact_grads(alone, step, rank) for rank in range(2)])
            reference.step()
            assert_same_bits(f"step {step}", snapshot(model), snapshot(alone))
        scales.append(scaler.get_scale())
    return scales


def _unscale() -> tuple[str, float]:
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, config())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(exact_grads(model, 0, dist.get_rank()))).backward()
    scaler.unscale_(optimizer)
    before = snapshot(model)
    message = ""
    try:
        scaler.step(optimizer)
    except OptimizerError as error:
        message = str(error)
    assert_same_bits("refused", snapshot(model), before)
    return message, float(sum(optimizer.steps.values()))


def test_a_scaler_that_unscaled_a_part_of_the_gradients_is_refused_on_every_rank() -> None:
    for message, steps in run_ranks(_unscale, 2):
        assert "must be unscaled by step, since a rank of 2 has only its own part" in message
        assert steps == 0


def test_the_grad_scaler_of_torch_is_refused_where_it_sees_no_gradients() -> None:
    model = weights(SHAPES, torch.bfloat16)
    optimizer = DistributedOptimizer(model, config(bf16=True, grad_reduce_in_fp32=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(rough_grads(0, 0, torch.bfloat16))).backward()
    with pytest.raises(OptimizerError, match=r"torch.amp: must find gradients in param.grad"):
        scaler.step(optimizer)
    assert set(optimizer.steps.values()) == {0}


def test_a_second_step_on_16_bit_gradients_is_refused() -> None:
    model = weights(SHAPES, torch.bfloat16)
    optimizer = DistributedOptimizer(model, config(bf16=True))
    model(rough_grads(0, 0, torch.bfloat16)).backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match="16-bit gradients must be used once"):
        optimizer.step()


def test_micro_batches_of_bf16_are_summed_in_fp32_where_that_is_asked_for() -> None:
    model, alone = weights(SHAPES, torch.bfloat16), weights(SHAPES, torch.bfloat16).float()
    optimizer = DistributedOptimizer(model, config(bf16=True, grad_reduce_in_fp32=True))
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    batches = [rough_grads(i, 0, torch.bfloat16) for i in range(4)]
    for batch in batches:
        model(batch).backward()
    optimizer.step()
    for name, param in alone.named_parameters():
        param.grad = summed(batches, name, torch.float32)
    reference.step()
    _check_weights(model, alone, torch.bfloat16)
    assert all(param.grad is None for param in model.parameters())
    assert all(param.main_grad.dtype == torch.float32 for param in model.parameters())
