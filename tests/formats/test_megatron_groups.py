"""Every parameter must meet the settings that it trained with, whatever stage it comes to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.megatron.groups import GroupParam, Groups, Settings, read_groups
from ckpttools.formats.megatron.trees import fingerprint, same
from ckpttools.storage.inert import Inert, InertType

WEIGHT = GroupParam("decoder.layers.0.mlp.linear_fc2.weight", 2)
BIAS = GroupParam("decoder.layers.0.mlp.linear_fc2.bias", 1)
NORM = GroupParam("decoder.layers.0.input_layernorm.weight", 1)
EMBEDDING = GroupParam("embedding.word_embeddings.weight", 2, "embedding")
Q_NORM = GroupParam("decoder.layers.0.self_attention.q_layernorm.weight", 1, "qk_layernorm")
NEW = {"dist_ckpt_save_pre_mcore_014": False}  # an argument that core 0.14 added


def group(wd_mult: float, **settings: object) -> Settings:
    base = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False}
    return {**base, "is_decoupled_lr": False, "lr": 0.01, **settings}


def read(
    *stages: tuple[Sequence[Settings], Sequence[GroupParam]],
    arguments: Mapping[str, object] | None = None,
    decay_qk_layernorm: bool = False,
) -> Groups:
    files = [(f"file{i}", groups, params) for i, (groups, params) in enumerate(stages)]
    return read_groups(files, arguments=arguments or {}, decay_qk_layernorm=decay_qk_layernorm)


def mults(groups: Sequence[Settings]) -> list[object]:
    return [g["wd_mult"] for g in groups]


# --- membership ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_members_are_those_of_the_live_optimizer(case: oracle.Case) -> None:
    manifest = api.open_checkpoint(case.directory).manifest
    groups: Any = manifest.objects["param_groups"]
    mine = {name: i for i, g in enumerate(groups) for name in g.members}
    live: dict[str, set[int]] = {}
    for rank in case.layout():
        for shard in rank["shards"]:
            if case.pp > 1 and shard["canon"] == oracle.OUTPUT and case.model["tie_embeddings"]:
                continue  # one tensor with the embedding
            settings = rank["param_groups"][shard["opt"]][shard["group"]]
            live.setdefault(shard["canon"], set()).add(int(settings["wd_mult"] == 0.0))
    assert {name: {i} for name, i in mine.items()} == live
    assert [g.settings["wd_mult"] for g in groups] == [1.0, 0.0]
    assert all("step" not in g.settings for g in groups)
    assert manifest.objects["step"] == case.step


def test_biases_and_vectors_dont_decay() -> None:
    groups = read(([group(1.0), group(0.0)], [WEIGHT, BIAS]))
    matrix_bias = GroupParam("a.bias", 2)
    params = (WEIGHT, EMBEDDING, BIAS, NORM, Q_NORM, matrix_bias, GroupParam("scalar", 0))
    assert [groups.group_of(p) for p in params] == [0, 0, 1, 1, 1, 1, 0]


def test_norms_of_queries_and_keys_decay_where_the_run_says_so() -> None:
    groups = read(([group(1.0), group(0.0)], [WEIGHT, BIAS]), decay_qk_layernorm=True)
    assert [groups.group_of(p) for p in (WEIGHT, Q_NORM, NORM)] == [0, 0, 1]


def test_embeddings_have_their_own_group_where_the_learning_rate_is_decoupled() -> None:
    listed = [group(1.0, is_decoupled_lr=True), group(1.0), group(0.0)]
    groups = read((listed, [EMBEDDING, WEIGHT, NORM]))
    assert [groups.group_of(p) for p in (EMBEDDING, WEIGHT, NORM)] == [0, 1, 2]
    named = groups.by_name([EMBEDDING, WEIGHT, NORM])
    assert [g.members for g in named] == [(EMBEDDING.name,), (WEIGHT.name,), (NORM.name,)]


def test_groups_that_no_rule_tells_apart_have_no_members() -> None:
    groups = read(
        ([group(1.0), group(1.0, lr_mult=0.1), group(0.0)], [WEIGHT, BIAS]), arguments=NEW
    )
    assert groups.group_of(WEIGHT) is None
    assert groups.by_name([WEIGHT, BIAS]) == tuple(
        ParamGroup({k: v for k, v in g.items() if k != "step"}, None) for g in groups.listing
    )


def test_unknown_members_are_refused_only_where_a_loader_goes_by_position() -> None:
    listed = [group(1.0), group(1.0, lr_mult=0.1), group(0.0)]
    by_key = read((listed, [WEIGHT, BIAS]), arguments=NEW)
    assert by_key.for_stage([BIAS]) == listed
    by_position = read((listed, [WEIGHT, BIAS]))
    message = (
        f"{BIAS.name}: its parameter group must be known, since this checkpoint's Megatron finds "
        "groups by position, got groups that no rule tells apart"
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        by_position.for_stage([BIAS])


def test_two_groups_of_one_kind_and_different_rates_are_two_groups_without_members() -> None:
    listed = [group(1.0, max_lr=0.1), group(1.0, max_lr=0.2)]
    groups = read((listed, [WEIGHT]), arguments=NEW)
    assert list(groups.listing) == listed
    assert groups.group_of(WEIGHT) is None


# --- order ---------------------------------------------------------------------------------------


def test_by_key_every_stage_lists_all_groups_in_one_order_empty_ones_too() -> None:
    listed = [group(1.0, step=3), group(0.0, step=3)]
    groups = read((listed, [WEIGHT]), (listed, [BIAS, WEIGHT]), arguments=NEW)
    assert groups.by_key
    assert not groups.marked_by_key
    for params in ([], [BIAS], [BIAS, WEIGHT], [WEIGHT]):
        assert groups.for_stage(params) == listed
    assert groups.for_stage([])[0] is not groups.listing[0]  # a writer may change its own


def test_a_group_can_itself_show_that_its_loader_goes_by_key() -> None:
    groups = read(([group(1.0, default_config=True), group(0.0)], [WEIGHT, BIAS]))
    assert groups.by_key
    assert groups.marked_by_key


def test_by_key_another_order_in_another_file_is_refused() -> None:
    listed = [group(1.0), group(0.0)]
    for other in ([group(0.0), group(1.0)], [group(1.0)]):
        with pytest.raises(
            FormatError,
            match="file1: every rank must list the same parameter groups in the same order, got",
        ):
            read((listed, [WEIGHT]), (other, [WEIGHT]), arguments=NEW)


def test_by_position_a_stage_lists_what_it_uses_as_first_seen() -> None:
    decayed, not_decayed = group(1.0, lr=0.5), group(0.0)
    groups = read(
        ([decayed, not_decayed], [WEIGHT, BIAS]), ([not_decayed, decayed], [NORM, WEIGHT])
    )
    assert not groups.by_key
    assert groups.for_stage([BIAS, NORM, WEIGHT]) == [not_decayed, decayed]
    assert groups.for_stage([WEIGHT, BIAS]) == [decayed, not_decayed]
    assert groups.for_stage([NORM]) == [not_decayed]
    assert groups.for_stage([]) == []


def test_by_position_a_list_in_another_order_than_its_parameters_is_refused() -> None:
    message = "file0: parameter groups must be in first-seen order [(0.0, 1.0, False, False, "
    with pytest.raises(FormatError, match=re.escape(message)):
        read(([group(1.0), group(0.0)], [NORM, WEIGHT]))


def files(root: Path) -> list[Any]:
    return [oracle.read(path) for path in sorted(root.rglob("model_optim_rng.pt"))]


def lists(root: Path) -> list[list[float]]:
    return [
        [g["wd_mult"] for g in content["optimizer"]["optimizer"]["param_groups"]]
        for content in files(root)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # its second stage starts with a norm, and its loader goes by position
        ("megadlms_gqa_tp1_pp1_dp2_bucket6000", [[1.0, 0.0], [0.0, 1.0]]),
        ("gqa_tp1_pp1_dp2", [[1.0, 0.0], [1.0, 0.0]]),
    ],
)
def test_stages_get_their_lists_end_to_end(
    name: str, expected: list[list[float]], tmp_path: Path
) -> None:
    source = oracle.case(name).directory
    api.reshard(source, tmp_path / "out", target=Target(pp=2))
    assert lists(tmp_path / "out") == expected
    (before,) = (c["optimizer"]["optimizer"]["param_groups"] for c in files(source))
    for content in files(tmp_path / "out"):  # each group has its own settings
        for found in content["optimizer"]["optimizer"]["param_groups"]:
            assert found == next(g for g in before if g["wd_mult"] == found["wd_mult"])
    api.reshard(tmp_path / "out", tmp_path / "back", target=Target(pp=1))
    assert lists(tmp_path / "back") == [[1.0, 0.0]]


# --- steps ---------------------------------------------------------------------------------------


def test_steps_are_equal_as_numbers_and_missing_ones_are_filled() -> None:
    empty = group(0.0, lr=0.3)
    groups = read(([group(1.0, step=3.0), empty], [WEIGHT, BIAS]), ([group(1.0, step=3)], [WEIGHT]))
    assert groups.step == 3
    assert [(g["step"], type(g["step"])) for g in groups.listing] == [(3.0, float), (3.0, float)]
    assert groups.listing[1]["lr"] == 0.3
    assert read(([group(1.0, step=None)], [WEIGHT])).step is None
    assert "step" not in read(([group(1.0)], [WEIGHT])).listing[0]
    assert read(([group(1.0, step=10**400)], [WEIGHT])).step == 10**400


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (True, "file0: step must be a number, got True"),
        ("3", "file0: step must be a number, got '3'"),
        (2.5, "file0: step must be a whole number, got 2.5"),
        (math.nan, "file0: step must be a whole number, got nan"),
        (math.inf, "file0: step must be a whole number, got inf"),
        (-1, "file0: step must be a whole number, got -1"),
    ],
)
def test_a_step_that_is_no_count_is_refused(step: object, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        read(([group(1.0, step=step)], [WEIGHT]))


def test_steps_that_differ_are_refused_with_both_files() -> None:
    with pytest.raises(
        FormatError, match="file1: step must be the same in all groups, got 4 and 3 in file0"
    ):
        read(([group(1.0, step=3)], [WEIGHT]), ([group(1.0, step=4)], [WEIGHT]))


# --- disagreement --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (group(1.0, lr=0.02),
         "lr of the parameter group with wd_mult 1.0 must be that of file0, got 0.02 and 0.01"),
        (group(1.0, eps=1),
         "eps of the parameter group with wd_mult 1.0 must be that of file0, got 1 and none"),
        ({k: v for k, v in group(1.0).items() if k != "lr"}, "got none and 0.01"),
        (dict(reversed(group(1.0).items())), "must be in the order of file0, got ['lr', "),
    ],
)  # fmt: skip
def test_a_group_that_differs_between_files_is_refused_with_both(
    theirs: Settings, message: str
) -> None:
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        read(([group(1.0)], [WEIGHT]), ([theirs], [WEIGHT]))
    assert str(caught.value).startswith("file1: ")


def test_a_group_that_is_there_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="file0: parameter groups must differ, got two of"):
        read(([group(1.0), group(1.0)], [WEIGHT]))


# --- equality of what files hold -----------------------------------------------------------------


def inert(*args: object, state: object = None, name: str = "A") -> Inert:
    return Inert(InertType("m", name), args, state=state)


SHARED: list[object] = [1, 2]


@pytest.mark.parametrize(
    "tree",
    [None, 1, 1.0, True, -0.0, math.nan, "1", "\ud800", b"1", (1, 2), [1, 2], [], {}, {1, 2},
     frozenset([1]), {"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": [1], "b": 2}, [[1], 2], [1, [2]],
     InertType("m", "A"), inert(), inert(1), inert(state=1), inert(name="B"), inert((1,)),
     [SHARED, SHARED], "nan", [b""], ["b''"]],
    ids=repr,
)  # fmt: skip
def test_trees_are_the_same_as_themselves_and_as_no_other(
    tree: object, request: pytest.FixtureRequest
) -> None:
    all_trees = request.node.get_closest_marker("parametrize").args[1]
    assert fingerprint(tree) == fingerprint(tree)
    assert [same(tree, other) for other in all_trees].count(True) == 1


def test_sharing_costs_nothing_and_changes_nothing() -> None:
    deep: object = [1]
    for _ in range(90):
        deep = [deep, deep]
    assert same(deep, deep)
    assert same([SHARED, SHARED], [[1, 2], [1, 2]])


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(FormatError, match="objects must not contain themselves"):
        same(tree, [])


def test_tensors_are_told_apart_by_their_place_in_a_storage() -> None:
    from ckpttools.dtypes import dtype
    from ckpttools.storage.torchzip import StorageRef, TensorRef

    storage = StorageRef(dtype("float32"), 4, payload=bytes(range(16)))
    equal = StorageRef(dtype("float32"), 4, payload=bytes(range(16)))
    other = StorageRef(dtype("float32"), 4, payload=bytes(16))
    first = TensorRef(storage, 0, (2,), (1,))
    assert same(first, TensorRef(equal, 0, (2,), (1,)))
    assert not same(first, TensorRef(storage, 2, (2,), (1,)))
    assert not same(first, TensorRef(storage, 0, (2,), (2,)))
    assert not same(first, TensorRef(other, 0, (2,), (1,)))
