"""A Megatron checkpoint that went through the native form comes back as Megatron wrote it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_edit as edit
import oracle_megatron as oracle
import pytest
from whole_tensors import bits, whole

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import CkptError, FormatError, UsageError
from ckpttools.layout.rules import builtin_rules, rules_of_table, rules_table
from ckpttools.storage.sealed_json import serialize

CASES = {case.name: case for case in oracle.cases()}
PER_RANK = (".rng_state: only in the second", ".rerun_state_machine: only in the second")


def own_target(case: oracle.Case) -> Target:
    return Target(
        tp=case.tp, pp=case.pp, vpp=case.vpp, dp=case.dp, bucket_size=case.bucket_size or "none"
    )


def differences(a: Path, b: Path) -> list[str]:
    """Compare as files; what belongs to ranks isn't carried, and the report says so."""
    found = oracle.compare_files(a, b, ignore_args={"save"})
    return [line for line in found if not line.endswith(PER_RANK)]


def other_topology(number: int, case: oracle.Case) -> Target:
    """Return a topology that isn't the case's own, each kind of change in its turn.

    Padding rows of the v0.12.3 fixture hold trained values, which a smaller TP has no room for.
    """
    if case.name.startswith("v0.12.3"):
        return Target(tp=2, pp=2, dp=3)
    targets = (
        Target(tp=1, pp=1, vpp=1, dp=7),
        Target(tp=2, pp=1, vpp=1, dp=1, bucket_size=900),
        Target(tp=1, pp=2, vpp=1, dp=3),
        Target(tp=2, pp=2, vpp=1, dp=2, bucket_size="none"),
    )
    return targets[number % len(targets)]


@pytest.mark.parametrize("name", CASES)
def test_through_any_topology_of_the_native_form_megatron_gets_its_own_files_back(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    target = other_topology(list(CASES).index(name), case)
    report = api.reshard(case.directory, tmp_path / "native", to="zero1", target=target)
    assert any(line.startswith("rng_state: it belongs to") for line in report.lost)
    api.reshard(tmp_path / "native", tmp_path / "back", to="megatron", target=own_target(case))
    assert differences(tmp_path / "back", case.directory) == []


@pytest.mark.parametrize(
    "name", ["gqa_tp1_pp1_dp2_bucket6000", "tied_tp1_pp2_dp2", "deep_tp1_pp2_dp1_vpp2"]
)
def test_what_is_not_named_stays_in_both_directions(name: str, tmp_path: Path) -> None:
    api.reshard(CASES[name].directory, tmp_path / "native", to="zero1")
    api.reshard(tmp_path / "native", tmp_path / "back", to="megatron")
    assert differences(tmp_path / "back", CASES[name].directory) == []


def test_a_second_step_in_the_native_form_loses_nothing(tmp_path: Path) -> None:
    case = CASES["tied_tp1_pp1_dp2"]
    api.reshard(case.directory, tmp_path / "a", to="zero1", target=Target(tp=2, pp=2))
    api.reshard(tmp_path / "a", tmp_path / "b", target=Target(tp=1, pp=1, dp=5))
    api.reshard(tmp_path / "b", tmp_path / "back", to="megatron", target=own_target(case))
    assert differences(tmp_path / "back", case.directory) == []


# --- a run that went on in the native form -----------------------------------------------------


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture in the native form; not to be changed."""
    path = tmp_path_factory.mktemp("native") / "out"
    api.reshard(CASES["gqa_tp2_pp1_dp2"].directory, path, to="zero1", target=Target(tp=1, pp=2))
    return path


def changed(native: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a native checkpoint with another ``manifest.json``, signed anew."""
    shutil.copytree(native, path)
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_bytes(serialize(document))
    return path


def trained(document: dict[str, Any]) -> None:
    """What 14 more iterations by another optimizer would leave."""
    objects = document["objects"]
    names = [p["name"] for p in document["layout"]["params"]]
    objects["iteration"] = 17
    objects["step"] = {"map": dict.fromkeys(names, 17)}
    objects["opt_param_scheduler"]["map"]["num_steps"] = 204
    for group in objects["param_groups"]:
        group["settings"] = {"lr": 0.25, "betas": [0.5, 0.75], "extra": "ours"}


def test_step_settings_and_iteration_of_the_native_checkpoint_win(
    native: Path, tmp_path: Path
) -> None:
    source = changed(native, tmp_path / "src", trained)
    target = own_target(CASES["gqa_tp2_pp1_dp2"])
    report = api.reshard(source, tmp_path / "out", to="megatron", target=target)
    (tracker,) = (tmp_path / "out").glob("*.txt")
    assert tracker.read_text() == "17"
    tree = oracle.read(tmp_path / "out" / "iter_0000017" / "mp_rank_01" / edit.MODEL)
    assert tree["iteration"] == 17
    assert tree["opt_param_scheduler"]["num_steps"] == 204
    decayed, plain = tree["optimizer"]["optimizer"]["param_groups"]
    assert (decayed["lr"], decayed["betas"], decayed["wd_mult"]) == (0.25, (0.5, 0.75), 1.0)
    assert (type(decayed["step"]), decayed["step"]) == (float, 17.0)
    assert (plain["wd_mult"], plain["weight_decay"], "extra" in plain) == (0.0, 0.0, False)
    assert any("args.consumed_train_samples is that of iteration 3" in n for n in report.findings)


def test_without_further_training_nothing_is_said_of_stale_arguments(
    native: Path, tmp_path: Path
) -> None:
    report = api.reshard(native, tmp_path / "out", to="megatron", dry_run=True)
    assert not any("consumed" in line for line in report.findings)


def steps_differ(document: dict[str, Any]) -> None:
    document["objects"]["step"] = {"map": {"a": 3, "b": 4}}


def settings_differ(document: dict[str, Any]) -> None:
    (decayed, plain) = document["objects"]["param_groups"]
    first = {"settings": {"lr": 0.5}, "params": decayed["params"][:1]}
    rest = {"settings": {"lr": 0.25}, "params": decayed["params"][1:]}
    document["objects"]["param_groups"] = [first, rest, plain]


def of_another_model(document: dict[str, Any]) -> None:
    carried = document["carried"]["megatron"]
    carried["params"]["decoder.layers.0.mlp.linear_fc1.bias"] = ["cpu", False]


def cut_otherwise(document: dict[str, Any]) -> None:
    for param in document["layout"]["params"]:
        if "linear_fc1" in param["name"]:
            param["blocks"] = [1]


def never_megatron(document: dict[str, Any]) -> None:
    document["carried"] = {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (steps_differ, "step must be the same for all parameters, got 2 steps"),
        (settings_differ, "must have the same settings, got 2 groups of them"),
        (of_another_model, "must have every parameter, got none of decoder.layers.0.mlp"),
        (cut_otherwise, "linear_fc1.weight: must be cut as Megatron cuts it"),
        (never_megatron, "got format zero1, which holds nothing of a Megatron run"),
    ],
)
def test_what_a_megatron_run_cant_hold_is_refused(
    native: Path, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    source = changed(native, tmp_path / "src", change)
    with pytest.raises(UsageError, match=message):
        api.reshard(source, tmp_path / "out", to="megatron")


def test_a_checkpoint_that_never_was_megatron_is_refused_with_the_missing_fact(
    tmp_path: Path,
) -> None:
    source = whole(tmp_path / "src", {("w", "weight"): bits((5, 3), "bfloat16")})
    api.reshard(source, tmp_path / "native", to="zero1")
    with pytest.raises(UsageError, match="needs a source with Megatron's arguments"):
        api.reshard(tmp_path / "native", tmp_path / "out", to="megatron")


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a change that sets one entry of the carried document."""

    def change(document: dict[str, Any]) -> None:
        inside: Any = document["carried"]["megatron"]
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", value=2), "carried: megatron: version must be 1, got 2"),
        (put("version", value=None), "version must be 1, got None"),
        (put("iteration_name", value=3), "'iteration_name' must be a str"),
        (put("layouts", value=[3]), r"layouts must be texts, got \[3\]"),
        (put("vocab_size", value=-1), "vocab_size must be a size, got -1"),
        (put("stages", value=[[1], [1, 2]]), "every stage must have the same number"),
        (put("stages", value=[]), "stages must be lists of layers"),
        (put("rules", value={"family": "x", "rule": [{}]}), "carried: megatron: rules: rule 1"),
        (
            put("params", "output_layer.weight", value=[1, 2]),
            "output_layer.weight: must be a place",
        ),
        (put("entries", value={}), "'entries' must be a list"),
        (put("tree", value=[1]), "tree: must hold a dict with names, got list"),
        (
            put("tree", "map", "args", value={"call": 1, "args": [], "via": "reduce"}),
            "must be a name",
        ),
        (put("tree", value={"map": {}}), "'args' must be a Inert"),
        (put("groups", "listing", value={"map": {}}), "listing must be a list"),
        (put("buffer_keys", value={"ref": 3}), "a ref must be of an object that stood earlier"),
        (put("slots", value=None), "'slots' must be a list, got none"),
        (lambda d: d["carried"].update(megatron=[]), "must hold a dict with names, got list"),
    ],
)
def test_a_carried_document_that_is_none_is_refused_with_its_place(
    native: Path, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    source = changed(native, tmp_path / "src", change)
    with pytest.raises((FormatError, CkptError), match=message):
        api.reshard(source, tmp_path / "out", to="megatron", dry_run=True)


def test_rules_come_back_equal_from_the_plain_data_that_carries_them() -> None:
    rules = builtin_rules("megatron-gpt")
    table = json.loads(json.dumps(rules_table(rules)))
    assert rules_of_table(table, where=rules.where) == rules


# --- what can't be carried ----------------------------------------------------------------------


def test_extra_state_is_refused_unless_its_loss_is_accepted(tmp_path: Path) -> None:
    source = edit.copy_of("gqa_tp2_pp1_dp2", tmp_path / "src")
    entry = "decoder.layers.1.mlp.linear_fc1._extra_state"
    edit.edit_all(source, edit.MODEL, lambda tree: tree["model"].__setitem__(entry, b"scales"))
    with pytest.raises(UsageError, match=f"{entry}: must be empty to be carried"):
        api.reshard(source, tmp_path / "out", to="zero1")
    accepted = ReadOptions(accept_loss=frozenset({"extra_state"}))
    report = api.reshard(source, tmp_path / "out", to="zero1", options=accepted)
    assert any(line.startswith("extra_state: ") for line in report.lost)


def test_weights_alone_come_back_as_weights_alone(tmp_path: Path) -> None:
    case = CASES["gqa_tp1_pp1_dp2"]
    api.strip(case.directory, tmp_path / "weights")
    api.strip(case.directory, tmp_path / "native", to="zero1")
    api.reshard(tmp_path / "native", tmp_path / "back", to="megatron")
    assert differences(tmp_path / "back", tmp_path / "weights") == []
