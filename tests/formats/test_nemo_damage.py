"""A NeMo directory that is torn, damaged or hostile must be refused by name, never misread."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_builder import DISTRIBUTED, content, differences, legacy, model, truth, zarr
from torch.distributed.checkpoint.metadata import Metadata

from ckpttools import api
from ckpttools.api import ReadOptions
from ckpttools.errors import (
    FormatError,
    RuleError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from ckpttools.formats.nemo.configuration import with_sizes
from ckpttools.formats.nemo.settings import plain_number, setting
from ckpttools.formats.nemo.state import NemoState, portable, restore
from ckpttools.manifest import WEIGHT
from ckpttools.storage.inert import Inert, new_global

FC2 = "model.decoder.layers.mlp.linear_fc2.weight"
QKV = "optimizer.state.exp_avg.model.decoder.layers.self_attention.linear_qkv.weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DISTRIBUTED, tmp_path / "run"))


def refused(path: Path, kind: type[Exception], message: str, **options: Any) -> None:
    with pytest.raises(kind, match=message):
        api.open_checkpoint(path, format="nemo", options=ReadOptions(**options))


def edit_metadata(run: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((run / ".metadata").read_bytes())
    change(metadata)
    (run / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def drop(key: str) -> Callable[[Metadata], None]:
    """Remove a key and what is stored of it."""

    def change(metadata: Metadata) -> None:
        del metadata.state_dict_metadata[key]
        for index in [i for i in metadata.storage_data if i.fqn == key]:
            del metadata.storage_data[index]

    return change


def rename(old: str, new: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        for index in [i for i in metadata.storage_data if i.fqn == old]:
            info = metadata.storage_data.pop(index)
            vars(index)["fqn"] = new
            metadata.storage_data[index] = info

    return change


def edit_common(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = torch.load(run / "common.pt", weights_only=False)
    change(tree)
    torch.save(tree, run / "common.pt")


# --- torn -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt"])
def test_a_missing_file_is_named(name: str, run: Path) -> None:
    (run / name).unlink()
    refused(run, FormatError, f"{name}: (a distributed checkpoint )?must (be there|have it)")
    assert any(name in line for line in api.verify(run, format="nemo").damage)


def test_a_directory_without_metadata_json_is_none(run: Path) -> None:
    (run / "metadata.json").unlink()
    refused(run, FormatError, "metadata.json: a distributed checkpoint must have it, got none")


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp"])
def test_a_file_cut_short_is_refused(name: str, run: Path) -> None:
    data = (run / name).read_bytes()
    (run / name).write_bytes(data[:-500])
    refused(run, FormatError, f"{name}.*part must lie in {len(data) - 500} bytes")


def test_a_changed_bit_of_a_moment_is_found(run: Path) -> None:
    place = run / "__0_0.distcp"
    data = bytearray(place.read_bytes())
    data[40_000] ^= 1
    place.write_bytes(data)
    assert any("__0_0.distcp" in line for line in api.verify(run).damage)


# --- keys that disagree ---------------------------------------------------------------


def test_a_moment_that_is_missing_is_named(run: Path) -> None:
    edit_metadata(run, drop(QKV))
    refused(run, FormatError, r"linear_qkv.weight \(exp_avg\): must be there.*got none")


def test_a_weight_that_is_missing_is_named(run: Path) -> None:
    edit_metadata(run, drop(FC2))
    refused(run, FormatError, r"linear_fc2.weight \(fp32_param\): must be there.*no weight of it")


def test_a_master_under_both_names_is_refused(run: Path) -> None:
    both = "optimizer.state.param.model.output_layer.weight"

    def change(metadata: Metadata) -> None:
        rename("optimizer.state.exp_avg.model.output_layer.weight", both)(metadata)

    edit_metadata(run, change)
    refused(run, FormatError, r"output_layer.weight \(fp32_param\): must be stored once, got optim")


@pytest.mark.parametrize("kind", ["param", "fp32_param"])
def test_a_master_is_found_under_either_name(kind: str, run: Path) -> None:
    for key, factory in (
        ("model.decoder.layers.mlp.linear_fc1.weight", True),
        ("model.output_layer.weight", False),
    ):
        old = "param" if factory else "fp32_param"
        if old != kind:
            edit_metadata(
                run, rename(f"optimizer.state.{old}.{key}", f"optimizer.state.{kind}.{key}")
            )
    found = content(api.read_manifest(run))
    assert differences(found, truth()) == []


def test_a_stack_of_another_depth_is_refused(run: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[FC2]
        entry.size = torch.Size((1, 16, 24))
        del entry.chunks[1]
        index = next(i for i in metadata.storage_data if i.fqn == FC2 and i.offset[0] == 1)
        del metadata.storage_data[index]

    edit_metadata(run, change)
    refused(run, FormatError, f"{FC2}: must have 2 layers as model.decoder.*, got 1")


def test_a_stack_of_more_layers_than_any_model_has_is_refused(run: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[FC2]
        entry.size = torch.Size((10**12, 16, 24))

    edit_metadata(run, change)
    refused(run, FormatError, "must have at most 100000 layers, got 1000000000000")


def test_a_hole_in_a_tensor_is_refused(run: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[FC2]
        del entry.chunks[1]
        index = next(i for i in metadata.storage_data if i.fqn == FC2 and i.offset[0] == 1)
        del metadata.storage_data[index]

    edit_metadata(run, change)
    refused(run, FormatError, "decoder.layers.1.mlp.linear_fc2.weight")


def test_state_of_an_optimizer_that_flattens_is_not_covered(run: Path) -> None:
    other = "optimizer.state.exp_avg.model.output_layer.weight"
    norm = "optimizer.state.exp_avg.model.decoder.final_layernorm.weight"
    edit_metadata(run, rename(norm, "x"))
    edit_metadata(run, drop("x"))
    edit_metadata(run, rename(other, other.replace("output_layer", "decoder.final_layernorm")))
    edit_metadata(run, drop("model.output_layer.weight"))
    for slot in ("fp32_param", "exp_avg_sq"):
        edit_metadata(run, drop(f"optimizer.state.{slot}.model.output_layer.weight"))
    refused(run, UnsupportedError, "must have the weight's shape .*as optimizers that flatten")


def test_names_under_two_prefixes_are_refused(run: Path) -> None:
    edit_metadata(run, rename("model.output_layer.weight", "module.output_layer.weight"))
    refused(run, FormatError, "all names must have one prefix, got those of model.emb.* and module")


def test_a_directory_without_a_model_is_refused(run: Path) -> None:
    def change(metadata: Metadata) -> None:
        for key in [k for k in metadata.state_dict_metadata if not k.startswith("optimizer")]:
            drop(key)(metadata)

    edit_metadata(run, change)
    refused(run, FormatError, "must hold a model, got no key of one")


# --- common.pt and metadata.json ------------------------------------------------------


def test_optimizer_state_without_its_settings_is_refused(run: Path) -> None:
    edit_common(run, lambda tree: tree.pop("optimizer_states"))
    refused(run, FormatError, "common.pt must hold optimizer_states, got none of it")


def test_settings_without_optimizer_state_are_refused_unless_accepted(run: Path) -> None:
    def change(metadata: Metadata) -> None:
        for key in [k for k in metadata.state_dict_metadata if k.startswith("optimizer")]:
            drop(key)(metadata)

    edit_metadata(run, change)
    refused(run, FormatError, "must hold the optimizer's tensors, as common.pt says, got none")
    options = ReadOptions(accept_loss=frozenset({"optimizer"}))
    opened = api.open_checkpoint(run, format="nemo", options=options)
    assert opened.manifest.slots() == (WEIGHT,)
    assert "weights only: the checkpoint has no optimizer state" in opened.notes


def test_groups_of_experts_have_no_members(run: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["optimizer_states"][0]["param_groups"][0]["is_expert"] = True

    edit_common(run, change)
    opened = api.open_checkpoint(run, format="nemo")
    assert [group.members for group in opened.manifest.objects["param_groups"]] == [None, None]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", FormatError, "metadata.json"),
        ("[]", FormatError, "must name the sharded_backend, got None"),
        ('{"sharded_backend": "fsdp"}', UnsupportedError, "must be one of torch_dist, zarr, got"),
    ],
)
def test_a_container_that_is_none_is_refused(
    text: str, kind: type[Exception], message: str, run: Path
) -> None:
    (run / "metadata.json").write_text(text)
    refused(run, kind, message)


def test_common_that_is_no_dict_is_refused(run: Path) -> None:
    torch.save([3], run / "common.pt")
    refused(run, FormatError, "common.pt: must hold a dict with names, got list")


def test_megatrons_own_distributed_form_is_not_taken_for_nemos(run: Path) -> None:
    assert api.detect_format(run).name == "nemo"
    torch.save({"args": {}, "iteration": 3, "checkpoint_version": 3.0}, run / "common.pt")
    with pytest.raises(UnknownFormatError, match="must be of exactly one known format, got none"):
        api.detect_format(run)


# --- zarr -----------------------------------------------------------------------------


def edit_zarray(root: Path, **changes: object) -> None:
    place = root / FC2 / ".zarray"
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"compressor": {"id": "zlib"}}, UnsupportedError, "compressor must be None, got"),
        ({"filters": [{}]}, UnsupportedError, "filters must be None, got"),
        ({"order": "F"}, UnsupportedError, "order must be C, got 'F'"),
        ({"zarr_format": 3}, FormatError, "must be of zarr_format 2"),
        ({"dtype": ">f4"}, FormatError, "dtype must be one of"),
        ({"shape": [2, -1, 3]}, FormatError, "shape must be whole numbers of at least 0"),
        ({"chunks": [1, 0, 3]}, FormatError, "chunks must be whole numbers of at least 1"),
        ({"chunks": [1, 3]}, FormatError, "chunks must have 3 sizes, got 2"),
        ({"shape": [10**9, 10**9, 1]}, FormatError, "must have at most 10000000 chunks"),
        ({"dimension_separator": "-"}, FormatError, "dimension_separator must be . or /"),
        ({"shape": [3, 12, 20]}, FormatError, "2.0.0: every chunk must be there, got none"),
    ],
)
def test_a_zarr_array_of_another_kind_is_refused(
    changes: dict[str, object], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    root = zarr(tmp_path / "zarr", model(2))
    edit_zarray(root, **changes)
    refused(root, kind, message)


def test_a_zarr_chunk_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    root = zarr(tmp_path / "zarr", model(2))
    place = root / FC2 / "1.0.0"
    data = place.read_bytes()
    place.write_bytes(data[:-1])
    refused(root, FormatError, f"1.0.0: must have {len(data)} bytes, got {len(data) - 1}")
    place.unlink()
    refused(root, FormatError, "1.0.0: every chunk must be there, got none")
    assert any("1.0.0" in line for line in api.verify(root, format="nemo").damage)


# --- configurations that are objects of their own ----------------------------------------


def omega(values: dict[str, object]) -> Inert:
    """Return a configuration as OmegaConf pickles it: nodes that know their parent."""
    made = Inert(new_global("omegaconf.dictconfig", "DictConfig"), via="newobj")
    content: dict[str, object] = {}
    for key, value in values.items():
        node = Inert(new_global("omegaconf.nodes", "AnyNode"), via="newobj")
        node.state = {"_metadata": None, "_parent": made, "_val": value}
        content[key] = omega(value) if isinstance(value, dict) else node
    made.state = {"_metadata": None, "_parent": None, "_content": content}
    return made


def test_settings_are_found_in_an_omegaconf_container() -> None:
    config = omega({"cfg": {"heads": 8, "optim": {"name": "adam"}}})
    assert setting(config, "cfg", "heads") == 8
    assert setting(config, "cfg", "optim", "name") == "adam"
    assert setting(config, "cfg", "nothing", "name") is None


def test_what_json_cannot_hold_stays_with_nemo() -> None:
    tree = {"epoch": 1, "hyper_parameters": omega({"cfg": {"heads": 8}})}
    assert portable(tree)[1] == ("hyper_parameters",)
    again = restore(NemoState(tree, extra={"a": None}).to_document())
    assert (dict(again.tree), dict(again.extra)) == ({"epoch": 1}, {"a": None})


@pytest.mark.parametrize(
    "changes",
    [{"version": 2}, {"grouping": "none"}, {"file_name": "../x"}, {"tree": []}, {"prefix": 3}],
)
def test_a_carried_document_that_is_none_is_refused(changes: dict[str, object]) -> None:
    document = NemoState({"epoch": 1}).to_document()
    assert isinstance(document, dict)
    with pytest.raises(FormatError, match="carried: nemo: must"):
        restore({**document, **changes})


def test_an_omegaconf_container_gets_the_sizes_of_the_target(tmp_path: Path) -> None:
    manifest = api.read_manifest(legacy(tmp_path / "run", model(2)))
    layout = manifest.objects["sharded_layout"]
    config = {"cfg": omega({"tensor_model_parallel_size": 4})}
    made = with_sizes({"hyper_parameters": config}, layout)
    assert setting(made, "hyper_parameters", "cfg", "tensor_model_parallel_size") == 1
    assert setting(config, "cfg", "tensor_model_parallel_size") == 4


def test_a_tensor_of_several_elements_is_no_number(tmp_path: Path) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p
        tree["optimizer_states"][0]["param_groups"][0]["lr"] = torch.zeros(2)

    root = legacy(tmp_path / "run", model(2), edit=edit)
    with pytest.raises(FormatError, match="lr: must be a number, or a tensor of one, got a tensor"):
        api.open_checkpoint(root)
    assert plain_number(0.5, "x") == 0.5


def test_vocabulary_rows_that_do_not_fit_are_refused(run: Path) -> None:
    refused(run, FormatError, "vocab_rows must be rows of a vocabulary", vocab_size=41)


def test_rules_that_do_not_fit_are_an_error_when_the_user_gave_them(
    run: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('family = "x"\n[[rule]]\nname = "a"\nstage = "first"\n')
    with pytest.raises(RuleError, match="must match exactly one rule"):
        api.open_checkpoint(run, options=ReadOptions(rules_path=str(rules)))
    with pytest.raises(UsageError, match="--layout"):
        api.open_checkpoint(run, options=ReadOptions(layout="x"))
