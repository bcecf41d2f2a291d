"""Which facts no Apex file has, where they come from, and what is refused where they don't."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apex_files as files
import pytest
import torch
from safetensors.torch import save_file

from ckpttools import api
from ckpttools.api import ReadOptions
from ckpttools.errors import CkptError, FormatError, UnknownFormatError, UsageError

Change = Callable[[dict[str, Any]], object]
VARIANT = files.FIXTURES / "fp32_store_ws2"
V2, MODEL = VARIANT / "v2.pt", VARIANT / "model.pt"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A directory with the states of two ranks and the weights, to be changed."""
    path = tmp_path / "ranks"
    path.mkdir()
    for rank in range(2):
        shutil.copy(VARIANT / f"v1_local_rank{rank}.pt", path)
    shutil.copy(MODEL, path)
    return path


def names(tmp_path: Path, content: object) -> ReadOptions:
    path = tmp_path / "names.json"
    path.write_text(json.dumps(content))
    return ReadOptions(names_path=str(path))


KNOWN = list(json.loads(files.NAMES.read_text()).values())
TOLD = ReadOptions(names_path=str(files.NAMES))


def refused(
    path: Path, error: type[CkptError], rule: str, options: ReadOptions = TOLD
) -> CkptError:
    with pytest.raises(error, match=rule) as caught:
        api.open_checkpoint(path, format="apex", options=options)
    assert "\n" not in str(caught.value)
    return caught.value


def changed(path: Path, change: Change) -> None:
    """Change a state and save it again, as a forger would."""
    tree = files.load(path)
    change(tree)
    files.save(tree, path)


# --- names --------------------------------------------------------------------------------


def test_numbers_are_no_names() -> None:
    rule = "parameters must have names, got numbers alone in 2 groups"
    error = refused(V2, UsageError, rule, ReadOptions(model_path=str(MODEL)))
    assert error.hint == "give their names by number with --names FILE"


@pytest.mark.parametrize(
    "content",
    [KNOWN, {str(i): name for i, name in enumerate(KNOWN)}, [KNOWN[:7], KNOWN[7:]]],
    ids=["list", "object", "lists"],
)
def test_names_may_be_told_in_three_ways(content: object, tmp_path: Path) -> None:
    told = api.digest(V2, options=names(tmp_path, content))
    assert told == api.digest(V2, options=TOLD)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (KNOWN[:-1], "must name 14 parameters, got 13 names"),
        ([*KNOWN, "more"], "must name 14 parameters, got 15 names"),
        ([KNOWN[:6], KNOWN[6:]], r"must have lists of \[7, 7\] names for the groups, got \[6, 8\]"),
        ({"0": "a"}, "must have a name for each number below 14, got none for '1'"),
        (
            {str(i): name for i, name in enumerate([*KNOWN, "more"])},
            "must have a name for each number below 14, got one for '14'",
        ),
        (7, "must be a list or an object of names, got 7"),
        ([1, *KNOWN[1:]], "must be a list or an object of names"),
    ],
)
def test_names_must_be_one_for_each_number(content: object, rule: str, tmp_path: Path) -> None:
    refused(V2, UsageError, rule, names(tmp_path, content))


def test_a_name_is_one_parameters(tmp_path: Path) -> None:
    twice = [KNOWN[1], *KNOWN[1:]]
    refused(V2, FormatError, "a name must be one parameter's, got", names(tmp_path, twice))


def test_names_that_fit_no_weight_are_refused(tmp_path: Path) -> None:
    swapped = [KNOWN[1], KNOWN[0], *KNOWN[2:]]
    told = ReadOptions(names_path=names(tmp_path, swapped).names_path, model_path=str(MODEL))
    refused(V2, FormatError, r"parameter 0 must have the shape \[48, 16\] of the weight", told)
    gathered = VARIANT / "v1_gathered.pt"
    refused(gathered, FormatError, "parameter 0 must have the 768 elements of the weight", told)
    other = ["elsewhere", *KNOWN[1:]]
    told = ReadOptions(names_path=names(tmp_path, other).names_path, model_path=str(MODEL))
    refused(V2, FormatError, "model.pt: must have the weight elsewhere of", told)


def one_group(tmp_path: Path, count: int = 3) -> Path:
    """A v2 file of one group, with weights in a directory."""
    path = tmp_path / "one"
    path.mkdir()
    shapes = [(2, 3), (6,), (3, 2)][:count]
    state = {
        i: dict.fromkeys(files.SLOTS, torch.arange(6.0).reshape(shape))
        for i, shape in enumerate(shapes)
    }
    group = {"lr": 1.0, "betas": (0.1, 0.2), "eps": 0.0, "weight_decay": 0.0}
    tree = {
        "state": {"step": 1, **state},
        "param_groups": [{**group, "params": list(range(count))}],
        "format": 2,
    }
    torch.save(tree, path / "optim.pt")
    weights = {f"w{i}": torch.arange(6.0).reshape(shape) for i, shape in enumerate(shapes)}
    torch.save(weights, path / "model.pt")
    return path


def test_the_order_of_the_weights_names_the_members_of_a_single_group(tmp_path: Path) -> None:
    path = one_group(tmp_path)
    manifest = api.read_manifest(path)
    (group,) = manifest.objects["param_groups"]
    assert group.members == ("w0", "w1", "w2")


@pytest.mark.parametrize(
    "weights",
    [
        {"w0": (2, 3), "w1": (3, 2), "w2": (6,)},
        {"w0": (2, 3), "w1": (6,), "w2": (3, 2), "buffer": (1,)},
        {"w0": (2, 3), "w1": (6,)},
    ],
)
def test_an_order_that_does_not_fit_throughout_names_nothing(
    weights: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    path = one_group(tmp_path)
    torch.save({name: torch.ones(shape) for name, shape in weights.items()}, path / "model.pt")
    refused(
        path, UsageError, "parameters must have names, got numbers alone in 1 groups", ReadOptions()
    )


def test_a_tied_weight_is_one_parameter_under_either_name(tmp_path: Path) -> None:
    path = one_group(tmp_path)
    weights = torch.load(path / "model.pt")
    torch.save({**weights, "tied": weights["w0"]}, path / "model.pt")
    assert {spec.name for spec in api.read_manifest(path).tensors} == {"w0", "w1", "w2"}
    other = api.read_manifest(path, options=names(tmp_path, ["tied", "w1", "w2"]))
    assert {spec.name for spec in other.tensors} == {"tied", "w1", "w2"}


def test_names_that_torch_keeps_are_taken_and_must_be_those_that_are_told(tmp_path: Path) -> None:
    path = one_group(tmp_path)
    own = ["x", "y", "z"]
    changed(path / "optim.pt", lambda tree: tree["param_groups"][0].update(param_names=own))
    (path / "model.pt").unlink()
    (group,) = api.read_manifest(path).objects["param_groups"]
    assert group.members == ("x", "y", "z")
    assert "param_names" not in group.settings
    rule = "--names: must agree with the names in the files, got 'q' where parameter 1 is 'y'"
    refused(path, UsageError, rule, names(tmp_path, ["x", "q", "z"]))


@pytest.mark.parametrize("wrap", [lambda w: {"state_dict": w}, lambda w: {"model": w, "epoch": 1}])
def test_weights_may_lie_in_a_dict_and_behind_a_wrapper(
    wrap: Callable[[dict[str, torch.Tensor]], dict[str, Any]], tmp_path: Path
) -> None:
    path = one_group(tmp_path)
    weights = torch.load(path / "model.pt")
    torch.save(wrap({f"module.{name}": w for name, w in weights.items()}), path / "model.pt")
    (group,) = api.read_manifest(path).objects["param_groups"]
    assert group.members == ("w0", "w1", "w2")


def test_weights_may_be_a_safetensors_file(tmp_path: Path) -> None:
    path = one_group(tmp_path)
    save_file(torch.load(path / "model.pt"), tmp_path / "weights.safetensors")
    digest = api.digest(path)
    (path / "model.pt").unlink()
    model = ReadOptions(model_path=str(tmp_path / "weights.safetensors"))
    assert api.digest(path, options=model) == digest


# --- facts that are missing ----------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fp32_store_ws2", "bf16_rem_ws2", "fp32_nostore_ws2"])
def test_a_v1_state_needs_the_weights(variant: str) -> None:
    path = files.FIXTURES / variant / "v1_gathered.pt"
    error = refused(path, UsageError, "parameter 0, embedding.word.weight: its shape must be known")
    assert error.hint == "give the model's weights with --model FILE"


def test_a_missing_rank_is_named(ranks: Path) -> None:
    (ranks / "v1_local_rank0.pt").unlink()
    refused(ranks, FormatError, "must have the states of all 2 ranks, got none of rank 0")
    refused(
        VARIANT / "v1_local_rank0.pt",
        FormatError,
        "v1_local_rank0.pt: must have the states of all 2 ranks, got none of rank 1",
    )


def test_files_of_two_kinds_are_not_one_checkpoint(ranks: Path) -> None:
    shutil.copy(V2, ranks)
    rule = r"must hold one v2 file, one gathered file, or v1 files of all ranks, got v1_local_rank0"
    error = refused(ranks, FormatError, rule)
    assert "v2.pt (v2)" in str(error)
    assert error.hint
    for file in ranks.glob("v1*"):
        file.unlink()
    shutil.copy(V2, ranks / "v2-again.pt")
    refused(ranks, FormatError, "must hold one v2 file")


def test_a_directory_without_a_state_is_none_of_apex(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.mkdir()
    shutil.copy(MODEL, path)
    with pytest.raises(UnknownFormatError):
        api.detect_format(path)
    refused(path, FormatError, "must hold a state dict of DistributedFusedAdam, got none")
    refused(MODEL, FormatError, "must be a state dict of Apex's DistributedFusedAdam, got another")


def test_other_files_beside_the_states_are_passed_over_and_named(ranks: Path) -> None:
    torch.save({"epoch": 3}, ranks / "trainer.pt")
    (ranks / "broken.pt").write_bytes(b"PK\3\4 and no more")
    (ranks / "notes.txt").write_text("what I did")
    opened = api.open_checkpoint(ranks, options=TOLD)
    assert "broken.pt is not read" in opened.notes
    assert "trainer.pt is not read" in opened.notes


def test_a_file_may_have_any_name(ranks: Path) -> None:
    (ranks / "v1_local_rank1.pt").rename(ranks / "\u00b2")  # a digit, and no number
    (ranks / "\u0663").write_text("not a zip")
    assert api.detect_format(ranks).name == "apex"
    assert len(api.read_manifest(ranks, options=TOLD).tensors) == 56
