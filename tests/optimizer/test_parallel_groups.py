"""Is the run right on meshes: norms counted once, sub-groups, device meshes, redundant groups?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch_reference import (
    Weight,
    Weights,
    assert_same_bits,
    exact_grads,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.rules import Split
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, ParallelGroups, Sharding

SHAPES = ((6, 4), (5,), (), (257,))
CLIP = 0.5


def config(**settings: Any) -> OptimizerConfig:
    """Return settings that make several buckets."""
    return OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, "bucket_size": 100, **settings})


def clipped(alone: nn.Module, every: list[dict[str, Tensor]]) -> float:
    """Take one step of torch's AdamW with clipping in one process; return the norm before."""
    set_mean(alone, every)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
    torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True).step()
    return float(norm)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check equality up to the rounding of the norm."""
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_clipping_is_by_the_norm_of_the_mean_over_all_data_parallel_ranks(ranks: int) -> None:
    run_ranks(_clip_dp, ranks)


def _clip_dp() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(clip_grad=CLIP))
    model(exact_grads(model, 0, dist.get_rank())).backward()
    optimizer.step()
    norm = clipped(alone, [exact_grads(alone, 0, r) for r in range(dist.get_world_size())])
    assert norm > 2 * CLIP
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
    assert_close(snapshot(model), snapshot(alone))
    # The moments are linear in the clip, where the parameters of a first step barely show it.
    piece = next(piece for piece in optimizer.pieces if piece.range.param.size)
    clipped_grad = alone.get_parameter(piece.name).grad.reshape(-1)
    part = clipped_grad[piece.range.param.start : piece.range.param.end]
    torch.testing.assert_close(piece.exp_avg, 0.1 * part, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 3])
def test_zeros_among_the_summed_gradients_are_counted_over_all_ranks_where_asked_for(
    ranks: int,
) -> None:
    run_ranks(_count_zeros, ranks)


def _count_zeros() -> None:
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(clip_grad=0.0, log_num_zeros_in_grad=True))
    assert optimizer.num_zeros_in_grad is None
    model(exact_grads(model, 0, dist.get_rank())).backward()
    optimizer.step()
    set_mean(alone, [exact_grads(alone, 0, r) for r in range(dist.get_world_size())])
    zeros = sum(int((param.grad == 0).sum()) for param in alone.parameters())
    assert optimizer.num_zeros_in_grad == zeros > 0


def test_a_gradient_norm_that_is_not_finite_is_refused_before_anything_is_changed() -> None:
    run_ranks(_norm_not_finite, 2)


def _norm_not_finite() -> None:
    for value in (float("nan"), float("inf")):
        model = weights(SHAPES)
        optimizer = DistributedOptimizer(model, config(clip_grad=CLIP))
        grads = exact_grads(model, 0, dist.get_rank())
        if dist.get_rank() == 1:
            grads["1.weight"][0] = value
        model(grads).backward()
        with pytest.raises(
            OptimizerError, match=f"clip_grad: the norm must be finite, got {value}"
        ):
            optimizer.step()
        assert_same_bits("unchanged", snapshot(model), snapshot(weights(SHAPES)))
        assert set(optimizer.steps.values()) == {0}


def test_a_parameter_that_tensor_ranks_hold_copies_of_counts_once_in_the_norm() -> None:
    run_ranks(_clip_tp, 4)


def _clip_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = ParallelGroups.from_mesh(mesh)
    dp, tp = groups.rank("dp"), groups.rank("tp")
    rows = slice(3 * tp, 3 * tp + 3)

    def cut(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**whole, "0.weight": whole["0.weight"][rows].clone()}

    alone = weights(SHAPES)
    model = weights(((3, 4), *SHAPES[1:]))
    with torch.no_grad():
        for name, value in cut(snapshot(alone)).items():
            model.get_parameter(name).copy_(value)
    optimizer = DistributedOptimizer(
        model,
        config(clip_grad=CLIP, fp16=False, loss_scale=1.0),
        groups=groups,
        shardings={"0.weight": Sharding(split=Split(0, Blocks((1,))))},
    )
    model(cut(exact_grads(alone, 0, dp))).backward()
    optimizer.step()
    norm = clipped(alone, [exact_grads(alone, 0, rank) for rank in range(2)])
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
    assert_close(snapshot(model), cut(snapshot(alone)))
    _skips_everywhere(optimizer, model, cut(exact_grads(alone, 1, dp)))


def _skips_everywhere(
    optimizer: DistributedOptimizer, model: Weights, grads: dict[str, Tensor]
) -> None:
    """A gradient on one rank that is not finite skips the step on the other model ranks too."""
    before = snapshot(model)
    optimizer.zero_grad()
    if dist.get_rank() == 3:
        grads["0.weight"].view(-1)[0] = float("nan")
    model(grads).backward()
    optimizer.step()
    assert_same_bits("skipped", snapshot(model), before)


def test_a_copy_on_another_pipeline_stage_counts_once_in_the_norm() -> None:
    run_ranks(_clip_pp, 4)


def _clip_pp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    groups = ParallelGroups.from_mesh(mesh)
    alone = weights(SHAPES)
    first = groups.rank("pp") == 0
    # Parameter 0 is the embedding; the last stage has a copy of it under another name.
    names = ["0.weight", "1.weight"] if first else ["2.weight", "3.weight", "head.weight"]
    stage = Weights((), torch.float32)
    for name in names:
        source = "0.weight" if name == "head.weight" else name
        stage.add_module(name.split(".")[0], Weight(alone.get_parameter(source).detach().clone()))
    shared = stage.get_parameter("0.weight" if first else "head.weight")
    shared.shared_embedding = True
    shardings = {} if first else {"head.weight": Sharding(tied_to="0.weight")}
    optimizer = DistributedOptimizer(
        stage, config(clip_grad=CLIP, loss_scale=1.0), groups=groups, shardings=shardings
    )
    whole = exact_grads(alone, 0, groups.rank("dp"))
    whole["head.weight"] = whole["0.weight"]  # as the exchange between the stages leaves it
    stage(whole).backward()
    optimizer.step()
    norm = clipped(alone, [exact_grads(alone, 0, rank) for rank in range(2)])
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
    expected = snapshot(alone)
    expected["head.weight"] = expected["0.weight"]
    assert_close(snapshot(stage), {name: expected[name] for name in names})


def test_data_parallel_groups_of_other_ranks_than_the_first_work_side_by_side() -> None:
    run_ranks(_side_by_side, 4)


def _side_by_side() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(
        model,
        config(clip_grad=0.0, overlap_grad_reduce=True, overlap_param_gather=True),
        groups=ParallelGroups(dp=pairs[mine]),
    )
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        model(exact_grads(model, step, dist.get_rank())).backward()
        optimizer.step()
        set_mean(alone, [exact_grads(alone, step, 2 * mine + rank) for rank in range(2)])
        reference.step()
    optimizer.finish_param_sync()
    assert_same_bits("pair", snapshot(model), snapshot(alone))
    assert (optimizer.dp.rank, optimizer.dp.size) == (dist.get_rank() % 2, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_replicas_of_two_ranks_equal_four_ranks(overlap: bool) -> None:
    run_ranks(_redundant, 4, overlap)


def _redundant(overlap: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("redundant", "dp"))
    model, alone = weights(SHAPES), weights(SHAPES)
    optimizer = DistributedOptimizer(
        model,
        config(clip_grad=0.0, overlap_grad_reduce=overlap),
        groups=ParallelGroups.from_mesh(mesh),
    )
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    for step in range(3):
        every = [exact_grads(alone, step, rank) for rank in range(4)]
        for rank in (0, 1, 2):  # parameter 1 is used by one rank of one replica alone
            del every[rank]["1.weight"]
        optimizer.zero_grad()
        model(every[dist.get_rank()]).backward()
        optimizer.step()
        set_mean(alone, every)
        reference.step()
        assert_same_bits(f"step {step}", snapshot(model), snapshot(alone))
    assert optimizer.dp.size == 2
