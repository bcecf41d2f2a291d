"""Apex's and Transformer Engine's kernels, by stand-ins: neither runs without CUDA.

What is held here is our side: when a launch happens, and with which arguments in which order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ckpttools.errors import ConfigError
from ckpttools.optimizer import adam
from ckpttools.optimizer.adam import AdamSettings, Kernel, Pieces, adam_step, check_kernel

SETTINGS = AdamSettings(lr=3e-3, beta1=0.85, beta2=0.97, eps=1e-7, weight_decay=0.3)


@pytest.fixture(autouse=True)
def forget_loaded_kernels() -> Iterator[None]:
    adam._launch_op.cache_clear()
    yield
    adam._launch_op.cache_clear()


def make_pieces(sizes: tuple[int, ...]) -> Pieces:
    """Return pieces whose four lists differ; equal at every call."""
    generator = torch.Generator().manual_seed(13)

    def make() -> list[Tensor]:
        return [torch.rand(size, generator=generator) for size in sizes]

    return Pieces(make(), make(), make(), make())


@pytest.mark.parametrize("kernel", ["apex", "transformer_engine"])
def test_a_kernel_that_is_not_installed_is_an_error_that_names_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("amp_C", "transformer_engine", "transformer_engine_torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"kernel: {kernel} must be installed .*, got ") as caught:
        check_kernel(kernel, torch.device("cuda"))
    assert caught.value.hint == 'set kernel to "fused" for the one of torch'
    with pytest.raises(ConfigError, match=f"kernel: {kernel} must be installed"):
        adam_step(kernel, make_pieces((3,)), SETTINGS, [1])


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel: must be one of fused, foreach, .* got 'slow'"):
        check_kernel("slow", torch.device("cpu"))  # type: ignore[arg-type]


def install_launch_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put a stand-in for the installed kernel, which does its work by `foreach`, in its place.

    Returns:
        A list that gets the number of tensors of each launch.
    """
    launches: list[int] = []

    def multi_tensor_adam(
        chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float,
        eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
    ) -> None:  # fmt: skip
        assert chunk == 65536
        assert (noop.dtype, noop.item()) == (torch.int32, 0)
        grads, params, exp_avgs, exp_avg_sqs = lists
        launches.append(len(params))
        settings = AdamSettings(
            lr, beta1, beta2, eps, weight_decay, bool(mode), bool(bias_correction)
        )
        pieces = Pieces(params, grads, exp_avgs, exp_avg_sqs)
        adam_step("foreach", pieces, settings, [step] * len(params))

    for name in adam._LAUNCH_MODULES[kernel]:
        module = ModuleType(name)
        module.multi_tensor_adam = multi_tensor_adam  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        parent = name.partition(".")[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent) if parent != name else module)
    return launches


@pytest.mark.parametrize("kernel", ["apex", "transformer_engine"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_an_installed_kernel_is_launched_once_for_each_step_number(
    kernel: Kernel, decoupled: bool, corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = install_launch_kernel(kernel, monkeypatch)
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match=f"kernel: {kernel} needs tensors on CUDA, got cpu"):
        check_kernel(kernel, device)
    monkeypatch.setattr(adam, "check_kernel", lambda *_: None)
    settings = replace(SETTINGS, decoupled=decoupled, bias_correction=corrected)
    sizes, steps = (103, 17, 7), [4, 1, 4]
    mine, expected = make_pieces(sizes), make_pieces(sizes)
    adam_step(kernel, mine, settings, steps, torch.tensor(3.0))
    adam_step("foreach", expected, settings, steps, torch.tensor(3.0))
    assert launches == [2, 1]
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        assert all(map(torch.equal, getattr(mine, name), getattr(expected, name))), name
    assert not torch.equal(mine.params[0], make_pieces(sizes).params[0])
