"""What FSDP2, tensor parallelism or both have cut, any other cut takes over, bit for bit.

Sizes divide by nothing: a layer of 29 rows, one of 3 and one of 1 on up to four ranks, so that
pieces are uneven and ranks have none of some tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from general_models import OPTIMIZERS, blank, build, differences, state_of, train, whole
from gloo_ranks import run_ranks
from torch import nn

from ckpttools import api
from ckpttools.hooks.general import load_general, save_general

SAVED_AT, ENDS_AT = 3, 5


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def cut(kind: str) -> nn.Sequential:
    """Build the model as a kind of run has it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = build()
    size = dist.get_world_size()
    if kind == "plain":
        return model
    if kind in ("tp", "fsdp x tp"):
        mesh = mesh_of(size) if kind == "tp" else mesh_of(2, size // 2)
        names = mesh if kind == "tp" else mesh["tp"]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
        parallelize_module(model, names, plan)
        if kind == "tp":
            return model
        parts = mesh["dp"]
    else:
        parts = mesh_of(2, size // 2) if kind == "hsdp" else mesh_of(size)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=parts)
    fully_shard(model, mesh=parts)
    return model


def saved(folder: str, kinds: list[str], name: str) -> list[Any]:
    """Train and save each kind of run; return how its state differs from a plain run's."""
    alone = build()
    optimizer = OPTIMIZERS[name](alone.parameters())
    train(alone, optimizer, 0, SAVED_AT)
    expected = state_of(alone, optimizer)
    found = []
    for kind in kinds:
        model = cut(kind)
        mine = OPTIMIZERS[name](model.parameters())
        train(model, mine, 0, SAVED_AT)
        found += [(kind, odd) for odd in differences(state_of(model, mine), expected)]
        save_general(Path(folder) / f"{kind}{dist.get_world_size()}", model, mine)
    return found


def loaded(folder: str, kinds: list[str], name: str, places: list[str]) -> list[Any]:
    """Load checkpoints into each kind of run and go on; return what ends elsewhere."""
    alone = build()
    optimizer = OPTIMIZERS[name](alone.parameters())
    train(alone, optimizer, 0, SAVED_AT)
    at_save = state_of(alone, optimizer)
    train(alone, optimizer, SAVED_AT, ENDS_AT)
    found: list[Any] = []
    for kind in kinds:
        for place in (Path(folder) / one for one in places):
            model = cut(kind)
            mine = OPTIMIZERS[name](model.parameters())
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            got = load_general(place, model, mine)
            odd = differences(state_of(model, mine), at_save)
            train(model, mine, SAVED_AT, ENDS_AT)
            odd += differences(state_of(model, mine), state_of(alone, optimizer))
            odd += [*got.unused, *got.notes]
            found += [(place.name, kind, one) for one in odd]
    return found


ALL = ["plain", "fsdp", "tp", "fsdp x tp", "hsdp"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    assert run_ranks(saved, 4, str(folder), ALL, "adamw", timeout_s=200) == [[]] * 4
    assert run_ranks(saved, 3, str(folder), ["fsdp"], "adamw", timeout_s=200) == [[]] * 3
    assert run_ranks(saved, 1, str(folder), ["plain"], "adamw", timeout_s=200) == [[]]
    return folder


@pytest.mark.parametrize(
    ("ranks", "kinds", "places"),
    [
        (1, ["plain", "fsdp"], ["plain4", "fsdp4", "tp4", "fsdp x tp4", "hsdp4", "fsdp3"]),
        (2, ["fsdp", "tp"], ["fsdp x tp4", "fsdp3", "plain1"]),
        (3, ["fsdp"], ["tp4", "hsdp4"]),
        (4, ["tp", "fsdp x tp", "hsdp"], ["plain1", "fsdp3", "fsdp x tp4"]),
    ],
)
def test_every_cut_takes_over_what_every_cut_saved(
    checkpoints: Path, ranks: int, kinds: list[str], places: list[str]
) -> None:
    found = run_ranks(loaded, ranks, str(checkpoints), kinds, "adamw", places, timeout_s=300)
    assert found == [[]] * ranks


def test_every_cut_saves_the_same_content_each_element_once(checkpoints: Path) -> None:
    assert len({api.digest(path)[0] for path in checkpoints.iterdir()}) == 1
    sizes = set()
    for path in sorted(checkpoints.iterdir()):
        manifest = api.read_manifest(path)
        sizes.add(sum(part.extent.length for chunk in manifest.chunks for part in chunk.parts))
        assert api.detect_format(path).check(path) == []
    assert len(sizes) == 1  # what several ranks hold is written once


class RowScale(torch.optim.Optimizer):
    """Keeps a number for each row, the same on every rank, a count and a text: no step, no hook."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                rows = whole(param.grad).abs().reshape(len(param), -1).sum(1, True)
                state["rows"] = state.get("rows", 0) + rows
                state["count"] = state.get("count", 0) + 1
                state["text"] = "odd"
                param.sub_(param.grad, alpha=group["lr"] / state["count"])


def odd_state(folder: str) -> list[Any]:
    """Save with two ranks of FSDP2, load in a plain run and the other way."""
    found: list[Any] = []
    for kind, other in (("fsdp", "plain"), ("plain", "fsdp"), ("fsdp", "fsdp")):
        model, fresh = cut(kind), cut(other)
        optimizer, mine = RowScale(model.parameters()), RowScale(fresh.parameters())
        train(model, optimizer, 0, 2)
        place = Path(folder) / f"{kind} {other}"
        save_general(place, model, optimizer)
        load_general(place, fresh, mine)
        train(model, optimizer, 2, 4)
        train(fresh, mine, 2, 4)
        found += differences(state_of(fresh, mine), state_of(model, optimizer))
    return found


def test_state_of_other_shapes_than_the_parameters_and_of_no_tensors_goes_along(
    tmp_path: Path,
) -> None:
    assert run_ranks(odd_state, 2, str(tmp_path), timeout_s=200) == [[], []]
    manifest = api.read_manifest(tmp_path / "fsdp plain")
    assert {spec.shape for spec in manifest.tensors if spec.slot == "rows"} == {
        (29, 1),
        (3, 1),
        (1, 1),
    }
    values = manifest.objects["state_values"]
    assert values["0.weight"] == {"count": 2, "text": "odd"}  # type: ignore[index]


def shares(folder: str) -> list[int]:
    """Return what each rank read, and what it holds."""
    model = cut("fsdp")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    got = load_general(folder, model, optimizer)
    held = sum(param.to_local().numel() for param in model.parameters())  # type: ignore[attr-defined]
    return [got.read_bytes, 3 * 4 * held]


def test_a_rank_reads_its_own_share_and_no_more(checkpoints: Path) -> None:
    for name in ("fsdp4", "plain1"):
        for read, held in run_ranks(shares, 3, str(checkpoints / name), timeout_s=200):
            assert read == held


def after_evaluation(folder: str) -> list[Any]:
    """A forward pass without a backward one leaves whole parameters in the model."""
    from torch.distributed.fsdp import fully_shard

    model, fresh = build(), build()
    for one in (model, fresh):
        fully_shard(one, mesh=mesh_of(2), reshard_after_forward=False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    other = OPTIMIZERS["adamw"](fresh.parameters())
    train(model, optimizer, 0, 2)
    with torch.no_grad():
        model(torch.ones(2, 13))
    assert not any(hasattr(param, "placements") for param in model.parameters())
    save_general(folder, model, optimizer)
    with torch.no_grad():
        before = fresh(torch.ones(2, 13))
    load_general(folder, fresh, other)
    with torch.no_grad():
        after = fresh(torch.ones(2, 13)), model(torch.ones(2, 13))
    assert not torch.equal(before, after[0])
    return [] if torch.equal(*after) else ["the model computes with the weights of before"]


def test_parameters_that_a_forward_pass_left_whole_are_cut_again_first(tmp_path: Path) -> None:
    assert run_ranks(after_evaluation, 2, str(tmp_path / "run"), timeout_s=200) == [[], []]


def sub_mesh(folder: str) -> list[Any]:
    """A DTensor on two of three ranks: the third has no part of it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 2])
    whole = torch.arange(10.0).reshape(5, 2)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    save_general(folder, model)
    with torch.no_grad():
        model.w.to_local().zero_()
    got = load_general(folder, model)
    rank = {0: slice(0, 3), 1: slice(0, 0), 2: slice(3, 5)}[dist.get_rank()]
    same = dist.get_rank() == 1 or torch.equal(model.w.to_local(), whole[rank])
    return [same, got.read_bytes]


def test_a_rank_outside_a_mesh_has_no_part(tmp_path: Path) -> None:
    found = run_ranks(sub_mesh, 3, str(tmp_path / "run"), timeout_s=200)
    assert found == [[True, 24], [True, 0], [True, 16]]


def partial(folder: str) -> str:
    from torch.distributed.tensor import DTensor, Partial

    model = nn.Module()
    model.w = nn.Parameter(DTensor.from_local(torch.ones(3), mesh_of(2), [Partial()]))
    try:
        save_general(folder, model)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "saved"


def test_sums_that_are_still_to_be_made_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(partial, 2, str(tmp_path / "run")):
        assert "w: placements must be Shard or Replicate, got P" in text
    assert list(tmp_path.iterdir()) == []


def test_a_blank_model_differs() -> None:
    model = build()
    assert differences(dict(blank(model).state_dict()), dict(build().state_dict()))
