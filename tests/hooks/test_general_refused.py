"""What can't be saved, or read on one rank, is an error by name on all, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from general_models import adamw, build, differences, state_of, train
from gloo_ranks import run_ranks
from torch import nn

from ckpttools.errors import (
    CkptError,
    FormatError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckpttools.hooks.general import load_general, plan_general, save_general
from ckpttools.optimizer import RemoteError


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
