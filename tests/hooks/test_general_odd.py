"""Odd parameters keep their pattern: frozen, later frozen, never trained, tied, before a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from general_models import adamw, blank, build, differences, state_of, train
from torch import nn

from ckpttools import api
from ckpttools.errors import (
    MismatchError,
)
from ckpttools.hooks.general import load_general, save_general

NEVER = frozenset({"2.weight"})


def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards(tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2, skip=NEVER)
    save_general(tmp_path / "run", model, optimizer)
    fresh = build()
    other = adamw(fresh)
    train(fresh, other, 0, 1)  # here it has state, of which the save knows nothing
    load_general(tmp_path / "run", fresh, other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    assert fresh[2].weight not in other.state
    train(model, optimizer, 2, 4)
    train(fresh, other, 2, 4)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []


def test_parameters_at_different_steps_keep_their_own(tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    train(model, optimizer, 2, 5, skip=NEVER)
    save_general(tmp_path / "run", model, optimizer)
    steps = api.read_manifest(tmp_path / "run").objects["step"]
    assert steps["2.weight"] == 2  # type: ignore[index]
    assert steps["2.bias"] == 5  # type: ignore[index]
    fresh = build()
    other = adamw(fresh)
    load_general(tmp_path / "run", fresh, other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []


def test_a_save_before_the_first_step_is_a_save_of_no_state(tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    save_general(tmp_path / "run", model, optimizer)
    fresh = build()
    other = adamw(fresh)
    train(fresh, other, 0, 2)
    load_general(tmp_path / "run", fresh, other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    assert not other.state


def test_a_parameter_frozen_from_the_start_is_a_weight_alone(tmp_path: Path) -> None:
    def frozen() -> nn.Sequential:
        model = build()
        model[0].requires_grad_(requires_grad=False)
        return model

    model = frozen()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    slots = {
        spec.slot for spec in api.read_manifest(tmp_path / "run").tensors if spec.name[0] == "0"
    }
    assert slots == {"weight"}
    fresh = frozen()
    other = adamw(fresh)
    load_general(tmp_path / "run", blank(fresh), other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    thawed = build()
    with pytest.raises(MismatchError, match=r"0.weight \(step\): must be in the checkpoint"):
        load_general(tmp_path / "run", thawed, adamw(thawed))
    load_general(tmp_path / "run", thawed, adamw(thawed), allow=("optimizer",))


def test_a_parameter_frozen_later_keeps_its_state(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train(model, optimizer, 0, 2)
    model[0].requires_grad_(requires_grad=False)
    train(model, optimizer, 2, 3)
    save_general(tmp_path / "run", model, optimizer)
    fresh = build()
    fresh[0].requires_grad_(requires_grad=False)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.02)
    load_general(tmp_path / "run", blank(fresh), other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self, *, head_first: bool = False) -> None:
        super().__init__()
        head = nn.Linear(3, 7, bias=False)
        if head_first:
            self.head = head
        self.embedding = nn.Embedding(7, 3)
        self.head = head
        self.head.weight = self.embedding.weight


def test_tied_parameters_are_stored_once_and_found_by_either_name(tmp_path: Path) -> None:
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    manifest = api.read_manifest(tmp_path / "run")
    assert {spec.name for spec in manifest.tensors} == {"embedding.weight"}
    fresh = Tied(head_first=True)
    assert next(iter(dict(fresh.named_parameters()))) == "head.weight"
    other = adamw(fresh)
    got = load_general(tmp_path / "run", blank(fresh), other)
    assert got.unused == ()
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert other.state[fresh.head.weight]["step"] == 2


def test_a_checkpoint_with_both_names_of_a_tied_parameter_is_no_surprise(tmp_path: Path) -> None:
    apart = nn.ModuleDict({"embedding": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    with torch.no_grad():
        apart["head"].weight.copy_(apart["embedding"].weight)
    save_general(tmp_path / "run", apart)
    model = Tied()
    assert load_general(tmp_path / "run", model).unused == ()
    assert torch.equal(model.head.weight, apart["head"].weight)


def test_groups_keep_their_settings_by_their_members(tmp_path: Path) -> None:
    def grouped(rates: tuple[float, float], order: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "lr": rates[0]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": rates[1], "tag": "b"},
        ]
        return model, torch.optim.AdamW(groups[::order])

    model, optimizer = grouped((0.1, 0.7), 1)
    save_general(tmp_path / "run", model, optimizer)
    fresh, other = grouped((0.2, 0.3), -1)
    got = load_general(tmp_path / "run", fresh, other)
    assert [group["lr"] for group in other.param_groups] == [0.7, 0.1]
    assert got.notes == ()
    mixed = build()
    one = torch.optim.AdamW(mixed.parameters())
    with pytest.raises(MismatchError, match="parameters of group 0 must be in one group of the"):
        load_general(tmp_path / "run", mixed, one)
    got = load_general(tmp_path / "run", mixed, one, allow=("param_groups",))
    assert any("parameters of group 0" in note for note in got.notes)
