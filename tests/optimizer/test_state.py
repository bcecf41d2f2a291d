"""Is state a rank's own, by name, without communication, and does a run go on from it exactly?"""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor
from torch_reference import Weights, assert_same_bits, exact_grads, same_bits, snapshot, weights

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    ParamAndGradBuffer,
    Range,
    RecordingCollectives,
    collectives_for,
    get_megatron_optimizer,
    parse_yaml_args,
)

SHAPES = ((7,), (13, 17), (), (0,), (257,), (64,))


def config(**settings: Any) -> OptimizerConfig:
    """Return settings that make several buckets."""
    return OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, "bucket_size": 100, **settings})


def train(model: Weights, optimizer: DistributedOptimizer, first: int, last: int) -> None:
    """Take steps; parameter 4 has no gradient in step 0, so steps differ between parameters."""
    for step in range(first, last):
        optimizer.zero_grad()
        grads = exact_grads(model, step, dist.get_rank() if dist.is_initialized() else 0)
        if step == 0:
            del grads["4.weight"]
        optimizer.scale_loss(model(grads)).backward()
        optimizer.step()
    optimizer.finish_param_sync()


def everything(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """Return copies of this rank's state, by name and slot."""
    return {
        f"{piece.name} {slot}": tensor.clone()
        for piece in optimizer.pieces
        for slot, tensor in piece.slots().items()
    }


def test_state_dict_makes_no_collective_call_and_knows_its_rank() -> None:
    kinds = run_ranks(_only_one_asks, 3)
    assert kinds == [[], [], []]


def _only_one_asks() -> list[str]:
    recorder = RecordingCollectives(collectives_for(None, torch.device("cpu")))
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(), collectives=recorder)
    train(model, optimizer, 0, 2)
    recorder.events.clear()
    if dist.get_rank() == 0:  # as written in many a script: it must not hang, nor lie
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert (state["rank"], state["world_size"]) == (0, 3)
        assert (state["dp_rank"], state["dp_size"]) == (0, 3)
        assert state["names"] == list(optimizer.steps)
        assert state["steps"] == {name: 2 - (name == "4.weight") for name in optimizer.steps}
        for piece in optimizer.pieces:
            entry = state["state"][piece.name]
            part = piece.range.param
            assert (entry["start"], entry["stop"]) == (part.start, part.end)
            assert entry["shape"] == list(piece.slot.param.shape)
            assert same_bits(entry["exp_avg"], piece.exp_avg)
            assert same_bits(entry["exp_avg_sq"], piece.exp_avg_sq)
    return [event.op for event in recorder.events]


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True, "loss_scale_window": 2}])
def test_a_run_goes_on_bit_for_bit_from_a_loaded_state_and_loading_touches_nothing_else(
    settings: dict[str, Any],
) -> None:
    run_ranks(_goes_on, 2, settings)


def _goes_on(settings: dict[str, Any]) -> None:
    own = config(**settings, initial_loss_scale=1024.0)
    dtype = own.params_dtype
    assert isinstance(dtype, torch.dtype)
    model = weights(SHAPES, dtype)
    optimizer = DistributedOptimizer(model, own)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 0, 3)
    scheduler.step()
    state, params = copy.deepcopy(optimizer.state_dict()), snapshot(model)
    train(model, optimizer, 3, 6)

    fresh_model = weights(SHAPES, dtype)
    fresh = DistributedOptimizer(fresh_model, own)
    before, random = snapshot(fresh_model), torch.get_rng_state()
    fresh.load_state_dict(state)
    assert_same_bits("parameters after loading", snapshot(fresh_model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert fresh.param_groups[0]["lr"] == 0.005
    assert fresh.steps == state["steps"]
    for name, value in params.items():
        with torch.no_grad():
            fresh_model.get_parameter(name).copy_(value)
    train(fresh_model, fresh, 3, 6)
    assert_same_bits("parameters", snapshot(fresh_model), snapshot(model))
    assert_same_bits("state", everything(fresh), everything(optimizer))
    assert fresh.steps == optimizer.steps

    cold_model = weights(SHAPES, dtype)
    cold = DistributedOptimizer(cold_model, own)
    for name, value in params.items():
        with torch.no_grad():
            cold_model.get_parameter(name).copy_(value)
    cold.reload_model_params()
    train(cold_model, cold, 3, 6)
    assert not same_bits(snapshot(cold_model)["1.weight"], snapshot(model)["1.weight"])


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to

    return change


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "rank": (_set("dp_rank", to=1), "dp_rank must be 0, got 1"),
    "world": (_set("dp_size", to=2), "dp_size must be 1, got 2"),
    "format": (_set("format", to="torch"), "must be a rank's state of format"),
    "version": (_set("format_version", to=2), "must be a rank's state of format"),
    "kind": (_set("kind", to="zero2"), "kind must be zero1, got 'zero2'"),
    "name": (_set("names", to=["other"]), "names: must have .*, got none"),
    "missing": (_without("state", "5.weight"), "state: must have 5.weight, got none"),
    "extra": (_set("state", "9.weight", to={}), "state: must not have 9.weight, got it"),
    "shape": (_set("state", "1.weight", "shape", to=[17, 13]), "1.weight: shape and range must"),
    "range": (_set("state", "1.weight", "start", to=1), "1.weight: shape and range must be"),
    "slot": (_without("state", "1.weight", "exp_avg"), "1.weight: must have exp_avg, got none"),
    "length": (
        _set("state", "1.weight", "exp_avg", to=torch.zeros(3)),
        r"1.weight \(exp_avg\): must be a tensor of \(221,\), got \(3,\)",
    ),
    "dtype": (
        _set("state", "5.weight", "exp_avg_sq", to=torch.zeros(64, dtype=torch.float64)),
        r"5.weight \(exp_avg_sq\): must be torch.float32, got torch.float64",
    ),
    "step": (_set("steps", "5.weight", to=-1), "5.weight: step must be a whole number, got -1"),
    "steps": (_without("steps", "5.weight"), "steps must be there for every parameter"),
    "groups": (_set("param_groups", to=[]), "a parameter group must have the members of ours"),
    "scaler": (_set("grad_scaler", to={"scale": 2.0}), "loss scale state: must have"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(what: str) -> None:
    own = config(fp16=True, initial_loss_scale=1024.0, loss_scale_window=3)
    model = weights(SHAPES, torch.float16)
    optimizer = DistributedOptimizer(model, own)
    train(model, optimizer, 0, 2)
    other_model = weights(SHAPES, torch.float16)
    other = DistributedOptimizer(other_model, own)
    other.param_groups[0]["lr"] = 0.5
    train(other_model, other, 3, 7)
    state = copy.deepcopy(other.state_dict())
    change, message = WRONG[what]
    change(state)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert_same_bits("state", _flat(after), _flat(before))
    for key in ("steps", "param_groups", "grad_scaler"):
        assert after[key] == before[key], key


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name} {slot}": value
        for name, entry in state["state"].items()
        for slot, value in entry.items()
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_size", [None, 1, 100])
def test_the_range_map_tells_where_each_element_lies(ranks: int, bucket_size: int | None) -> None:
    owners = run_ranks(_range_map, ranks, bucket_size)
    names = [f"{i}.weight" for i, shape in enumerate(SHAPES) if shape != (0,)]
    for name in names:
        found = sorted(element for owned in owners for element in owned.get(name, []))
        assert found == list(range(weights(SHAPES).get_parameter(name).numel())), name
    assert {name for owned in owners for name in owned} == set(names)


def _range_map(bucket_size: int | None) -> dict[str, list[int]]:
    """Check this rank's map by painting the buffer; return the elements that it owns, by name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = weights(SHAPES)
    optimizer = DistributedOptimizer(model, config(bucket_size=bucket_size))
    (buffer,) = optimizer.buffers
    buffer.param_data.copy_(torch.arange(buffer.numel))  # each parameter, a view, sees its places
    named = {param: name for name, param in model.named_parameters()}
    start_of = {number: int(bucket.param_data[0]) for number, bucket in enumerate(buffer.buckets)}
    found = {}
    for param, ranges in optimizer.build_model_gbuf_param_range_map().items():
        places = param.detach().reshape(-1).to(torch.int64)
        bucket = next(n for n, b in enumerate(buffer.buckets) if any(p is param for p in b.params))
        share = buffer.buckets[bucket].param_data.numel() // size
        first = start_of[bucket] + rank * share
        own = [i for i, place in enumerate(places.tolist()) if first <= place < first + share]
        low, high = int(places[own[0]]), int(places[own[-1]]) + 1
        assert ranges == {
            "gbuf_world": Range(low, high),
            "gbuf_world_in_bucket": Range(low - start_of[bucket], high - start_of[bucket]),
            "gbuf_local": Range(low - first, high - first),
            "param": Range(own[0], own[-1] + 1),
        }
        found[named[param]] = own
    return found


def test_the_promised_names_work_as_written(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.yaml"
    path.write_text("optimizer:\n  lr: 1.0e-3\n  clip_grad: 0.0\n")
    args = parse_yaml_args(path)
    assert isinstance(args, argparse.Namespace)
    args.use_distributed_optimizer = True
    args.overlap_param_gather = True
    args.overlap_param_gather_with_optimizer_step = True
    model = weights(SHAPES)
    optimizer = get_megatron_optimizer(OptimizerConfig.from_args(args), [model])
    assert isinstance(optimizer, DistributedOptimizer)
    buffer = optimizer.buffers[0]
    assert isinstance(buffer, ParamAndGradBuffer)
    for each in (buffer, buffer.buckets[0]):
        assert each.param_gather_handle is None
        each.start_param_sync()
        assert each.param_gather_handle is not None
        each.finish_param_sync()
        assert each.param_gather_handle is None
    args.use_distributed_optimizer = False
    args.overlap_param_gather = args.overlap_param_gather_with_optimizer_step = False
    assert type(get_megatron_optimizer(args, model)) is torch.optim.AdamW
