"""The oracle must be right on what Megatron wrote, and must notice what is wrong."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch

CASES = oracle.cases()
PLAIN = oracle.case("gqa_tp2_pp2_dp1")
RANK = "iter_0000003/mp_rank_01_001"
Edit = Callable[[dict[Any, Any]], None]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A writable copy of one fixture."""
    return Path(shutil.copytree(PLAIN.directory, tmp_path / "copy"))


def edit_file(path: Path, edit: Edit) -> None:
    content = oracle.read(path)
    edit(content)
    torch.save(content, path)


def edit_pickle(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes in a torch file's pickle, where it names classes we cannot import."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in records if name.endswith("/data.pkl"))
    assert records[pickled].count(old) == 1
    records[pickled] = records[pickled].replace(old, new)
    with zipfile.ZipFile(path, "w") as archive:
        for name, payload in records.items():
            archive.writestr(name, payload)


def buffer_of(content: dict[Any, Any]) -> dict[str, Any]:
    (buffer,) = content[0].values()
    return dict(buffer)


# --- decoding ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_a_fixture_gives_its_truth_bit_for_bit(case: oracle.Case) -> None:
    decoded = oracle.decode(case.directory, case.layout())
    truth = case.truth_tensors()
    assert len(truth) >= 4 * 13
    assert oracle.tensor_differences(decoded.tensors, truth) == []
    assert decoded.step == case.step
    assert decoded.args.padded_vocab_size == case.padded_vocab
    assert [group["wd_mult"] for group in decoded.param_groups] == [1.0, 0.0]


@pytest.mark.parametrize("family", ["gqa", "tied_fp32"])
def test_truths_of_one_family_differ_in_padding_rows_only(family: str) -> None:
    first, *others = {c.truth: c for c in oracle.cases(family)}.values()
    assert others
    for other in others:
        a, b = first.truth_tensors(), other.truth_tensors()
        assert oracle.tensor_differences(a, b) != []
        vocab_size = first.model["vocab_size"]
        a, b = (oracle.logical_rows(truth, vocab_size) for truth in (a, b))
        assert oracle.tensor_differences(a, b) == []


def test_a_layout_of_another_dp_size_decodes_the_same_values() -> None:
    case, other = oracle.case("gqa_tp1_pp1_dp1"), oracle.case("gqa_tp1_pp1_dp4")
    assert case.layout() != other.layout()
    decoded = oracle.decode(case.directory, other.layout())
    assert oracle.tensor_differences(decoded.tensors, case.truth_tensors()) == []


def test_a_layout_with_its_ranges_moved_decodes_other_values() -> None:
    layout = PLAIN.layout()
    for rank in layout:
        first = rank["buffers"][0]["params"][0]
        first["start"], first["end"] = first["start"] + 1, first["end"] + 1
    decoded = oracle.decode(PLAIN.directory, layout)
    found = oracle.tensor_differences(decoded.tensors, PLAIN.truth_tensors())
    names = {line.split(":")[0] for line in found}
    assert names == {
        f"{slot}/{name}"
        for slot in oracle.SLOTS
        for name in ("output_layer.weight", "decoder.layers.0.mlp.linear_fc2.weight")
    }


def test_a_layout_of_another_split_is_refused() -> None:
    other = oracle.case("gqa_tp1_pp1_dp2")
    with pytest.raises((oracle.OracleError, FileNotFoundError)):
        oracle.decode(PLAIN.directory, other.layout())


@pytest.mark.parametrize("slot", oracle.SLOTS)
def test_decoding_refuses_replicas_that_differ(copy: Path, slot: str) -> None:
    norm = next(
        p
        for p in PLAIN.layout()[3]["buffers"][0]["params"]
        if p["canon"] == "decoder.final_layernorm.weight"
    )

    def spoil(content: dict[Any, Any]) -> None:
        buffer_of(content)[slot][norm["start"]] += 1

    edit_file(copy / RANK / "distrib_optim.pt", spoil)
    with pytest.raises(
        oracle.OracleError, match=f"{slot}/decoder.final_layernorm.weight: replicas"
    ):
        oracle.decode(copy, PLAIN.layout())


def test_decoding_refuses_tied_copies_that_differ(tmp_path: Path) -> None:
    case = oracle.case("tied_tp1_pp2_dp2")
    root = Path(shutil.copytree(case.directory, tmp_path / "copy"))

    def spoil(content: dict[Any, Any]) -> None:
        buffer_of(content)["exp_avg"][7] += 1

    edit_file(root / "iter_0000003/mp_rank_00_001/distrib_optim.pt", spoil)
    with pytest.raises(
        oracle.OracleError, match="exp_avg/output_layer.weight: must equal embedding"
    ):
        oracle.decode(root, case.layout())


# --- comparing files --------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_checkpoint_equals_its_copy_as_files(case: oracle.Case, tmp_path: Path) -> None:
    root = Path(shutil.copytree(case.directory, tmp_path / "copy"))
    assert oracle.compare_files(case.directory, root) == []


def test_saving_again_without_a_change_is_no_difference(copy: Path) -> None:
    edit_file(copy / RANK / "distrib_optim.pt", lambda _: None)
    edit_pickle(copy / RANK / "model_optim_rng.pt", b"padded_vocab_size", b"padded_vocab_size")
    assert oracle.compare_files(PLAIN.directory, copy) == []


def _value(content: dict[Any, Any]) -> None:
    buffer_of(content)["exp_avg_sq"][5] += 1


def _sign_of_zero(content: dict[Any, Any]) -> None:
    moment = buffer_of(content)["exp_avg"]
    zero = int((moment == 0).nonzero()[0])
    moment[zero] = -0.0


def _key_order(content: dict[Any, Any]) -> None:
    (key,) = content[0]
    content[0][key] = dict(reversed(content[0][key].items()))


def _dtype(content: dict[Any, Any]) -> None:
    (key,) = content[0]
    content[0][key]["param"] = content[0][key]["param"].double()


def _shape(content: dict[Any, Any]) -> None:
    (key,) = content[0]
    content[0][key]["param"] = content[0][key]["param"][:-1].clone()


def _number_type(content: dict[Any, Any]) -> None:
    (key,) = content[0]
    content[0][key]["numel_unpadded"] = float(content[0][key]["numel_unpadded"])


def _missing_key(content: dict[Any, Any]) -> None:
    del content["buckets_coalesced"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_value, ".exp_avg_sq: 1 of 6048 elements differ, the first at flat index 5"),
        (_sign_of_zero, ".exp_avg: 1 of 6048 elements differ"),
        (_key_order, "key order: number 0 is 'param' and 'numel_unpadded'"),
        (_dtype, ".param: dtype torch.float32 and torch.float64"),
        (_shape, ".param: shape (6048,) and (6047,)"),
        (_number_type, ".numel_unpadded: int and float"),
        (_missing_key, ".buckets_coalesced: only in the first"),
    ],
    ids=["value", "sign of zero", "key order", "dtype", "shape", "number type", "missing key"],
)
def test_a_planted_difference_in_the_optimizer_file_is_named_alone(
    copy: Path, edit: Edit, message: str
) -> None:
    edit_file(copy / RANK / "distrib_optim.pt", edit)
    (found,) = oracle.compare_files(PLAIN.directory, copy)
    assert found.startswith(f"{RANK}/distrib_optim.pt: ")
    assert message in found


def test_a_difference_in_args_is_named_unless_it_is_ignored(copy: Path) -> None:
    edit_pickle(copy / RANK / "model_optim_rng.pt", b"snapshot.pickle", b"snapshot.other!")
    root = PLAIN.directory
    (found,) = oracle.compare_files(root, copy)
    assert found.startswith(f"{RANK}/model_optim_rng.pt: .args.memory_snapshot_path: ")
    assert found.endswith("'snapshot.pickle' and 'snapshot.other!'")
    assert oracle.compare_files(root, copy, ignore_args={"memory_snapshot_path"}) == []
    assert oracle.compare_files(root, copy, ignore_args={"save"}) != []
    assert oracle.compare_files(root, copy, ignore_keys={"args"}) == []


def test_a_class_that_cannot_be_imported_is_compared_by_name_and_arguments(copy: Path) -> None:
    edit_pickle(copy / RANK / "model_optim_rng.pt", b"AttnBackend", b"AttnFrontend")
    (found,) = oracle.compare_files(PLAIN.directory, copy)
    assert found.endswith(".args.attention_backend: AttnBackend and AttnFrontend")


def test_a_missing_and_an_extra_file_are_named(copy: Path) -> None:
    (copy / RANK / "distrib_optim.pt").rename(copy / "extra.pt")
    assert oracle.compare_files(PLAIN.directory, copy) == [
        f"{RANK}/distrib_optim.pt: only in the first",
        "extra.pt: only in the second",
    ]


def test_another_iteration_in_the_tracker_is_named(copy: Path) -> None:
    (copy / "latest_checkpointed_iteration.txt").write_text("4")
    found = oracle.compare_files(PLAIN.directory, copy)
    assert found == ["latest_checkpointed_iteration.txt: bytes differ"]
