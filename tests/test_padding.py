"""Padding is never content: what lies in gaps gets nowhere, what lies in spare rows is counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import megatron_edit as edit
import numpy as np
import oracle_megatron as oracle
import pytest
import torch

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import FormatError, UsageError

CASES = [case.name for case in oracle.cases()]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
NAN_BITS = {2: 0x7FC0, 4: 0x7FC00000}
ALL_SLOTS = "(weight, fp32_param, exp_avg, exp_avg_sq)"


def poison(case: oracle.Case, root: Path) -> int:
    """Write NaN to every element that belongs to no parameter; return how many there were."""
    poisoned = 0
    for rank in case.layout():
        if rank["dp"]:
            continue
        folder = oracle.rank_directory(root, rank["tp"], rank["pp"], pipeline=case.pp > 1)
        for file in (edit.MODEL, edit.OPTIMIZER):
            with edit.edited(folder / file) as tree:
                for buffer, tensors in zip(rank["buffers"], flats(tree, file), strict=True):
                    for flat in tensors:
                        free = free_elements(buffer, len(flat), saved=file == edit.OPTIMIZER)
                        flat[free] = NAN_BITS[flat.itemsize]
                        poisoned += int(free.sum())
    return poisoned


def free_elements(buffer: dict[str, Any], length: int, *, saved: bool) -> np.ndarray:
    """Say of each element of a live or saved buffer whether it belongs to no parameter."""
    padded = [stop - start for start, stop in buffer["bucket_indices"]]
    unpadded = buffer["bucket_numel_unpadded"]
    free = np.ones(length, bool)
    for p in buffer["params"]:
        k = p["bucket"]
        start = p["start"] - (sum(padded[:k]) - sum(unpadded[:k]) if saved else 0)
        free[start : start + p["end"] - p["start"]] = False
    return free


def flats(tree: Any, file: str) -> list[list[np.ndarray]]:
    """Return the flat tensors of each buffer of a file, writable."""
    if file == edit.MODEL:
        chunks = [edit.weights(tree, key) for key in edit.chunks(tree)]
        return [[edit.elements(next(iter(chunk.values())).storage)] for chunk in chunks]
    entries = [next(iter(tree[i].values())) for i in range(len(tree) - 1)]
    return [[edit.values(entry[slot]) for slot in edit.SLOTS[1:]] for entry in entries]


def other_topology(case: oracle.Case) -> Target:
    """Return a topology on which every cut and gap lies elsewhere."""
    return Target(tp=3 - case.tp, pp=3 - case.pp, dp=4)


def has_nan(root: Path) -> bool:
    """Say whether any floating-point element that a torch file stores is NaN, gaps included."""
    found = False
    for path in root.rglob("*.pt"):
        with edit.edited(path) as tree:
            for flat in itertools.chain(*flats(tree, path.name)):
                kind = torch.bfloat16 if flat.itemsize == 2 else torch.float32
                found |= bool(torch.from_numpy(flat.copy()).view(kind).isnan().any())
    return found


@pytest.mark.parametrize("name", CASES)
def test_nan_in_gaps_and_bucket_ends_changes_nothing_and_gets_nowhere(
    name: str, tmp_path: Path
) -> None:
    case = oracle.case(name)
    root = edit.copy_of(name, tmp_path / "src")
    assert poison(case, root) > 100
    assert has_nan(root)
    assert api.digest(root) == api.digest(case.directory)
    target = other_topology(case)
    api.reshard(root, tmp_path / "out", target=target)
    api.reshard(case.directory, tmp_path / "sound", target=target)
    assert not has_nan(tmp_path / "out")
    assert oracle.compare_files(tmp_path / "out", tmp_path / "sound") == []


def vocabulary(root: Path, case: oracle.Case) -> dict[str, torch.Tensor]:
    """Decode the vocabulary tensors of a checkpoint with a fixture's layout."""
    tensors = oracle.decode(root, case.layout()).tensors
    return {k: t for k, t in tensors.items() if k.endswith(oracle.VOCABULARY)}


def test_padding_rows_of_both_sides_are_carried_bit_for_bit(tmp_path: Path) -> None:
    src, dst = oracle.case("gqa_tp2_pp1_dp2"), oracle.case("gqa_tp1_pp2_dp2")
    api.reshard(src.directory, tmp_path / "out", target=Target(tp=1, pp=2))
    before, after = vocabulary(src.directory, src), vocabulary(tmp_path / "out", dst)
    trained = 0
    for key, tensor in after.items():
        assert (before[key].shape[0], tensor.shape[0]) == (128, 112)
        assert oracle.same_bits(before[key][:112].contiguous(), tensor.contiguous())
        trained += int(torch.count_nonzero(tensor[100:]))
    assert trained > 0


def test_new_padding_rows_are_zero_and_counted_in_one_line(tmp_path: Path) -> None:
    src, dst = oracle.case("gqa_tp1_pp1_dp2"), oracle.case("gqa_tp2_pp1_dp2")
    report = api.reshard(src.directory, tmp_path / "out", target=Target(tp=2))
    for key, tensor in vocabulary(tmp_path / "out", dst).items():
        assert tensor.shape[0] == 128, key
        assert not tensor[112:].contiguous().view(torch.uint8).any(), key
    (line,) = report.findings
    both = f"{EMBEDDING} {ALL_SLOTS} and {OUTPUT} {ALL_SLOTS}"
    assert line == f"16 new rows of vocabulary padding are zero in {both}"


def test_dropped_padding_rows_are_counted_and_said_to_be_zero(tmp_path: Path) -> None:
    report = api.reshard(
        oracle.case("gqa_tp2_pp1_dp2").directory, tmp_path / "out", target=Target(tp=1)
    )
    (line,) = report.findings
    both = f"{EMBEDDING} {ALL_SLOTS} and {OUTPUT} {ALL_SLOTS}"
    assert line == f"16 rows of vocabulary padding have no room in {both}; all were zero"


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_value_in_a_dropped_padding_row_is_reported_with_its_tensor(
    tmp_path: Path, dry_run: bool
) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    for slot, row in (("exp_avg", 48), ("exp_avg_sq", 63), ("exp_avg", 47)):
        with edit.slot_values(case, root, 1, 0, slot) as find:
            name = EMBEDDING if row != 47 else OUTPUT
            find(name).reshape(64, 32)[row, 31] = 1  # row 48 of rank 1 is row 112 of the whole
    report = api.reshard(root, tmp_path / "out", target=Target(tp=1), dry_run=dry_run)
    (line,) = report.findings
    assert line.endswith(f"; values that are not zero were in {EMBEDDING} (exp_avg, exp_avg_sq)")
    assert line.startswith("16 rows of vocabulary padding have no room in ")
    assert f"note: {line}" in report.lines()


def test_gathering_drops_all_padding_and_says_which_was_trained(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    rows = vocabulary(case.directory, case)
    trained = {key for key, tensor in rows.items() if tensor[100:].any()}
    assert trained == {f"{slot}/{OUTPUT}" for slot in ("model", *oracle.SLOTS)}
    report = api.gather(case.directory, tmp_path / "out")
    (line,) = report.findings
    assert line.startswith("12 rows of vocabulary padding have no room in ")
    assert line.endswith(f"; values that are not zero were in {OUTPUT} {ALL_SLOTS}")


def test_a_change_in_padding_alone_is_told_apart_from_content(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    with edit.slot_values(case, root, 0, 0, "exp_avg") as find:
        find(OUTPUT).reshape(112, 32)[111, 0] = 1
    result = api.diff(root, case.directory)
    assert result.same
    assert result.padding == ((OUTPUT, "exp_avg"),)
    assert api.digest(root) == api.digest(case.directory)
    found = api.verify(root, against=case.directory)
    assert found.ok
    assert "padding rows differ in 1 tensors, which is allowed" in found.notes


@pytest.mark.parametrize("vocab_size", [96, 113, 128])
def test_wrong_vocab_size_is_refused_with_both_numbers(vocab_size: int, tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    legal = -(-vocab_size // 16) * 16
    message = (
        f"{EMBEDDING}: a vocabulary of {vocab_size} rows must be padded to {legal} .a multiple of "
        f"16 x TP 1., got 112"
    )
    options = ReadOptions(vocab_size=vocab_size)
    with pytest.raises(FormatError, match=message) as caught:
        api.reshard(case.directory, tmp_path / "out", options=options)
    assert caught.value.hint == "give the true size with --vocab-size"
    outcome = edit.run_cli(
        "reshard", case.directory, tmp_path / "out", "--vocab-size", vocab_size, "--tp", 2
    )
    assert outcome.code == 1
    assert "hint: give the true size with --vocab-size" in outcome.err
    assert list(tmp_path.iterdir()) == []


def without_vocab_size(name: str, tmp_path: Path) -> Path:
    return edit.set_args(edit.copy_of(name, tmp_path / "src"), vocab_size=None)


def test_named_vocab_size_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = without_vocab_size(case.name, tmp_path)
    options = ReadOptions(vocab_size=100)
    report = api.reshard(root, tmp_path / "out", target=Target(tp=2), options=options)
    assert report.findings[0].startswith("16 new rows of vocabulary padding are zero in ")
    # The new files' arguments still lack the number, so that a reader is told it again.
    assert api.verify(tmp_path / "out", against=case.directory, options=options).ok


def test_unknown_vocab_size_keeps_the_row_count(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = without_vocab_size(case.name, tmp_path)
    report = api.reshard(root, tmp_path / "out", target=Target(tp=2, dp=1))
    assert report.findings == ()
    for path in edit.rank_files(tmp_path / "out", edit.MODEL):
        content = oracle.read(path)
        assert content["model"][EMBEDDING].shape == (56, 32)
        assert content["args"].padded_vocab_size == 112
    assert api.verify(tmp_path / "out", against=root).ok


def test_unknown_vocab_size_on_tensor_ranks_that_do_not_divide_it_is_refused(
    tmp_path: Path,
) -> None:
    root = without_vocab_size("tied_tp1_pp1_dp2", tmp_path)
    edit.set_args(root, num_attention_heads=6)
    message = f"^{EMBEDDING}: its 112 rows must divide over TP, got 3$"
    with pytest.raises(UsageError, match=message) as caught:
        api.reshard(root, tmp_path / "out", target=Target(tp=3))
    assert caught.value.hint == "give the true number of rows with --vocab-size"
    outcome = edit.run_cli("reshard", root, tmp_path / "out", "--tp", 3)
    assert (outcome.code, outcome.out) == (1, "")
    assert "hint: give the true number of rows with --vocab-size" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    options = ReadOptions(vocab_size=100)
    report = api.reshard(root, tmp_path / "out", target=Target(tp=3), options=options)
    assert report.findings[0].startswith("32 new rows of vocabulary padding are zero in ")
