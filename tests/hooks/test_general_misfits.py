"""What of a checkpoint doesn't fit a run is named on every rank, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from general_models import OPTIMIZERS, adamw, blank, build, differences, state_of, train
from torch import nn

from ckpttools import api
from ckpttools.errors import (
    MismatchError,
)
from ckpttools.hooks.general import load_general, save_general


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A saved run of two steps of AdamW."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    return tmp_path / "run", model, optimizer


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
