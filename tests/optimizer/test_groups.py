"""An optimizer is given groups that this rank is in and that mean one axis each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from ckpttools.errors import OptimizerError
from ckpttools.optimizer.collectives import SingleRank
from ckpttools.optimizer.groups import Axis, ParallelGroups

CPU = torch.device("cpu")
AXES: tuple[Axis, ...] = ("dp", "tp", "pp", "redundant")
Ranks = dict[str, tuple[int, ...]]


def ranks_of(groups: ParallelGroups) -> Ranks:
    for axis in AXES:
        ranks = groups.ranks(axis)
        assert groups.size(axis) == len(ranks)
        assert ranks[groups.rank(axis)] == (dist.get_rank() if dist.is_initialized() else 0)
        collectives = groups.collectives(axis, CPU)
        assert (collectives.rank, collectives.size) == (groups.rank(axis), groups.size(axis))
    return {axis: groups.ranks(axis) for axis in AXES}


def test_without_torch_distributed_every_axis_is_this_process() -> None:
    groups = ParallelGroups()
    assert ranks_of(groups) == dict.fromkeys(AXES, (0,))
    assert isinstance(groups.collectives("dp", CPU), SingleRank)


def default_groups() -> Ranks:
    return ranks_of(ParallelGroups())


def test_without_a_group_the_state_is_sharded_over_all_ranks() -> None:
    alone = [dict.fromkeys(AXES, (rank,)) for rank in range(3)]
    assert run_ranks(default_groups, 3) == [{**axes, "dp": (0, 1, 2)} for axes in alone]


def groups_of_a_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Ranks:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return ranks_of(ParallelGroups.from_mesh(mesh))


def test_a_mesh_gives_each_axis_its_dimension_and_the_missing_ones_size_one() -> None:
    results = run_ranks(groups_of_a_mesh, 4, (2, 2), ("dp", "tp"))
    assert [(axes["dp"], axes["tp"]) for axes in results] == [
        ((0, 2), (0, 1)),
        ((1, 3), (0, 1)),
        ((0, 2), (2, 3)),
        ((1, 3), (2, 3)),
    ]
    assert [axes["pp"] for axes in results] == [(0,), (1,), (2,), (3,)]


def dimensions_by_other_names() -> tuple[Ranks, list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    messages = []
    for names in ({}, {"dp": "shard"}):
        with pytest.raises(OptimizerError) as caught:
            ParallelGroups.from_mesh(mesh, **names)
        messages.append(str(caught.value))
    return ranks_of(ParallelGroups.from_mesh(mesh, dp="shard", redundant="replica")), messages


def test_a_meshs_dimensions_are_named_by_the_caller_or_refused() -> None:
    results = run_ranks(dimensions_by_other_names, 4)
    assert [axes["dp"] for axes, _ in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [axes["redundant"] for axes, _ in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for _, messages in results:
        assert messages == [
            "device mesh: must have a dimension dp, got ['replica', 'shard']",
            "device mesh: its dimensions must be shard, tp, pp, redundant, got replica",
        ]


def groups_of_others() -> list[str]:
    others = dist.new_group([0])
    messages = []
    for axis in AXES:
        try:
            ParallelGroups(**{axis: others})
        except OptimizerError as error:
            messages.append(str(error))
    return messages


def test_a_group_without_this_rank_is_refused_by_its_name() -> None:
    first, second = run_ranks(groups_of_others, 2)
    assert first == []
    assert second == [
        f"{axis} group: this rank must be in it, got one without rank 1" for axis in AXES
    ]


def one_group_for_two_axes() -> list[str]:
    messages = []
    for groups in ({"dp": dist.group.WORLD, "tp": dist.group.WORLD}, {"pp": dist.group.WORLD}):
        with pytest.raises(OptimizerError) as caught:
            ParallelGroups(**groups)
        messages.append(str(caught.value))
    return messages


def test_two_axes_over_the_same_ranks_are_refused() -> None:
    first, second = run_ranks(one_group_for_two_axes, 2)
    assert first == [
        "tp group: must share this rank alone with the dp group, got rank 1 in both",
        "pp group: must share this rank alone with the dp group, got rank 1 in both",
    ]
    assert second[0].endswith("got rank 0 in both")


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(OptimizerError, match="tp group: must be a process group, got 'tp'"):
        ParallelGroups(tp="tp")  # type: ignore[arg-type]
