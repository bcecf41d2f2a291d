"""What is written for Apex is Apex's own file of the same state, byte for byte, and more beside."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import apex_files as files
import oracle_megatron as megatron
import oracle_torch_files as torch_files
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools import api
from ckpttools.api import ReadOptions, Selection, Target
from ckpttools.errors import CkptError, FormatError, UsageError
from ckpttools.formats.apex import ApexFormat
from ckpttools.manifest import MASTER
from ckpttools.storage.sealed_json import serialize

TP1 = megatron.case("gqa_tp1_pp1_dp2").directory
TP2 = megatron.case("gqa_tp2_pp2_dp1").directory
TIED_FP32 = megatron.case("tied_tp1_pp1_dp2_fp32").directory
KINDS = [
    (variant, kind)
    for variant in files.VARIANTS
    for kind in ("v2.pt", "v1_gathered.pt")
    if (files.FIXTURES / variant / kind).exists()
]


def options_of(variant: str) -> ReadOptions:
    return ReadOptions(
        names_path=str(files.NAMES), model_path=str(files.FIXTURES / variant / "model.pt")
    )


def target_of(variant: str) -> Target:
    return Target(masters="remainders" if "_rem_" in variant else "stored")


def records(path: Path) -> dict[str, bytes]:
    """The records of a torch file in their order, without the archive's folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def same(a: Any, b: Any, where: str = "") -> None:
    """Equal types, keys in equal order, dtypes, shapes and bits."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{number}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), where
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), where
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron's fixture for a run that stores masters; not to be changed."""
    path = tmp_path_factory.mktemp("apex") / "out"
    api.reshard(TP2, path, to="apex", target=Target(masters="stored"))
    return path


# --- Apex's own file ------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_the_file_is_apexs_own_of_the_same_state(variant: str, kind: str, tmp_path: Path) -> None:
    source = files.FIXTURES / variant / kind
    out = tmp_path / "out"
    api.reshard(source, out, to="apex", target=target_of(variant), options=options_of(variant))
    mine, theirs = out / "optimizer.pt", files.FIXTURES / variant / "v2.pt"
    same(torch.load(mine, weights_only=True), torch.load(theirs, weights_only=True))
    found, expected = records(mine), records(theirs)
    assert list(found) == list(expected)
    odd = [name for name in expected if found[name] != expected[name]]
    assert odd == [".data/serialization_id"]
    weights = torch.load(files.FIXTURES / variant / "model.pt")
    same(torch.load(out / "model.pt", weights_only=True), weights)


def test_a_capturable_run_is_written_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    tree = torch.load(files.FIXTURES / "fp32_store_ws2" / "v2.pt")
    tree["state"]["step"] = torch.tensor([5], dtype=torch.int32)
    for group in tree["param_groups"]:
        group["lr"] = torch.tensor(group["lr"])
    torch.save(tree, path)
    options = ReadOptions(names_path=str(files.NAMES))
    api.reshard(path, tmp_path / "out", options=options)
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert found["state"]["step"] == 5
    assert found["param_groups"][0]["lr"] == 0.009999999776482582
    assert not (tmp_path / "out" / "model.pt").exists()


def test_settings_of_users_stay_in_their_groups(tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    tree = torch.load(files.FIXTURES / "fp32_store_ws2" / "v2.pt")
    tree["param_groups"][1] |= {"is_expert": True, "tags": ["a", ("b", 1)], "more": {"x": None}}
    torch.save(tree, path)
    api.reshard(path, tmp_path / "out", options=ReadOptions(names_path=str(files.NAMES)))
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    same(
        [sorted(group.items()) for group in found["param_groups"]],
        [sorted(group.items()) for group in tree["param_groups"]],
    )


# --- from others and back -------------------------------------------------------------------


@pytest.mark.parametrize("masters", ["stored", "remainders"])
def test_megatrons_state_is_in_apexs_file_by_number(masters: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = api.reshard(TP2, out, to="apex", target=Target(masters=masters))
    tree = torch.load(out / "optimizer.pt", weights_only=True)
    weights = torch.load(out / "model.pt", weights_only=True)
    names = json.loads((out / "ckpttools.json").read_text())["names"]
    true = megatron.case("gqa_tp2_pp2_dp1").truth_tensors()
    assert tree["state"]["step"] == 3
    assert type(tree["state"]["step"]) is int
    assert sorted(names) == sorted(weights)
    changed = 0
    for number, name in enumerate(names):
        for slot, tensor in tree["state"][number].items():
            held = true[f"{slot}/{name}"]
            padded = name in megatron.VOCABULARY
            assert tensor.shape == ((112, *held.shape[1:]) if padded else held.shape), name
            rows = 100 if padded else held.shape[0]
            assert torch.equal(tensor[:rows], held[:rows]), (name, slot)
        master = tree["state"][number]["param"]
        expected = files.half_away(master) if masters == "remainders" else master.bfloat16()
        assert torch.equal(weights[name].view(torch.int16), expected.view(torch.int16)), name
        changed += int((files.half_away(master) != master.bfloat16()).sum())
    assert changed == 1
    said = " ".join(report.findings)
    assert ("1 of 21920 elements differ from the source's" in said) == (masters == "remainders")


def test_the_way_of_masters_must_be_told_where_it_matters(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="how the run keeps masters of 16-bit weights") as caught:
        api.reshard(TP1, tmp_path / "out", to="apex")
    assert "--masters stored" in caught.value.hint
    assert not (tmp_path / "out").exists()
    api.reshard(TIED_FP32, tmp_path / "fp32", to="apex")


def test_a_run_that_kept_remainders_keeps_them_unless_told(tmp_path: Path) -> None:
    variant = files.FIXTURES / "bf16_rem_ws2"
    options = options_of("bf16_rem_ws2")
    api.reshard(variant / "v1_gathered.pt", tmp_path / "same", options=options)
    same(torch.load(tmp_path / "same" / "model.pt"), torch.load(variant / "model.pt"))
    target = Target(masters="stored")
    api.reshard(variant / "v1_gathered.pt", tmp_path / "stored", options=options, target=target)
    weights = torch.load(tmp_path / "stored" / "model.pt")
    masters = torch.load(variant / "v2.pt")["state"]
    for number, name in json.loads(files.NAMES.read_text()).items():
        expected = masters[int(number)]["param"].bfloat16()
        assert torch.equal(weights[name].view(torch.int16), expected.view(torch.int16))


def test_megatron_comes_back_from_apex(written: Path, tmp_path: Path) -> None:
    api.reshard(written, tmp_path / "back", to="megatron", target=Target(tp=2, pp=2, dp=1))
    assert api.diff(TP2, tmp_path / "back").equal
    api.reshard(TP2, tmp_path / "straight", target=Target(tp=1, pp=1, dp=2))
    api.reshard(written, tmp_path / "one", to="megatron", target=Target(tp=1, pp=1, dp=2))
    lost = {"rng_state"}  # it belongs to ranks
    for root in (tmp_path / "straight", tmp_path / "one"):
        assert not lost & torch_files.read(next(root.rglob("model_optim_rng.pt"))).keys()
    assert torch_files.compare_files(tmp_path / "straight", tmp_path / "one") == []


def test_tensor_ranks_and_stages_come_back_from_whole_tensors(
    written: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    api.reshard(written, out, to="zero1", target=Target(tp=2, pp=2, dp=3))
    assert api.diff(TP2, out).equal
    again = tmp_path / "again"
    api.reshard(out, again, to="apex", target=Target(masters="stored"))
    for name in ("optimizer.pt", "model.pt"):
        assert (again / name).read_bytes() == (written / name).read_bytes()


def test_rows_of_padding_are_those_of_one_tensor_rank(written: Path) -> None:
    manifest = api.read_manifest(written)
    rows = {(s.shape[0], s.padding_rows) for s in manifest.tensors if s.padding_rows}
    assert rows == {(100, 12)}
    assert {s.name for s in manifest.tensors if s.padding_rows} == {
        "embedding.word_embeddings.weight",
        "output_layer.weight",
    }


def test_what_apex_has_no_place_for_stands_beside(written: Path) -> None:
    source, found = api.read_manifest(TP2).objects, api.read_manifest(written).objects
    for key in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far", "step"):
        assert found[key] == source[key], key
    assert found["adam_w_mode"] is True  # Megatron's groups say decoupled_weight_decay


def test_an_l2_run_stays_one(tmp_path: Path) -> None:
    source = files.FIXTURES / "fp32_l2mode_ws2" / "v2.pt"
    options = ReadOptions(names_path=str(files.NAMES), adam_w_mode=False)
    report = api.reshard(source, tmp_path / "out", options=options)
    assert "adam_w_mode: build the optimizer with adam_w_mode=False" in report.findings
    assert api.read_manifest(tmp_path / "out").objects["adam_w_mode"] is False


def test_a_weight_without_a_master_is_its_own(tmp_path: Path) -> None:
    source = files.FIXTURES / "fp32_store_ws2" / "v2.pt"
    api.reshard(
        source,
        tmp_path / "out",
        options=options_of("fp32_store_ws2"),
        selection=Selection(exclude=(f"*:{MASTER}",)),
    )
    same(torch.load(tmp_path / "out" / "optimizer.pt"), torch.load(source))


def test_narrow_moments_beside_wide_masters_are_widened(tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    tree = torch.load(files.FIXTURES / "fp32_store_ws2" / "v2.pt")
    for number in range(14):
        for slot, kind in (("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.float16)):
            tree["state"][number][slot] = tree["state"][number][slot].to(kind)
    torch.save(tree, path)
    api.reshard(path, tmp_path / "out", options=ReadOptions(names_path=str(files.NAMES)))
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["state"]
    for number in range(14):
        for slot, tensor in tree["state"][number].items():
            assert torch.equal(found[number][slot], tensor.float())
            assert found[number][slot].dtype == torch.float32


def test_empty_and_0d_tensors_have_their_place(tmp_path: Path) -> None:
    params = [files.random_param("none", (0, 3), 1), files.random_param("one", (), 2)]
    run = files.Run(params, 2)
    path = files.save_run(run, tmp_path / "run")
    options = ReadOptions(names_path=str(path.with_suffix(".json")))
    api.reshard(path, tmp_path / "out", options=options)
    tree = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    for number, param in enumerate(params):
        for slot, tensor in param.state.items():
            assert tree["state"][number][slot].shape == tensor.shape
            assert torch.equal(tree["state"][number][slot], tensor)
    assert api.verify(tmp_path / "out").ok


# --- what was written vouches for itself --------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_bit_anywhere_stays_unseen(written: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(written.iterdir())), label="file")
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1), label="bit")
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    try:
        assert ApexFormat().check(written)
    finally:
        path.write_bytes(content)


def test_what_is_sound_has_no_problem(written: Path) -> None:
    assert ApexFormat().check(written) == []
    assert api.verify(written).ok


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"names": ["a"]}, "must name the 15 parameters of .*, got 1 names"),
        ({"names": [1]}, "names must be a list of texts"),
        ({"padding": {"a": 0}}, "padding must map names to rows"),
        ({"padding": {"output_layer.weight": 113}}, "must have its 113 rows of padding, got shape"),
        ({"objects": {"secret": 1}}, "objects must be iteration, .*, got 'secret'"),
        ({"objects": []}, "objects and carried must be objects"),
        ({"layout": {}}, "layout"),
        ({"format_version": 2}, "format_version must be 1, got 2"),
        ({"more": 1}, "got a difference: .'more'"),
    ],
)
def test_a_forged_sidecar_is_refused(
    change: dict[str, object], rule: str, written: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(written, tmp_path / "copy"))
    place = path / "ckpttools.json"
    place.write_bytes(serialize({**json.loads(place.read_text()), **change}))
    with pytest.raises(FormatError, match=rule):
        api.open_checkpoint(path, format="apex")


def test_options_of_the_source_are_not_needed_for_what_was_written(
    written: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "names.json"
    wrong.write_text('["a"]')
    opened = api.open_checkpoint(written, options=ReadOptions(names_path=str(wrong)))
    assert "--names: not used, ckpttools.json tells it" in opened.notes


def test_names_may_be_taken_from_what_was_written_before(written: Path, tmp_path: Path) -> None:
    """A run that goes on under Apex saves its own file: the names are still those."""
    path = tmp_path / "newer.pt"
    shutil.copy(written / "optimizer.pt", path)
    options = ReadOptions(
        names_path=str(written / "ckpttools.json"), model_path=str(written / "model.pt")
    )
    found = api.read_manifest(path, options=options)
    assert {spec.name for spec in found.tensors} == {
        spec.name for spec in api.read_manifest(written).tensors
    }


def test_a_destination_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        api.reshard(TP1, tmp_path / "out", to="apex", target=Target(tp=2, masters="stored"))
    assert list(tmp_path.iterdir()) == []
