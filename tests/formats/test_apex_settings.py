"""What Apex's file must have and a source lacks, and what it can't hold, is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import apex_files as files
import pytest

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.apex import ApexFormat
from ckpttools.manifest import WEIGHT, Manifest, TensorSpec


def options_of(variant: str) -> ReadOptions:
    return ReadOptions(
        names_path=str(files.NAMES), model_path=str(files.FIXTURES / variant / "model.pt")
    )


def lay_out(source: Manifest, target: Target | None = None) -> Any:
    return ApexFormat().lay_out(source, target or Target(), "out")


@pytest.fixture(scope="module")
def plain() -> Manifest:
    """A source in float32."""
    return api.read_manifest(
        files.FIXTURES / "fp32_store_ws2" / "v2.pt", options=options_of("fp32_store_ws2")
    )


def with_objects(source: Manifest, **objects: object) -> Manifest:
    return dataclasses.replace(source, objects={**source.objects, **objects})


def with_settings(source: Manifest, change: Mapping[str, object], *drop: str) -> Manifest:
    """The source with other settings in its first group."""
    first, *rest = source.objects["param_groups"]  # type: ignore[misc]  # a tuple of groups
    kept = {key: value for key, value in first.settings.items() if key not in drop}
    group = ParamGroup({**kept, **change}, first.members)
    return with_objects(source, param_groups=(group, *rest))


def specs_without(source: Manifest, *drop: tuple[str, str]) -> Manifest:
    """The source without some tensors."""
    kept = [i for i, spec in enumerate(source.tensors) if spec.key not in drop]
    chunks = [
        dataclasses.replace(c, tensor=kept.index(c.tensor))
        for c in source.chunks
        if c.tensor in kept
    ]
    tensors = tuple(source.tensors[i] for i in kept)
    return dataclasses.replace(source, tensors=tensors, chunks=tuple(chunks))


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        (Target(tp=2), "--tp: must be 1, since Apex's file has whole tensors, got 2"),
        (Target(pp=2), "--pp: must be 1, since Apex's file has whole tensors, got 2"),
        (Target(vpp=2), "--vpp: must be 1"),
        (Target(bucket_size=7), "--bucket-size: must not be given for whole tensors, got 7"),
        (Target(bucket_size="none"), "--bucket-size: must not be given for whole tensors"),
        (Target(first_stage_layers=1), "--first-stage-layers: must not be given"),
        (Target(last_stage_layers=1), "--last-stage-layers: must not be given"),
    ],
)
def test_whole_tensors_have_no_sizes(target: Target, rule: str, plain: Manifest) -> None:
    with pytest.raises(UsageError, match=rule):
        lay_out(plain, target)


def test_a_number_of_ranks_means_nothing_and_is_said_to(plain: Manifest) -> None:
    for target in (Target(dp=8), Target(world=8), Target(tp=1, pp=1, dp=2)):
        assert any("the same for any number of data-par" in n for n in lay_out(plain, target).notes)
    assert not any("data-parallel" in note for note in lay_out(plain).notes)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_a_setting_that_apex_needs_is_not_made_up(name: str, plain: Manifest) -> None:
    with pytest.raises(UsageError, match=rf"param_groups\[0\]: must have {name}, got"):
        lay_out(with_settings(plain, {}, name))


def test_bias_correction_is_on_where_no_setting_turns_it_off(plain: Manifest) -> None:
    draft = lay_out(with_settings(plain, {}, "bias_correction"))
    assert any(note.startswith("bias_correction: true") for note in draft.notes)
    off = lay_out(with_settings(plain, {"bias_correction": False}))
    assert not any(note.startswith("bias_correction") for note in off.notes)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_what_apex_cannot_do_is_refused(name: str, plain: Manifest) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be off, since Apex can't do it"):
        lay_out(with_settings(plain, {name: True}))
    lay_out(with_settings(plain, {name: False}))


def test_both_ways_of_weight_decay_in_one_run_are_refused(plain: Manifest) -> None:
    mixed = with_settings(plain, {"decoupled_weight_decay": True})
    assert "adam_w_mode: build the optimizer with adam_w_mode=True" in lay_out(mixed).notes
    first, second = mixed.objects["param_groups"]  # type: ignore[misc]  # a tuple of groups
    opposite = {"decoupled_weight_decay": False, "weight_decay": 0.1}
    other = ParamGroup({**second.settings, **opposite}, second.members)
    with pytest.raises(UsageError, match="Apex has one adam_w_mode, got true and false"):
        lay_out(with_objects(mixed, param_groups=(first, other)))


@pytest.mark.parametrize("step", [4, 4.0, {"a": 4, "b": 4.0}])
def test_steps_that_are_one_number_are_written(step: object, plain: Manifest) -> None:
    draft = lay_out(with_objects(plain, step=step))
    assert any(b"K\x04K\x00}" in patch.data for patch in draft.patches)


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        ({"a": 4, "b": 5}, "step must be one number for all parameters, got 4, 5"),
        ({}, "step must be one number for all parameters, got none"),
        (None, "step must be a natural number, got None"),
        (2.5, "step must be a natural number, got 2.5"),
        (-1, "step must be a natural number, got -1"),
        (True, "step must be a natural number, got True"),
    ],
)
def test_steps_that_are_none_are_refused(step: object, rule: str, plain: Manifest) -> None:
    with pytest.raises(UsageError, match=rule):
        lay_out(with_objects(plain, step=step))


def test_groups_must_be_there_and_name_their_members(plain: Manifest) -> None:
    with pytest.raises(UsageError, match="needs parameter groups, got a source without them"):
        lay_out(with_objects(plain, param_groups=()))
    first, second = plain.objects["param_groups"]  # type: ignore[misc]  # a tuple of groups
    unknown = ParamGroup(first.settings, None)
    with pytest.raises(UsageError, match=r"param_groups\[0\]: its members must be known"):
        lay_out(with_objects(plain, param_groups=(unknown, second)))
    with pytest.raises(UsageError, match="must be in one parameter group, got it twice"):
        lay_out(with_objects(plain, param_groups=(first, first, second)))
    with pytest.raises(UsageError, match="must be in a group and have state, got state without"):
        lay_out(with_objects(plain, param_groups=(first,)))
    more = ParamGroup(second.settings, (*second.members, "zz"))
    with pytest.raises(UsageError, match="zz: must be in a group and have state, got a group's"):
        lay_out(with_objects(plain, param_groups=(first, more)))


def test_state_that_apex_has_not_or_needs_is_refused(plain: Manifest) -> None:
    with pytest.raises(UsageError, match="head.weight: must have fp32_param, exp_avg, exp_avg_sq"):
        lay_out(specs_without(plain, ("head.weight", "exp_avg_sq")))
    last = plain.tensors[-1]
    more = TensorSpec(last.name, "max_exp_avg_sq", last.dtype, last.shape)
    chunk = dataclasses.replace(plain.chunks[-1], tensor=len(plain.tensors))
    odd = dataclasses.replace(plain, tensors=(*plain.tensors, more), chunks=(*plain.chunks, chunk))
    with pytest.raises(
        UsageError, match="no other state, got exp_avg, exp_avg_sq, fp32_param, max"
    ):
        lay_out(odd)
    weights = [spec.key for spec in plain.tensors if spec.slot != WEIGHT]
    with pytest.raises(UsageError, match="needs optimizer state, got weights alone"):
        lay_out(specs_without(plain, *weights))
