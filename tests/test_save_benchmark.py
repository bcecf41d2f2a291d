"""The benchmark of saving must measure what it says, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--layers", "2", "--width", "32", "--rounds", "1", "--step", "1")


@pytest.mark.soak
def test_every_way_to_save_is_timed_in_one_run(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "save.py"), *SMALL]
    done = subprocess.run(
        [*command, "--json", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] >= 2 * 32 * 33 * 12
    (row,) = found["rounds"]
    assert row["ours, behind"]["stall"] < row["ours, behind"]["durable"]
    assert row["DCP load"]["cpu"] > 0
    assert found["summary"]["stall, ours / copy"][0] == pytest.approx(
        row["ours, behind"]["stall"] / row["copy"]["stall"]
    )
    assert list(tmp_path.iterdir()) == []
