"""Gradients are divided once: by ranks, loss scale and clip; overflows skip on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor, nn
from torch_reference import (
    assert_same_bits,
    exact_grads,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import DistributedFusedAdam, OptimizerConfig

SHAPES = ((6, 4), (5,), (), (257,), (613,))
CAP = 200 * 4 / 2**20
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bucket_cap_mb": CAP}
CLIP = 0.5


def torch_adam(model: nn.Module) -> torch.optim.AdamW:
    """Return the reference."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def everyone(model: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Return the gradients of each rank."""
    return [exact_grads(model, step, rank) for rank in range(dist.get_world_size())]


@pytest.mark.parametrize("ranks", [1, 3])
def test_norm_and_clip_are_those_of_the_mean_over_all_ranks(ranks: int) -> None:
    run_ranks(_clip, ranks)


def _clip() -> None:
    for average in (True, False):
        model, alone = weights(SHAPES), weights(SHAPES)
        optimizer = DistributedFusedAdam(model, **SETTINGS, average_grad_sync=average)
        model(exact_grads(model, 0, dist.get_rank())).backward()
        every = everyone(alone, 0)
        set_mean(alone, every)
        if not average:
            for param in alone.parameters():
                param.grad *= len(every)
        some = list(model.parameters())[3:]
        theirs = [p.grad for p in list(alone.parameters())[3:]]
        expected = float(torch.nn.utils.get_total_norm([g for g in theirs if g is not None]))
        assert float(optimizer.grad_norm(some)) == pytest.approx(expected, rel=1e-6)
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP))
        assert norm > 2 * CLIP
        assert float(optimizer.clip_grad_norm(CLIP)) == pytest.approx(norm, rel=1e-6)
        assert float(optimizer.grad_norm()) == pytest.approx(CLIP, rel=1e-5)
        optimizer.step()
        torch_adam(alone).step()
        for name, param in alone.named_parameters():
            got = model.get_parameter(name)
            torch.testing.assert_close(got, param, rtol=1e-5, atol=1e-6)
        # The moments are linear in the clip, where a first step's parameters barely show it.
        for piece in optimizer.pieces:
            part = slice(piece.range.param.start, piece.range.param.end)
            mean = alone.get_parameter(piece.name).grad
            assert mean is not None
            first = mean.reshape(-1)[part] * (1 - 0.9)
            torch.testing.assert_close(piece.values("exp_avg"), first, rtol=1e-5, atol=1e-9)


def test_only_the_l2_norm_of_all_parameters_is_clipped() -> None:
    model = weights(SHAPES)
    optimizer = DistributedFusedAdam(model, **SETTINGS)
    model(exact_grads(model, 0, 0)).backward()
    with pytest.raises(OptimizerError, match="norm_type must be 2, got inf"):
        optimizer.grad_norm(norm_type=float("inf"))
    with pytest.raises(OptimizerError, match="must be given all parameters, got some of them"):
        optimizer.clip_grad_norm(1.0, list(model.parameters())[:2])
    assert float(optimizer.clip_grad_norm(1e9, model.parameters())) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_unscaled_gradients_train_to_the_same_bits(ranks: int) -> None:
    run_ranks(_unscale, ranks)


def _unscale() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, reference = DistributedFusedAdam(model, **SETTINGS), torch_adam(alone)
    for step in range(3):
        optimizer.zero_grad()
        (model(exact_grads(model, step, dist.get_rank())) * 1024).backward()
        (found,) = optimizer.unscale_grads(torch.tensor(1 / 1024)).values()
        assert found.item() == 0
        optimizer.step()
        set_mean(alone, everyone(alone, step))
        reference.step()
    assert_same_bits("unscaled", snapshot(model), snapshot(alone))


def test_a_norm_that_is_not_finite_clips_nothing() -> None:
    model = weights(SHAPES)
    optimizer = DistributedFusedAdam(model, **SETTINGS)
    grads = exact_grads(model, 0, 0)
    grads["3.weight"][7] = float("inf")
    model(grads).backward()
    assert float(optimizer.clip_grad_norm(CLIP)) == float("inf")
    optimizer.step()
    good = [piece for piece in optimizer.pieces if piece.name != "3.weight"]
    assert all(piece.values("exp_avg").isfinite().all() for piece in good)
    assert any(piece.values("exp_avg").any() for piece in good)


def test_torch_amp_skips_on_every_rank_where_one_overflows_and_all_scales_agree() -> None:
    scales = run_ranks(_amp, 2)
    # Overflow at step 1 halves the scale; two good steps double it again.
    assert scales == [[256.0, 128.0, 128.0, 256.0]] * 2


def _amp() -> list[float]:
    rank = dist.get_rank()
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, reference = DistributedFusedAdam(model, **SETTINGS), torch_adam(alone)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        grads = exact_grads(model, step, rank)
        if step == 1 and rank == 1:
            grads["3.weight"][3] = float("nan")
        before = snapshot(model)
        scaler.scale(model(grads)).backward()
        with warnings.catch_warnings():  # torch's: it passes itself, as Apex's class asks
            warnings.simplefilter("ignore", FutureWarning)
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 1:
            assert_same_bits("skipped", snapshot(model), before)
            continue
        set_mean(alone, everyone(alone, step))
        reference.step()
    assert_same_bits("torch.amp", snapshot(model), snapshot(alone))
    assert set(optimizer.steps.values()) == {3}
    return scales


def test_torch_amp_may_unscale_by_the_optimizer_and_not_by_itself() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer, reference = DistributedFusedAdam(model, **SETTINGS), torch_adam(alone)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(exact_grads(model, 0, 0))).backward()
    optimizer.unscale_grads(1 / scaler.get_scale())
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    set_mean(alone, [exact_grads(alone, 0, 0)])
    reference.step()
    assert_same_bits("unscaled before", snapshot(model), snapshot(alone))
    optimizer.zero_grad()
    scaler.scale(model(exact_grads(model, 1, 0))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(OptimizerError, match="must be unscaled by step, since they are sharded"):
        optimizer.step(grad_scaler=scaler)
    with pytest.raises(OptimizerError, match="must be a torch.amp.GradScaler that scaled a loss"):
        optimizer.step(grad_scaler=3)


def test_a_loss_scale_of_the_configuration_skips_and_shrinks_on_every_rank() -> None:
    assert run_ranks(_own_scale, 2) == [[64.0, 32.0, 32.0]] * 2


def _own_scale() -> list[float]:
    rank = dist.get_rank()
    model, alone = weights(SHAPES), weights(SHAPES)
    config = OptimizerConfig(
        optimizer="distributed_fused_adam",
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        fp16=True,
        params_dtype=torch.float32,
        initial_loss_scale=64.0,
        hysteresis=1,
        overlap_grad_reduce=True,
        bucket_size=200,
    )
    optimizer, reference = DistributedFusedAdam.from_config(config, model), torch_adam(alone)
    assert optimizer.scaler is not None
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        grads = exact_grads(model, step, rank)
        if step == 1 and rank == 0:
            grads["4.weight"][3] = float("inf")
        optimizer.scale_loss(model(grads)).backward()
        optimizer.step()
        scales.append(float(optimizer.scaler.scale))
        if step != 1:
            set_mean(alone, everyone(alone, step))
            reference.step()
    assert_same_bits("own loss scale", snapshot(model), snapshot(alone))
    return scales


def test_a_configuration_that_clips_does_so_in_every_step() -> None:
    model, other = weights(SHAPES), weights(SHAPES)
    config = OptimizerConfig(optimizer="distributed_fused_adam", lr=0.01, clip_grad=CLIP)
    one = DistributedFusedAdam.from_config(config, model)
    two = DistributedFusedAdam(other, lr=0.01, weight_decay=0.01)
    for step in range(2):
        for each, optimizer in ((model, one), (other, two)):
            optimizer.zero_grad()
            each(exact_grads(each, step, 0)).backward()
        two.clip_grad_norm(CLIP)
        one.step()
        two.step()
    assert_same_bits("clipped", snapshot(model), snapshot(other))
    assert one.last_grad_norm is not None
    assert one.last_grad_norm > CLIP


def test_sixteen_bit_gradients_are_widened_and_those_of_micro_batches_summed_in_fp32() -> None:
    run_ranks(_half_grads, 2)


def _half_grads() -> None:
    for options in ({"grad_sync_dtype": torch.bfloat16}, {"grad_sync_dtype": torch.float32}):
        model = weights(SHAPES, torch.bfloat16)
        optimizer = DistributedFusedAdam(model, **SETTINGS, **options)
        masters = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
        reference = torch.optim.AdamW(list(masters.values()), lr=0.01, weight_decay=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            total = {n: torch.zeros_like(m) for n, m in masters.items()}
            # 256 + 1 is no bfloat16 number; fp32 buffers keep it.
            for factor in (1.0, 256.0) if options["grad_sync_dtype"] == torch.float32 else (1.0,):
                for rank in range(2):
                    sign = {n: torch.full_like(m, (rank + 1) * factor) for n, m in masters.items()}
                    total = {n: g + sign[n] / 2 for n, g in total.items()}
                    if rank == dist.get_rank():
                        with optimizer.no_sync() if factor == 1.0 else warnings.catch_warnings():
                            model(sign).backward()
            optimizer.step()
            for name, master in masters.items():
                master.grad = total[name]
            reference.step()
        for name, param in model.named_parameters():
            assert torch.equal(param.detach(), masters[name].detach().bfloat16()), name
        for piece in optimizer.pieces:
            part = slice(piece.range.param.start, piece.range.param.end)
            assert torch.equal(piece.values("fp32_param"), masters[piece.name].view(-1)[part])
