"""Copies that must be equal are compared bit for bit; what merely looks equal is never merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_edit as edit
import numpy as np
import oracle_megatron as oracle
import pytest
import torch

from ckpttools import api, conversion
from ckpttools.api import Resources, Target
from ckpttools.errors import ReplicaError
from ckpttools.formats import Draft
from ckpttools.plan import Plan

NORM = "decoder.layers.1.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
SLOT_NAMES = {"weight": "weight", "param": "fp32_param"} | {s: s for s in edit.SLOTS[2:]}


def as_floats(bits: np.ndarray) -> np.ndarray:
    """Return the values of bf16 or fp32 bits, by torch."""
    dtype = torch.bfloat16 if bits.dtype.itemsize == 2 else torch.float32
    return torch.from_numpy(bits.copy()).view(dtype).double().numpy()


def refusal(root: Path, tmp_path: Path) -> str:
    """Return the message with which both doors refuse the checkpoint."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ReplicaError) as caught:
        api.reshard(root, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    outcome = edit.run_cli("verify", root)
    assert outcome.code == 3
    assert str(caught.value) in outcome.out
    assert edit.run_cli("reshard", root, tmp_path / "out").code == 1
    return str(caught.value)


def one_ulp(case: oracle.Case, root: Path, rank: tuple[int, int], name: str, slot: str) -> float:
    """Move one element of a rank's copy by one ulp; return how far that is."""
    with edit.slot_values(case, root, *rank, slot) as find:
        mine = find(name)
        before = as_floats(mine[5:6])
        mine[5] += 1
        return float(np.abs(as_floats(mine[5:6]) - before)[0])


@pytest.mark.parametrize("slot", edit.SLOTS)
def test_norm_whose_copies_on_tensor_ranks_differ_by_one_ulp_is_refused(
    slot: str, tmp_path: Path
) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    gap = one_ulp(case, root, (1, 0), NORM, slot)
    file = edit.MODEL if slot == "weight" else edit.OPTIMIZER
    assert refusal(root, tmp_path) == (
        f"{NORM} ({SLOT_NAMES[slot]}): copies must be equal, got 1 elements with a largest "
        f"difference of {gap:g} between iter_0000003/mp_rank_00/{file} and "
        f"iter_0000003/mp_rank_01/{file}"
    )


@pytest.mark.parametrize("slot", edit.SLOTS)
def test_tied_embedding_whose_copies_on_stages_differ_by_one_ulp_is_refused(
    slot: str, tmp_path: Path
) -> None:
    case = oracle.case("tied_tp1_pp2_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    gap = one_ulp(case, root, (0, 1), "output_layer.weight", slot)
    file = edit.MODEL if slot == "weight" else edit.OPTIMIZER
    assert refusal(root, tmp_path) == (
        f"{EMBEDDING} ({SLOT_NAMES[slot]}): copies must be equal, got 1 elements with a largest "
        f"difference of {gap:g} between iter_0000003/mp_rank_00_000/{file} and "
        f"iter_0000003/mp_rank_00_001/{file}"
    )


@pytest.mark.parametrize("budget_bytes", [1 << 30, 3 * (4 << 10)])
def test_largest_difference_is_that_of_the_whole_copy_whatever_the_tiles(
    budget_bytes: int, tmp_path: Path
) -> None:
    case = oracle.case("tied_tp1_pp2_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    with edit.slot_values(case, root, 0, 1, "exp_avg") as find:
        values = find("output_layer.weight").view("<f4")
        values[[0, 1300, 2600]] = (0.25, 7.0, -0.5)
    with edit.slot_values(case, root, 0, 0, "exp_avg") as find:
        find(EMBEDDING).view("<f4")[[0, 1300, 2600]] = (0.0, 2.0, 0.5)
    resources = Resources(budget_bytes=budget_bytes, workers=1)
    with pytest.raises(ReplicaError, match="got 3 elements with a largest difference of 5 between"):
        api.reshard(root, tmp_path / "out", resources=resources)


@pytest.mark.parametrize(
    ("pair", "difference"),
    [
        ((np.nan, 1.0), "nan"),
        ((np.inf, 1.0), "inf"),
        ((0.0, -0.0), "0"),
        ((np.inf, -np.inf), "inf"),
    ],
)
def test_copies_that_no_number_tells_apart_are_refused_too(
    pair: tuple[float, float], difference: str, tmp_path: Path
) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    for tp, value in enumerate(pair):
        with edit.slot_values(case, root, tp, 0, "exp_avg_sq") as find:
            find(NORM).view("<f4")[5] = value
    assert f"got 1 elements with a largest difference of {difference} between" in refusal(
        root, tmp_path
    )


def test_equal_nans_in_all_copies_are_equal(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    for tp in range(2):
        with edit.slot_values(case, root, tp, 0, "exp_avg_sq") as find:
            find(NORM).view("<f4")[5] = np.nan
    api.reshard(root, tmp_path / "out", target=Target(tp=1))
    assert api.verify(tmp_path / "out", against=root).ok


def test_first_copy_alone_is_carried_after_all_were_compared(tmp_path: Path) -> None:
    report = api.reshard(
        oracle.case("gqa_tp2_pp2_dp1").directory, tmp_path / "out", target=Target(tp=1, pp=1)
    )
    # Five norms, four slots, one further tensor rank.
    assert "20 copies (norms and other replicas) equal the first bit for bit" in report.proof


def test_equal_halves_of_a_split_tensor_are_both_kept(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for slot in edit.SLOTS:
        with edit.slot_values(case, root, 0, 0, slot) as find:
            kept = find(name).copy()
        with edit.slot_values(case, root, 1, 0, slot) as find:
            assert (find(name) != kept).any()
            find(name)[:] = kept
    api.reshard(root, tmp_path / "out", target=Target(tp=1))
    whole = oracle.decode(tmp_path / "out", oracle.case("gqa_tp1_pp1_dp2").layout()).tensors
    for slot in ("model", "param", "exp_avg", "exp_avg_sq"):
        tensor = whole[f"{slot}/{name}"]
        first, second = tensor.chunk(2)
        assert tensor.shape == (64, 32)
        assert oracle.same_bits(first, second)


def test_two_tensors_of_equal_content_stay_two(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1)]
    for tp in range(2):
        for slot in edit.SLOTS:
            with edit.slot_values(case, root, tp, 0, slot) as find:
                find(names[1])[:] = find(names[0])
    before = len(api.read_manifest(case.directory).tensors)
    report = api.reshard(root, tmp_path / "out", target=Target(tp=1, pp=2))
    assert report.tensors == before
    assert api.verify(tmp_path / "out", against=root).ok


def test_untied_output_layer_that_equals_the_embedding_is_no_copy_of_it(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp2_dp1")
    root = edit.copy_of(case.name, tmp_path / "src")
    for tp in range(2):
        for slot in edit.SLOTS:
            with edit.slot_values(case, root, tp, 0, slot) as find:
                kept = find(EMBEDDING).copy()
            with edit.slot_values(case, root, tp, 1, slot) as find:
                find("output_layer.weight")[:] = kept
    report = api.reshard(root, tmp_path / "out", target=Target(tp=1, pp=1))
    copies = [line for line in report.proof if "copies" in line]
    assert copies == ["20 copies (norms and other replicas) equal the first bit for bit"]
    tensors = {spec.key for spec in api.read_manifest(tmp_path / "out").tensors}
    assert {(EMBEDDING, "weight"), ("output_layer.weight", "weight")} <= tensors


def test_a_copy_that_comes_out_wrong_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy of a norm is right, the second one is damaged after it was written."""
    source = oracle.case("gqa_tp1_pp1_dp2").directory
    write = conversion.write

    def damaged(draft: Draft, plan: Plan, *rest: Any) -> int:
        done = write(draft, plan, *rest)
        copy = next(c for c in plan.dst.chunks if c.replica_id == 1)
        extent = copy.parts[0].extent
        path = Path(plan.dst.root, plan.dst.files[extent.file].path)
        data = bytearray(path.read_bytes())
        data[extent.offset] ^= 1
        path.write_bytes(data)
        return done

    monkeypatch.setattr(conversion, "write", damaged)
    with pytest.raises(ReplicaError, match="copies must be equal"):
        api.reshard(source, tmp_path / "out", target=Target(tp=2))
    assert list(tmp_path.iterdir()) == []
