"""Checkpoints of other tools and of our own optimizers come into torch's, and the other way.

What is loaded is held against the tensors of the consolidated form, which other code wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from general_models import blank, build, differences, state_of, train
from gloo_ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from ckpttools import api
from ckpttools.errors import MismatchError
from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.hooks.general import load_general, save_general
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
BF16 = FIXTURES / "gqa_tp2_pp1_dp2" / "torch"
FP32 = FIXTURES / "tied_tp2_pp1_dp1_fp32" / "torch"


class Named(nn.Module):
    """A model of the names and shapes of a checkpoint, all zero."""

    def __init__(self, place: Path, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        for spec in api.read_manifest(place).tensors:
            if spec.slot == "weight":
                *path, last = spec.name.split(".")
                module: nn.Module = self
                for name in path:
                    if name not in module._modules:
                        module.add_module(name, nn.Module())
                    module = module.get_submodule(name)
                kind = dtype or getattr(torch, spec.dtype.name)
                module.register_parameter(last, nn.Parameter(torch.zeros(spec.shape, dtype=kind)))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW with the groups that Megatron makes."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.7},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.3},
        ]
    )


def gathered(place: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by ``name`` or ``state.name.slot``."""
    api.gather(place, folder)
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def check(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, torch.Tensor]
) -> None:
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[f"state.{name}.fp32_param"])
        for key in ("exp_avg", "exp_avg_sq"):
            got = optimizer.state[param][key]
            assert got.any(), (name, key)
            assert torch.equal(got, expected[f"state.{name}.{key}"])
        assert optimizer.state[param]["step"].dtype == torch.float32


@pytest.mark.parametrize("place", [BF16, FP32], ids=["bf16", "fp32"])
def test_a_megatron_checkpoint_goes_on_in_torch_s_adamw(place: Path, tmp_path: Path) -> None:
    model = Named(place, torch.float32)
    optimizer = adamw(model)
    got = load_general(place, model, optimizer)
    check(model, optimizer, gathered(place, tmp_path / "whole"))
    assert got.unused == ()
    masters = [
        note for note in got.notes if "the float32 weight is the checkpoint's master" in note
    ]
    assert len(masters) == (len(list(model.parameters())) if place == BF16 else 0)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {api.inspect(place)["step"]}
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert not decays & {0.7, 0.3}
    save_general(tmp_path / "run", model, optimizer, carry=got.objects)
    fresh = Named(place, torch.float32)
    other = adamw(fresh)
    load_general(tmp_path / "run", fresh, other)
    check(fresh, other, gathered(place, tmp_path / "again"))
    assert api.read_manifest(tmp_path / "run").objects["iteration"] == got.objects["iteration"]


def test_weights_alone_of_a_megatron_checkpoint_keep_their_dtype(tmp_path: Path) -> None:
    model = Named(BF16)
    load_general(BF16, model)
    expected = gathered(BF16, tmp_path / "whole")
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, expected[name])
    with pytest.raises(MismatchError, match=r"exp_avg\): dtype must be bfloat16 as in this run"):
        load_general(BF16, model, adamw(model), allow=("*:fp32_param",))


def megatron_on_ranks(place: str) -> list[Any]:
    """Load into FSDP2, and say what differs from a plain model, and what was read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = Named(Path(place), torch.float32)
    optimizer = adamw(alone)
    load_general(place, alone, optimizer)
    model = Named(Path(place), torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    mine = adamw(model)
    got = load_general(place, model, mine)
    held = sum(param.to_local().numel() for param in model.parameters())  # type: ignore[attr-defined]
    return [*differences(state_of(model, mine), state_of(alone, optimizer)), got.read_bytes / held]


def test_a_megatron_checkpoint_comes_into_fsdp_each_rank_its_share() -> None:
    for (per_element,) in run_ranks(megatron_on_ranks, 3, str(BF16), timeout_s=200):
        assert per_element == 12  # master and both moments


def ours(model: nn.Module) -> DistributedOptimizer:
    return DistributedOptimizer(model, OptimizerConfig(lr=0.5, clip_grad=0.0, weight_decay=0.1))


def test_a_save_of_torch_s_adamw_comes_into_our_optimizer_and_back(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    train(model, optimizer, 0, 3)
    save_general(tmp_path / "general", model, optimizer)
    mine = build()
    sharded = ours(blank(mine))
    load_sharded(tmp_path / "general", sharded)
    assert set(sharded.steps.values()) == {3}
    assert sharded.param_groups[0]["lr"] == 0.02
    save_sharded(tmp_path / "native", sharded)
    assert api.detect_format(tmp_path / "native").name == "zero1"
    fresh = build()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.9, weight_decay=0.9)
    load_general(tmp_path / "native", blank(fresh), other)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    coupled = build()
    with pytest.raises(MismatchError, match="decoupled_weight_decay"):
        load_general(tmp_path / "native", coupled, torch.optim.Adam(coupled.parameters()))


def test_a_run_that_began_with_megatron_s_files_goes_back_to_them(tmp_path: Path) -> None:
    model = Named(FP32, torch.float32)
    optimizer = adamw(model)
    got = load_general(FP32, model, optimizer)
    save_general(tmp_path / "run", model, optimizer, carry=got.objects)
    api.reshard(tmp_path / "run", tmp_path / "zero1", to="zero1")
    assert api.inspect(tmp_path / "zero1")["topology"] == {"tp": 2, "pp": 1, "dp": 1}
    api.reshard(tmp_path / "zero1", tmp_path / "again", to="megatron")
    assert api.diff(tmp_path / "again", FP32).equal


def test_a_layout_that_tells_of_another_model_is_let_go(tmp_path: Path) -> None:
    model = Named(BF16, torch.float32)  # weights of another dtype than the layout's
    got = load_general(BF16, model)
    save_general(tmp_path / "run", model, carry=got.objects)
    assert "sharded_layout" in got.objects
    assert "sharded_layout" not in api.read_manifest(tmp_path / "run").objects
