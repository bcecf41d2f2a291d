"""Every file that Apex wrote is read to the bits that its run held, without Apex or torch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import apex_files as files
import google_crc32c
import pytest
import torch

from ckpttools import api
from ckpttools.api import ReadOptions
from ckpttools.formats import ParamGroup
from ckpttools.manifest import IDENTITY, MASTER, REMAINDER, WEIGHT

KINDS = ("v2.pt", "v1_gathered.pt", "ranks")
CASES = [
    (variant, kind)
    for variant in files.VARIANTS
    for kind in KINDS
    if kind == "ranks" or (files.FIXTURES / variant / kind).exists()
]


def place_of(variant: str, kind: str, tmp_path: Path) -> Path:
    """The file of a fixture, or a directory with those of its ranks and nothing else."""
    if kind != "ranks":
        return files.FIXTURES / variant / kind
    path = tmp_path / "ranks"
    path.mkdir(exist_ok=True)
    for file in (files.FIXTURES / variant).glob("v1_local_rank*.pt"):
        shutil.copy(file, path)
    return path


def options_of(variant: str) -> ReadOptions:
    """What the files of a fixture don't tell."""
    return ReadOptions(
        names_path=str(files.NAMES), model_path=str(files.FIXTURES / variant / "model.pt")
    )


def test_there_are_files_of_all_kinds() -> None:
    assert len(files.VARIANTS) == 13
    assert [sum(k == kind for _, k in CASES) for kind in KINDS] == [13, 12, 13]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_every_slot_of_every_file_is_what_the_run_held(
    variant: str, kind: str, tmp_path: Path
) -> None:
    path = place_of(variant, kind, tmp_path)
    _, found = api.digest(path, options=options_of(variant))
    narrow = files.meta(variant)["opt_kwargs"].get("dtype") == "bfloat16"
    expected = {}
    for key, tensor in files.truth(variant).items():
        held = tensor.bfloat16() if narrow else tensor
        assert torch.equal(held.float(), tensor.float()), key
        expected[key] = (
            str(held.dtype).removeprefix("torch."),
            tuple(held.shape),
            google_crc32c.value(bits(held)),
        )
    assert {(d.name, d.slot): (d.dtype, d.shape, d.crc32c) for d in found} == expected


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("bf16_rem_ws2", "v1_gathered.pt"), ("fp32_store_2x2", "ranks"), ("fp32_store_ws4", "v2.pt")],
)
def test_gathered_tensors_are_what_the_run_held(variant: str, kind: str, tmp_path: Path) -> None:
    path = place_of(variant, kind, tmp_path)
    api.gather(path, tmp_path / "out", options=options_of(variant))
    found, expected = files.gathered(tmp_path / "out"), files.truth(variant)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_every_file_is_sound(variant: str, kind: str, tmp_path: Path) -> None:
    found = api.verify(place_of(variant, kind, tmp_path), options=options_of(variant))
    assert (found.damage, found.differences) == ((), ())


@pytest.mark.parametrize("variant", files.VARIANTS)
def test_step_and_groups_are_those_of_the_run(variant: str, tmp_path: Path) -> None:
    known = files.meta(variant)
    for kind in KINDS:
        if (variant, kind) not in CASES:
            continue
        manifest = api.read_manifest(place_of(variant, kind, tmp_path), options=options_of(variant))
        assert manifest.objects["step"] == known["step_value"]
        assert "adam_w_mode" not in manifest.objects
        groups = manifest.objects["param_groups"]
        assert isinstance(groups, tuple)
        for group, expected in zip(groups, known["param_groups"], strict=True):
            assert isinstance(group, ParamGroup)
            assert {**group.settings, "params": list(group.members or ())} == {
                **expected,
                "betas": tuple(expected["betas"]),
            }


def test_the_mode_is_what_the_user_says_and_else_a_remark(tmp_path: Path) -> None:
    path = place_of("fp32_l2mode_ws2", "v2.pt", tmp_path)
    unknown = api.open_checkpoint(path, options=options_of("fp32_l2mode_ws2"))
    assert "adam_w_mode: no Apex file tells it" in unknown.notes[0]
    told = ReadOptions(names_path=str(files.NAMES), adam_w_mode=False)
    opened = api.open_checkpoint(path, options=told)
    assert opened.manifest.objects["adam_w_mode"] is False
    assert opened.notes == ()


def test_a_v2_file_needs_no_weights(tmp_path: Path) -> None:
    path = place_of("fp32_store_ws2", "v2.pt", tmp_path)
    manifest = api.read_manifest(path, options=ReadOptions(names_path=str(files.NAMES)))
    assert manifest.slots() == (MASTER, "exp_avg", "exp_avg_sq")


def test_masters_are_read_where_the_run_kept_them(tmp_path: Path) -> None:
    found = {}
    for variant in ("bf16_store_ws2", "bf16_rem_ws2", "fp32_nostore_ws2"):
        path = place_of(variant, "v1_gathered.pt", tmp_path)
        manifest = api.read_manifest(path, options=options_of(variant))
        index = manifest.index()
        weight, master = (index["head.weight", slot] for slot in (WEIGHT, MASTER))
        chunks = manifest.by_tensor()
        shared = chunks[weight][0].parts == chunks[master][0].parts
        found[variant] = {chunk.codec for chunk in chunks[master]}, shared
    assert found == {
        "bf16_store_ws2": ({IDENTITY}, False),
        "bf16_rem_ws2": ({REMAINDER}, False),
        "fp32_nostore_ws2": ({IDENTITY}, True),
    }


def test_copies_of_a_redundant_group_are_copies(tmp_path: Path) -> None:
    path = place_of("fp32_store_2x2", "ranks", tmp_path)
    options = options_of("fp32_store_2x2")
    manifest = api.read_manifest(path, options=options)
    for copy in (0, 1):
        assert any(chunk.replica_id == copy for chunk in manifest.chunks)
    assert manifest.objects["buckets"] == "9 buckets over 2 ranks, 2 copies"
    checked = "\n".join(api.verify(path, options=options).checked)
    assert "copies (norms and other replicas) equal the first bit for bit" in checked


def test_one_copy_of_each_rank_is_enough(tmp_path: Path) -> None:
    path = place_of("fp32_store_2x2", "ranks", tmp_path)
    whole = api.digest(path, options=options_of("fp32_store_2x2"))[0]
    (path / "v1_local_rank3.pt").unlink()
    assert api.digest(path, options=options_of("fp32_store_2x2"))[0] == whole
    (path / "v1_local_rank0.pt").unlink()
    assert api.digest(path, options=options_of("fp32_store_2x2"))[0] == whole


def test_a_run_at_any_number_of_ranks_can_be_compared(tmp_path: Path) -> None:
    variants = ("fp32_store_ws2", "fp32_contig_ws2", "fp32_nostore_ws2")
    options = options_of("fp32_store_ws2")
    whole = files.FIXTURES / "fp32_store_ws2" / "v2.pt"
    for variant in variants:
        same = api.diff(place_of(variant, "v1_gathered.pt", tmp_path), whole, options=options)
        assert same.equal
        assert same.compared == 56
    other = api.diff(
        files.FIXTURES / "fp32_l2mode_ws2" / "v2.pt",
        whole,
        options=ReadOptions(names_path=str(files.NAMES)),
    )
    assert not other.equal


def test_inspect_tells_kind_step_and_buckets(tmp_path: Path) -> None:
    path = place_of("fp32_store_ws4", "ranks", tmp_path)
    found = api.inspect(path, options=options_of("fp32_store_ws4"))
    assert found["format"] == "apex"
    assert found["layouts"] == ["v1"]
    assert found["step"] == 5
    assert found["buckets"] == "10 buckets over 4 ranks"


def test_apex_is_not_imported(tmp_path: Path) -> None:
    path = place_of("bf16_rem_ws2", "v1_gathered.pt", tmp_path)
    api.read_manifest(path, options=options_of("bf16_rem_ws2"))
    assert not any(name.split(".")[0] == "apex" for name in sys.modules)
