"""What torch's distributed checkpoints hold is read without torch, whatever cut and wrote them.

The fixtures are torch 2.13's; the truths were taken from the live run, and safetensors reads them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from whole_tensors import EDGES, bits, whole

from ckpttools import api
from ckpttools.api import Selection, Target
from ckpttools.dtypes import dtype
from ckpttools.errors import FormatError, UnsupportedError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.dcp.keys import Naming
from ckpttools.formats.dcp.state import DcpState
from ckpttools.formats.dcp.write import deal
from ckpttools.manifest import Manifest, TensorSpec

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
OBJECTS = json.loads((FIXTURES / "truth_objects.json").read_text())
TRUTHS = {
    "fsdp2_ws2": "fp32",
    "fsdp2_ws4": "fp32",
    "fsdp2_tp2_ws4": "tp2",
    "threads2_ws2": "fp32",
    "file_per_item_ws2": "fp32",
    "fs_safetensors_ws2": "fp32",
    "hf_sharded_ws4": "fp32",
    "hf_sharded_mapped_ws2": "fp32",
    "bf16_ws2": "bf16",
}
WITH_OBJECTS = ("fsdp2_ws2", "fsdp2_ws4", "fsdp2_tp2_ws4", "threads2_ws2", "bf16_ws2")
ORDER = ("embed", "up", "norm", "down")


def truth_of(case: str) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each tensor but steps, by name and slot."""
    found = {}
    for key, tensor in load_file(FIXTURES / f"truth_{TRUTHS[case]}.safetensors").items():
        where, _, rest = key.partition(".")
        name, slot = rest, "weight"
        if where == "optim":
            name, _, slot = rest.removeprefix("state.").rpartition(".")
        if slot != "step":
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            kind = str(tensor.dtype).removeprefix("torch.")
            found[name, slot] = kind, tuple(tensor.shape), data
    return found


def values_of(manifest: Manifest) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """Read every tensor by the Manifest alone, with numpy."""
    wholes = [np.zeros(spec.shape, spec.dtype.carrier) for spec in manifest.tensors]
    for chunk in manifest.chunks:
        (part,) = chunk.parts
        spec = manifest.tensors[chunk.tensor]
        file = Path(manifest.root) / manifest.files[part.extent.file].path
        data = file.read_bytes()[part.extent.offset :][: part.extent.length]
        steps = part.strides and tuple(stride * spec.dtype.itemsize for stride in part.strides)
        box = np.ndarray(chunk.region.lengths, spec.dtype.carrier, data, 0, steps or None)
        wholes[chunk.tensor][chunk.region.slices] = box
    return {
        spec.key: (spec.dtype.name, spec.shape, whole.tobytes())
        for spec, whole in zip(manifest.tensors, wholes, strict=True)
    }


@pytest.mark.parametrize("case", TRUTHS)
def test_each_slot_of_each_tensor_has_the_bits_that_the_run_had(case: str) -> None:
    expected = truth_of(case)
    assert len(expected) == 22
    assert len({data for _, _, data in expected.values()}) > 15
    manifest = api.read_manifest(FIXTURES / case)
    assert manifest.format == "dcp"
    assert values_of(manifest) == expected


@pytest.mark.parametrize("case", TRUTHS)
def test_steps_are_numbers_and_belong_to_the_optimizer(case: str) -> None:
    manifest = api.read_manifest(FIXTURES / case)
    assert manifest.objects["step"] == 2
    assert manifest.slots() == ("weight", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("case", WITH_OBJECTS)
def test_groups_are_by_name_and_what_the_script_saved_is_kept(case: str) -> None:
    manifest = api.read_manifest(FIXTURES / case)
    (group,) = manifest.objects["param_groups"]
    prefix = "optim.param_groups.0."
    told = {k.removeprefix(prefix): v for k, v in OBJECTS.items() if k.startswith(prefix)}
    members = told.pop("params")
    assert isinstance(group, ParamGroup)
    assert repr(list(group.members or ())) == members
    assert {name: repr(value) for name, value in group.settings.items()} == told
    assert manifest.objects["adam_w_mode"] is True
    state = manifest.objects["carried"]["dcp"]
    assert isinstance(state, DcpState)
    assert state.naming == Naming("model.", "optim.")
    others = {key: repr(other.tree) for key, other in state.others.items()}
    assert others == {k: v for k, v in OBJECTS.items() if k.startswith("train.")}


@pytest.mark.parametrize("case", WITH_OBJECTS)
def test_weights_are_in_the_order_of_the_model_whoever_wrote_them(case: str) -> None:
    names = list(dict.fromkeys(spec.name for spec in api.read_manifest(FIXTURES / case).tensors))
    assert names[0] == "steps_seen"
    assert list(dict.fromkeys(name.partition(".")[0] for name in names[1:])) == list(ORDER)


def test_ranks_are_counted_and_boxes_are_those_of_the_ranks() -> None:
    manifest = api.read_manifest(FIXTURES / "fsdp2_tp2_ws4")
    assert manifest.objects["topology"] == {"dp": 4}
    index = manifest.index()["up.weight", "weight"]
    boxes = [chunk.region.offsets for chunk in manifest.chunks if chunk.tensor == index]
    assert sorted(boxes) == [(0, 0), (6, 0), (12, 0), (18, 0)]


@pytest.mark.parametrize("case", TRUTHS)
def test_nothing_is_wrong_with_what_torch_wrote(case: str) -> None:
    found = api.verify(FIXTURES / case)
    assert (found.damage, found.differences) == ((), ())


@pytest.mark.parametrize("case", ["fsdp2_ws2", "file_per_item_ws2", "bf16_ws2"])
def test_a_bit_that_changes_in_any_file_is_damage(case: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / case, tmp_path / "src"))
    files = sorted(root.glob("*.distcp"))
    for file in (files[0], files[-1]):
        sound = file.read_bytes()
        for position in (7, len(sound) // 3, len(sound) // 2, len(sound) - 9):
            file.write_bytes(_flipped(sound, position))
            assert api.verify(root).damage != (), (file.name, position)
        file.write_bytes(sound)
    assert api.verify(root).damage == ()


def _flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "fsdp2_ws2", tmp_path / "src"))
    (root / "__1_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"__1_0\.distcp: must be there, as the metadata says"):
        api.read_manifest(root)


def test_a_missing_file_of_the_writer_for_hugging_face_leaves_a_hole(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "hf_sharded_ws4", tmp_path / "src"))
    (root / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(FormatError, match=r"chunks must cover \[.*\] exactly once, got a hole"):
        api.read_manifest(root)


def test_tensors_that_were_put_together_are_refused_and_their_chunks_are_read() -> None:
    root = FIXTURES / "hf_consolidated_ws2"
    with pytest.raises(UnsupportedError, match="must be a directory of chunks") as refused:
        api.read_manifest(root)
    assert refused.value.hint == "name its directory `sharded`"
    found = values_of(api.read_manifest(root / "sharded"))
    expected = {key: one for key, one in truth_of("fsdp2_ws2").items() if key[1] == "weight"}
    expected.pop(("steps_seen", "weight"))
    # Without an optimizer nothing tells that `model.` isn't a part of the names.
    assert {(name.removeprefix("model."), slot): v for (name, slot), v in found.items()} == expected


def test_metadata_of_each_rank_alone_is_refused_by_name(tmp_path: Path) -> None:
    root = Path(shutil.copytree(FIXTURES / "fsdp2_ws2", tmp_path / "src"))
    (root / ".metadata").rename(root / "__0.metadata")
    with pytest.raises(UnsupportedError, match="must have one .metadata of all ranks"):
        api.read_manifest(root)


@pytest.mark.parametrize(("case", "world"), [("fsdp2_ws4", 3), ("bf16_ws2", 1), ("fsdp2_ws2", 5)])
def test_a_checkpoint_goes_to_other_ranks_and_back_with_all_that_it_had(
    case: str, world: int, tmp_path: Path
) -> None:
    report = api.reshard(FIXTURES / case, tmp_path / "out", target=Target(world=world))
    assert report.lost == ()
    out = api.read_manifest(tmp_path / "out")
    assert values_of(out) == truth_of(case)
    source = api.read_manifest(FIXTURES / case)
    assert out.objects["topology"] == {"dp": world}
    for key in ("step", "param_groups", "adam_w_mode"):
        assert out.objects[key] == source.objects[key]
    assert _state(out) == _state(source)
    assert api.verify(tmp_path / "out").damage == ()


def _state(manifest: Manifest) -> DcpState:
    state = manifest.objects["carried"]["dcp"]
    assert isinstance(state, DcpState)
    return state


@pytest.mark.parametrize("form", ["sharded", "zero1", "zero2"])
def test_a_checkpoint_comes_back_from_other_forms_under_its_own_keys(
    form: str, tmp_path: Path
) -> None:
    case = "bf16_ws2"
    api.reshard(FIXTURES / case, tmp_path / "there", to=form, target=Target(world=3))
    report = api.reshard(tmp_path / "there", tmp_path / "back", to="dcp", target=Target(world=2))
    assert report.lost == ()
    back = api.read_manifest(tmp_path / "back")
    assert values_of(back) == truth_of(case)
    assert _state(back) == _state(api.read_manifest(FIXTURES / case))


def test_rows_of_padding_go_to_torchs_form_and_back_to_megatrons(tmp_path: Path) -> None:
    source = FIXTURES.parent / "megatron" / "gqa_tp2_pp1_dp2" / "torch"
    api.reshard(source, tmp_path / "out", to="dcp", target=Target(tp=1, world=3))
    manifest = api.read_manifest(tmp_path / "out")
    assert {spec.padding_rows for spec in manifest.tensors} == {0, 28}
    assert api.verify(tmp_path / "out", against=source).differences == ()
    api.reshard(tmp_path / "out", tmp_path / "back", to="megatron", target=Target(tp=2, dp=2))
    assert api.verify(tmp_path / "back", against=source).differences == ()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(tp=2), "--tp: must not be given for dcp, which any layout loads, got 2"),
        (Target(bucket_size=7), "--bucket-size: must not be given for dcp"),
        (Target(world=2, dp=3), "--world: must be one number of ranks, at least 1, got 2 and 3"),
        (Target(world=0), "--world: must be one number of ranks, at least 1, got 0"),
    ],
)
def test_sizes_that_boxes_do_not_have_are_refused(
    target: Target, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        api.reshard(FIXTURES / "fsdp2_ws2", tmp_path / "out", target=target)


def test_every_dtype_and_every_odd_shape_is_written_and_torch_reads_it(tmp_path: Path) -> None:
    held = {key: tensor for key, tensor in EDGES.items() if key[1] != "step"}
    source = whole(tmp_path / "src", held)
    api.reshard(source, tmp_path / "out", to="dcp", target=Target(world=3))
    assert api.verify(tmp_path / "out", against=source).differences == ()
    read: dict[str, Any] = {
        "model": {n: torch.zeros_like(t) for (n, slot), t in held.items() if slot == "weight"}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.load(read, checkpoint_id=str(tmp_path / "out"))
    for name, tensor in read["model"].items():
        assert _bits(tensor) == _bits(held[name, "weight"]), name


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_tensor_of_some_size_is_cut_over_the_files_as_fsdp2_does(tmp_path: Path) -> None:
    held = {("big", "weight"): bits((400, 50), "float32"), ("small", "weight"): torch.ones(3)}
    source = whole(tmp_path / "src", held)
    api.reshard(source, tmp_path / "out", to="dcp", target=Target(world=3))
    listed = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    boxes = listed.state_dict_metadata["model.big"].chunks
    assert [(*box.offsets, *box.sizes) for box in boxes] == [
        (0, 0, 134, 50),
        (134, 0, 134, 50),
        (268, 0, 132, 50),
    ]
    assert api.verify(tmp_path / "out", against=source).differences == ()


def test_a_step_that_is_a_tensor_of_its_own_is_refused(tmp_path: Path) -> None:
    source = whole(
        tmp_path / "src", {k: EDGES[k] for k in (("ragged", "weight"), ("ragged", "step"))}
    )
    with pytest.raises(UsageError, match=r"--to dcp: ragged \(step\): steps must be numbers"):
        api.reshard(source, tmp_path / "out", to="dcp")


def test_state_without_its_weight_is_refused(tmp_path: Path) -> None:
    selection = Selection(exclude=("up.*:weight",))
    with pytest.raises(UsageError, match="--to dcp: optim.state.up.* must be state of a weight"):
        api.reshard(FIXTURES / "bf16_ws2", tmp_path / "out", selection=selection)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([0, 12, 1 << 16]),
)
def test_each_element_of_each_tensor_falls_to_one_file(
    shapes: list[tuple[int, ...]], parts: int, least: int
) -> None:
    specs = [TensorSpec(f"t{i}", "weight", dtype("float32"), s) for i, s in enumerate(shapes)]
    found = deal(specs, parts, least_cut_bytes=least)
    assert len(found) == parts
    counts = [np.zeros(shape, int) for shape in shapes]
    for part in found:
        for index, box in part:
            counts[index][box.slices] += 1
    assert all((count == 1).all() for count in counts)
    for index, shape in enumerate(shapes):
        rows = [box.lengths[0] for part in found for i, box in part if i == index and shape]
        cut = torch.zeros(shape).chunk(parts) if len(rows) > 1 else ()
        assert not cut or rows == [len(piece) for piece in cut]


def test_weights_alone_are_written_without_groups_and_steps(tmp_path: Path) -> None:
    api.strip(FIXTURES / "fsdp2_ws2", tmp_path / "out")
    manifest = api.read_manifest(tmp_path / "out")
    assert manifest.slots() == ("weight",)
    assert "step" not in manifest.objects
    assert "param_groups" not in manifest.objects
    assert not any(b"param_groups" in p.read_bytes() for p in (tmp_path / "out").iterdir())
