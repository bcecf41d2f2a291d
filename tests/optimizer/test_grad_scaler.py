"""The loss scale follows overflows as Megatron's does, and survives a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.optimizer.config import OptimizerConfig
from ckpttools.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    GradScaler,
    scaler_of,
)


def make(**changed: float) -> DynamicGradScaler:
    settings = {"initial_scale": 64.0, "growth_interval": 3, "hysteresis": 2, **changed}
    return DynamicGradScaler(**settings)  # type: ignore[arg-type]


def scales(scaler: GradScaler, steps: str) -> list[float]:
    """Return the scale after each step: ``x`` overflows, ``.`` doesn't."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(float(scaler.scale))
    return found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Growth after three good steps, and then after three more.
        ("......", [64, 64, 128, 128, 128, 256]),
        # The first overflow is forgiven, every later one halves.
        ("xxxx", [64, 32, 16, 8]),
        # Good steps between don't refill what is forgiven ...
        ("x..x..x", [64, 64, 64, 32, 32, 32, 16]),
        # ... growth does.
        ("x...xx", [64, 64, 64, 128, 128, 64]),
        # An overflow starts the count of good steps anew.
        ("..x...", [64, 64, 64, 64, 64, 128]),
    ],
)
def test_the_scale_after_each_step(steps: str, expected: list[float]) -> None:
    assert scales(make(), steps) == expected


def test_the_scale_stops_at_its_minimum() -> None:
    assert scales(make(min_scale=24.0), "xxxxx") == [64, 32, 24, 24, 24]


def test_the_scale_stays_finite_where_growth_would_pass_fp32() -> None:
    largest = 2.0**127
    assert scales(make(initial_scale=largest, growth_interval=1), "...") == [largest] * 3


def reference(steps: list[bool], interval: int, hysteresis: int) -> float:
    """Tell the scale from the history alone, without counters."""
    scale, start, last_growth = 64.0, 0, 0
    for now in range(1, len(steps) + 1):
        if steps[now - 1]:
            start = now
            forgiven = sum(steps[last_growth:now]) < hysteresis
            scale = scale if forgiven else max(scale / 2, 1.0)
        elif now - start == interval:
            scale, start, last_growth = scale * 2, now, now
    return scale


@given(
    steps=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
)
def test_the_counters_tell_what_the_history_tells(
    steps: list[bool], interval: int, hysteresis: int
) -> None:
    scaler = make(growth_interval=interval, hysteresis=hysteresis)
    for step in steps:
        scaler.update(step)
    assert float(scaler.scale) == reference(steps, interval, hysteresis)


@given(steps=st.text("x.", max_size=12), rest=st.text("x.", max_size=12))
def test_a_run_goes_on_from_a_state_as_if_never_stopped(steps: str, rest: str) -> None:
    whole, first, second = make(), make(), make(initial_scale=2.0)
    scales(first, steps)
    second.load_state_dict(first.state_dict())
    assert scales(whole, steps + rest)[len(steps) :] == scales(second, rest)
    assert whole.state_dict() == second.state_dict()


def test_the_state_is_plain_numbers_under_megatrons_keys() -> None:
    scaler = make()
    scales(scaler, "xx.")
    state = {"scale": 32.0, "growth_tracker": 1, "hysteresis_tracker": 0}
    assert scaler.state_dict() == state
    assert [type(value) for value in scaler.state_dict().values()] == [float, int, int]


def test_megatrons_state_with_a_tensor_of_one_element_is_read() -> None:
    scaler = make()
    scaler.load_state_dict(
        {"scale": torch.tensor([512.0]), "growth_tracker": 2, "hysteresis_tracker": 1}
    )
    assert (scaler.scale.shape, scaler.scale.dtype) == ((), torch.float32)
    assert scales(scaler, ".xx") == [1024, 1024, 512]


def test_a_count_beyond_a_shortened_interval_grows_the_scale_at_the_next_good_step() -> None:
    scaler = make(growth_interval=3)
    scaler.load_state_dict({"scale": 8.0, "growth_tracker": 700, "hysteresis_tracker": 2})
    assert scales(scaler, "....") == [16, 16, 16, 32]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale": None}, "scale must be one number, got None"),
        ({"scale": torch.ones(2)}, "scale must be one number, got tensor"),
        ({"scale": True}, "scale must be one number, got True"),
        ({"scale": float("inf")}, "scale: must be positive and finite in fp32, got inf"),
        ({"scale": 0.0}, "scale: must be positive and finite in fp32, got 0.0"),
        ({"growth_tracker": 1.5}, "growth_tracker must be a whole number, got 1.5"),
        ({"hysteresis_tracker": "2"}, "hysteresis_tracker must be a whole number, got '2'"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(
    changed: Mapping[str, object], message: str
) -> None:
    scaler = make()
    scales(scaler, "xx.")
    before = scaler.state_dict()
    good = {"scale": 8.0, "growth_tracker": 2, "hysteresis_tracker": 1}
    with pytest.raises(OptimizerError, match=f"loss scale state: {message}"):
        scaler.load_state_dict({**good, **changed})
    with pytest.raises(OptimizerError, match="loss scale state: must have growth_tracker, got"):
        scaler.load_state_dict({"scale": 8.0, "hysteresis_tracker": 1})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("make_scaler", [ConstantGradScaler, DynamicGradScaler])
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-20, 65537.0])
def test_scale_and_reciprocal_are_0_d_fp32_and_rounded_once(
    make_scaler: Callable[[float], GradScaler], scale: float
) -> None:
    scaler = make_scaler(scale) if scale >= 1 else ConstantGradScaler(scale)
    for tensor, number in ((scaler.scale, scale), (scaler.inv_scale, 1 / scale)):
        assert (tensor.shape, tensor.dtype) == ((), torch.float32)
        assert torch.equal(tensor, torch.tensor(number, dtype=torch.float64).float())


def test_a_constant_scale_is_moved_by_nothing() -> None:
    scaler = ConstantGradScaler(128.0)
    assert scales(scaler, "xx.....") == [128.0] * 7
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": 8.0})
    assert float(scaler.scale) == 128.0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e39, 1e-50])
def test_a_scale_that_fp32_cannot_hold_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="loss scale: must be positive and finite in fp32, got"):
        ConstantGradScaler(scale)
    with pytest.raises(ConfigError, match="loss scale: "):
        DynamicGradScaler(scale, min_scale=scale)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"growth_interval": 0}, "growth_interval must be at least 1, got 0"),
        ({"hysteresis": 0}, "hysteresis must be at least 1, got 0"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1 and finite, got 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1, got 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor must be between 0 and 1, got 0.0"),
        ({"min_scale": 65.0}, "min_scale must be at most initial_scale, got 65 and 64"),
        ({"min_scale": 0.0}, "min_scale: must be positive and finite in fp32, got 0.0"),
    ],
)
def test_settings_of_the_dynamic_scale_out_of_range_are_refused(
    changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"loss scale: {message}"):
        make(**changed)


def test_the_settings_choose_the_scaler_as_megatron_does() -> None:
    assert scaler_of(OptimizerConfig()) is None
    assert scaler_of(OptimizerConfig(bf16=True)) is None
    for config in (
        OptimizerConfig(loss_scale=16.0),
        OptimizerConfig(loss_scale=16.0, bf16=True),
        OptimizerConfig(loss_scale=16.0, fp16=True),
    ):
        constant = scaler_of(config)
        assert isinstance(constant, ConstantGradScaler)
        assert float(constant.scale) == 16.0
    config = OptimizerConfig(
        fp16=True, initial_loss_scale=32.0, min_loss_scale=8.0, loss_scale_window=2, hysteresis=3
    )
    dynamic = scaler_of(config)
    assert isinstance(dynamic, DynamicGradScaler)
    assert scales(dynamic, "..xxxxxx") == [32, 64, 64, 64, 32, 16, 8, 8]
