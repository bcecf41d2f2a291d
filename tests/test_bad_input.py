"""A source with a fault, a rules file or a name that is none, are refused in one line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import megatron_edit as edit
import megatron_hostile as hostile
import oracle_megatron as oracle
import pytest
from megatron_faults import BY_POSITION, FAULTS, TP1, TP2
from megatron_stage_faults import STAGE_FAULTS

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.storage.inert import Inert, new_global

ALL_FAULTS = FAULTS | STAGE_FAULTS


@pytest.mark.parametrize("label", ALL_FAULTS)
def test_fault_is_refused_with_place_rule_and_value(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fault = ALL_FAULTS[label]
    root = edit.copy_of(fault.fixture, tmp_path / "src")
    fault.change(root)
    message = fault.message.replace("{root}", re.escape(str(root)))
    edit.assert_refused(root, message, hint=fault.hint)
    checked = edit.run_cli("verify", root)
    assert checked.code == fault.verify, checked
    text = checked.out if fault.verify == 3 else checked.err
    assert re.search(message, text), text


@pytest.mark.parametrize("label", hostile.OPTIMIZER_FILES)
def test_optimizer_file_of_no_known_version_of_another_model_or_with_a_fault_is_refused(
    label: str, tmp_path: Path
) -> None:
    root = edit.tiny(tmp_path / "src")
    (model,), (place,) = (edit.rank_files(root, file) for file in (edit.MODEL, edit.OPTIMIZER))
    shutil.copyfile(hostile.FOLDER / f"distrib_optim_{label}.pt", place)
    _, message, code = hostile.OPTIMIZER_FILES[label]
    for name, path in (("{model}", model), ("{optimizer}", place)):
        message = message.replace(name, re.escape(str(path)))
    edit.assert_refused(root, message)
    assert edit.run_cli("verify", root).code == code


@pytest.mark.parametrize("name", ["compressed", "overlap", "calls_system", "key_bomb", "encrypted"])
@pytest.mark.parametrize("file", [edit.MODEL, edit.OPTIMIZER])
def test_hostile_torch_file_in_the_place_of_a_rank_file_is_refused(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = edit.tiny(tmp_path / "src")
    (place,) = edit.rank_files(root, file)
    shutil.copyfile(hostile.FOLDER.parent / f"{name}.pt", place)
    edit.assert_refused(root, f"{re.escape(str(place))}: .*")
    # A pickle that only describes a call is a whole file, of another kind than this one.
    assert edit.run_cli("verify", root).code in (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_call_in_place_of_the_arguments_is_refused_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = edit.tiny(tmp_path / "src")
    (place,) = edit.rank_files(root, edit.MODEL)
    shutil.copyfile(hostile.FOLDER / "model_args_is_call.pt", place)
    message = "args must be an argparse.Namespace, got <inert 'os.system'>"
    edit.assert_refused(root, f"{re.escape(str(place))}: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_call_inside_the_arguments_is_carried_as_data_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = edit.tiny(tmp_path / "src")
    call = Inert(new_global("os", "system"), (f"touch {hostile.CANARY}",))
    edit.set_args(root, save=call)
    for verb in ("inspect", "verify", "digest"):
        assert edit.run_cli(verb, root).code == 0
    assert edit.run_cli("reshard", root, tmp_path / "out", "--tp", 2).code == 0
    assert edit.run_cli("gather", root, tmp_path / "whole").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src", "whole"]


def test_the_call_would_be_made_by_a_reader_that_unpickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shows that the files above are loaded guns, not blanks.
    for name in ("is_call", "has_call"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        oracle.read(hostile.FOLDER / f"model_args_{name}.pt")
        assert (folder / hostile.CANARY).exists()


def test_committed_hostile_files_are_those_that_the_builder_makes() -> None:
    built = dict(hostile.files())
    committed = {path.name: path.read_bytes() for path in hostile.FOLDER.glob("*.pt")}
    assert committed == built
    assert (hostile.FOLDER / "README.md").read_text() == hostile.readme()


# Sources that are sound in another way.


def test_weights_alone_are_resharded_on_request_and_the_report_says_so(tmp_path: Path) -> None:
    root = edit.copy_of(TP2, tmp_path / "src")
    edit.remove("mp_rank_00/distrib_optim.pt", "mp_rank_01/distrib_optim.pt")(root)
    options = ReadOptions(accept_loss=frozenset({"optimizer"}))
    report = api.reshard(root, tmp_path / "out", target=Target(tp=1), options=options)
    assert "weights only: the checkpoint has no optimizer state" in report.findings
    assert any(line.startswith("optimizer: ") for line in report.lost)
    assert not any(line.startswith("optimizer") for line in report.carried)
    assert not any("masters" in line for line in report.proof)
    # The result says itself that it has no optimizer, so that nothing more has to be accepted.
    (file,) = edit.rank_files(tmp_path / "out", edit.MODEL)
    assert "optimizer" not in oracle.read(file)
    assert edit.rank_files(tmp_path / "out", edit.OPTIMIZER) == []
    found = api.verify(tmp_path / "out", against=root, options=options)
    assert found.ok
    assert found.checked[-1] == f"content equals {root}"
    assert edit.run_cli("verify", tmp_path / "out").code == 0
    whole = oracle.case(TP1).directory
    assert edit.run_cli("verify", tmp_path / "out", "--against", whole).code == 0
    required = ("--against", whole, "--require", "optimizer")
    assert edit.run_cli("verify", tmp_path / "out", *required).code == 3
    again = api.gather(tmp_path / "out", tmp_path / "whole")
    assert "weights only: the checkpoint has no optimizer state" in again.findings
    assert api.verify(tmp_path / "whole", against=tmp_path / "out").ok


@pytest.mark.parametrize("fixture", [TP2, BY_POSITION])
def test_step_that_an_empty_group_lacks_is_filled_in(fixture: str, tmp_path: Path) -> None:
    root = edit.copy_of(fixture, tmp_path / "src")
    for path in edit.rank_files(root, edit.MODEL):
        with edit.edited(path) as tree:
            assert edit.groups(tree)[1].pop("step") == 3.0
    api.reshard(root, tmp_path / "out", target=Target(tp=1))
    (file,) = edit.rank_files(tmp_path / "out", edit.MODEL)
    written = oracle.read(file)["optimizer"]["optimizer"]["param_groups"]
    assert [group["step"] for group in written] == [3.0, 3.0]


def test_stray_directories_beside_ranks_and_other_iterations_change_nothing(
    tmp_path: Path,
) -> None:
    root = edit.copy_of(TP2, tmp_path / "src")
    shutil.copytree(edit.iteration(root), root / "iter_0000002")
    (edit.iteration(root) / "notes").mkdir()
    (edit.iteration(root) / "notes" / "x.txt").write_text("x")
    assert api.verify(root).ok
    assert api.digest(root) == api.digest(oracle.case(TP2).directory)


# Sources and destinations that are no checkpoints.


@pytest.mark.parametrize("verb", ["inspect", "verify", "digest", "reshard", "gather", "diff"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "must exist, got no such path"),
        ("empty", "must be of exactly one known format, got none"),
        ("text", "must be of exactly one known format, got none"),
        ("stuff", "must be of exactly one known format, got none"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_every_verb(
    verb: str, name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("x")
    (tmp_path / "stuff" / "iter_0000003").mkdir(parents=True)
    before = sorted(tmp_path.iterdir())
    second = {"reshard": (tmp_path / "out",), "gather": (tmp_path / "out",)}
    second["diff"] = (oracle.case(TP1).directory,)
    outcome = edit.run_cli(verb, tmp_path / name, *second.get(verb, ()))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[0] == f"error: {tmp_path / name}: {message}"
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return edit.tiny(tmp_path / "src")


# What the user gives beside the source.


def rules_text() -> str:
    return (Path(api.__file__).parent / "rules" / "megatron_gpt.toml").read_text()


FC1 = "decoder.layers.{layer}.mlp.linear_fc1.{weight,bias}"
SECOND_FC2 = '\n[[rule]]\nname = "decoder.layers.{layer}.mlp.{linear_fc2}.weight"\nstage = "layer"'
RULES = {
    "unmatched": (
        lambda text: text.replace("linear_fc2.weight", "linear_fc9.weight"),
        "decoder.layers.0.mlp.linear_fc2.weight: must match exactly one rule of {rules}, got none",
        "describe the parameter in a rules file and give it with --rules FILE",
    ),
    "matched twice": (
        lambda text: text + SECOND_FC2,
        "decoder.layers.0.mlp.linear_fc2.weight: must match exactly one rule of {rules}, got .*",
        "",
    ),
    "split without blocks": (
        lambda text: text.replace("blocks = [1, 1]\n", "", 1),
        "{rules}: rule [0-9]+: "
        + re.escape(FC1)
        + ": a rule that cuts a dimension must declare its sub-blocks, got none",
        "blocks = [1] for an unfused tensor, [1, 1] for [gate; up]",
    ),
    "not TOML": (lambda _: "[[rule", "{rules}: a rules file must be TOML, got .*", ""),
    "of nothing": (lambda _: "", "{rules}: a rules file must have a family .*, got .*", ""),
}


@pytest.mark.parametrize("label", RULES)
def test_bad_rules_file_is_refused_and_is_no_damage_of_the_checkpoint(
    label: str, source: Path, tmp_path: Path
) -> None:
    change, message, hint = RULES[label]
    rules = tmp_path / "rules.toml"
    rules.write_text(change(rules_text()))
    expected = message.replace("{rules}", re.escape(str(rules)))
    edit.assert_refused(source, expected, "--rules", rules, hint=hint)
    outcome = edit.run_cli("verify", source, "--rules", rules)
    assert (outcome.code, outcome.out) == (1, "")


def test_same_rules_in_a_file_of_ones_own_are_taken(source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(rules_text())
    assert edit.run_cli("verify", source, "--rules", rules).code == 0
    outcome = edit.run_cli("reshard", source, tmp_path / "out", "--rules", rules, "--tp", 2)
    assert outcome.code == 0


LAYOUTS = "core-0.13, core-0.12, core-0.7, core-0.6, core-0.5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "core-0.1"), f"--layout: must be one of {LAYOUTS}, got 'core-0.1'"),
        (
            ("--format", "zip"),
            f"format: must be one of {', '.join(api.format_names())}, got 'zip'",
        ),
    ],
)
def test_name_that_does_not_exist_is_no_damage_of_the_checkpoint(
    options: tuple[str, str], message: str, source: Path
) -> None:
    edit.assert_refused(source, message, *options)
    outcome = edit.run_cli("verify", source, *options)
    assert (outcome.code, outcome.out) == (1, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", 3), "--tp: must divide the 2 attention heads, got 3"),
        (("--pp", 2), "--pp 2 --vpp 1: pipeline: 1 layers must divide over 2 stages, got .*"),
        (("--vpp", 2), "--vpp: needs more than one pipeline stage, got 2"),
        (
            ("--first-stage-layers", 2),
            "--pp 1 --vpp 1: pipeline: -1 layers must divide over 0 stages, got .*",
        ),
        (("--world", 3, "--tp", 2), "--world: must be TP 2 x PP 1 x CP 1 x DP, got 3"),
    ],
)
def test_topology_that_the_model_cannot_have_is_refused(
    options: tuple[object, ...], message: str, source: Path
) -> None:
    edit.assert_refused(source, message, *options)
