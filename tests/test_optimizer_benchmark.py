"""The optimizer's benchmark must measure what it says: costs, ratios and memory of all variants."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--layers", "2", "--width", "64", "--rounds", "1", "--iterations", "2")


def bench(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Run a small benchmark of two variants."""
    done = bench("optimizer.py", *SMALL, "--precision", "bf16", "--variants", "ours", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_variant_is_timed_beside_compute_alone(result: dict[str, Any]) -> None:
    rows = result["precisions"]["bf16"]
    assert list(rows) == ["compute", "ours"]
    wall, compute = rows["ours"]["wall"][0], rows["compute"]["wall"][0]
    assert wall > 0
    assert rows["ours"]["cost"][0] == pytest.approx(wall - compute)
    assert rows["ours"]["ours_to_this"] == [1.0, 1.0, 1.0]


def test_the_state_of_a_rank_is_its_share_of_twelve_bytes_a_parameter(
    result: dict[str, Any],
) -> None:
    row = result["precisions"]["bf16"]["ours"]
    assert result["parameters"] == 2 * 64 * 65
    share = 12 * result["parameters"] / result["ranks"]
    assert share <= row["state_bytes"] <= share + 12 * 128
    assert row["state_to_formula"] == pytest.approx(row["state_bytes"] / share)


def test_an_unknown_variant_is_refused() -> None:
    done = bench("optimizer.py", *SMALL, "--variants", "theirs")
    assert done.returncode == 1
    assert "--variants: must be of compute; DDP + AdamW;" in done.stderr


def test_the_overlap_benchmark_runs_or_says_by_name_why_not() -> None:
    small = ("--layers", "3", "--width", "64", "--batch", "8", "--rounds", "1", "--iterations", "1")
    done = bench("optimizer_overlap.py", *small, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "skipped" in found:
        assert found["skipped"]
    else:
        assert found["hidden"]
