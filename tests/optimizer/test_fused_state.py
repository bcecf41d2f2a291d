"""A rank's own state goes out and in again, in every form; whole state is that of torch."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch_reference import (
    Weights,
    assert_same_bits,
    exact_grads,
    same_bits,
    set_mean,
    snapshot,
    weights,
)

from ckpttools.errors import OptimizerError
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.layout.sharded_pieces import flat_pieces
from ckpttools.optimizer import DistributedFusedAdam, DistributedOptimizer, OptimizerConfig

BF16 = torch.bfloat16
CAP = 600 * 4 / 2**20
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bucket_cap_mb": CAP}
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "stored": (BF16, {}),
    "remainder": (
        BF16,
        {"store_params": False, "store_param_remainders": True, "param_sync_dtype": BF16},
    ),
    "weight": (BF16, {"store_params": False}),
    "scaled": (
        BF16,
        {
            "with_scaled_states": True,
            "dtype": torch.float16,
            "grad_sync_dtype": torch.float32,
        },
    ),
}


def build(form: str) -> tuple[Weights, DistributedFusedAdam]:
    """Return a fresh model and optimizer."""
    dtype, options = FORMS[form]
    model = weights(dtype=dtype)
    return model, DistributedFusedAdam(model, **SETTINGS, **options)


def train(model: Weights, optimizer: DistributedFusedAdam, first: int, last: int) -> None:
    """Take some steps."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        optimizer.zero_grad()
        model(exact_grads(model, step, rank)).backward()
        optimizer.step()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_from_each_rank_s_own_state_to_the_same_bits(ranks: int) -> None:
    run_ranks(_round_trip, ranks, timeout_s=120)


def _round_trip() -> None:
    for form in FORMS:
        model, optimizer = build(form)
        train(model, optimizer, 0, 2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        saved = snapshot(model)
        train(model, optimizer, 2, 4)

        other, again = build(form)
        again.param_groups[0]["lr"] = 0.5
        other.load_state_dict(saved)
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
        assert set(again.steps.values()) == {2}
        train(other, again, 2, 4)
        assert_same_bits(form, snapshot(other), snapshot(model))
        for one, two in zip(optimizer.shards, again.shards, strict=True):
            assert_same_bits(form, one.slots(), two.slots())


def test_state_tells_whose_it_is_and_makes_no_copy() -> None:
    model, optimizer = build("remainder")
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    assert (state["kind"], state["rank"], state["world_size"]) == ("zero2", 0, 1)
    parts = state["state"]["8.weight"]
    assert [(part["start"], part["stop"]) for part in parts] == [(0, 576), (576, 1009)]
    assert set(parts[0]) == {
        "shape", "start", "stop", "weight", "param_remainder", "exp_avg", "exp_avg_sq"
    }  # fmt: skip
    pointers = {
        t.untyped_storage().data_ptr() for s in optimizer.shards for t in s.slots().values()
    }
    assert parts[1]["exp_avg"].untyped_storage().data_ptr() in pointers
    fragments = optimizer.state[model.get_submodule("8").weight]["fragments"]
    assert [fragment["exp_avg"].numel() for fragment in fragments] == [576, 433]


def test_state_that_is_not_this_rank_s_is_refused_and_nothing_is_changed() -> None:
    model, optimizer = build("remainder")
    train(model, optimizer, 0, 2)
    state = optimizer.state_dict()
    other, again = build("remainder")
    with pytest.raises(OptimizerError, match="the model must have the weights of the state, which"):
        again.load_state_dict(state)
    other.load_state_dict(snapshot(model))
    broken: list[tuple[dict[str, Any], str]] = [
        ({**state, "kind": "zero1"}, "kind must be zero2, got 'zero1'"),
        ({**state, "dp_size": 2}, "dp_size must be 1, got 2"),
        (
            {**state, "state": {**state["state"], "8.weight": state["state"]["8.weight"][:1]}},
            "8.weight: must have 2 parts, got 1",
        ),
        (
            {**state, "state": {**state["state"], "8.weight": [{}, {}]}},
            "8.weight: shape and range must be",
        ),
    ]
    for damaged, message in broken:
        with pytest.raises(OptimizerError, match=message):
            again.load_state_dict(damaged)
    assert not any(piece.values("exp_avg").any() for piece in again.pieces)
    assert set(again.steps.values()) == {0}
    _, scaled = build("scaled")
    with pytest.raises(OptimizerError, match="must have exp_avg_scale, got none"):
        scaled.load_state_dict(state)
    zero1 = DistributedOptimizer(weights(), OptimizerConfig(lr=0.01))
    with pytest.raises(OptimizerError, match="kind must be zero2, got 'zero1'"):
        again.load_state_dict(zero1.state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchs_own_state_goes_in_and_out_and_training_goes_on_alike(ranks: int) -> None:
    run_ranks(_torch_form, ranks)


def _torch_form() -> None:
    ranks = dist.get_world_size()
    alone = weights()
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1, fused=True)

    def step_alone(step: int) -> None:
        set_mean(alone, [exact_grads(alone, step, rank) for rank in range(ranks)])
        reference.step()

    for step in range(2):
        step_alone(step)
    model, optimizer = build("fp32")
    with torch.no_grad():
        for name, param in alone.named_parameters():
            model.get_parameter(name).copy_(param)
    optimizer.load_torch_state_dict(reference.state_dict())
    train(model, optimizer, 2, 3)
    step_alone(2)
    assert_same_bits("torch's state", snapshot(model), snapshot(alone))
    gathered = optimizer.gather_torch_state_dict()
    whole = optimizer.sharded_param_state_dp_zero()
    if dist.get_rank():
        assert gathered is None
        assert whole is None
        return
    assert gathered is not None
    assert whole is not None
    for index, state in reference.state_dict()["state"].items():
        for slot, tensor in state.items():
            assert same_bits(gathered["state"][index][slot].float(), tensor.float()), slot
    fresh = torch.optim.AdamW(weights().parameters(), lr=9.0, fused=True)
    fresh.load_state_dict(gathered)
    assert fresh.param_groups[0]["lr"] == 0.01
    (tensors,) = whole[0].values()
    (layout,) = (buffer.layout for buffer in optimizer.buffers)
    for name, start in zip(model.state_dict(), layout.file_starts, strict=True):
        param = alone.get_parameter(name).detach().reshape(-1)
        assert same_bits(tensors["param"][start : start + param.numel()], param), name


@pytest.mark.parametrize("form", ["stored", "remainder", "scaled", "weight"])
def test_torchs_own_state_goes_into_every_form(form: str) -> None:
    model, optimizer = build(form)
    train(model, optimizer, 0, 2)
    gathered = optimizer.gather_torch_state_dict()
    assert gathered is not None
    other, again = build(form)
    other.load_state_dict(snapshot(model))
    again.load_torch_state_dict(gathered)
    for one, two in zip(optimizer.pieces, again.pieces, strict=True):
        for slot in one.logical_slots():
            values = two.values(slot)
            if form == "scaled":  # the scale is found anew: one step of the 16 bits
                torch.testing.assert_close(
                    values, one.values(slot), rtol=0, atol=float(values.abs().max()) * 2**-10
                )
            else:
                assert same_bits(values, one.values(slot)), (one.name, slot)
    assert_same_bits("weights", snapshot(other), snapshot(model))


def test_every_rank_describes_the_run_alike_and_owns_what_the_description_says() -> None:
    layouts = run_ranks(_described, 3)
    assert layouts[0] == layouts[1] == layouts[2]
    assert from_document(to_document(layouts[0]), where="here") == layouts[0]


def _described() -> ShardedLayout:
    model, optimizer = build("scaled")
    params = list(model.parameters())
    optimizer.init_params_bucket(params[2:5])
    layout = optimizer.describe()
    assert layout.kind == "zero2"
    found = flat_pieces(layout, dist.get_rank())
    assert len(found) == len(optimizer.shards)
    for piece, shard in zip(found, optimizer.shards, strict=True):
        assert piece.numel == shard.numel
        assert shard.bucket.local_params.numel() == piece.numel
        mine = [(p.name, p.range.param.start, p.range.param.end) for p in shard.pieces]
        theirs = [(layout.params[s.param].name, s.start, s.stop) for s in piece.slices]
        assert mine == theirs
        for part, at in zip(shard.pieces, piece.slices, strict=True):
            stop = at.at + at.stop - at.start
            assert same_bits(shard.bucket.local_params[at.at : stop], part.weight)
    return layout
