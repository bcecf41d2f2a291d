"""Megatron itself must load what we wrote, hold the same state, and take the same next step."""

from __future__ import annotations

from pathlib import Path

import oracle_megatron as oracle
import pytest
from peers.megatron_runs import (
    GQA,
    TIED,
    Topology,
    assert_same_state,
    load,
    needs_megatron,
    run,
    step,
)

from ckpttools import api
from ckpttools.api import Target

pytestmark = needs_megatron


def reshard(name: str, topology: Topology, out: Path) -> Path:
    """Take a fixture to a topology."""
    target = Target(
        tp=topology.tp,
        pp=topology.pp,
        dp=topology.dp,
        bucket_size=topology.bucket_size or "none",
    )
    api.reshard(oracle.case(name).directory, out, target=target)
    return out


@pytest.mark.parametrize(
    ("name", "model", "topology"),
    [
        ("gqa_tp2_pp1_dp2", GQA, Topology(tp=1, pp=2, dp=3)),
        ("gqa_tp1_pp2_dp2", GQA, Topology(tp=2, pp=1, dp=1, bucket_size=3600)),
        ("gqa_tp1_pp1_dp4", GQA, Topology(tp=4, pp=1, dp=1)),
        ("tied_tp1_pp1_dp2", TIED, Topology(tp=2, pp=2, dp=1)),
        ("tied_tp1_pp2_dp2", TIED, Topology(tp=1, pp=1, dp=3)),
        ("tied_tp1_pp1_dp2_fp32", TIED, Topology(tp=2, pp=2, dp=1, dtype="fp32")),
        ("megadlms_gqa_tp1_pp1_dp2_bucket6000", GQA, Topology(tp=1, pp=2, dp=1)),
        ("v0.12.3_tied_tp2_pp1_dp1", TIED, Topology(tp=1, pp=1, dp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.options())),
)
def test_megatron_holds_the_truth_after_a_reshard(
    name: str, model: str, topology: Topology, tmp_path: Path
) -> None:
    case = oracle.case(name)
    out = reshard(name, topology, tmp_path / "out")
    held = load(out, model, topology, tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=False)


@pytest.mark.parametrize(
    ("a", "b", "model"),
    [
        ("gqa_tp2_pp1_dp2", "gqa_tp1_pp2_dp2", GQA),
        ("gqa_tp1_pp1_dp4", "gqa_tp2_pp2_dp1", GQA),
        ("tied_tp1_pp1_dp2", "tied_tp1_pp2_dp2", TIED),
        ("tied_tp1_pp1_dp2_fp32", "tied_tp2_pp1_dp1_fp32", TIED),
    ],
)
def test_megatron_takes_the_same_step_from_our_file_as_from_its_own(
    a: str, b: str, model: str, tmp_path: Path
) -> None:
    case = oracle.case(b)
    topology = Topology.of(case)
    ours = step(reshard(a, topology, tmp_path / "out"), model, topology, tmp_path)
    theirs = step(case.directory, model, topology, tmp_path)
    assert ours.facts["step"] == [4.0]
    assert oracle.tensor_differences(theirs.tensors, case.truth_tensors()) != []
    assert oracle.tensor_differences(ours.tensors, theirs.tensors) == []
    assert ours.facts["losses"] == theirs.facts["losses"]


def test_a_bucket_size_that_shows_loads_under_that_bucket_size_and_no_other(tmp_path: Path) -> None:
    topology = Topology(dp=2, bucket_size=3600)
    case = oracle.case("gqa_tp1_pp1_dp2")
    out = reshard(case.name, topology, tmp_path / "out")
    held = load(out, GQA, topology, tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=True)
    with pytest.raises(AssertionError):
        run("load", out, GQA, Topology(dp=2), ["--out", str(tmp_path / "other.safetensors")])
