"""By what is an fp16 loss multiplied, so that small gradients don't vanish?

The loss is multiplied by a scale, and the gradients are divided by it before the update. The
dynamic scale halves when gradients overflow and doubles after a long enough run without. Names
and meanings are Megatron-core's, so that its checkpoints' ``grad_scaler`` entry is read and
written as it is:

* ``hysteresis`` overflows are forgiven before the scale shrinks. From then on *each* overflow
  shrinks it: the count is only refilled when the scale grows.
* A step without overflow counts towards growth; an overflow sets that count to zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ckpttools.errors import ConfigError, OptimizerError
from ckpttools.optimizer.config import OptimizerConfig


class GradScaler(Protocol):
    """What the optimizer asks of a loss scale."""

    @property
    def scale(self) -> Tensor:
        """The factor of the loss: 0-d fp32, positive."""

    @property
    def inv_scale(self) -> Tensor:
        """The reciprocal of `scale`, rounded once to fp32."""

    def update(self, found_inf: bool) -> None:
        """Take in whether this step's gradients, on any rank, overflowed."""

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over what `state_dict` returned, here or in Megatron."""


class ConstantGradScaler:
    """Keep one scale whatever happens; it has no state.

    Raises:
        ConfigError: the scale is not positive and finite in fp32.
    """

    def __init__(self, scale: float, *, device: torch.device | str = "cpu") -> None:
        self._scale = _fp32("loss scale", scale).to(device)

    @property
    def scale(self) -> Tensor:
        """The factor of the loss: 0-d fp32, positive."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """The reciprocal of `scale`, rounded once to fp32."""
        return self._scale.reciprocal()

    def update(self, found_inf: bool) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, object]:
        """Return an empty dictionary, as Megatron does."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Change nothing: a constant scale comes from the settings, not from a checkpoint."""


class DynamicGradScaler:
    """Let the scale follow the gradients.

    Args:
        initial_scale: the first scale.
        min_scale: the scale never shrinks below it.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps without
            overflow.
        backoff_factor: what it is multiplied by at an overflow, once ``hysteresis`` is used up.
        growth_interval: steps.
        hysteresis: the overflow, counted since the last growth, that is the first to shrink it.
        device: where `scale` is kept.

    Raises:
        ConfigError: a number is out of its range; the message names it.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, count in (("growth_interval", growth_interval), ("hysteresis", hysteresis)):
            if count < 1:
                raise ConfigError(f"loss scale: {name} must be at least 1, got {count}")
        if not 1.0 < growth_factor < math.inf:
            raise ConfigError(
                f"loss scale: growth_factor must be above 1 and finite, got {growth_factor}"
            )
        if not 0.0 < backoff_factor < 1.0:
            raise ConfigError(
                f"loss scale: backoff_factor must be between 0 and 1, got {backoff_factor}"
            )
        if min_scale > initial_scale:
            raise ConfigError(
                f"loss scale: min_scale must be at most initial_scale, "
                f"got {min_scale:g} and {initial_scale:g}"
            )
        self._scale = _fp32("loss scale", initial_scale).to(device)
        self._min_scale = _fp32("loss scale: min_scale", min_scale).to(device)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    @property
    def scale(self) -> Tensor:
        """The factor of the loss: 0-d fp32, positive. `update` puts a new tensor in its place."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """The reciprocal of `scale`, rounded once to fp32."""
        return self._scale.reciprocal()

    def update(self, found_inf: bool) -> None:
        """Take in whether this step's gradients, on any rank, overflowed.

        The scale stays finite: growth past what fp32 holds is left out, where Megatron's scale
        becomes infinite and with it every later gradient.
        """
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = torch.maximum(self._scale * self.backoff_factor, self._min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            grown = self._scale * self.growth_factor
            self._scale = torch.where(torch.isfinite(grown), grown, self._scale)

    def state_dict(self) -> dict[str, object]:
        """Return scale and counters as plain numbers, under Megatron's keys.

        Megatron itself keeps ``scale`` as a tensor of one element.
        """
        return {
            "scale": self._scale.item(),
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a state; ``scale`` may be a number, or a tensor of one element.

        A refused state changes nothing.

        Raises:
            OptimizerError: a key is missing, or its value is not what it must be.
        """
        for key in ("scale", "growth_tracker", "hysteresis_tracker"):
            if key not in state:
                raise OptimizerError(f"loss scale state: must have {key}, got {sorted(state)}")
        scale = state["scale"]
        if isinstance(scale, Tensor) and scale.numel() == 1:
            scale = scale.item()
        if isinstance(scale, bool) or not isinstance(scale, (float, int)):
            raise OptimizerError(f"loss scale state: scale must be one number, got {scale!r}")
        counts: list[int] = []
        for key, most in (
            ("growth_tracker", self.growth_interval - 1),
            ("hysteresis_tracker", None),
        ):
            count = state[key]
            if isinstance(count, bool) or not isinstance(count, int):
                raise OptimizerError(
                    f"loss scale state: {key} must be a whole number, got {count!r}"
                )
            # A shorter interval than that of the run which saved: the next step grows the scale.
            counts.append(count if most is None else min(count, most))
        try:
            kept = _fp32("loss scale state: scale", scale)
        except ConfigError as error:
            raise OptimizerError(str(error)) from None
        self._scale = kept.to(self._scale.device)
        self._growth_tracker, self._hysteresis_tracker = counts


def scaler_of(
    config: OptimizerConfig, *, device: torch.device | str = "cpu"
) -> ConstantGradScaler | DynamicGradScaler | None:
    """Return the scaler that the settings ask for, as Megatron chooses it; None where none.

    A constant one where ``loss_scale`` is given; else a dynamic one for ``fp16``, which halves
    and doubles; else none.
    """
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device=device)
    if config.fp16:
        return DynamicGradScaler(
            config.initial_loss_scale,
            config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
            device=device,
        )
    return None


def _fp32(where: str, number: float) -> Tensor:
    """Return a positive finite number as a 0-d fp32 tensor."""
    if 0.0 < number < math.inf:
        # Doubles beyond fp32's range become infinite here, and tiny ones zero.
        tensor = torch.tensor(number, dtype=torch.float64).to(torch.float32)
        if 0.0 < tensor.item() < math.inf:
            return tensor
    raise ConfigError(f"{where}: must be positive and finite in fp32, got {number!r}")
