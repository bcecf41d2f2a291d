"""Tensor- and pipeline-parallel runs save whole tensors' worth, and load each other's files.

Every topology trains the same global model with the same global gradients, small whole numbers
over eight, so all of them hold the same state, each its own part of it.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.hooks import load_sharded, save_gathered, save_sharded
from ckpttools.layout.blocks import Blocks, local_shape, shard_boxes
from ckpttools.layout.rules import Split
from ckpttools.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    ParallelGroups,
    Sharding,
)

TOPOLOGIES = {"tp1": (1, 1, 1), "tp2dp2": (2, 1, 2), "pp2dp2": (1, 2, 2), "tp2pp2": (2, 2, 1)}
SHAPES = {"fc1": (8, 5), "fc2": (5, 4), "norm": (5,)}
SPLITS = {"fc1": Split(0, Blocks((1, 1))), "fc2": Split(1, Blocks((1,))), "norm": None}
LAYERS = 4
EMBEDDING = (11, 5)


def shapes() -> dict[str, tuple[int, ...]]:
    layers = {f"layers.{i}.{n}": shape for i in range(LAYERS) for n, shape in SHAPES.items()}
    return {"embedding": EMBEDDING, **layers}


def whole(name: str, salt: int) -> torch.Tensor:
    """Return a global tensor whose every element tells its place, in eighths."""
    shape = shapes()[name]
    values = torch.arange(prod(shape)) + 1000 * list(shapes()).index(name)
    return (((values * 37 + salt * 101) % 17 - 8) / 8).reshape(shape)


def split_of(name: str) -> Split | None:
    return SPLITS.get(name.rpartition(".")[2])


def stage_of(name: str) -> Sharding:
    if name == "embedding":
        return Sharding(split=None, stage="first")
    return Sharding(split=split_of(name), stage="layer", layer=int(name.split(".")[1]))


def local(name: str, tensor: torch.Tensor, tp: int, tp_size: int) -> torch.Tensor:
    """Return a tensor rank's own part of a global tensor."""
    split = split_of(name)
    if split is None:
        return tensor.clone()
    part = torch.empty(local_shape(tensor.shape, split.dim, tp_size))
    for mine, theirs in shard_boxes(tuple(tensor.shape), split.dim, split.blocks, tp_size, tp):
        there = tuple(slice(o, o + n) for o, n in zip(theirs.offsets, theirs.lengths, strict=True))
        here = tuple(slice(o, o + n) for o, n in zip(mine.offsets, mine.lengths, strict=True))
        part[here] = tensor[there]
    return part


def groups_of(sizes: tuple[int, int, int]) -> ParallelGroups | None:
    """Make the groups of a topology, tensor ranks first; None on ranks that take no part."""
    tp_size, pp_size, dp_size = sizes
    rank, world = dist.get_rank(), tp_size * pp_size * dp_size
    mine: dict[str, Any] = {}
    for axis, size, stride in (
        ("tp", tp_size, 1),
        ("dp", dp_size, tp_size),
        ("pp", pp_size, tp_size * dp_size),
    ):
        starts = [r for r in range(world) if r // stride % size == 0]
        for start in starts:
            members = [start + i * stride for i in range(size)]
            group = dist.new_group(members)
            if rank in members:
                mine[axis] = group
    return ParallelGroups(**mine) if rank < world else None


def run(groups: ParallelGroups, sizes: tuple[int, int, int]) -> DistributedOptimizer:
    """Build a rank's optimizer; parameters start at zero."""
    tp_size, pp_size, _ = sizes
    tp, pp = groups.rank("tp"), groups.rank("pp")
    per_stage = LAYERS // pp_size
    names = [
        name
        for name in shapes()
        if (stage_of(name).layer or 0) // per_stage == pp and (name != "embedding" or pp == 0)
    ]
    named = [
        (name, torch.nn.Parameter(local(name, torch.zeros(shapes()[name]), tp, tp_size)))
        for name in names
    ]
    config = OptimizerConfig(
        lr=0.02,
        weight_decay=0.1,
        clip_grad=0.0,
        bucket_size=60,
        kernel="foreach",  # the fused one rounds the last elements of each rank's own tensor apart
    )
    shardings = {name: stage_of(name) for name in names}
    return DistributedOptimizer(named, config, groups=groups, shardings=shardings)


def train(optimizer: DistributedOptimizer, groups: ParallelGroups, start: int, stop: int) -> None:
    for step in range(start, stop):
        optimizer.zero_grad()
        for managed in optimizer.managed:
            part = local(
                managed.name, whole(managed.name, step), groups.rank("tp"), groups.size("tp")
            )
            managed.param.grad = part
        optimizer.step()


def save_all(folder: str) -> bool:
    for name, sizes in TOPOLOGIES.items():
        groups = groups_of(sizes)
        if groups is not None:
            optimizer = run(groups, sizes)
            train(optimizer, groups, 0, 2)
            save_sharded(f"{folder}/{name}", optimizer, iteration=2)
            save_gathered(f"{folder}/{name}-whole", optimizer, iteration=2)
        dist.barrier()
    return True


def load_all(folder: str, names: list[str]) -> bool:
    """Load each checkpoint into each topology, go on, and save what came of it."""
    for name, sizes in TOPOLOGIES.items():
        groups = groups_of(sizes)
        for source in names:
            if groups is not None:
                optimizer = run(groups, sizes)
                load_sharded(Path(folder) / source, optimizer)
                train(optimizer, groups, 2, 4)
                save_sharded(f"{folder}/{source}-on-{name}", optimizer, iteration=4)
            dist.barrier()
    return True


def straight(folder: str) -> bool:
    sizes = TOPOLOGIES["tp1"]
    groups = groups_of(sizes)
    if groups is not None:
        optimizer = run(groups, sizes)
        train(optimizer, groups, 0, 4)
        save_sharded(f"{folder}/straight", optimizer, iteration=4)
    dist.barrier()
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert all(run_ranks(save_all, 4, str(folder), timeout_s=240))
    return folder


def test_every_topology_saves_the_same_whole_tensors(saved: Path) -> None:
    digests = {path.name: api.digest(path)[0] for path in sorted(saved.iterdir())}
    assert len(digests) == 2 * len(TOPOLOGIES)
    assert len(set(digests.values())) == 1, digests


def test_resharding_a_topology_gives_the_same_content_and_the_splits_are_those_named(
    saved: Path, tmp_path: Path
) -> None:
    api.reshard(saved / "tp2pp2", tmp_path / "out", target=api.Target(tp=1, pp=1, dp=3))
    assert api.digest(tmp_path / "out")[0] == api.digest(saved / "tp1")[0]
    api.reshard(tmp_path / "out", tmp_path / "back", target=api.Target(tp=2, pp=2, dp=1))
    assert api.digest(tmp_path / "back")[0] == api.digest(saved / "tp1")[0]
    manifest = api.read_manifest(saved / "tp2pp2")
    specs = {spec.name: spec.shape for spec in manifest.tensors}
    assert specs == shapes()


def test_any_topology_goes_on_from_any_other_as_the_run_that_never_stopped(
    saved: Path, tmp_path: Path
) -> None:
    assert all(run_ranks(straight, 4, str(tmp_path), timeout_s=120))
    expected = api.digest(tmp_path / "straight")[0]
    assert expected != api.digest(saved / "tp1")[0]
    names = [*TOPOLOGIES, "tp2dp2-whole"]
    assert all(run_ranks(load_all, 4, str(saved), names, timeout_s=400))
    found = {
        f"{source} on {name}": api.digest(saved / f"{source}-on-{name}")[0]
        for source in names
        for name in TOPOLOGIES
    }
    assert {case for case, digest in found.items() if digest != expected} == set()
