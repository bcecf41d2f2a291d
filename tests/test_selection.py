"""A part of a checkpoint is exactly what was asked for, and the report says what was left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_edit as edit
import oracle_megatron as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.api import ReadOptions, Resources, Selection, Target
from ckpttools.dtypes import dtype
from ckpttools.errors import UsageError
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.selection import matches, select

SOURCE = oracle.case("gqa_tp2_pp1_dp2").directory
SMALL = Resources(budget_bytes=1 << 20, workers=1)
SLOTS = ("weight", "fp32_param", "exp_avg", "exp_avg_sq")
LAYER_1 = 6
"""Parameters in a layer of the fixture; 15 in all."""

NAMES = ("a.weight", "a.bias", "b.0.weight", "b.1.weight", "weight", "b[0].weight")


def manifest_of(keys: list[tuple[str, str]]) -> Manifest:
    """Return a Manifest of tensors of three bytes each, one after the other."""
    specs = tuple(TensorSpec(name, slot, dtype("uint8"), (3,)) for name, slot in keys)
    chunks = tuple(
        Chunk(i, Box.whole((3,)), (Part(Extent(0, 3 * i, 3), dtype("uint8")),))
        for i in range(len(specs))
    )
    return Manifest("none", "", (File("f", 3 * len(specs)),), specs, chunks, {"step": 7})


ALL = manifest_of([(name, slot) for name in NAMES for slot in SLOTS])


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def keys(path: Path) -> set[tuple[str, str]]:
    return {spec.key for spec in api.read_manifest(path).tensors}


# --- patterns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a.weight", {("a.weight", slot) for slot in SLOTS}),
        ("exp_avg", {(name, "exp_avg") for name in NAMES}),
        ("exp_avg*", {(name, slot) for name in NAMES for slot in ("exp_avg", "exp_avg_sq")}),
        ("b.?.weight", {(f"b.{i}.weight", slot) for i in (0, 1) for slot in SLOTS}),
        ("b.[1-9].*:exp_avg", {("b.1.weight", "exp_avg")}),
        ("*:weight", {(name, "weight") for name in NAMES}),
        ("a.weight:*", {("a.weight", slot) for slot in SLOTS}),
        ("b[[]0].weight:fp32_param", {("b[0].weight", "fp32_param")}),
        # a slot's name fits a tensor of that name too, which is why there is name:slot
        ("weight", {(n, "weight") for n in NAMES} | {("weight", slot) for slot in SLOTS}),
        ("*", {(name, slot) for name in NAMES for slot in SLOTS}),
    ],
)
def test_a_pattern_fits_a_name_a_slot_or_both(pattern: str, found: set[tuple[str, str]]) -> None:
    assert {spec.key for spec in ALL.tensors if matches(pattern, spec)} == found
    kept, left_out = select(ALL, Selection(include=(pattern,)))
    assert {spec.key for spec in kept.tensors} == found
    assert {spec.key for spec in left_out} == {s.key for s in ALL.tensors} - found
    if len(left_out):
        assert select(ALL, Selection(exclude=(pattern,)))[0].tensors == left_out


@pytest.mark.parametrize("side", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["c.weight", "Exp_avg", "a.weight:exp", "b.2*", "a", "", ":"])
def test_a_pattern_that_fits_nothing_is_refused(pattern: str, side: str) -> None:
    asked = {"include": ("*",), side: ("exp_avg", pattern)}
    message = f"{pattern}: must match a tensor's name or slot, got none that does"
    with pytest.raises(UsageError) as caught:
        select(ALL, Selection(**asked))
    assert str(caught.value) == message
    assert caught.value.hint == (
        "slots are weight, fp32_param, exp_avg, exp_avg_sq; `ckpttools inspect -v` lists names"
    )


def test_a_selection_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="selection: must leave a tensor, got none"):
        select(ALL, Selection(exclude=("*",)))
    with pytest.raises(UsageError, match="selection: must leave a tensor, got none"):
        select(ALL, Selection(include=("a.*",), exclude=("*weight", "a.bias")))


def test_the_empty_selection_takes_all_and_is_false() -> None:
    assert not Selection()
    assert Selection(include=("*",))
    assert Selection(exclude=("*",))
    kept, left_out = select(ALL, Selection())
    assert (kept.tensors, kept.chunks, left_out) == (ALL.tensors, ALL.chunks, ())


patterns = st.lists(
    st.sampled_from(["*", "a.*", "b.*", "weight", "exp_avg", "*:exp_avg_sq", "b.0*:weight"]),
    max_size=3,
).map(tuple)


@given(st.permutations(ALL.tensors), patterns, patterns)
def test_what_is_taken_keeps_its_bytes_and_its_order(
    specs: list[TensorSpec], include: tuple[str, ...], exclude: tuple[str, ...]
) -> None:
    source = manifest_of([spec.key for spec in specs])
    selection = Selection(include, exclude)
    wanted = [s for s in source.tensors if selection.takes(s)]
    if not wanted:
        return
    kept, left_out = select(source, selection)
    assert list(kept.tensors) == wanted
    assert [s for s in source.tensors if s in wanted or s in left_out] == list(source.tensors)
    places = {source.tensors[c.tensor].key: c.parts[0].extent for c in source.chunks}
    assert {kept.tensors[c.tensor].key: c.parts[0].extent for c in kept.chunks} == {
        s.key: places[s.key] for s in wanted
    }
    assert (kept.files, kept.objects) == (source.files, source.objects)


# --- parts of a checkpoint ---------------------------------------------------------------------

PARTS = {
    "weights": Selection(include=("*:weight",)),
    "optimizer": Selection(exclude=("*:weight",)),
    "one layer": Selection(include=("decoder.layers.1.*",)),
    "one tensor": Selection(include=("decoder.layers.1.mlp.linear_fc2.weight:exp_avg",)),
    "moments": Selection(include=("exp_avg*",), exclude=("output_layer*", "embedding*")),
}
COUNTS = {"weights": 15, "optimizer": 45, "one layer": 24, "one tensor": 1, "moments": 26}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole"
    api.gather(SOURCE, path)
    return path


def tensors_of(path: Path) -> dict[str, Any]:
    return {k: v for f in sorted(path.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.mark.parametrize("part", PARTS)
def test_any_part_can_be_gathered_and_equals_the_same_part_of_the_whole(
    part: str, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    report = api.gather(SOURCE, out, selection=PARTS[part], resources=SMALL)
    found, full = tensors_of(out), tensors_of(whole)
    assert len(found) == COUNTS[part] == report.tensors
    assert all(oracle.same_bits(found[key], full[key]) for key in found)
    dropped = {line.split(":")[0] for line in report.lost if line.endswith("left out as asked")}
    missing = keys(whole) - keys(out)
    assert dropped == {slot for _, slot in missing}
    assert api.verify(out).ok
    comparison = api.diff(out, whole)
    assert (comparison.differences, set(comparison.only_b)) == ((), missing)
    state = json.loads((out / "state.json").read_text())
    members = {name for group in state["param_groups"] or () for name in group["params"]}
    has_optimizer = any(slot != "weight" for _, slot in keys(out))
    assert members == ({name for name, _ in keys(out)} if has_optimizer else set())
    assert (state["step"] is None) == (not has_optimizer)


def test_a_part_of_a_part_is_the_part_of_the_whole(tmp_path: Path) -> None:
    one = Selection(include=("decoder.layers.1.*",))
    api.gather(SOURCE, tmp_path / "moments", selection=Selection(include=("exp_avg*",)))
    api.gather(tmp_path / "moments", tmp_path / "a", selection=one)
    both = Selection(include=one.include, exclude=("weight", "fp32_param"))
    api.gather(SOURCE, tmp_path / "b", selection=both)
    assert listing(tmp_path / "a") == listing(tmp_path / "b")


ALL_OR_NONE = "must have all of the optimizer's tensors or none, got none of"


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            Selection(exclude=("decoder.layers.1.mlp.linear_fc2.weight",)),
            "must have every weight, got none of decoder.layers.1.mlp.linear_fc2.weight",
        ),
        (
            Selection(exclude=("weight",)),
            "must have every weight, got none of decoder.final_layernorm.weight",
        ),
        (
            Selection(exclude=("exp_avg",)),
            f"{ALL_OR_NONE} decoder.final_layernorm.weight (exp_avg)",
        ),
        (
            Selection(exclude=("output_layer.weight:exp_avg_sq",)),
            f"{ALL_OR_NONE} output_layer.weight (exp_avg_sq)",
        ),
    ],
)
def test_megatron_takes_all_weights_and_all_or_nothing_of_the_optimizer(
    selection: Selection, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        api.reshard(SOURCE, tmp_path / "out", selection=selection, target=Target(tp=1))
    assert str(caught.value) == f"--to megatron: {message}"
    assert "--to safetensors" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


# --- strip -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gqa_tp2_pp1_dp2", "tied_tp1_pp2_dp2", "megadlms_gqa_tp1_pp1_dp2_bucket6000"]
)
def test_stripped_weights_are_a_megatron_checkpoint_that_says_what_it_lacks(
    name: str, tmp_path: Path
) -> None:
    source, out = oracle.case(name).directory, tmp_path / "out"
    report = api.strip(source, out, resources=SMALL)
    assert report.dst_format == "megatron"
    lines = report.lines()
    assert (
        "NOT carried: optimizer: no state of it is written; start Megatron with --no-load-optim"
    ) in lines
    for slot in SLOTS[1:]:
        assert any(line.startswith(f"NOT carried: {slot}: ") for line in lines)
    result = api.verify(out, against=source)
    assert result.ok
    assert api.verify(out, require=frozenset({"optimizer"})).differences
    assert {slot for _, slot in keys(out)} == {"weight"}
    assert not list(out.rglob("distrib_optim.pt"))
    for mine, theirs in zip(
        edit.rank_files(out, edit.MODEL), edit.rank_files(source, edit.MODEL), strict=True
    ):
        entry, original = oracle.read(mine), oracle.read(theirs)
        assert set(original) - set(entry) == {"optimizer"}
        assert list(entry["model"]) == list(original["model"])
        assert all(
            value is None or oracle.same_bits(value, original["model"][key])
            for key, value in entry["model"].items()
        )


def test_stripped_weights_go_to_any_topology_and_are_stripped_again(tmp_path: Path) -> None:
    api.strip(SOURCE, tmp_path / "a", target=Target(tp=1, pp=2))
    api.strip(tmp_path / "a", tmp_path / "b", target=Target(tp=2, pp=1))
    api.reshard(tmp_path / "b", tmp_path / "c", target=Target(tp=4))
    for made in "abc":
        assert api.verify(tmp_path / made, against=SOURCE).ok
    assert api.inspect(tmp_path / "c")["topology"] == {"tp": 4, "pp": 1, "dp": 2, "cp": 1}


def test_named_slots_alone_are_stripped_to_safetensors(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = api.strip(SOURCE, out, slots=["exp_avg", "exp_avg_sq"], to="safetensors")
    assert {slot for _, slot in keys(out)} == {"weight", "fp32_param"}
    found, full = tensors_of(out), tensors_of(whole)
    assert len(found) == 30
    assert all(oracle.same_bits(found[key], full[key]) for key in found)
    assert "exp_avg: 15 tensors of 87.7 kB are left out as asked" in report.lost
    with pytest.raises(UsageError, match=r"--to megatron: must have all of the optimizer's"):
        api.strip(SOURCE, tmp_path / "no", slots=["exp_avg"])
    with pytest.raises(UsageError, match=r"\*:exp_av: must match a tensor's name or slot"):
        api.strip(SOURCE, tmp_path / "no", slots=["exp_av"], to="safetensors")


def test_a_checkpoint_without_optimizer_files_is_stripped_where_that_is_accepted(
    tmp_path: Path,
) -> None:
    lost = edit.copy_of("gqa_tp1_pp1_dp1", tmp_path / "lost")
    for path in edit.rank_files(lost, edit.OPTIMIZER):
        path.unlink()
    options = ReadOptions(accept_loss=frozenset({"optimizer"}))
    api.strip(lost, tmp_path / "out", options=options)
    assert api.verify(tmp_path / "out", against=SOURCE).ok


# --- from container to container ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa_tp2_pp1_dp2", "tied_tp2_pp1_dp1_fp32"])
def test_from_one_consolidated_form_to_another_nothing_is_lost(name: str, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    first = tmp_path / "first"
    report = api.gather(oracle.case(name).directory, first)
    steps = {"again": "safetensors", "store": "zarr", "store2": "zarr", "back": "safetensors"}
    source = first
    for step, to in steps.items():
        done = api.gather(source, tmp_path / step, to=to, resources=SMALL)
        assert (done.carried, done.lost) == (report.carried, ())
        assert api.digest(tmp_path / step)[0] == api.digest(first)[0]
        source = tmp_path / step
    assert listing(tmp_path / "again") == listing(first)
    assert listing(tmp_path / "store2") == listing(tmp_path / "store")
    assert listing(tmp_path / "back") == listing(first)
    assert len(json.loads((first / "objects" / "args.json").read_text())) > 100


@pytest.mark.parametrize("to", ["safetensors", "zarr"])
def test_a_consolidated_checkpoint_is_stripped_with_its_objects(
    to: str, whole: Path, tmp_path: Path
) -> None:
    if to == "zarr":
        pytest.importorskip("zarr")
    api.gather(whole, tmp_path / "source", to=to)
    report = api.strip(tmp_path / "source", tmp_path / "out", to="safetensors")
    assert (
        "optimizer: its parameter groups and step, since no state of it is written" in report.lost
    )
    state, old = (json.loads((p / "state.json").read_text()) for p in (tmp_path / "out", whole))
    assert (state["step"], state["param_groups"]) == (None, None)
    assert set(old["not_carried"]) < set(state["not_carried"])
    for key in ("source", "iteration", "num_floating_point_operations_so_far"):
        assert state[key] == old[key]
    for name in ("args", "opt_param_scheduler"):
        path = Path("objects") / f"{name}.json"
        assert (tmp_path / "out" / path).read_bytes() == (whole / path).read_bytes()
    weights = {k: v for k, v in tensors_of(whole).items() if not k.startswith("state.")}
    found = tensors_of(tmp_path / "out")
    assert found.keys() == weights.keys()
    assert all(oracle.same_bits(found[key], weights[key]) for key in weights)


def test_an_object_that_was_changed_is_refused(whole: Path, tmp_path: Path) -> None:
    api.gather(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "objects" / "args.json"
    path.write_bytes(path.read_bytes().replace(b'"num_layers": 2', b'"num_layers": 3'))
    assert not api.verify(tmp_path / "copy").ok
    with pytest.raises(api.CkptError, match="args.json: SHA-256 must be .*, got another"):
        api.gather(tmp_path / "copy", tmp_path / "out")


# --- the command line --------------------------------------------------------------------------


def test_the_options_of_the_command_line_mean_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = edit.run_cli("strip", SOURCE, out, "--json")
    assert done.code == 0, done.err
    assert {slot for _, slot in keys(out)} == {"weight"}
    done = edit.run_cli(
        *("strip", SOURCE, tmp_path / "b", "--slot", "exp_avg", "--slot", "exp_avg_sq"),
        *("--to", "safetensors"),
    )
    assert done.code == 0, done.err
    assert {slot for _, slot in keys(tmp_path / "b")} == {"weight", "fp32_param"}
    for verb in ("reshard", "gather"):
        done = edit.run_cli(
            *(verb, SOURCE, tmp_path / verb, "--include", "decoder.layers.1.*"),
            *("--include", "exp_avg", "--exclude", "exp_avg_sq", "--exclude", "output*"),
            *(["--to", "safetensors"] if verb == "reshard" else []),
        )
        assert done.code == 0, done.err
        assert "NOT carried: exp_avg_sq: 15 tensors of" in done.out
        assert len(keys(tmp_path / verb)) == 3 * LAYER_1 + (15 - LAYER_1 - 1)
    done = edit.run_cli("gather", SOURCE, tmp_path / "no", "--include", "none")
    assert (done.code, done.out) == (1, "")
    assert "error: none: must match a tensor's name or slot, got none that does" in done.err
    assert not (tmp_path / "no").exists()
