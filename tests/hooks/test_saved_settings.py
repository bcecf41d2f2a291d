"""Which settings a live run takes of a checkpoint's groups: by members, whole groups, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpttools.errors import MismatchError
from ckpttools.formats import ParamGroup
from ckpttools.hooks.saved_settings import SavedSettings
from ckpttools.manifest import Manifest

LIVE = {"lr": 1.0, "betas": (0.5, 0.6), "weight_decay": 0.0}


def settings(
    *saved: tuple[dict[str, object], str],
    live: str = "abc",
    trains: str = "abc",
    decoupled: bool = True,
    **objects: object,
) -> SavedSettings:
    """Return the settings for a run with one group; members are letters."""
    groups = tuple(ParamGroup(group, tuple(members)) for group, members in saved)
    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in live}
    config = SimpleNamespace(decoupled_weight_decay=decoupled, bias_correction=True)
    optimizer: Any = SimpleNamespace(
        managed=[SimpleNamespace(name=name, param=param) for name, param in params.items()],
        param_groups=[{**LIVE, "params": list(params.values())}],
        trains=set(trains),
        steps=dict.fromkeys(live, 0),
        config=config,
    )
    manifest = Manifest(
        "test", "run", (), (), (), objects={"step": 3, "param_groups": groups, **objects}
    )
    return SavedSettings(manifest, optimizer, {name: name for name in live})


def test_settings_are_those_of_the_members_group() -> None:
    found = settings(({"lr": 0.1}, "xyz"), ({"lr": 0.2, "betas": [0.9, 0.95]}, "cabd"))
    found.check()
    assert [taken for _, taken in found.groups()] == [{"lr": 0.2, "betas": (0.9, 0.95)}]
    assert found.steps() == {"a": 3, "b": 3, "c": 3}


def test_members_of_several_groups_are_refused() -> None:
    with pytest.raises(MismatchError, match="must be in one group of the checkpoint, got 2"):
        settings(({"lr": 0.1}, "a"), ({"lr": 0.2}, "bc")).check()


def test_a_name_in_two_saved_groups_is_refused() -> None:
    with pytest.raises(MismatchError, match="b: must be in one parameter group of the checkpoint"):
        settings(({"lr": 0.1}, "abc"), ({"lr": 0.2}, "b")).check()


def test_a_parameter_without_a_saved_group_does_not_take_its_neighbours() -> None:
    with pytest.raises(MismatchError, match="c: must be in the parameter group of the checkpoint"):
        settings(({"lr": 0.1}, "ab")).check()
    frozen = settings(({"lr": 0.1}, "ab"), trains="ab")
    assert [taken for _, taken in frozen.groups()] == [{"lr": 0.1}]


@pytest.mark.parametrize("told", [True, False])
def test_how_weight_decay_is_done_must_be_the_runs_way(told: bool) -> None:
    by_groups = {"decoupled_weight_decay": told, "weight_decay": 0.1}
    settings((by_groups, "abc"), decoupled=told).check()
    settings(({}, "abc"), decoupled=told, adam_w_mode=told).check()
    settings(({**by_groups, "weight_decay": 0.0}, "abc"), decoupled=not told).check()
    for other in (
        settings((by_groups, "abc"), decoupled=not told),
        settings(({}, "abc"), decoupled=not told, adam_w_mode=told),
    ):
        with pytest.raises(MismatchError, match=f"adam_w_mode must be {not told} as in this run"):
            other.check()
