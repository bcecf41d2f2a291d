"""Megatron itself must load the fixtures, and must hold what the truth says."""

from __future__ import annotations

from pathlib import Path

import oracle_megatron as oracle
import pytest
from peers.megatron_runs import (
    DEEP,
    GQA,
    TIED,
    Topology,
    assert_same_state,
    load,
    needs_megatron,
    step,
)

pytestmark = needs_megatron


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gqa_tp1_pp1_dp2", GQA),
        ("gqa_tp1_pp1_dp2_bucket6000", GQA),
        ("gqa_tp2_pp2_dp1", GQA),
        ("megadlms_gqa_tp1_pp1_dp2_bucket6000", GQA),
        ("tied_tp1_pp2_dp2", TIED),
        ("tied_tp2_pp1_dp1_fp32", TIED),
        ("deep_tp1_pp1_dp2", DEEP),
        ("v0.12.3_tied_tp2_pp1_dp1", TIED),
    ],
)
def test_megatron_holds_the_truth_of_a_fixture(name: str, model: str, tmp_path: Path) -> None:
    case = oracle.case(name)
    held = load(case.directory, model, Topology.of(case), tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=True)


def test_two_layouts_of_a_family_load_the_same_logical_state(tmp_path: Path) -> None:
    split, whole = oracle.case("gqa_tp2_pp2_dp1"), oracle.case("gqa_tp1_pp1_dp2")
    held = load(split.directory, GQA, Topology.of(split), tmp_path)
    assert oracle.tensor_differences(held.tensors, whole.truth_tensors()) != []
    assert_same_state(held, whole.truth_tensors(), whole.model["vocab_size"], padding=False)


def test_another_dp_size_loads_the_same_state(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp1")
    held = load(case.directory, GQA, Topology(dp=4), tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=True)


def test_the_same_state_trains_to_the_same_bits_whatever_files_it_came_from(tmp_path: Path) -> None:
    whole, cut = oracle.case("gqa_tp1_pp1_dp2"), oracle.case("gqa_tp1_pp1_dp1")
    first = step(whole.directory, GQA, Topology(dp=2), tmp_path, steps=2)
    second = step(cut.directory, GQA, Topology(dp=2), tmp_path, steps=2)
    assert first.facts["step"] == [5.0]
    assert len(first.facts["losses"]) == 2
    assert oracle.tensor_differences(first.tensors, whole.truth_tensors()) != []
    assert oracle.tensor_differences(first.tensors, second.tensors) == []
    assert first.facts["losses"] == second.facts["losses"]


def test_megatron_refuses_the_files_of_another_topology(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    with pytest.raises(AssertionError, match="tensor_model_parallel_size is 2 in the checkpoint"):
        load(case.directory, GQA, Topology(), tmp_path)
