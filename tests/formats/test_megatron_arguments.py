"""What the layout depends on is read from the arguments, and follows the topology when written."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import FormatError, UnsupportedError, UsageError
from ckpttools.formats.megatron.arguments import (
    Run,
    default_bucket_size,
    read_run,
    rewrite,
    settings_of,
)
from ckpttools.formats.megatron.directory import find_iteration
from ckpttools.formats.megatron.ranks import RankFiles, read_rank
from ckpttools.layout.pipeline import Split
from ckpttools.storage.inert import Inert, InertType

CASES = oracle.cases()


@cache
def rank_files(name: str = "gqa_tp2_pp2_dp1", tp: int = 0, pp: int = 0) -> RankFiles:
    return read_rank(find_iteration(oracle.case(name).directory), tp, pp)


def run_with(**settings: object) -> Run:
    return read_run({**rank_files().settings, **settings}, "f")


def run_without(*names: str) -> Run:
    return read_run({k: v for k, v in rank_files().settings.items() if k not in names}, "f")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_run_of_a_fixture_is_that_of_its_writer(case: oracle.Case) -> None:
    run = read_run(rank_files(case.name).settings, "f")
    model = case.model
    assert (run.tp, run.pp, run.dp, run.cp) == (case.tp, case.pp, case.dp, 1)
    assert (run.vpp, run.split, run.custom_split) == (case.vpp, Split(), False)
    assert (run.instances, run.chained) == (1, False)
    assert run.num_layers == model["num_layers"]
    assert run.num_attention_heads == model["num_attention_heads"]
    assert run.padded_vocab_size == case.padded_vocab
    assert run.vocab_size in (None, model["vocab_size"])
    assert run.padded_rows(model["vocab_size"], case.tp) == case.padded_vocab
    assert run.facts == {
        "gated": model["gated_linear_unit"],
        "tied": model["tie_embeddings"],
        "output_gate": False,
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_are_numbered_as_in_the_live_run(case: oracle.Case) -> None:
    run = read_run(rank_files(case.name).settings, "f")
    for rank in case.layout():
        if rank["dp"] == 0:
            assert run.global_rank(rank["tp"], rank["pp"]) == rank["rank"]
            files = rank_files(case.name, rank["tp"], rank["pp"])
            assert files.settings["rank"] == rank["rank"]


def test_ranks_can_be_numbered_pipeline_first() -> None:
    run = run_with(data_parallel_size=3, context_parallel_size=5)
    assert run.buffer_ranks == 15
    assert [run.global_rank(t, p) for p in (0, 1) for t in (0, 1)] == [0, 1, 30, 31]
    other = replace(run, rank_order_tp_pp_dp=True)
    assert [other.global_rank(t, p) for p in (0, 1) for t in (0, 1)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "tp", "padded"), [(100, 1, 112), (100, 2, 128), (112, 1, 112), (1, 3, 48)]
)
def test_a_vocabulary_is_padded_to_a_multiple_that_grows_with_tp(
    rows: int, tp: int, padded: int
) -> None:
    assert run_with(make_vocab_size_divisible_by=16).padded_rows(rows, tp) == padded


def test_bucket_sizes_follow_from_the_arguments_where_gradients_overlap() -> None:
    assert run_with(overlap_grad_reduce=False, ddp_bucket_size=7).bucket_size is None
    assert run_with(overlap_grad_reduce=True, ddp_bucket_size=7).bucket_size == 7
    large = run_with(overlap_grad_reduce=True, ddp_bucket_size=None, data_parallel_size=50)
    assert large.bucket_size == default_bucket_size(50) == 50_000_000
    assert run_without("overlap_grad_reduce").bucket_size is None


@pytest.mark.parametrize(
    ("settings", "decays"),
    [
        ({}, False),
        ({"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}, True),
        ({"apply_wd_to_qk_layernorm": True}, True),
    ],
)
def test_the_decay_of_query_and_key_norms_is_read_in_both_spellings(
    settings: dict[str, object], decays: bool
) -> None:
    assert run_with(**settings).decay_qk_layernorm is decays


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"virtual_pipeline_model_parallel_size": None}, {"vpp": 1}),
        ({"virtual_pipeline_model_parallel_size": 3}, {"vpp": 3}),
        ({"decoder_first_pipeline_num_layers": 5}, {"split": Split(first=5)}),
        ({"decoder_last_pipeline_num_layers": 7}, {"split": Split(last=7)}),
        ({"account_for_embedding_in_pipeline_split": True}, {"split": Split(embedding=True)}),
        ({"account_for_loss_in_pipeline_split": True}, {"split": Split(loss=True)}),
        ({"pipeline_model_parallel_layout": "Et|tL"}, {"custom_split": True}),
        ({"overlap_param_gather_with_optimizer_step": True}, {"chained": True}),
        (
            {"num_distributed_optimizer_instances": 3, "data_parallel_size": 15},
            {"instances": 3, "dp": 15},
        ),
    ],
)
def test_stages_chunks_and_optimizers_are_read(
    settings: dict[str, object], facts: dict[str, Any]
) -> None:
    assert run_with(**settings) == replace(run_with(), **facts)
    assert run_without(*settings.keys() - {"data_parallel_size"}) == run_with()  # older runs


def test_instances_share_the_ranks_of_a_buffer() -> None:
    settings = {"data_parallel_size": 6, "context_parallel_size": 5}
    assert run_with(**settings).buffer_ranks == 30
    assert run_with(**settings, num_distributed_optimizer_instances=3).buffer_ranks == 10
    message = "f: args.num_distributed_optimizer_instances must divide DP x CP = 30, got 7"
    with pytest.raises(FormatError, match=re.escape(message)):
        run_with(**settings, num_distributed_optimizer_instances=7)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_model_parallel_size", 2, "must be 1 (expert parallelism is not supported), got 2"),
        ("num_experts", 8, "must be None (mixture of experts is not supported), got 8"),
        ("mtp_num_layers", 1, "must be None (multi-token prediction layers"),
        ("use_megatron_fsdp", True, "must be False (Megatron-FSDP"),
        ("heterogeneous_layers_config_path", "x", "must be None (heterogeneous layers"),
        ("use_distributed_optimizer", False, "must be True, got False"),
        ("no_weight_decay_cond_type", "x", "must be None or 'apply_wd_to_qk_layernorm', got 'x'"),
    ],
)
def test_a_run_whose_layout_is_not_covered_is_refused(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"f: args.{key} {message}")):
        run_with(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tensor_model_parallel_size", 0, "must be a size, got 0"),
        ("tensor_model_parallel_size", True, "must be a size, got True"),
        ("pipeline_model_parallel_size", "2", "must be a size, got '2'"),
        ("num_layers", None, "must be a size, got None"),
        ("vocab_size", -1, "must be a size, got -1"),
        ("swiglu", 1, "must be True or False, got 1"),
        ("swiglu", None, "must be True or False, got None"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(f"f: args.{key} {message}")):
        run_with(**{key: value})


def test_a_setting_that_is_missing_is_refused_or_has_the_default_of_its_time() -> None:
    with pytest.raises(FormatError, match=re.escape("f: args.num_layers must be a size, got None")):
        run_without("num_layers")
    with pytest.raises(UnsupportedError, match="args.use_distributed_optimizer must be True"):
        run_without("use_distributed_optimizer")
    old = run_without("context_parallel_size", "quick_geglu", "vocab_size", "attention_output_gate")
    assert (old.cp, old.vocab_size, old.output_gate) == (1, None, False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "--tp: must be at least 1, got 0"),
        ({"pp": -1}, "--pp: must be at least 1, got -1"),
        ({"dp": 0}, "--dp: must be at least 1, got 0"),
        ({"vpp": 0, "pp": 2}, "--vpp: must be at least 1, got 0"),
        ({"tp": 3}, "--tp: must divide the 4 attention heads, got 3"),
        ({"vpp": 2}, "--vpp: needs more than one pipeline stage, got 2"),
        ({"dp": 7}, "--dp: DP x CP must divide over 3 optimizer instances, got 35"),
    ],
)
def test_a_topology_that_megatron_has_not_is_refused(sizes: dict[str, int], message: str) -> None:
    run = run_with(
        data_parallel_size=3, context_parallel_size=5, num_distributed_optimizer_instances=3
    )
    kept = run.with_topology(tp=1, pp=2, vpp=2, dp=6)
    assert (kept.tp, kept.pp, kept.vpp, kept.dp, kept.buffer_ranks) == (1, 2, 2, 6, 10)
    with pytest.raises(UsageError, match=re.escape(message)):
        run.with_topology(**{"tp": 1, "pp": 1, "vpp": 1, "dp": 3, **sizes})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(pp=3), "--pp 3 --vpp 1: pipeline: 4 layers must divide over 3 stages"),
        (Target(pp=2, vpp=3), "--pp 2 --vpp 3: pipeline: layers of each stage must divide over 3"),
        (
            Target(pp=2, first_stage_layers=1, last_stage_layers=1),
            "--pp 2 --vpp 1: pipeline: 2 layers must divide over 0 stages",
        ),
    ],
)
def test_stages_that_the_layers_cannot_make_are_refused(
    target: Target, message: str, tmp_path: Path
) -> None:
    source = oracle.case("deep_tp1_pp1_dp2").directory
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        api.reshard(source, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        None,
        {"tensor_model_parallel_size": 1},
        Inert(InertType("other", "Namespace"), state={}),
        Inert(InertType("argparse", "Namespace"), state=[1]),
        Inert(InertType("argparse", "Namespace"), state={1: 2}),
        Inert(InertType("argparse", "Namespace")),
    ],
)
def test_arguments_that_are_no_namespace_are_refused(args: object) -> None:
    with pytest.raises(FormatError, match="f: args must be an argparse.Namespace, got "):
        settings_of(args, "f")


# --- rewriting -----------------------------------------------------------------------------------


def test_only_what_follows_from_the_topology_is_rewritten_in_place() -> None:
    args = rank_files().args
    before = settings_of(args, "f")
    run = run_with().with_topology(tp=1, pp=2, vpp=1, dp=3)
    after = settings_of(rewrite(args, run, tp=0, pp=1, padded_vocab_size=112), "f")
    assert list(after) == list(before)
    changed = {key: after[key] for key in after if after[key] is not before[key]}
    assert changed == {
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 3,
        "world_size": 6,
        "rank": 3,
        "local_rank": 3,
        "padded_vocab_size": 112,
    } | ({"inprocess_active_world_size": 6} if "inprocess_active_world_size" in before else {})
    assert settings_of(args, "f") == before  # the source's own are not touched


def test_settings_that_the_source_lacks_are_not_added() -> None:
    args = Inert(InertType("argparse", "Namespace"), state={"rank": 9, "x": 1})
    state = settings_of(rewrite(args, run_with(), tp=1, pp=0, padded_vocab_size=112), "f")
    assert state == {"rank": 1, "x": 1}


PIPELINE_SETTINGS = {
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
}


@pytest.mark.parametrize(
    ("before", "facts", "after"),
    [
        ({}, {"vpp": 3}, {"virtual_pipeline_model_parallel_size": 3}),
        ({"virtual_pipeline_model_parallel_size": 2}, {"vpp": 1}, {}),
        (
            {"num_layers_per_virtual_pipeline_stage": 5},
            {"vpp": 3},
            {"virtual_pipeline_model_parallel_size": 3, "num_layers_per_virtual_pipeline_stage": 2},
        ),
        ({"num_layers_per_virtual_pipeline_stage": 5}, {"vpp": 1}, {}),
        (
            {"num_virtual_stages_per_pipeline_rank": 5},
            {"vpp": 3},
            {"virtual_pipeline_model_parallel_size": 3, "num_virtual_stages_per_pipeline_rank": 3},
        ),
        (
            # Chunks of several sizes can't be told by one size.
            {"num_layers_per_virtual_pipeline_stage": 5},
            {"vpp": 3, "split": Split(first=6)},
            {
                "virtual_pipeline_model_parallel_size": 3,
                "num_virtual_stages_per_pipeline_rank": 3,
                "decoder_first_pipeline_num_layers": 6,
            },
        ),
        (
            {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 4},
            {"split": Split(last=3)},
            {"decoder_last_pipeline_num_layers": 3},
        ),
        (
            {},
            {"split": Split(embedding=True, loss=True)},
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        ({"pipeline_model_parallel_layout": "Et|tL"}, {}, {}),
        (
            {"pipeline_model_parallel_layout": "Et|tL"},
            {"custom_split": True},
            {"pipeline_model_parallel_layout": "Et|tL"},
        ),
    ],
)
def test_settings_of_stages_say_the_same_whichever_of_them_the_source_uses(
    before: dict[str, object], facts: dict[str, Any], after: dict[str, object]
) -> None:
    settings = {**PIPELINE_SETTINGS, **before}
    args = Inert(InertType("argparse", "Namespace"), state=settings)
    run = replace(run_with(), num_layers=12, pp=2, **facts)
    state = settings_of(rewrite(args, run, tp=0, pp=0, padded_vocab_size=None), "f")
    assert state == {**PIPELINE_SETTINGS, **after}


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in {"gqa_tp2_pp2_dp1", "tied_tp1_pp1_dp2"}], ids=str
)
def test_every_rank_has_its_own_arguments_end_to_end(case: oracle.Case, tmp_path: Path) -> None:
    api.reshard(case.directory, tmp_path / "out", target=Target(tp=2, pp=2, dp=5))
    found = [
        vars(oracle.read(path)["args"]) for path in sorted(tmp_path.rglob("model_optim_rng.pt"))
    ]
    assert [a["rank"] for a in found] == [0, 10, 1, 11]  # folders go by tensor rank first
    for args in found:
        assert args["world_size"] == 20
        assert args["padded_vocab_size"] == 128
