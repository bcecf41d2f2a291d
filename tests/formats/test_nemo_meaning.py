"""What another optimizer's state means in NeMo: said, translated, or refused, and never dropped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle_megatron as megatron
import pytest
import torch
from nemo_builder import DISTRIBUTED, legacy, model

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import FormatError, UsageError
from ckpttools.formats import Draft, ParamGroup, registry
from ckpttools.layout.box import Box
from ckpttools.manifest import Chunk, Extent, File, Manifest, Part, TensorSpec

GQA = megatron.case("gqa_tp1_pp1_dp2").directory


def with_objects(source: Manifest, **changes: object) -> Manifest:
    return replace(source, objects={**source.objects, **changes})


def with_settings(source: Manifest, *of: Mapping[str, object]) -> Manifest:
    """Return a source with settings changed, for each group or for all alike."""
    groups: Any = source.objects["param_groups"]
    each = of * len(groups) if len(of) == 1 else of
    changed = tuple(
        replace(group, settings={**group.settings, **mine})
        for group, mine in zip(groups, each, strict=True)
    )
    return with_objects(source, param_groups=changed)


def lay_out(source: Manifest, fmt: str = "nemo") -> Draft:
    return registry()[fmt].lay_out(source, Target(), "")


def optim_of(draft_path: Path) -> object:
    common = torch.load(draft_path / "common.pt", weights_only=True)
    return common["hyper_parameters"]["cfg"]["optim"]


# --- how weight decay is done ---------------------------------------------------------------


@pytest.mark.parametrize("stated", [True, False, None])
@pytest.mark.parametrize("told", [True, False])
def test_what_is_told_of_weight_decay_stands_in_the_new_configuration(
    stated: bool | None, told: bool, tmp_path: Path
) -> None:
    optim: dict[str, object] = {"name": "distributed_fused_adam"}
    if stated is not None:
        optim["adam_w_mode"] = stated
    source = legacy(tmp_path / "source", model(2), config={"optim": optim})
    options = ReadOptions(adam_w_mode=told)
    for to in ("nemo", "nemo-legacy", "zero1"):
        api.reshard(source, tmp_path / to, to=to, options=options)
        assert api.read_manifest(tmp_path / to).objects["adam_w_mode"] is told
    assert optim_of(tmp_path / "nemo") == {"name": "distributed_fused_adam", "adam_w_mode": told}
    api.reshard(tmp_path / "zero1", tmp_path / "back", to="nemo")
    assert api.read_manifest(tmp_path / "back").objects["adam_w_mode"] is told


def test_torchs_own_word_for_weight_decay_is_understood(tmp_path: Path) -> None:
    api.reshard(GQA, tmp_path / "out", to="nemo")  # torch's AdamW says it in its groups
    assert optim_of(tmp_path / "out") == {"name": "distributed_fused_adam", "adam_w_mode": True}
    source = with_settings(api.read_manifest(GQA), {"decoupled_weight_decay": False})
    assert any("the run needs adam_w_mode: False" in note for note in lay_out(source).notes)


def test_two_ways_of_weight_decay_are_refused() -> None:
    both = {"decoupled_weight_decay": True}, {"decoupled_weight_decay": False, "weight_decay": 0.1}
    source = with_settings(api.read_manifest(GQA), *both)
    with pytest.raises(UsageError, match="since NeMo has one adam_w_mode, got true and false"):
        lay_out(source)


def test_a_group_without_weight_decay_says_nothing_of_how_it_is_done() -> None:
    both = {"decoupled_weight_decay": True}, {"decoupled_weight_decay": False, "weight_decay": 0.0}
    assert "weight decay was added" not in str(
        lay_out(with_settings(api.read_manifest(GQA), *both)).notes
    )


# --- settings and step ----------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["nemo", "nemo-legacy"])
@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_what_apexs_optimizer_cannot_do_is_refused(name: str, fmt: str) -> None:
    source = api.read_manifest(GQA)
    with pytest.raises(UsageError, match=rf"param_groups\[0\]: {name} must be off"):
        lay_out(with_settings(source, {name: True}), fmt)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_a_setting_that_nemo_needs_must_be_there(name: str) -> None:
    source = api.read_manifest(GQA)
    groups: Any = source.objects["param_groups"]
    bare = {key: value for key, value in groups[1].settings.items() if key != name}
    without = groups[0], replace(groups[1], settings=bare)
    with pytest.raises(UsageError, match=rf"param_groups\[1\]: must have {name}, got is_expert"):
        lay_out(with_objects(source, param_groups=without))


@pytest.mark.parametrize("step", [math.nan, math.inf, -1, -3.0, True])
def test_a_step_that_is_no_number_of_steps_is_refused(step: object) -> None:
    with pytest.raises(UsageError, match="must have the optimizer's step as a whole number, got"):
        lay_out(with_objects(api.read_manifest(DISTRIBUTED), step=step))


def test_a_parameter_in_two_groups_is_refused() -> None:
    source = api.read_manifest(DISTRIBUTED)
    groups: Any = source.objects["param_groups"]
    twice = ParamGroup(groups[1].settings, (*groups[1].members, groups[0].members[2]))
    with pytest.raises(UsageError, match="must be in one parameter group, got it twice"):
        lay_out(with_objects(source, param_groups=(groups[0], twice)))


# --- what is lost ---------------------------------------------------------------------------


def test_the_report_lists_what_of_a_megatron_run_nemo_has_no_place_for() -> None:
    lost = lay_out(api.read_manifest(GQA)).lost
    assert "what `--to megatron` needs: NeMo's files have no place for it" in lost
    assert "args: NeMo has its own; start it from NeMo's configuration" in lost


def test_what_a_run_added_since_it_left_nemo_is_listed_too(tmp_path: Path) -> None:
    api.reshard(DISTRIBUTED, tmp_path / "own", to="zero1")
    source = api.read_manifest(tmp_path / "own")
    assert lay_out(source).lost == ()
    trained = with_objects(source, opt_param_scheduler={"num_steps": 9}, grad_scaler={"scale": 2.0})
    assert [line.partition(":")[0] for line in lay_out(trained).lost] == [
        "opt_param_scheduler",
        "grad_scaler",
    ]


# --- padding --------------------------------------------------------------------------------


def padded(names: Mapping[str, int], root: Path) -> Manifest:
    """Return weights of 5 rows in all, some of them padding, in one file, without a layout."""
    root.mkdir()
    (root / "data").write_bytes(bytes(range(40)) * len(names))
    bf16 = api.read_manifest(DISTRIBUTED).tensors[0].dtype
    return Manifest(
        "test",
        str(root),
        (File("data", 40 * len(names)),),
        tuple(TensorSpec(n, "weight", bf16, (5 - rows, 4), rows) for n, rows in names.items()),
        tuple(
            Chunk(i, Box.whole((5, 4)), (Part(Extent(0, 40 * i, 40), bf16),))
            for i in range(len(names))
        ),
    )


@pytest.mark.parametrize("fmt", ["nemo", "nemo-legacy"])
def test_padding_rows_stay_padding_where_rules_tell_a_vocabulary(fmt: str, tmp_path: Path) -> None:
    source = padded(
        {"embedding.word_embeddings.weight": 2, "output_layer.weight": 2}, tmp_path / "s"
    )
    specs = lay_out(source, fmt).manifest.tensors
    assert {(s.shape, s.padding_rows) for s in specs} == {((3, 4), 2)}


@pytest.mark.parametrize("fmt", ["nemo", "nemo-legacy"])
def test_padding_rows_that_no_reader_could_tell_are_not_written(fmt: str, tmp_path: Path) -> None:
    source = padded({"odd.table": 2, "odd.other": 0}, tmp_path / "s")
    specs = lay_out(source, fmt).manifest.tensors
    assert {(s.name, s.shape, s.padding_rows) for s in specs} == {
        ("odd.table", (3, 4), 0),
        ("odd.other", (5, 4), 0),
    }


# --- files ----------------------------------------------------------------------------------


def test_lists_of_names_must_be_as_long_as_the_groups(tmp_path: Path) -> None:
    state = model(2)
    source = legacy(tmp_path / "source", state)
    decay = [n for n, s in state.items() if s["weight"].ndim > 1]
    rest = [n for n in state if n not in decay]
    place = tmp_path / "names.json"
    place.write_text(json.dumps([decay, rest]))
    api.read_manifest(source, options=ReadOptions(names_path=str(place)))
    place.write_text(json.dumps([[*decay, rest[0]], rest[1:]]))
    with pytest.raises(FormatError, match=r"must have lists of \[10, 5\] names for the groups of"):
        api.read_manifest(source, options=ReadOptions(names_path=str(place)))


def test_state_that_is_of_no_parameter_is_refused(tmp_path: Path) -> None:
    def edit(_t: int, _p: int, tree: dict[str, Any]) -> None:
        tree["optimizer_states"][0]["state"]["ema"] = torch.zeros(3)

    source = legacy(tmp_path / "source", model(2), edit=edit)
    with pytest.raises(FormatError, match="state must be of numbered parameters, got 'ema'"):
        api.read_manifest(source)
