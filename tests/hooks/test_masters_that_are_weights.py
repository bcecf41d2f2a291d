"""What torch's AdamW trained in float32 goes straight to Megatron, whose masters are copies.

The files are held against those that the same state gives by way of the sharded optimizer's form,
and against the original's, which the run began with.
"""

from __future__ import annotations

from pathlib import Path

import oracle_megatron as megatron
import pytest
import torch
from general_models import set_grads
from hooks.test_general_across import BF16, FP32, Named, adamw

from ckpttools import api
from ckpttools.errors import UsageError
from ckpttools.hooks.general import load_general, save_general


def save(place: Path, folder: Path, dtype: torch.dtype, *, steps: int = 0) -> Path:
    """Go on from a Megatron checkpoint in AdamW, and save that."""
    model = Named(place, dtype)
    optimizer = adamw(model)
    carry = api.open_checkpoint(place).manifest.objects
    if dtype == torch.float32:
        carry = dict(load_general(place, model, optimizer).objects)
    for step in range(steps):
        set_grads(model, step)
        optimizer.step()
    return save_general(folder, model, optimizer, iteration=3 + steps, carry=carry)


def differences(a: Path, b: Path) -> list[str]:
    return [
        line
        for line in megatron.compare_files(a, b, ignore_args={"save"})
        if not line.endswith(".rng_state: only in the second")
    ]


@pytest.mark.parametrize("steps", [0, 2])
def test_masters_are_written_from_the_weights_as_by_way_of_zero1(
    steps: int, tmp_path: Path
) -> None:
    saved = save(FP32, tmp_path / "saved", torch.float32, steps=steps)
    assert {spec.slot for spec in api.read_manifest(saved).tensors} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
    }
    report = api.reshard(saved, tmp_path / "straight", to="megatron")
    api.reshard(saved, tmp_path / "zero1", to="zero1", target=api.Target(tp=2, dp=1))
    api.reshard(tmp_path / "zero1", tmp_path / "around", to="megatron")
    assert differences(tmp_path / "straight", tmp_path / "around") == []
    assert any("are their own masters" in line for line in report.findings), report.findings
    found = api.verify(tmp_path / "straight", against=saved)
    assert (found.damage, found.differences) == ((), ())


@pytest.mark.parametrize("to", ["nemo", "nemo-legacy"])
def test_nemo_gets_them_too(to: str, tmp_path: Path) -> None:
    saved = save(FP32, tmp_path / "saved", torch.float32, steps=2)
    target = api.Target(tp=2, dp=2, masters="stored")
    report = api.reshard(saved, tmp_path / "straight", to=to, target=target)
    api.reshard(saved, tmp_path / "zero1", to="zero1", target=api.Target(tp=2, dp=1))
    api.reshard(tmp_path / "zero1", tmp_path / "around", to=to, target=target)
    assert any("are their own masters" in line for line in report.findings), report.findings
    assert api.digest(tmp_path / "straight") == api.digest(tmp_path / "around")
    found = api.verify(tmp_path / "straight", against=saved)
    assert found.damage == ()
    # The distributed form has the names of fused norms.
    odd = [line for line in found.differences if "norm" not in line or to == "nemo-legacy"]
    assert odd == []


def test_a_run_without_masters_is_told_what_it_lacks_and_how_to_go_on(tmp_path: Path) -> None:
    saved = save(BF16, tmp_path / "saved", torch.bfloat16, steps=1)
    with pytest.raises(UsageError, match=r"got none of .* \(fp32_param\)") as caught:
        api.reshard(saved, tmp_path / "out", to="megatron")
    assert "takes the weights alone" in str(caught.value.hint)
    report = api.reshard(
        saved, tmp_path / "out", to="megatron", selection=api.Selection(include=("weight",))
    )
    assert report is not None
