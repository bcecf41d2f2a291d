"""A rank reads at most 1.1 times what it is to hold, however the files and the run are cut.

Every read of elements goes through `FilePool.read_into`, and is counted there. Apart from it stand
what tells where elements lie, which every rank reads (``NAMED``, a few kilobytes a file), and the
check of weights against their masters, which data-parallel rank zero does for all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import oracle_megatron as oracle
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hooks.test_megatron_checkpoints import fresh_groups, truth_of
from torch import nn

from ckpttools import evidence
from ckpttools.hooks import CheckpointManager, load_general, load_sharded, save_sharded
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.rules import Split
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    ParallelGroups,
    ShardedOptimizer,
    Sharding,
)
from ckpttools.storage.local import FilePool

MOST = 1.1
NAMED = {
    "manifest.json",  # the layout, steps, groups and sums of all files
    "rank-*.safetensors",  # the header: keys and their places
    "ckpttools.json",  # beside dcp: names of what torch's form has no place for
    ".metadata",  # of dcp: every chunk and its file
    "*.distcp",  # of dcp: the directory of each archive
    "*.pt",  # of Megatron: the directory and the pickled tree of each archive
    "latest_checkpointed_iteration.txt",
}


# --- counting -------------------------------------------------------------------------------


class Reads:
    """What this process reads of a directory: elements, and which files beside them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.elements = 0
        self.beside: set[str] = set()
        self._apart = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        read, check, opens = FilePool.read_into, evidence.check_casts, FilePool._open
        pooled = []

        def read_into(pool: FilePool, file: int, offset: int, buffer: memoryview) -> None:
            if not self._apart:
                self.elements += len(buffer)
            read(pool, file, offset, buffer)

        def check_casts(*args: Any) -> Any:
            self._apart = True
            try:
                return check(*args)
            finally:
                self._apart = False

        def opened(pool: FilePool, file: int) -> int:
            pooled.append(file)
            try:
                return opens(pool, file)
            finally:
                pooled.pop()

        def heard(event: str, args: tuple[object, ...]) -> None:
            if event == "open" and listening and not pooled:
                path = Path(str(args[0]))
                if path.is_relative_to(self.place) and path.is_file():
                    self.beside.add(path.name)

        listening = [True]
        sys.addaudithook(heard)
        with (
            patch.object(FilePool, "read_into", read_into),
            patch.object(FilePool, "_open", opened),
            patch.object(evidence, "check_casts", check_casts),
        ):
            yield
        listening.clear()


def told(reads: Reads, share: int) -> dict[str, Any]:
    """Return what a test asks of a rank."""
    return {"read": reads.elements, "share": share, "beside": sorted(reads.beside)}


def assert_within(ranks: list[dict[str, Any] | None]) -> None:
    took_part = [rank for rank in ranks if rank is not None]
    assert len(took_part) > 1
    for rank in took_part:
        assert rank["share"] > 10_000  # so that a header would show
        assert rank["share"] <= rank["read"] <= MOST * rank["share"], rank
        for name in rank["beside"]:
            assert any(Path(name).match(pattern) for pattern in NAMED), name
        assert rank["beside"]


# --- runs -----------------------------------------------------------------------------------

SHAPES = {"fc1": (96, 60), "fc2": (60, 48), "norm": (60,)}
SPLITS = {"fc1": Split(0, Blocks((1, 1))), "fc2": Split(1, Blocks((1,))), "norm": None}


def groups_of(tp: int, dp: int) -> ParallelGroups | None:
    """Make groups of tp x dp ranks, tensor ranks first; None on ranks that take no part."""
    rank, mine = dist.get_rank(), {}
    for axis, size, stride in (("tp", tp, 1), ("dp", dp, tp)):
        for start in [r for r in range(tp * dp) if r // stride % size == 0]:
            members = [start + i * stride for i in range(size)]
            group = dist.new_group(members)
            if rank in members:
                mine[axis] = group
    return ParallelGroups(**mine) if rank < tp * dp else None


def named(tp: int) -> list[tuple[str, nn.Parameter]]:
    """Return a tensor rank's parameters; tp of them make the model."""
    params = []
    for name, shape in SHAPES.items():
        split, local = SPLITS[name], list(shape)
        if split is not None:
            local[split.dim] //= tp
        params.append((name, nn.Parameter(torch.zeros(local, dtype=torch.bfloat16))))
    return params


def flat_of(groups: ParallelGroups, tp: int) -> DistributedOptimizer:
    config = OptimizerConfig(lr=0.1, bf16=True, clip_grad=0.0, bucket_size=3000)
    shardings = {n: Sharding(split, stage="first") for n, split in SPLITS.items()}
    return DistributedOptimizer(named(tp), config, groups=groups, shardings=shardings)


def fused_of(groups: ParallelGroups) -> DistributedFusedAdam:
    return DistributedFusedAdam(
        named(1),
        lr=0.1,
        weight_decay=0.1,
        grad_sync_dtype=torch.float32,
        store_params=True,
        store_param_remainders=False,
        bucket_cap_mb=0.01,
        groups=groups,
    )


def share_of(optimizer: ShardedOptimizer) -> int:
    """Return the bytes of this rank's part of weights and state."""
    return sum(
        piece.range.param.size * (piece.slot.param.element_size() + 4 * len(piece.logical_slots()))
        for piece in optimizer.pieces
    )


def load(place: Path, optimizer: ShardedOptimizer) -> dict[str, Any]:
    reads = Reads(place)
    with reads.counted():
        restored = load_sharded(place, optimizer)
    assert restored.read_bytes == reads.elements
    return told(reads, share_of(optimizer))


def linear() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(97, 101), nn.Tanh(), nn.Linear(101, 53))


def stepped(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a rank's part of a model and of Adam's moments for it."""
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return 3 * sum(tensor.numel() * 4 for tensor in local)


def sharded_by_fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def load_plain(place: Path, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reads = Reads(place)
    with reads.counted():
        restored = load_general(place, model, optimizer)
    assert restored.read_bytes == reads.elements
    return told(reads, bytes_of(model))


# --- our optimizers -------------------------------------------------------------------------


def between_topologies(folder: str, saved: tuple[int, int], loads: tuple[int, int]) -> Any:
    groups = groups_of(*saved)
    if groups is not None:
        save_sharded(folder, flat_of(groups, saved[0]), iteration=1)
    dist.barrier()
    groups = groups_of(*loads)
    return None if groups is None else load(Path(folder), flat_of(groups, loads[0]))


@pytest.mark.parametrize(
    ("saved", "loads"),
    [((2, 2), (1, 3)), ((1, 3), (2, 2)), ((1, 2), (4, 1)), ((4, 1), (2, 2))],
    ids=lambda sizes: "tp{}dp{}".format(*sizes),
)
def test_tensor_ranks_read_the_runs_of_their_columns_and_not_what_lies_between(
    saved: tuple[int, int], loads: tuple[int, int], tmp_path: Path
) -> None:
    assert_within(run_ranks(between_topologies, 4, str(tmp_path / "a"), saved, loads))


def zero1_to_zero2(folder: str) -> Any:
    four, three = groups_of(1, 4), groups_of(1, 3)
    assert four is not None
    save_sharded(folder, flat_of(four, 1), iteration=1)
    dist.barrier()
    return None if three is None else load(Path(folder), fused_of(three))


def test_four_ranks_of_zero1_are_read_by_three_of_zero2_each_its_third(tmp_path: Path) -> None:
    ranks = run_ranks(zero1_to_zero2, 4, str(tmp_path / "a"))
    assert_within(ranks)
    whole = sum(rank["share"] for rank in ranks if rank is not None)
    assert whole == sum(torch.Size(shape).numel() for shape in SHAPES.values()) * 14


def of_megatron(name: str) -> dict[str, Any]:
    case = oracle.case(name)
    config = OptimizerConfig(lr=0.1, bf16=True, clip_grad=0.0, bucket_size=5000)
    optimizer = DistributedOptimizer(fresh_groups(truth_of(case)["model"]), config)
    return load(case.directory, optimizer)


@pytest.mark.parametrize("name", ["gqa_tp2_pp2_dp1", "tied_tp1_pp2_dp2"])
def test_files_of_megatron_are_read_by_three_ranks_each_its_third(name: str) -> None:
    assert_within(run_ranks(of_megatron, 3, name))


# --- torch's optimizers ---------------------------------------------------------------------


def save_cut(folder: str, form: str) -> bool:
    model = sharded_by_fsdp(linear())
    with CheckpointManager(folder, format=form) as manager:
        manager.save(1, model, stepped(model), rng=False)
    return True


def load_whole(folder: str) -> dict[str, Any]:
    return load_plain(Path(folder), linear())


def load_cut(folder: str) -> dict[str, Any]:
    return load_plain(Path(folder), sharded_by_fsdp(linear()))


@pytest.mark.parametrize("form", ["sharded", "dcp"])
@pytest.mark.parametrize("runs", [load_whole, load_cut], ids=["replicas", "fsdp"])
def test_what_three_ranks_of_fsdp_saved_two_read_each_what_it_holds(
    form: str, runs: Any, tmp_path: Path
) -> None:
    run_ranks(save_cut, 3, str(tmp_path), form)
    step = next(tmp_path.glob("step-*"))
    ranks = run_ranks(runs, 2, str(step))
    assert_within(ranks)
    whole = bytes_of(linear())
    assert sum(rank["share"] for rank in ranks) == whole * (2 if runs is load_whole else 1)


def dcp_to_ours(folder: str) -> dict[str, Any]:
    config = OptimizerConfig(lr=0.01, clip_grad=0.0, bucket_size=3000)
    optimizer = DistributedOptimizer(linear(), config)
    return load(Path(folder), optimizer)


def test_a_checkpoint_of_torch_s_is_read_by_our_optimizer_each_rank_its_third(
    tmp_path: Path,
) -> None:
    run_ranks(save_cut, 2, str(tmp_path), "dcp")
    assert_within(run_ranks(dcp_to_ours, 3, str(next(tmp_path.glob("step-*")))))
