"""What the user says of a source is taken or refused, and never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apex_files as apex
import oracle_megatron as megatron
import pytest
import torch

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import MismatchError, UsageError

GQA = megatron.case("gqa_tp1_pp1_dp2").directory
V2 = apex.FIXTURES / "fp32_store_ws2" / "v2.pt"
NAMED = ReadOptions(names_path=str(apex.NAMES))


@pytest.mark.parametrize("to", ["zero1", "zero2", "nemo", "safetensors", "apex"])
def test_the_way_of_weight_decay_is_taken_from_the_user_for_any_source(
    to: str, tmp_path: Path
) -> None:
    api.reshard(GQA, tmp_path / "own", to="zero1")
    target = Target(masters="stored") if to == "apex" else Target()
    options = ReadOptions(adam_w_mode=False)
    with pytest.raises(UsageError, match="--l2-mode: must agree with the parameter groups, got de"):
        api.reshard(tmp_path / "own", tmp_path / "l2", to=to, target=target, options=options)
    options = ReadOptions(adam_w_mode=True)
    api.reshard(tmp_path / "own", tmp_path / to, to=to, target=target, options=options)
    assert api.read_manifest(tmp_path / to).objects["adam_w_mode"] is True


def test_checkpoints_that_differ_in_weight_decay_are_not_equal(tmp_path: Path) -> None:
    for mode in (True, False):
        options = ReadOptions(names_path=str(apex.NAMES), adam_w_mode=mode)
        api.reshard(V2, tmp_path / str(mode), to="apex", options=options)
    found = api.diff(tmp_path / "True", tmp_path / "False")
    assert not found.same
    assert [str(d) for d in found.differences] == ["adam_w_mode: True against False"]


@pytest.mark.parametrize(
    ("to", "masters", "rule"),
    [
        ("zero1", "remainders", "--masters: must not be given for zero1"),
        ("zero2", "stored", "--masters: must not be given for zero2"),
        ("megatron", "remainders", "--masters: must be stored for Megatron"),
    ],
)
def test_a_way_of_masters_that_a_target_does_not_know_is_refused(
    to: str, masters: Any, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rule):
        api.reshard(GQA, tmp_path / "out", to=to, target=Target(masters=masters))


def test_a_setting_that_is_no_plain_data_is_named_and_left_behind(tmp_path: Path) -> None:
    tree = torch.load(V2)
    ring: list[Any] = [1]
    ring.append(ring)
    tree["param_groups"][0] |= {"ring": ring, "limit": float("inf"), "kind": torch.float32}
    torch.save(tree, tmp_path / "v2.pt")
    for to in ("safetensors", "zarr"):
        report = api.reshard(tmp_path / "v2.pt", tmp_path / to, to=to, options=NAMED)
        line = "parameter groups: kind, limit, ring have no place in it"
        assert line in report.findings, report.findings
    with pytest.raises(MismatchError, match="parameter groups must keep kind, got none"):
        api.reshard(tmp_path / "v2.pt", tmp_path / "apex", options=NAMED)
