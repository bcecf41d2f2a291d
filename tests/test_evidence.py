"""A wrong formula, a wrong rounding or a wrong master is refused by what the files show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_edit as edit
import numpy as np
import oracle_megatron as oracle
import pytest
import torch
from coded_tensors import BF16, F16, F32, Store, expected, random_bits

from ckpttools import api, codecs
from ckpttools.api import Resources, Target
from ckpttools.errors import EvidenceError, LayoutError, ReplicaError
from ckpttools.evidence import check_casts, check_replicas
from ckpttools.layout import megatron as formula
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.layout.megatron import BufferParam, Cuts, buffer_layout
from ckpttools.manifest import IDENTITY, MASTER, WEIGHT, Manifest, TensorSpec
from ckpttools.storage.local import FilePool

CASES = [case.name for case in oracle.cases()]
BF16_CASES = [case.name for case in oracle.cases() if case.dtype == "bf16"]
GQA = [case.name for case in oracle.cases("gqa")]
EMBEDDING = "embedding.word_embeddings.weight"


def truncate(bits: codecs.Bits) -> codecs.Bits:
    """Cut off the lower half, which is not how a trainer rounds."""
    return (bits >> np.uint32(16)).astype("<u2")


def assert_refused(source: Path, tmp_path: Path, message: str) -> str:
    """Both doors refuse the source, in one line, and nothing is left behind; return the line."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(EvidenceError, match=message) as caught:
        api.reshard(source, tmp_path / "out", target=Target(dp=3))
    assert "\n" not in str(caught.value)
    outcome = edit.run_cli("reshard", source, tmp_path / "out", "--dp", 3)
    assert (outcome.code, outcome.out) == (1, "")
    assert str(caught.value) in outcome.err
    assert sorted(tmp_path.iterdir()) == before
    return str(caught.value)


MISPLACED = (
    r"exactly one must agree with the files, got none: layout [^:]+: [^:]+: ([a-z_.0-9]+) must "
    r"start at element ([0-9]+) of its storage by the buffer formula, got ([0-9]+)"
)


@pytest.mark.parametrize("name", CASES)
def test_without_the_64_alignment_no_real_checkpoint_is_understood(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = oracle.case(name)
    api.reshard(case.directory, tmp_path / "sound", target=Target(dp=3), dry_run=True)
    monkeypatch.setattr(formula, "PARAM_ALIGNMENT", 1)
    found = re.search(MISPLACED, assert_refused(case.directory, tmp_path, MISPLACED))
    assert found is not None
    buffer = case.layout()[0]["buffers"][0]
    live = {param["name"]: param["start"] for param in buffer["params"]}
    assert int(found[3]) == live[found[1]] > int(found[2])


@pytest.mark.parametrize("name", CASES)
def test_files_whose_weights_share_no_storage_are_understood_by_their_sizes_and_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = edit.with_own_storages(edit.copy_of(name, tmp_path / "src"))
    report = api.reshard(root, tmp_path / "out")
    assert "weights equal their masters, rounded" in report.proof[0]
    assert api.verify(tmp_path / "out", against=oracle.case(name).directory).ok
    monkeypatch.setattr(formula, "PARAM_ALIGNMENT", 1)
    with pytest.raises(EvidenceError, match="numel_unpadded must be .* by the buffer formula, got"):
        api.reshard(root, tmp_path / "other")


@pytest.mark.parametrize("name", BF16_CASES)
def test_truncation_in_place_of_rounding_fails_on_every_real_bf16_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = oracle.case(name)
    truth = oracle.decode(case.directory, case.layout()).tensors
    masters = truth[f"param/{EMBEDDING}"].contiguous().numpy().view("<u4")
    weights = truth[f"model/{EMBEDDING}"].contiguous().view(torch.uint16).numpy()
    wrong = int(np.count_nonzero(truncate(masters) != weights))
    assert wrong > masters.size // 5
    monkeypatch.setattr(codecs, "_to_bfloat16", truncate)
    message = (
        f"{EMBEDDING}: the weight must be its master rounded to bfloat16, got {wrong} of "
        f"{masters.size} elements that differ, first at "
    )
    assert_refused(case.directory, tmp_path, message)


def params_of(case: oracle.Case, buffer: dict[str, Any]) -> list[BufferParam]:
    """Return a live buffer's parameters as the formula takes them."""
    tied = case.family.startswith("tied") and case.pp > 1
    found = sorted(buffer["params"], key=lambda p: -p["start"])
    return [
        BufferParam(p["name"], p["end"] - p["start"], tied and p["canon"] in oracle.VOCABULARY)
        for p in found
    ]


def geometry(case: oracle.Case) -> tuple[list[object], list[object]]:
    """Return what the formula says and what the live run had, for each rank."""
    said, had = [], []
    for stage, buffer in ((rank["pp"], b) for rank in case.layout() for b in rank["buffers"]):
        first = (stage, buffer["model_chunk"]) == (0, 0)
        layout = buffer_layout(
            params_of(case, buffer), dp=case.dp, cuts=Cuts(case.bucket_size if first else None)
        )
        bounds = zip(layout.bucket_starts, layout.bucket_stops, strict=True)
        said.append(([list(pair) for pair in bounds], list(layout.bucket_unpadded)))
        had.append((buffer["bucket_indices"], buffer["bucket_numel_unpadded"]))
    return said, had


@pytest.mark.parametrize("name", CASES)
def test_formula_gives_the_live_buckets_of_every_rank(name: str) -> None:
    said, had = geometry(oracle.case(name))
    assert said == had


@pytest.mark.parametrize("name", GQA)
def test_with_half_the_bucket_alignment_neither_live_buckets_nor_storages_fit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formula, "BUCKET_ALIGNMENT", 64)
    said, had = geometry(oracle.case(name))
    assert said != had
    by_start = f"{EMBEDDING} must start at element [0-9]+ of its storage"
    by_end = "the weights' storage must have [0-9]+ elements"
    message = f"({by_start}|{by_end}) by the buffer formula, got [0-9]+"
    assert_refused(oracle.case(name).directory, tmp_path, message)


def test_small_buckets_take_out_the_paddings_that_the_declared_size_counts(
    tmp_path: Path,
) -> None:
    # The three last gaps of the walk now stand at bucket ends: 22848 - 32 = 22816.
    api.reshard(
        oracle.case("gqa_tp1_pp1_dp2").directory, tmp_path / "out", target=Target(bucket_size=3600)
    )
    (file,) = edit.rank_files(tmp_path / "out", edit.OPTIMIZER)
    (entry,) = oracle.read(file)[0].values()
    assert entry["numel_unpadded"] == 22816
    assert entry["param"].shape == (22816,)


def test_masters_swapped_between_two_tensors_of_one_shape_are_found(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    a, b = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1))
    with edit.slot_values(case, root, 0, 0, "param") as find:
        kept = find(a).copy()
        assert (kept != find(b)).any()
        find(a)[:] = find(b)
        find(b)[:] = kept
    assert_refused(root, tmp_path, f"got none: .*: {a}: the weight must be its master")
    outcome = edit.run_cli("verify", root)
    assert outcome.code == 3
    assert a in outcome.out


@pytest.mark.parametrize("name", ["gqa_tp2_pp1_dp2", "tied_tp1_pp2_dp2", "tied_tp1_pp1_dp2_fp32"])
def test_zeroed_master_is_found(name: str, tmp_path: Path) -> None:
    case = oracle.case(name)
    root = edit.copy_of(name, tmp_path / "src")
    victim = "decoder.layers.0.self_attention.linear_proj.weight"
    with edit.slot_values(case, root, case.tp - 1, 0, "param") as find:
        find(victim)[:] = 0
    assert_refused(root, tmp_path, f"got none: .*: {victim}: the weight must be its master")
    assert edit.run_cli("verify", root).code == 3


def test_master_off_by_one_bfloat16_step_in_one_element_is_found(tmp_path: Path) -> None:
    case = oracle.case("deep_tp1_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    victim = "decoder.layers.3.mlp.linear_fc1.weight"
    with edit.slot_values(case, root, 0, 0, "param") as find:
        find(victim)[77] += 1 << 16
    shape = (64, 16)
    place = [int(i) for i in np.unravel_index(77, shape)]
    message = f"{victim}: the weight .*, got 1 of 1024 elements that differ, first at \\{place}"
    assert_refused(root, tmp_path, message.replace("]", "\\]"))


def test_nothing_in_the_files_speaks_against_shifted_moments(tmp_path: Path) -> None:
    # Moments have no second copy that they could be held against. A wrong *formula* still can't
    # hide there, since masters lie under the same offsets; a file whose moments alone were moved
    # before they were saved passes, as long as its own checksums do. This test says so.
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    victim = "decoder.layers.0.mlp.linear_fc2.weight"
    with edit.slot_values(case, root, 0, 0, "exp_avg") as find:
        find(victim)[:] = np.roll(find(victim), 1)
    assert api.verify(root).ok
    differences = api.diff(root, case.directory).differences
    assert [(d.name, d.slot) for d in differences] == [(victim, "exp_avg")]


def test_without_the_cross_check_a_wrong_master_passes_and_the_report_says_what_was_skipped(
    tmp_path: Path,
) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    root = edit.copy_of(case.name, tmp_path / "src")
    with edit.slot_values(case, root, 0, 0, "param") as find:
        find("decoder.layers.0.mlp.linear_fc2.weight")[:] = 0
    report = api.reshard(root, tmp_path / "out", cross_check=False)
    assert report.skipped == ("weights against masters (--no-cross-check)",)
    assert not any("masters" in line for line in report.proof)
    assert not api.verify(tmp_path / "out").ok


# --- how weights were rounded, and masters in parts -----------------------------------------

SHAPE = (5, 7)
WHOLE = Box.whole(SHAPE)
SMALL = Resources(budget_bytes=3 * 4096, workers=1)


def ties(seed: int) -> np.ndarray:
    """Return masters that lie in the middle between two numbers of bfloat16."""
    bits = np.random.default_rng(seed).integers(0x3A00, 0x4700, SHAPE).astype("<u4")
    return bits << np.uint32(16) | np.uint32(0x8000)


def weights_and_masters(root: Path, rules: Sequence[str], **objects: object) -> Manifest:
    """Store a weight for each rule, rounded by it from a master of ties."""
    store = Store(root)
    for number, rule in enumerate(rules):
        name, masters = f"w{number}", ties(number)
        store.add(
            TensorSpec(name, WEIGHT, BF16, SHAPE), "widened_bf16", [expected(rule, [masters])]
        )
        store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
        store.add(TensorSpec(name, MASTER, F32, SHAPE), "identity", [masters])
    return store.manifest(objects)


@pytest.mark.parametrize(
    ("stored", "named", "wrong"),
    [
        (["nearest_even"] * 2, None, 0),
        (["half_away"] * 2, None, 2),
        (["nearest_even"] * 2, ("half_away",), 2),
        (["half_away"] * 2, ("half_away",), 0),
        (["half_away"] * 2, ("nearest_even", "half_away"), 0),
        (["nearest_even"] * 2, ("nearest_even", "half_away"), 0),
        (["nearest_even", "half_away"], ("nearest_even", "half_away"), 1),  # one must hold for all
        (["half_away"] * 2, ["half_away"], 0),
    ],
)
def test_one_of_the_rules_that_a_checkpoint_names_holds_for_all_its_weights(
    stored: list[str], named: object, wrong: int, tmp_path: Path
) -> None:
    objects = {} if named is None else {"weight_rounding": named}
    compared, failures = check_casts(weights_and_masters(tmp_path, stored, **objects), SMALL)
    assert compared == 2
    assert len(failures) == wrong


def test_the_rule_that_fits_best_is_the_one_that_a_failure_is_told_of(tmp_path: Path) -> None:
    both = ("nearest_even", "half_away")
    made = weights_and_masters(tmp_path, ["half_away"] * 3 + ["nearest_even"], weight_rounding=both)
    _, (failure,) = check_casts(made, SMALL)
    assert str(failure).startswith(
        "w3: the weight must be its master rounded half away from zero to bfloat16, got "
    )


def test_where_no_rule_is_known_nothing_is_compared_and_an_unknown_one_is_refused(
    tmp_path: Path,
) -> None:
    made = weights_and_masters(tmp_path, ["half_away"], weight_rounding=())
    assert check_casts(made, SMALL) == (0, [])
    message = f"{tmp_path}: weight_rounding must be of nearest_even, half_away, got 'up'"
    with pytest.raises(LayoutError, match=re.escape(message)):
        check_casts(replace(made, objects={"weight_rounding": ("up",)}), SMALL)


def in_parts(root: Path, *, own: bool, flip: int = 0, rule: str = "half_away") -> Manifest:
    """Store a weight and its master as remainders, beside the weight itself or a copy of it."""
    store, masters = Store(root), ties(3)
    hi, lo = expected("half_away", [masters]), (masters & 0xFFFF).astype("<u2")
    store.add(TensorSpec("w", WEIGHT, BF16, SHAPE), "widened_bf16", [hi ^ np.uint16(flip)])
    weight = replace(store.chunks[-1], codec=IDENTITY)
    store.add(TensorSpec("w", MASTER, F32, SHAPE), "remainder", [hi, lo], cut())
    masters_of = store.chunks[1:]
    if own:  # the weight is whole, its master in pieces: parts of the same bytes
        masters_of = []
        at = weight.parts[0].extent.offset
        for chunk in store.chunks[1:]:
            extent = replace(chunk.parts[0].extent, offset=at)
            high = replace(chunk.parts[0], extent=extent)
            masters_of.append(replace(chunk, parts=(high, chunk.parts[1])))
            at += extent.length
    store.chunks[:] = [weight, *masters_of]
    return store.manifest({"weight_rounding": (rule,)})


def cut() -> list[FlatRange]:
    return [FlatRange(0, 11, WHOLE), FlatRange(11, 24, WHOLE), FlatRange(24, 35, WHOLE)]


def test_a_master_made_of_the_weights_own_bytes_is_no_evidence(tmp_path: Path) -> None:
    for flip in (0, 1):  # whatever the bytes are
        made = in_parts(tmp_path / f"own{flip}", own=True, flip=flip, rule="nearest_even")
        assert check_casts(made, SMALL) == (0, [])


def test_a_float32_weight_that_is_its_master_counts_and_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("own", "copied"):
        store.add(TensorSpec(name, WEIGHT, F32, SHAPE), "identity", [ties(1)])
    store.add(TensorSpec("copied", MASTER, F32, SHAPE), "identity", [ties(2)])
    made = store.manifest({})
    alias = [replace(chunk, tensor=3) for chunk in made.by_tensor()[0]]
    own = TensorSpec("own", MASTER, F32, SHAPE)
    made = replace(made, tensors=(*made.tensors, own), chunks=(*made.chunks, *alias))
    read: list[int] = []
    read_into = FilePool.read_into

    def counted(pool: FilePool, file: int, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        read_into(pool, file, offset, buffer)

    with patch.object(FilePool, "read_into", counted):
        compared, (failure,) = check_casts(made, SMALL)
    assert compared == 2
    assert failure.spec.name == "copied"
    assert sum(read) == 2 * made.tensors[1].size_bytes


def test_a_master_in_parts_of_other_bytes_is_evidence(tmp_path: Path) -> None:
    assert check_casts(in_parts(tmp_path / "a", own=False), SMALL) == (1, [])
    for number, options in enumerate(({"flip": 1}, {"rule": "nearest_even"})):
        made = in_parts(tmp_path / f"b{number}", own=False, **options)  # type: ignore[arg-type]
        compared, (failure,) = check_casts(made, SMALL)
        assert compared == 1
        assert failure.count > 5


def test_a_master_of_the_weights_bytes_in_another_order_is_compared(tmp_path: Path) -> None:
    made = in_parts(tmp_path, own=True)
    weight, first, *rest = made.chunks
    moved = replace(first.parts[0], extent=rest[0].parts[0].extent)
    parts = (replace(moved, extent=replace(moved.extent, length=22)), first.parts[1])
    wrong = replace(made, chunks=(weight, replace(first, parts=parts), *rest))
    compared, failures = check_casts(wrong, SMALL)
    assert compared == 1
    assert failures


@pytest.mark.parametrize(
    ("way", "part"),
    [("remainder", 0), ("remainder", 1), ("scaled_f16", 0), ("scaled_bf16", 1), ("half_away", 0)],
)
def test_copies_in_parts_are_compared_by_their_elements(
    way: str, part: int, tmp_path: Path
) -> None:
    random, kinds = np.random.default_rng(5), {"half_away": BF16}
    spec = TensorSpec("w", "exp_avg", kinds.get(way, F32), SHAPE)
    first = {"scaled_f16": F16, "half_away": F32}.get(way, BF16)
    parts = [random_bits(SHAPE, first, random) & 0x3FFF | 0x2000, ties(1)]
    if way == "remainder":
        parts[1] = parts[1].astype("<u2")
    for flip in (0, 1):
        store = Store(tmp_path / f"{flip}")
        store.add(spec, way, parts[: 1 if way == "half_away" else 2])
        odd = [p.copy() for p in parts[: 1 if way == "half_away" else 2]]
        odd[part][0, 0] ^= flip << 15
        store.chunks.append(store.chunk(0, way, odd, WHOLE, replica=1))
        made = store.manifest()
        if not flip:
            assert check_replicas(made, SMALL) == 1
            continue
        message = r"w \(exp_avg\): copies must be equal, got \d+ elements .* between part0_0 and"
        with pytest.raises(ReplicaError, match=message):
            check_replicas(made, SMALL)
