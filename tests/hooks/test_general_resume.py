"""A run with any optimizer of torch goes on from its save as if it had never stopped.

Compared are weights, buffers, every entry of the optimizer's state with its kind and dtype, and the
settings of groups, bit by bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from general_models import OPTIMIZERS, blank, build, differences, set_grads, state_of, train
from gloo_ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpttools import api
from ckpttools.hooks.general import load_general, save_general
from ckpttools.manifest import WEIGHT

SAVED_AT, ENDS_AT = 3, 6


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return model, OPTIMIZERS[name](model.parameters())


@pytest.mark.parametrize("trained", [True, False], ids=["in a run that stepped", "in a new run"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_goes_on_as_if_it_had_never_stopped(
    name: str, trained: bool, tmp_path: Path
) -> None:
    model, optimizer = make(name)
    train(model, optimizer, 0, SAVED_AT)
    save_general(tmp_path / "run", model, optimizer, iteration=SAVED_AT)
    at_save = state_of(model, optimizer)
    fresh, other = make(name)
    if trained:  # its state is there, and of other steps
        train(fresh, other, 10, 15)
    blank(fresh)
    assert differences(state_of(fresh, other), at_save)
    got = load_general(tmp_path / "run", fresh, other)
    assert (got.unused, got.notes, got.format) == ((), (), "sharded")
    assert differences(state_of(fresh, other), at_save) == []
    train(model, optimizer, SAVED_AT, ENDS_AT)
    train(fresh, other, SAVED_AT, ENDS_AT)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []


def test_a_cold_start_ends_elsewhere() -> None:
    model, optimizer = make("adamw")
    train(model, optimizer, 0, ENDS_AT)
    cold, other = make("adamw")
    train(cold, other, SAVED_AT, ENDS_AT)
    assert differences(state_of(cold, other), state_of(model, optimizer))


def test_a_load_draws_no_random_numbers_and_takes_no_step(tmp_path: Path) -> None:
    model, optimizer = make("adamw")
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    fresh, other = make("adamw")
    stepped: list[object] = []
    other.register_step_pre_hook(lambda *_: stepped.append(1))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    load_general(tmp_path / "run", fresh, other)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert stepped == []


def test_fused_and_capturable_forms_keep_their_own_steps(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    train(model, optimizer, 0, SAVED_AT)
    save_general(tmp_path / "run", model, optimizer)
    fresh = blank(build())
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5, fused=True)
    load_general(tmp_path / "run", fresh, other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    plain = blank(build())
    unfused = torch.optim.AdamW(plain.parameters(), lr=0.5)
    load_general(tmp_path / "run", plain, unfused)
    assert unfused.param_groups[0]["fused"] is None  # how a step is computed is the run's own
    assert unfused.param_groups[0]["lr"] == 0.02
    train(plain, unfused, 3, 4)


def test_a_learning_rate_in_a_tensor_stays_in_that_tensor(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    train(model, optimizer, 0, 1)
    save_general(tmp_path / "run", model, optimizer)
    fresh = build()
    rate = torch.tensor(0.5)
    other = torch.optim.AdamW(fresh.parameters(), lr=rate)
    load_general(tmp_path / "run", fresh, other)
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_live_state_is_filled_where_it_is(tmp_path: Path) -> None:
    model, optimizer = make("adamw")
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    fresh, other = make("adamw")
    train(fresh, other, 7, 9)
    first = next(fresh.parameters())
    places = [other.state[first][key].data_ptr() for key in ("step", "exp_avg", "exp_avg_sq")]
    load_general(tmp_path / "run", fresh, other)
    assert places == [other.state[first][k].data_ptr() for k in ("step", "exp_avg", "exp_avg_sq")]


def test_channels_last_weights_and_state_come_back_in_their_order(tmp_path: Path) -> None:
    def conv() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = conv()
    train(model, optimizer, 0, 2)
    save_general(tmp_path / "run", model, optimizer)
    fresh, other = conv()
    blank(fresh)
    load_general(tmp_path / "run", fresh, other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    kept = other.state[next(fresh.parameters())]["exp_avg"]
    assert kept.is_contiguous(memory_format=torch.channels_last)


class Norms(nn.Module):
    """Buffers that are saved and one that isn't, a bf16 and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.low = nn.Parameter(torch.linspace(-1, 1, 11).bfloat16())
        self.complex = nn.Parameter(torch.full((3,), 1 - 2j))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("scalar", torch.tensor(17))


def test_buffers_and_every_dtype_come_back_and_what_is_not_persistent_stays(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Norms()
    with torch.no_grad():
        model.norm(torch.randn(4, 7))
    save_general(tmp_path / "run", model)
    names = {spec.name for spec in api.read_manifest(tmp_path / "run").tensors}
    assert names == set(model.state_dict())
    assert {spec.slot for spec in api.read_manifest(tmp_path / "run").tensors} == {WEIGHT}
    fresh = blank(Norms())
    with torch.no_grad():
        fresh.get_buffer("cache").fill_(5)
    load_general(tmp_path / "run", fresh)
    odd = differences(dict(fresh.state_dict()), dict(model.state_dict()))
    assert odd == []
    assert fresh.get_buffer("cache").tolist() == [5, 5]


def test_wrappers_add_nothing_to_names(tmp_path: Path) -> None:
    model = build()
    inner = torch.compile(checkpoint_wrapper(model), backend="eager")
    assert isinstance(inner, nn.Module)
    save_general(tmp_path / "run", nn.DataParallel(inner))
    names = {spec.name for spec in api.read_manifest(tmp_path / "run").tensors}
    assert names == {name for name, _ in model.named_parameters()}
    load_general(tmp_path / "run", blank(build()))


# ---- several ranks -----------------------------------------------------------------------------


def replicated(folder: str, names: list[str]) -> list[Any]:
    """Train under DistributedDataParallel, save, and load into a new run; return what differs."""
    found: list[Any] = []
    for name in names:
        model, optimizer = make(name)
        wrapped = nn.parallel.DistributedDataParallel(model)
        train(model, optimizer, 0, SAVED_AT)
        place = Path(folder) / name
        save_general(place, wrapped, optimizer, iteration=SAVED_AT)
        fresh, other = make(name)
        load_general(place, nn.parallel.DistributedDataParallel(blank(fresh)), other)
        train(model, optimizer, SAVED_AT, ENDS_AT)
        train(fresh, other, SAVED_AT, ENDS_AT)
        found += differences(state_of(fresh, other), state_of(model, optimizer))
    return found


def test_replicas_are_written_once_and_evenly_and_go_to_any_number_of_ranks(tmp_path: Path) -> None:
    names = ["adamw", "sgd", "adafactor"]
    assert run_ranks(replicated, 3, str(tmp_path), names) == [[], [], []]
    for name in names:
        folder = tmp_path / name
        assert len(list(folder.glob("rank-*.safetensors"))) == 3
        manifest = api.read_manifest(folder)
        assert all(chunk.replica_id == 0 for chunk in manifest.chunks)
        fresh, other = make(name)
        load_general(folder, blank(fresh), other)
        alone, optimizer = make(name)
        train(alone, optimizer, 0, SAVED_AT)
        assert differences(state_of(fresh, other), state_of(alone, optimizer)) == []


def evenly(folder: str) -> int:
    """Save a model of which one tensor has nearly all bytes."""
    model = nn.Sequential(nn.Linear(301, 997, bias=False), nn.Linear(997, 2))
    save_general(folder, model)
    return 0


def test_one_large_tensor_is_shared_out_by_rows(tmp_path: Path) -> None:
    run_ranks(evenly, 3, str(tmp_path / "run"))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "run").glob("rank-*"))]
    assert max(sizes) - min(sizes) < 20_000
    assert sum(sizes) > 301 * 997 * 4


def own_buffers(folder: str) -> list[float]:
    """Save batch statistics that differ from rank to rank, as training leaves them."""
    import torch.distributed as dist

    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.get_buffer("running_mean").fill_(float(dist.get_rank() + 7))
    save_general(folder, model)
    blank(model)
    load_general(folder, model)
    return [float(value) for value in model.get_buffer("running_mean")]


def test_of_buffers_that_differ_the_first_rank_s_count(tmp_path: Path) -> None:
    assert run_ranks(own_buffers, 2, str(tmp_path / "run")) == [[7.0] * 3, [7.0] * 3]


def stages(folder: str) -> list[str]:
    """Two pipeline stages of plain modules, each with a layer of its own name."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def stage() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = nn.ModuleDict({f"layer{rank}": nn.Linear(5, 4 + rank)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = stage()
    train(model, optimizer, 0, 2)
    save_general(folder, model, optimizer)
    fresh, other = stage()
    load_general(folder, blank(fresh), other)
    return differences(state_of(fresh, other), state_of(model, optimizer))


def test_pipeline_stages_save_and_load_their_own_layers(tmp_path: Path) -> None:
    assert run_ranks(stages, 2, str(tmp_path / "run")) == [[], []]
    (group,) = api.read_manifest(tmp_path / "run").objects["param_groups"]  # type: ignore[misc]
    members = {f"layer{rank}.{kind}" for rank in range(2) for kind in ("weight", "bias")}
    assert set(group.members) == members


def test_saved_gradients_are_of_no_matter(tmp_path: Path) -> None:
    model, optimizer = make("adamw")
    train(model, optimizer, 0, 1)
    save_general(tmp_path / "a", model, optimizer)
    set_grads(model, 40)
    save_general(tmp_path / "b", model, optimizer)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
