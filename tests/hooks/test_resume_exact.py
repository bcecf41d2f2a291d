"""The check that others use on their runs fails where it must, and names what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttools.testing import assert_resume_exact

KEPT: dict[str, Any] = {}


class Counting:
    """A run that adds up its steps; ``forgets`` names what a restore leaves out."""

    def __init__(self, forgets: str = "", gain: float = 1.0) -> None:
        self.values = {"weight": torch.zeros(3, dtype=torch.bfloat16), "moment": np.zeros(2)}
        self.forgets = forgets
        self.gain = gain

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.values = {name: one + self.gain * (step + 1) for name, one in self.values.items()}

    def state(self) -> Mapping[str, Any]:
        return {**self.values, "text": b"same"}

    def save(self, directory: Path, step: int) -> None:
        KEPT[f"{directory}"] = step, dict(self.values)

    def restore(self, directory: Path) -> None:
        _, saved = KEPT[f"{directory}"]
        self.values |= {name: one for name, one in saved.items() if name != self.forgets}


def test_a_run_that_takes_everything_over_passes(tmp_path: Path) -> None:
    assert_resume_exact(Counting, tmp_path, save_at=2, stop_at=4)
    assert KEPT[str(tmp_path)][0] == 2


@pytest.mark.parametrize("forgets", ["weight", "moment"])
def test_a_run_that_forgets_a_value_is_named_with_it(forgets: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"{forgets}: must be equal bit for bit after a res"):
        assert_resume_exact(lambda: Counting(forgets), tmp_path, save_at=2, stop_at=4)


def test_a_run_that_ends_alike_from_a_cold_start_shows_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a cold start must end elsewhere"):
        assert_resume_exact(lambda: Counting(gain=0.0), tmp_path, save_at=2, stop_at=4)


def test_a_rank_that_takes_no_part_in_one_of_the_runs_compares_nothing(tmp_path: Path) -> None:
    called = []
    assert_resume_exact(
        Counting,
        tmp_path,
        save_at=2,
        stop_at=4,
        make_resumed=lambda: None,
        barrier=lambda: called.append(1),
    )
    assert_resume_exact(
        lambda: None, tmp_path, save_at=2, stop_at=4, make_resumed=lambda: Counting("weight")
    )
    assert called == [1]
