"""What one call takes: pieces that belong together, settings in range, a usable divisor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.optimizer.adam import AdamSettings, Pieces, grad_scale_tensor, scratch_views

SETTINGS = AdamSettings(lr=3e-3, beta1=0.85, beta2=0.97, eps=1e-7, weight_decay=0.3)


def test_pieces_with_16_bit_gradients_make_their_own_scratch() -> None:
    half = torch.ones(5, dtype=torch.bfloat16)
    pieces = Pieces([torch.zeros(5)], [half], [torch.zeros(5)], [torch.zeros(5)])
    assert [(t.dtype, t.numel()) for t in pieces.fp32_grads] == [(torch.float32, 5)]
    full = Pieces([torch.zeros(5)], [half.float()], [torch.zeros(5)], [torch.zeros(5)])
    assert full.fp32_grads is full.grads


def bad_pieces() -> Iterator[tuple[dict[str, list[Tensor]], str]]:
    zeros = torch.zeros(4)
    yield {"grads": []}, "grads: must be 1 tensors for 1 parameter pieces, got 0"
    yield {"exp_avgs": [zeros] * 2}, "exp_avgs: must be 1 tensors for 1 parameter pieces, got 2"
    yield {"scratch": [zeros]}, "scratch: must be 0 tensors for 1 parameter pieces, got 1"
    yield {"grads": [zeros.double()]}, "grads: must be all float32, .* got torch.float64"
    yield {"params": [zeros.half()]}, r"params\[0\]: must be torch.float32, got torch.float16"
    yield {"exp_avg_sqs": [torch.zeros(5)]}, r"exp_avg_sqs\[0\]: must have 4 elements on cpu, got 5"
    yield {"grads": [torch.zeros(2, 2)]}, r"grads\[0\]: must be 1-D and contiguous, .*\(2, 2\)"
    yield {"params": [torch.zeros(8)[::2]]}, r"params\[0\]: must be 1-D and contiguous, .*\(2,\)"
    meta = torch.zeros(4, device="meta")
    yield {"grads": [meta]}, r"grads\[0\]: must have 4 elements on cpu, got 4 on meta"
    yield (
        {"grads": [zeros.half()], "scratch": [zeros, zeros]},
        "scratch: must be 1 tensors for 1 parameter pieces, got 2",
    )


@pytest.mark.parametrize(("changed", "message"), list(bad_pieces()))
def test_tensors_that_are_no_pieces_are_refused_by_list_and_index(
    changed: dict[str, list[Tensor]], message: str
) -> None:
    lists = {name: [torch.zeros(4)] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
    with pytest.raises(OptimizerError, match=message):
        Pieces(**{**lists, **changed})


def test_gradients_of_two_dtypes_in_one_call_are_refused() -> None:
    four = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(OptimizerError, match="got torch.bfloat16, torch.float32"):
        Pieces(four, [torch.zeros(4), torch.zeros(4).bfloat16()], four, four)


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (torch.zeros(6), r"\(6,\) of torch.float32"),
        (torch.zeros(8).half(), r"\(8,\) of torch.float16"),
        (torch.zeros(2, 4), r"\(2, 4\) of torch.float32"),
    ],
)
def test_scratch_memory_must_hold_all_gradients(memory: Tensor, found: str) -> None:
    grads = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(OptimizerError, match=f"at least 7 elements, got shape {found}"):
        scratch_views(grads, memory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": -1e-3}, "lr: must be a number at least 0 and finite, got -0.001"),
        ({"lr": float("nan")}, "lr: must be a number at least 0 and finite, got nan"),
        ({"eps": float("inf")}, "eps: must be a number at least 0 and finite, got inf"),
        ({"beta1": 1.0}, "beta1: must be a number at least 0 and below 1, got 1.0"),
        ({"weight_decay": None}, "weight_decay: must be a number .* got None"),
        ({"lr": torch.tensor(0.1)}, r"lr: must be a number .* got tensor\(0.1"),
    ],
)
def test_settings_out_of_range_and_tensors_are_refused(
    changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **changed)  # type: ignore[arg-type]


def test_settings_are_read_from_a_torch_parameter_group() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW(
        [param], lr=torch.tensor(0.5), betas=(0.7, 0.8), eps=1e-5, weight_decay=0.25
    )
    settings = AdamSettings.from_group(
        optimizer.param_groups[0], decoupled=False, bias_correction=False
    )
    assert settings == AdamSettings(0.5, 0.7, 0.8, 1e-5, 0.25, False, False)
    assert type(settings.lr) is float


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": None}, "parameter group: lr must be a number, got None"),
        ({"betas": (0.9,)}, r"parameter group: betas must be two numbers, got \(0.9,\)"),
        ({"betas": (0.9, 1.5)}, "beta2: must be a number at least 0 and below 1, got 1.5"),
    ],
)
def test_a_parameter_group_that_lacks_a_setting_is_refused(
    changed: dict[str, object], message: str
) -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, **changed}
    with pytest.raises(ConfigError, match=message):
        AdamSettings.from_group(group, decoupled=True, bias_correction=True)


def test_a_divisor_becomes_a_0_d_fp32_tensor() -> None:
    scale = grad_scale_tensor(0.1)
    assert scale is not None
    assert (scale.dtype, scale.dim(), scale.item()) == (torch.float32, 0, 13421773 / 2**27)
    from_tensor = grad_scale_tensor(torch.tensor([2.5], dtype=torch.float64, requires_grad=True))
    assert from_tensor is not None
    assert (from_tensor.dtype, from_tensor.shape, from_tensor.requires_grad) == (
        torch.float32,
        (),
        False,
    )
    assert from_tensor.item() == 2.5


def test_dividing_by_the_number_one_is_left_out() -> None:
    assert grad_scale_tensor(1.0) is None
    assert grad_scale_tensor(torch.tensor(1.0)) is not None


@pytest.mark.parametrize(
    ("divisor", "message"),
    [
        (0.0, "must be positive and finite, got 0.0"),
        (-2.0, "must be positive and finite, got -2.0"),
        (float("nan"), "must be positive and finite, got nan"),
        (1e-50, "must be positive and finite in fp32, got 1e-50"),
        (1e39, "must be positive and finite in fp32, got 1e\\+39"),
        (torch.ones(2), r"must be one element, got shape \(2,\)"),
    ],
)
def test_a_divisor_that_would_spoil_the_gradients_is_refused(
    divisor: float | Tensor, message: str
) -> None:
    with pytest.raises(OptimizerError, match=f"gradient divisor: {message}"):
        grad_scale_tensor(divisor)
