"""Odd parameters keep their pattern, and what doesn't fit is named on every rank, and changes none.

Frozen, later frozen, never trained and tied parameters; saving before the first step; differences
of every kind between a checkpoint and a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from general_models import OPTIMIZERS, blank, build, differences, state_of, train
from gloo_ranks import run_ranks
from torch import nn

from ckpttools import api
from ckpttools.errors import (
    CkptError,
    FormatError,
    MismatchError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckpttools.hooks.general import load_general, plan_general, save_general
from ckpttools.optimizer import RemoteError

NEVER = frozenset({"2.weight"})


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=0.02, **settings)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A saved run of two steps of AdamW."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    return tmp_path / "run", model, optimizer


# ---- patterns ----------------------------------------------------------------------------------


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


# ---- what doesn't fit --------------------------------------------------------------------------


def without_bias() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(bias=False)
    return model, adamw(model)


def wider() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    model[4] = nn.Linear(3, 2)
    return model, adamw(model)


def deeper() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    model.append(nn.Linear(1, 1))
    return model, adamw(model)


def double() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build().double()
    return model, adamw(model)


def other_optimizer(name: str) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        return model, OPTIMIZERS[name](model.parameters())

    return make


def coupled() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return model, torch.optim.Adam(model.parameters(), weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (without_bias, "0.bias (weight): must have a place in this run, got none (and 2 more)"),
        (wider, "4.weight (weight): shape must be (2, 3) as in this run, got (1, 3)"),
        (deeper, "5.weight (weight): must be in the checkpoint, got none"),
        (double, "0.weight (weight): dtype must be float64 as in this run, got float32"),
        (other_optimizer("amsgrad"), "0.weight (max_exp_avg_sq): must be in the checkpoint"),
        (other_optimizer("plain_sgd"), "0.weight (exp_avg): must have a place in this run"),
        (other_optimizer("sgd"), "0.weight (momentum_buffer): must be in the checkpoint"),
        (coupled, "param_groups (decoupled_weight_decay): must be False as here, got True"),
    ],
)
def test_every_difference_is_refused_by_name_and_nothing_is_changed(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    text: str,
    run: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = make()
    train(model, optimizer, 5, 6)
    before = state_of(model, optimizer)
    with pytest.raises(MismatchError) as caught:
        load_general(run[0], model, optimizer)
    assert text.split(" (and", maxsplit=1)[0] in str(caught.value)
    assert differences(state_of(model, optimizer), before) == []


def test_what_is_allowed_stays_as_it_is_and_is_told(
    run: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = deeper()
    mine = model.get_parameter("5.weight").detach().clone()
    got = load_general(run[0], model, optimizer, allow=("5.*",))
    assert "5.weight (weight): not in the checkpoint" in got.notes
    assert torch.equal(model.get_parameter("5.weight"), mine)
    assert torch.equal(model.get_parameter("0.weight"), run[1].get_parameter("0.weight"))
    assert model.get_parameter("5.weight") not in optimizer.state
    fewer, other = without_bias()
    got = load_general(run[0], fewer, other, allow=("*.bias",))
    assert "0.bias (exp_avg)" in got.unused
    fewer, other = without_bias()
    got = load_general(run[0], fewer, other, strict=False)
    assert "0.bias (weight): no place for it in this run" in got.notes


def test_a_parameter_of_whose_state_a_part_is_missing_begins_anew(
    run: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    model = build()
    optimizer = adamw(model, amsgrad=True)
    got = load_general(run[0], model, optimizer, allow=("*:max_exp_avg_sq",))
    assert not optimizer.state
    assert "0.weight (max_exp_avg_sq): not in the checkpoint" in got.notes
    train(model, optimizer, 0, 1)


def test_weights_alone_leave_the_optimizer(
    run: tuple[Path, nn.Module, torch.optim.Optimizer],
) -> None:
    model, optimizer = other_optimizer("sgd")()
    train(model, optimizer, 0, 1)
    before = state_of(model, optimizer)
    got = load_general(run[0], blank(model), optimizer, weights_only=True)
    odd = differences(state_of(model, optimizer), before)
    assert {text.split(":")[0] for text in odd} == set(model.state_dict())
    assert "0.weight (exp_avg)" in got.unused
    assert load_general(run[0], blank(build())).tensors == 6


def test_a_checkpoint_without_optimizer_state_is_no_pattern(
    run: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    api.strip(run[0], tmp_path / "weights")
    model = build()
    with pytest.raises(MismatchError, match=r"0.weight \(step\): must be in the checkpoint, got"):
        load_general(tmp_path / "weights", model, adamw(model))
    got = load_general(tmp_path / "weights", model, adamw(model), allow=("optimizer",))
    assert got.tensors == 6


def test_whole_tensors_and_other_numbers_of_ranks_hold_all_that_a_run_needs(
    run: tuple[Path, nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    place, model, optimizer = run
    api.gather(place, tmp_path / "whole")
    api.gather(place, tmp_path / "zarr", to="zarr")
    api.reshard(place, tmp_path / "five", target=api.Target(world=5))
    for form in ("whole", "zarr", "five"):
        fresh = blank(build())
        other = adamw(fresh)
        load_general(tmp_path / form, fresh, other)
        assert differences(state_of(fresh, other), state_of(model, optimizer)) == []


# ---- what can't be saved -----------------------------------------------------------------------


def hand_cut(folder: str) -> str:
    """Each rank has another half of a layer, and nothing says so."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank()))
        model.bias.zero_()
    try:
        save_general(folder, model)
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_tensors_that_differ_between_ranks_without_saying_how_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(hand_cut, 2, str(tmp_path / "run")):
        assert text == (
            "UnsupportedError: weight (weight): must be equal on all ranks that hold it whole, "
            "got other values on rank 1 than on rank 0"
        )
    assert list(tmp_path.iterdir()) == []


def unlike(folder: str) -> list[str]:
    """Ranks disagree on a shape, and on steps."""
    rank = dist.get_rank()
    said = []
    model = nn.Linear(2 + rank, 2)
    try:
        save_general(folder, model)
    except CkptError as error:
        said.append(str(error))
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    optimizer.state[model[0].weight]["step"].fill_(3 + rank)
    try:
        save_general(folder, model, optimizer)
    except CkptError as error:
        said.append(str(error))
    return said


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    for shape, step in run_ranks(unlike, 2, str(tmp_path / "run")):
        assert shape == (
            "weight (weight): must be float32 (2, 2) on every rank, got float32 (2, 3) on rank 1"
        )
        assert step == "0.weight: step must be 3 on every rank, got 4 on rank 1"


class NoExtra(nn.Module):
    """Could have state that is no tensor, and has none; one of two parameters has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 0))
        self.bias = nn.Parameter(torch.ones(3))

    def get_extra_state(self) -> Any:
        return torch.empty(0, dtype=torch.uint8)


def test_tensors_without_elements_and_empty_extra_state_are_no_trouble(tmp_path: Path) -> None:
    model = NoExtra()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    fresh = NoExtra()
    other = adamw(fresh)
    load_general(tmp_path / "run", fresh, other)
    assert torch.equal(other.state[fresh.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"])
    assert other.state[fresh.weight]["exp_avg"].shape == (3, 0)


class Extra(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 2}


def stranger(model: nn.Module) -> torch.optim.Optimizer:
    del model
    return torch.optim.SGD([nn.Parameter(torch.ones(3, 5))], lr=0.1)


def with_key(key: Any, value: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(model.parameters())] = {key: value}
        return optimizer

    return make


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("model", "make", "error", "text"),
    [
        (Extra(2, 2), None, UnsupportedError, "_extra_state: must be empty, got that of Extra"),
        (nn.LazyLinear(3), None, UnsupportedError, "weight: must have a shape"),
        (nn.Linear(2, 2, device="meta"), None, UnsupportedError, "weight: must have elements"),
        (
            nn.ParameterDict({"w": torch.ones(2, dtype=torch.complex128)}),
            None,
            UnsupportedError,
            "w: dtype must be one of float64",
        ),
        (nn.Linear(2, 2), stranger, UsageError, "group 0: parameters must be the model's"),
        (nn.Linear(2, 2), lbfgs, UnsupportedError, "state for each parameter alone, got LBFGS"),
        (
            nn.Linear(2, 2),
            with_key("history", [torch.ones(2)]),
            FormatError,
            "weight (history): must hold only plain and inert objects, got Tensor",
        ),
        (
            nn.Linear(2, 2),
            with_key("weight", torch.ones(2)),
            UnsupportedError,
            "must be text other than 'weight', got 'weight'",
        ),
        (
            nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.EmbeddingBag(3, 2)}),
            with_key("sparse", torch.eye(2).to_sparse()),
            UnsupportedError,
            "a.weight (sparse): must be a plain dense tensor or a DTensor of such",
        ),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_by_name(
    model: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer] | None,
    error: type[CkptError],
    text: str,
) -> None:
    with pytest.raises(error) as caught:
        plan_general(model, None if make is None else make(model))
    assert text in str(caught.value)


# ---- errors on one rank ------------------------------------------------------------------------


def failing(folder: str) -> list[str]:
    """One rank can't write; then one rank's files are cut short on disk."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    said = []
    place = Path(folder) / "run"
    if dist.get_rank() == 1:
        from ckpttools.hooks import general

        real = general.write_live

        def full(*_: object) -> Any:
            raise StorageError("disk: must have room, got none")

        general.write_live = full
    try:
        save_general(place, model, optimizer)
    except CkptError as error:
        said.append(f"{type(error).__name__}: {error}")
    if dist.get_rank() == 1:
        general.write_live = real
    dist.barrier()
    said.append(str(sorted(path.name for path in Path(folder).iterdir())))
    dist.barrier()
    save_general(place, model, optimizer)
    train(model, optimizer, 2, 3)
    before = state_of(model, optimizer)
    if dist.get_rank() == 0:
        victim = place / "rank-00001.safetensors"
        os.truncate(victim, victim.stat().st_size - 4)
    dist.barrier()
    try:
        load_general(place, model, optimizer)
    except (CkptError, RemoteError) as error:
        said.append(str(error))
    return said + differences(state_of(model, optimizer), before)


def test_an_error_on_one_rank_is_raised_on_all_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(failing, 2, str(tmp_path))
    assert first[0] == "RemoteError: rank 1: StorageError: disk: must have room, got none"
    assert second[0] == "StorageError: disk: must have room, got none"
    assert first[1] == second[1] == "[]"
    for said in (first, second):
        assert "rank-00001.safetensors" in said[2]
        assert len(said) == 3
