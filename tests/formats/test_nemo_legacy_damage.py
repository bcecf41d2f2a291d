"""Files of ranks that contradict each other, or hold another optimizer, must be refused by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_builder import NAME, content, legacy, model

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import EvidenceError, FormatError, RuleError, UnsupportedError
from ckpttools.formats.nemo.legacy_files import find_ranks
from ckpttools.manifest import WEIGHT, Manifest


def read(path: Path, **options: Any) -> Manifest:
    return api.read_manifest(path, options=ReadOptions(**options))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    root = legacy(tmp_path / "run", model(4), tp=2, pp=2)
    (root / "tp_rank_00_pp_rank_001" / NAME).unlink()
    with pytest.raises(FormatError, match="tp_rank_00_pp_rank_001.*every rank of TP 2 x PP 2 must"):
        find_ranks(root)


def test_the_configuration_shows_that_the_last_rank_is_missing(tmp_path: Path) -> None:
    root = legacy(tmp_path / "run", model(4), tp=4)
    (root / "mp_rank_03" / NAME).unlink()
    (root / "mp_rank_03").rmdir()
    with pytest.raises(FormatError, match="must be of tensor_model_parallel_size 4 as its config"):
        read(root)


def edited(key: str, value: object, rank: tuple[int, int] = (1, 0)) -> Any:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        if (t, p) == rank:
            tree[key] = value

    return edit


@pytest.mark.parametrize("key", ["global_step", "epoch", "lr_schedulers"])
def test_ranks_that_disagree_are_refused(key: str, tmp_path: Path) -> None:
    root = legacy(tmp_path / "run", model(2), tp=2, edit=edited(key, 8))
    with pytest.raises(FormatError, match=f"mp_rank_01.*: {key} must be that of .*mp_rank_00"):
        read(root)


def test_other_entries_of_ranks_may_differ_and_are_told(tmp_path: Path) -> None:
    root = legacy(tmp_path / "run", model(2), tp=2, edit=edited("loops", {"x": 1}))
    notes = api.open_checkpoint(root).notes
    assert "loops differs between the files of ranks; that of rank (0, 0) is carried" in notes


def optimizer_edit(change: Any, rank: tuple[int, int] = (0, 0)) -> Any:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        if (t, p) == rank:
            change(tree["optimizer_states"])

    return edit


def without(*keys: object) -> Any:
    def change(states: list[Any]) -> None:
        entry = states[0]
        for key in keys[:-1]:
            entry = entry[key]
        del entry[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda s: s.__setitem__(0, {"gathered_states": [], "format": 1}),
            UnsupportedError,
            "form",
        ),
        (lambda s: s[0]["state"].update(buckets=[]), UnsupportedError, "must be Apex's format 2"),
        (
            lambda s: s[0].update(format=1),
            UnsupportedError,
            "must be Apex's format 2, got its form",
        ),
        (
            lambda s: s[0].update(fp32_from_fp16_params=[]),
            UnsupportedError,
            "must be of distributed_fused_adam, got another optimizer",
        ),
        (lambda s: s.append({}), UnsupportedError, "must have one optimizer, got 2"),
        (lambda s: s.__setitem__(0, 3), FormatError, "must be a dict, got int"),
        (without("state"), FormatError, "must have state and param_groups, got param_groups, for"),
        (without("state", "step"), FormatError, "step must be a whole number, got None"),
        (without("state", 0), FormatError, r"parameter 0 must be .* of shape \(44, 12\), got None"),
        (without("state", 0, "exp_avg"), FormatError, "must have the tensors of the first"),
        (
            lambda s: s[0]["state"][0].update(param=3),
            FormatError,
            "param: must be a tensor, got in",
        ),
        (lambda s: s[0]["param_groups"].pop(), FormatError, "parameter groups must have"),
    ],
)
def test_an_optimizer_that_is_none_of_apex_format_2_is_refused(
    change: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    root = legacy(tmp_path / "run", model(2), edit=optimizer_edit(change))
    with pytest.raises((kind, EvidenceError), match=message):
        read(root)


def test_ranks_with_another_step_are_refused(tmp_path: Path) -> None:
    change = optimizer_edit(lambda s: s[0]["state"].update(step=8), rank=(1, 0))
    root = legacy(tmp_path / "run", model(2), tp=2, edit=change)
    with pytest.raises(FormatError, match="mp_rank_01.*: step must be that of .*, 9, got 8"):
        read(root)


def test_ranks_with_other_settings_are_refused(tmp_path: Path) -> None:
    change = optimizer_edit(lambda s: s[0]["param_groups"][0].update(lr=0.25), rank=(1, 0))
    root = legacy(tmp_path / "run", model(2), tp=2, edit=change)
    with pytest.raises(EvidenceError, match="must be the same in all files, got another lr"):
        read(root)


def test_a_copy_that_differs_is_found(tmp_path: Path) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        if (t, p) == (1, 0):
            tree["optimizer_states"][0]["state"][14]["exp_avg"] += 1

    root = legacy(tmp_path / "run", model(2), tp=2, edit=edit)
    verified = api.verify(root)
    assert any("copies must be equal" in line for line in verified.damage)


def test_without_a_configuration_a_tied_embedding_of_two_stages_is_asked_for(
    tmp_path: Path,
) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p, tree["hyper_parameters"]

    root = legacy(tmp_path / "run", model(2, tied=True), pp=2, edit=edit)
    with pytest.raises(RuleError, match="output_layer.weight: depends on the fact 'tied'"):
        read(root)


def test_extra_state_that_ranks_disagree_on_is_refused_unless_accepted(tmp_path: Path) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del p
        key = "model.decoder.layers.0.mlp.linear_fc1._extra_state"
        tree["state_dict"][key] = io.BytesIO(bytes([t]))

    root = legacy(tmp_path / "run", model(2), tp=2, edit=edit)
    with pytest.raises(FormatError, match="_extra_state: must be the same on every tensor rank"):
        read(root)
    read(root, accept_loss=frozenset({"extra_state"}))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(FormatError, match="must hold a dict with names, got list"):
        read(tmp_path / "list.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "empty.ckpt")
    with pytest.raises(FormatError, match="must hold a model under state_dict, got none"):
        read(tmp_path / "empty.ckpt")
    torch.save({"state_dict": {"model.a": 3}}, tmp_path / "number.ckpt")
    with pytest.raises(FormatError, match="a: must be a tensor, got int"):
        read(tmp_path / "number.ckpt")


def test_weights_alone_are_a_checkpoint(tmp_path: Path) -> None:
    state = model(2)

    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p, tree["optimizer_states"]

    root = legacy(tmp_path / "run", state, edit=edit)
    assert content(read(root)).keys() == state.keys()
    assert read(root).slots() == (WEIGHT,)
    api.reshard(root, tmp_path / "out", to="nemo-legacy", target=Target(tp=2))
    assert read(tmp_path / "out").slots() == (WEIGHT,)


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    root = legacy(tmp_path / "run", model(2), tp=2)
    place = root / "mp_rank_01" / NAME
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 4
    place.write_bytes(data)
    assert any("mp_rank_01" in line for line in api.verify(root).damage)
