"""An embedding that the last stage has a copy of is one tensor in files, whatever the stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.errors import OptimizerError
from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, ParallelGroups, Sharding

EMBEDDING = (7, 5)


def gradient(step: int, name: str) -> torch.Tensor:
    shape = EMBEDDING if name in ("embedding", "output") else (3,)
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2 + step).reshape(shape) / 8


def two_stages(*, marked: bool = True) -> DistributedOptimizer:
    """Build stage 0 or 1 of a model whose output layer is its embedding."""
    first = dist.get_rank() == 0
    tied = torch.nn.Parameter(torch.ones(EMBEDDING))
    if marked or not first:
        tied.shared_embedding = True  # type: ignore[attr-defined]  # Megatron's mark
    other = torch.nn.Parameter(torch.ones(3))
    named = [("embedding", tied), ("a", other)] if first else [("b", other), ("output", tied)]
    shardings = {
        "embedding": Sharding(stage="first"),
        "output": Sharding(stage="last", tied_to="embedding"),
        "a": Sharding(stage="layer", layer=0),
        "b": Sharding(stage="layer", layer=1),
    }
    mine = {name: shardings[name] for name, _ in named}
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = ParallelGroups(dp=alone, pp=dist.new_group([0, 1]))
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, bucket_size=30)
    return DistributedOptimizer(named, config, groups=groups, shardings=mine)


def train(optimizer: DistributedOptimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        for managed in optimizer.managed:
            managed.param.grad = gradient(step, managed.name)
        optimizer.step()
        optimizer.zero_grad()


def save_two_stages(folder: str) -> float:
    optimizer = two_stages()
    train(optimizer, 0, 2)
    save_sharded(Path(folder) / "two", optimizer, iteration=2)
    return float(optimizer.managed[0].param.detach().sum())


def go_on_with_two(folder: str) -> bool:
    optimizer = two_stages()
    load_sharded(Path(folder) / "one", optimizer)
    train(optimizer, 3, 4)
    save_sharded(Path(folder) / "four", optimizer, iteration=4)
    return True


def one_stage() -> DistributedOptimizer:
    names = {"embedding": EMBEDDING, "a": (3,), "b": (3,)}
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in names.items()]
    shardings = {
        "embedding": Sharding(stage="first"),
        "a": Sharding(stage="layer", layer=0),
        "b": Sharding(stage="layer", layer=1),
    }
    config = OptimizerConfig(lr=0.1, clip_grad=0.0)
    return DistributedOptimizer(named, config, shardings=shardings)


def test_a_tied_copy_is_a_replica_in_files_and_comes_and_goes_with_stages(tmp_path: Path) -> None:
    run_ranks(save_two_stages, 2, str(tmp_path))
    manifest = api.read_manifest(tmp_path / "two")
    assert {spec.name for spec in manifest.tensors} == {"embedding", "a", "b"}
    assert any(chunk.replica_id for chunk in manifest.chunks)
    assert api.verify(tmp_path / "two").ok
    single = one_stage()
    load_sharded(tmp_path / "two", single)
    train(single, 2, 3)
    save_sharded(tmp_path / "one", single, iteration=3)
    assert all(run_ranks(go_on_with_two, 2, str(tmp_path)))
    straight = one_stage()
    train(straight, 0, 4)
    save_sharded(tmp_path / "straight", straight, iteration=4)
    expected = api.digest(tmp_path / "straight")[0]
    assert api.digest(tmp_path / "four")[0] == expected != api.digest(tmp_path / "one")[0]


def forget_a_mark() -> str:
    optimizer = two_stages(marked=False)
    with pytest.raises(OptimizerError) as caught:
        save_sharded("nowhere", optimizer)
    return str(caught.value)


def test_a_tied_embedding_that_is_not_marked_on_every_stage_is_refused() -> None:
    messages = run_ranks(forget_a_mark, 2)
    assert all("must lie as the layout's formula says" in message for message in messages)
