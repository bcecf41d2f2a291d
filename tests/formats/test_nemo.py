"""NeMo's distributed form: what the original wrote is read whole, and what we write is the same."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nemo_builder import (
    DISTRIBUTED,
    LEGACY,
    content,
    differences,
    flat,
    half_away,
    legacy,
    model,
    truth,
    zarr,
    zarr_array,
)
from torch.distributed.checkpoint import FileSystemReader

from ckpttools import api
from ckpttools.api import ReadOptions, Selection, Target
from ckpttools.errors import UsageError
from ckpttools.formats import ParamGroup, registry
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import MASTER, WEIGHT, Manifest

GATED = "model.decoder.layers.mlp.linear_fc1.weight"


def read(path: Path, **options: Any) -> Manifest:
    return api.read_manifest(path, options=ReadOptions(**options))


def loaded(root: Path) -> dict[str, torch.Tensor]:
    """Let torch load every tensor of a directory."""
    listed = FileSystemReader(root).read_metadata().state_dict_metadata
    tensors = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in listed.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.load(tensors, storage_reader=FileSystemReader(root))
    return tensors


def boxes(root: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the chunks of each key as torch reads them from the metadata."""
    listed = FileSystemReader(root).read_metadata().state_dict_metadata
    return {
        k: sorted((tuple(c.offsets), tuple(c.sizes)) for c in m.chunks) for k, m in listed.items()
    }


# --- reading --------------------------------------------------------------------------


def test_the_originals_file_holds_what_the_live_run_held_in_every_slot() -> None:
    manifest = read(DISTRIBUTED)
    assert differences(content(manifest), truth()) == []
    assert len(manifest.tensors) == 60


def test_step_groups_and_layers_are_known() -> None:
    objects = read(DISTRIBUTED).objects
    first, second = objects["param_groups"]
    assert (objects["step"], objects["iteration"]) == (4, 4)
    assert first.settings["weight_decay"] == 0.1
    assert second.settings["weight_decay"] == 0.0
    assert first.settings["betas"] == (0.9, 0.95)
    assert first.settings["bias_correction"] is True
    assert len(first.members) == 10
    assert second.members == (
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.bias",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.final_layernorm.weight",
    )
    layout = objects["sharded_layout"]
    assert isinstance(layout, ShardedLayout)
    assert [p.name for p in layout.params][-2:] == [
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert objects["weight_rounding"] == ("nearest_even", "half_away")


@pytest.mark.parametrize(
    ("rule", "count"), [("one-dimensional", 5), ("norm-modules", 3), ("biases", 2)]
)
def test_the_user_names_the_rule_of_groups_that_no_file_tells(rule: str, count: int) -> None:
    manifest = read(DISTRIBUTED, layout=rule)
    assert len(manifest.objects["param_groups"][1].members) == count
    notes = api.open_checkpoint(DISTRIBUTED).notes
    assert any("no file tells their members; they are taken by the rule one-d" in n for n in notes)


@pytest.mark.parametrize("mode", [True, False])
def test_adam_w_mode_is_what_the_user_says(mode: bool) -> None:
    assert read(DISTRIBUTED, adam_w_mode=mode).objects["adam_w_mode"] is mode
    assert "adam_w_mode" not in read(DISTRIBUTED).objects
    notes = api.open_checkpoint(DISTRIBUTED).notes
    assert any("adam_w_mode is in no file" in note for note in notes)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="--layout: must be one of one-dimensional, norm-modules"):
        read(DISTRIBUTED, layout="core-0.13")


@pytest.mark.parametrize("tp", [1, 2])
def test_a_zarr_directory_is_read_alike(tp: int, tmp_path: Path) -> None:
    state = model(3)
    manifest = read(zarr(tmp_path / "zarr", state, tp))
    assert differences(content(manifest), state) == []
    assert manifest.objects["step"] == 9


def test_chunks_of_a_zarr_array_that_hang_over_its_edge_are_read(tmp_path: Path) -> None:
    state = model(3)
    zarr(tmp_path / "zarr", state, 1)
    place = tmp_path / "zarr" / "model.embedding.word_embeddings.weight"
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    zarr_array(place, state["embedding.word_embeddings.weight"][WEIGHT], [30, 7])
    assert differences(content(read(tmp_path / "zarr")), state) == []


# --- writing again --------------------------------------------------------------------


def test_the_same_state_is_written_as_the_original_wrote_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.reshard(DISTRIBUTED, out, to="nemo")
    original, ours = loaded(DISTRIBUTED), loaded(out)
    assert set(ours) == set(original)
    assert f"optimizer.state.param.{GATED}" in ours
    for key, tensor in original.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape)
        assert ours[key].view(torch.uint8).equal(tensor.view(torch.uint8)), key
    assert boxes(out) == boxes(DISTRIBUTED)
    theirs = torch.load(DISTRIBUTED / "common.pt", weights_only=True)
    mine = torch.load(out / "common.pt", weights_only=True)
    assert flat(mine) == flat(theirs)
    assert (out / "metadata.json").read_bytes() == (DISTRIBUTED / "metadata.json").read_bytes()


def test_chunks_are_those_that_tensor_ranks_would_write(tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.reshard(DISTRIBUTED, out, to="nemo", target=Target(tp=2))
    found = boxes(out)
    gated = [((layer, row, 0), (1, 12, 16)) for layer in (0, 1) for row in (0, 12, 24, 36)]
    assert found[GATED] == gated
    assert found["model.decoder.layers.self_attention.linear_proj.weight"] == [
        ((layer, 0, column), (1, 16, 8)) for layer in (0, 1) for column in (0, 8)
    ]
    assert found["model.decoder.final_layernorm.weight"] == [((0,), (16,))]
    assert sorted(f.name for f in out.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert differences(content(read(out)), truth()) == []


def test_both_forms_of_the_same_run_are_equal(tmp_path: Path) -> None:
    assert api.diff(DISTRIBUTED, LEGACY).same
    api.reshard(LEGACY, tmp_path / "out", to="nemo")
    assert boxes(tmp_path / "out") == boxes(DISTRIBUTED)
    assert api.diff(tmp_path / "out", DISTRIBUTED).same


@pytest.mark.parametrize("between", ["zero1", "zero2"])
def test_a_run_in_our_own_form_goes_back_to_nemo(between: str, tmp_path: Path) -> None:
    api.reshard(DISTRIBUTED, tmp_path / "own", to=between, target=Target(tp=2, pp=2, dp=3))
    report = api.reshard(tmp_path / "own", tmp_path / "back", to="nemo", target=Target(tp=1))
    assert report.lost == ()
    assert api.diff(tmp_path / "back", DISTRIBUTED).same
    theirs = torch.load(DISTRIBUTED / "common.pt", weights_only=True)
    assert flat(torch.load(tmp_path / "back" / "common.pt", weights_only=True)) == flat(theirs)


def test_weights_alone_are_written_without_an_optimizer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.reshard(DISTRIBUTED, out, to="nemo", selection=Selection(include=("*:weight",)))
    assert not any(key.startswith("optimizer") for key in loaded(out))
    assert "optimizer_states" not in torch.load(out / "common.pt", weights_only=True)
    assert read(out).slots() == (WEIGHT,)


# --- other sources --------------------------------------------------------------------


def test_weights_are_rounded_as_remainders_need_them(tmp_path: Path) -> None:
    state = model(2)
    for slots in state.values():
        slots[WEIGHT] = slots[MASTER].to(torch.bfloat16)
    source = legacy(tmp_path / "source", state)
    changed = sum(
        int((half_away(s[MASTER]).view(torch.int16) != s[WEIGHT].view(torch.int16)).sum())
        for s in state.values()
    )
    report = api.reshard(source, tmp_path / "out", to="nemo")
    found = content(read(tmp_path / "out"))
    assert changed > 100
    for name, slots in state.items():
        assert (
            found[name][WEIGHT].view(torch.int16).equal(half_away(slots[MASTER]).view(torch.int16))
        ), name
    assert any(f"{changed} of" in note for note in report.findings)
    api.reshard(source, tmp_path / "stored", to="nemo", target=Target(masters="stored"))
    assert differences(content(read(tmp_path / "stored")), state) == []


@pytest.mark.parametrize(
    ("name", "tp"),
    [("gqa_tp2_pp2_dp1", 1), ("tied_tp1_pp2_dp2", 2), ("tied_tp2_pp1_dp1_fp32", 1)],
)
def test_a_megatron_run_becomes_a_nemo_one(name: str, tp: int, tmp_path: Path) -> None:
    case = oracle.case(name)
    api.reshard(case.directory, tmp_path / "out", to="nemo", target=Target(tp=tp))
    found = content(read(tmp_path / "out"))
    expected = {
        key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): tensor
        for key, tensor in case.truth_tensors().items()
    }
    rows = case.model["vocab_size"]
    for key, tensor in expected.items():
        kind, _, own = key.partition("/")
        slot = {"model": WEIGHT, "param": MASTER}.get(kind, kind)
        wanted = tensor
        if slot == WEIGHT and tensor.dtype == torch.bfloat16:
            wanted = half_away(expected[f"param/{own}"])
        mine = found[own][slot]
        size = rows if "word_embeddings" in own or "output_layer" in own else None
        assert (
            mine[:size]
            .contiguous()
            .view(torch.uint8)
            .equal(wanted[:size].contiguous().view(torch.uint8))
        ), key
    step = torch.load(tmp_path / "out" / "common.pt", weights_only=True)["optimizer_states"][0]
    assert step["state"] == {"step": 3}
    assert list(step["param_groups"][0]) == [
        "is_expert",
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
    ]
    assert next(iter(step["param_groups"][1])) == "weight_decay"


def test_vocabulary_rows_are_padded_for_the_targets_ranks(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2")
    api.reshard(case.directory, tmp_path / "out", to="nemo", target=Target(tp=2))
    spec = next(s for s in read(tmp_path / "out").tensors if s.name.startswith("embedding"))
    assert (spec.shape, spec.padding_rows) == ((100, 32), 28)


def with_objects(**changes: object) -> Manifest:
    manifest = read(DISTRIBUTED)
    return replace(manifest, objects={**manifest.objects, **changes})


def groups(**settings: object) -> tuple[ParamGroup, ...]:
    found = read(DISTRIBUTED).objects["param_groups"]
    first = found[0]
    odd = ParamGroup({**first.settings, **settings}, first.members[:1])
    return (odd, ParamGroup(first.settings, first.members[1:]), found[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": {"a": 3, "b": 4}}, "must have one step for all parameters, got 3 for a and 4 fo"),
        ({"step": 3.5}, "must have the optimizer's step as a whole number, got 3.5"),
        ({"step": None}, "must have the optimizer's step as a whole number, got None"),
        ({"param_groups": groups(lr=0.25)}, "must have the lr of NeMo's group 'decay'"),
        ({"param_groups": ()}, "its parameter group must be known, got none"),
    ],
)
def test_what_nemo_cannot_express_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry()["nemo"].lay_out(with_objects(**changes), Target(), "")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(bucket_size=3000), "--to nemo: files have no buckets, got a size for them"),
        (Target(tp=3), "--tp 3: "),
        (Target(tp=0), "--tp: must be at least 1, got 0"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(target: Target, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        api.plan_reshard(read(DISTRIBUTED), target, to="nemo")


def test_a_subset_of_the_optimizers_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must have exp_avg, exp_avg_sq, fp32_param or weights al"):
        api.reshard(
            DISTRIBUTED, tmp_path / "out", to="nemo", selection=Selection(exclude=("*:exp_avg",))
        )


def test_a_subset_of_the_weights_is_refused(tmp_path: Path) -> None:
    for to in ("nemo", "nemo-legacy"):
        with pytest.raises(UsageError, match="embedding.word_embeddings.weight: must have every w"):
            api.reshard(
                DISTRIBUTED, tmp_path / to, to=to, selection=Selection(include=("decoder*",))
            )


def test_a_model_that_no_rule_knows_is_taken_whole(tmp_path: Path) -> None:
    state = {f"odd.{name}": slots for name, slots in model(2).items()}
    source = legacy_of_one(tmp_path / "source", state)
    assert any("only taken whole" in n for n in api.open_checkpoint(source).notes)
    api.reshard(source, tmp_path / "out", to="nemo")
    assert differences(content(read(tmp_path / "out")), state) == []
    with pytest.raises(UsageError, match="--tp: must be 1, since no rule tells how the tensors"):
        api.reshard(source, tmp_path / "two", to="nemo", target=Target(tp=2))


def legacy_of_one(root: Path, state: Any) -> Path:
    """Write one legacy file of names that no family has."""
    plain = {name.removeprefix("odd."): slots for name, slots in state.items()}

    def rename(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p
        tree["state_dict"] = {
            key.replace("model.", "model.odd."): value for key, value in tree["state_dict"].items()
        }

    return legacy(root, plain, edit=rename)


def test_inspect_digest_and_verify_know_the_form() -> None:
    assert api.inspect(DISTRIBUTED)["format"] == "nemo"
    assert api.digest(DISTRIBUTED) == api.digest(LEGACY)
    verified = api.verify(DISTRIBUTED, against=LEGACY)
    assert verified.damage == ()
    assert verified.differences == ()
