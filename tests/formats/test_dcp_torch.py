"""A directory that is written from any source, torch loads into a model and an optimizer.

torch 2.13 is the judge, with its own state dict APIs; the truths are those of the fixtures.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from ckpttools import api
from ckpttools.api import Target

FIXTURES = Path(__file__).parents[2] / "fixtures"
TIED = FIXTURES / "megatron" / "tied_tp1_pp1_dp2_fp32"
SLOTS = ("exp_avg", "exp_avg_sq")


class Named(nn.Module):
    """A model of parameters and buffers under given names."""

    def __init__(self, params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in (*params.items(), *buffers.items()):
            owner: nn.Module = self
            *parts, last = name.split(".")
            for part in parts:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            if name in params:
                owner.register_parameter(last, nn.Parameter(torch.zeros_like(tensor)))
            else:
                owner.register_buffer(last, torch.zeros_like(tensor))


def load(
    root: Path, model: nn.Module, optimizer: Any, names: tuple[str, str], **options: Any
) -> None:
    """Load as torch's tutorial does, without gathering: one process."""
    told = StateDictOptions(**options)
    weights, state = get_state_dict(model, optimizer, options=told)
    both = dict(zip(names, (weights, state), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.load(both, checkpoint_id=str(root))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=both[names[0]],
        optim_state_dict=both[names[1]],
        options=told,
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_of_torchs_is_loaded_again_after_it_went_to_other_ranks(
    world: int, tmp_path: Path
) -> None:
    truth = load_file(FIXTURES / "dcp" / "truth_fp32.safetensors")
    weights = {k.removeprefix("model."): t for k, t in truth.items() if k.startswith("model.")}
    count = {"steps_seen": weights.pop("steps_seen")}
    api.reshard(FIXTURES / "dcp" / "fsdp2_ws4", tmp_path / "out", target=Target(world=world))
    model = Named(weights, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    load(tmp_path / "out", model, optimizer, ("model", "optim"))
    for name, tensor in model.state_dict().items():
        assert same(tensor, truth[f"model.{name}"]), name
    for name, param in model.named_parameters():
        for slot in (*SLOTS, "step"):
            assert same(optimizer.state[param][slot], truth[f"optim.state.{name}.{slot}"]), name
    assert optimizer.param_groups[0]["lr"] == 0.001
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("via", [None, "zero1", "sharded", "safetensors"])
def test_a_megatron_checkpoint_is_loaded_by_torchs_adamw(via: str | None, tmp_path: Path) -> None:
    truth = load_file(TIED / "truth.safetensors")
    source = TIED / "torch"
    if via == "safetensors":
        api.gather(source, tmp_path / "there")
    elif via is not None:
        api.reshard(source, tmp_path / "there", to=via)
    source = source if via is None else tmp_path / "there"
    report = api.reshard(source, tmp_path / "out", to="dcp", target=Target(world=2))
    assert not any("step" in line or "param_groups" in line for line in report.lost)
    weights = {k.removeprefix("model/"): t for k, t in truth.items() if k.startswith("model/")}
    held = api.read_manifest(tmp_path / "out")
    rows = {spec.name: spec.stored_shape for spec in held.tensors if spec.slot == "weight"}
    weights = {name: weights[name][: shape[0]] for name, shape in rows.items()}
    model = Named(weights, {})
    groups = held.objects["param_groups"]
    assert isinstance(groups, tuple)
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [params[n] for n in g.members]} for g in groups])
    load(tmp_path / "out", model, optimizer, ("model", "optimizer"), strict=True)
    for name, param in params.items():
        assert same(param, weights[name]), name
        for slot in SLOTS:
            whole = truth[f"{slot}/{name}"][: rows[name][0]]
            assert same(optimizer.state[param][slot], whole.to(torch.float32)), (name, slot)
        assert optimizer.state[param]["step"].item() == 3
    assert {round(group["lr"], 4) for group in optimizer.param_groups} == {0.01}
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]


def test_torchs_own_converter_makes_the_nested_state_of_it(tmp_path: Path) -> None:
    api.reshard(FIXTURES / "dcp" / "bf16_ws2", tmp_path / "out", target=Target(world=3))
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    truth = load_file(FIXTURES / "dcp" / "truth_bf16.safetensors")
    assert list(state) == ["model", "optim", "train"]
    assert state["train"] == {"step": 2, "note": "fixture", "lr": [0.001, 0.002]}
    assert state["optim"]["param_groups"][0]["params"][:2] == ["embed.weight", "up.weight"]
    for name, tensor in state["model"].items():
        assert same(tensor, truth[f"model.{name}"])
    for name, entry in state["optim"]["state"].items():
        for slot, tensor in entry.items():
            assert same(tensor, truth[f"optim.state.{name}.{slot}"])
