"""The benchmark must measure what it says, on a checkpoint that holds what a real one holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttools import api
from ckpttools.storage.torchzip import read_torch_file, tensors

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "reshard.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run the smallest benchmark once, and keep its sources."""
    place = tmp_path_factory.mktemp("bench")
    done = bench("--size", "2MB", "--runs", "1", "--keep", str(place), "--json")
    assert done.returncode == 0, done.stderr
    return place, json.loads(done.stdout)


def sources(place: Path) -> list[Path]:
    return sorted(place.glob("llama-*"))


def test_every_job_is_timed_beside_cp(kept: tuple[Path, dict[str, Any]]) -> None:
    _, result = kept
    assert len(result["jobs"]) == 2
    for kinds in result["jobs"].values():
        assert list(kinds) == ["cp", "cp+fsync", "copy", "reshard"]
        assert kinds["cp"]["ratio_to_cp"] == 1
        for row in kinds.values():
            assert 0 < row["wall_min"] <= row["wall"] <= row["wall_max"]
            assert row["cpu"] > 0


def test_counts_are_those_of_the_state(kept: tuple[Path, dict[str, Any]]) -> None:
    _, result = kept
    for kinds in result["jobs"].values():
        copy, full = kinds["copy"], kinds["reshard"]
        # Headers, copies of norms and padding weigh something in a checkpoint as small as this.
        assert 1 <= copy["reads_per_state"] < 1.2
        assert 1 <= copy["writes_per_state"] < 1.7
        # Weights with masters (6 of 14 bytes), both sides in full, copies of norms on both sides.
        assert copy["reads_per_state"] + 2.4 < full["reads_per_state"] < 4.1
        assert full["writes_per_state"] == copy["writes_per_state"]
        assert copy["proc_reads_per_state"] > copy["reads_per_state"]
        assert full["most_ops_of_a_tensor"] <= 40
        assert set(full["phases"]) == {"evidence", "replicas", "plan", "write", "compare", "sync"}


def test_sources_pass_every_check_and_hold_one_model(kept: tuple[Path, dict[str, Any]]) -> None:
    place, result = kept
    first, second = sources(place)
    for source in (first, second):
        verified = api.verify(source)
        assert verified.ok
        assert any("weights equal their masters" in line for line in verified.checked)
    assert api.diff(first, second).same
    assert api.open_checkpoint(first).manifest.state_bytes == result["state_bytes"]


def test_values_differ_from_element_to_element(kept: tuple[Path, dict[str, Any]]) -> None:
    for path in sources(kept[0])[0].rglob("distrib_optim.pt"):
        file = read_torch_file(path)
        for tensor in tensors(file.tree):
            start, length = file.extent(tensor)
            values = np.fromfile(path, "<u4", count=length // 4, offset=start)
            assert len(np.unique(values)) > 0.9 * len(values)  # gaps between parameters are zero


def test_kept_sources_are_used_again(kept: tuple[Path, dict[str, Any]]) -> None:
    place, _ = kept
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*.pt")}
    done = bench("--size", "2MB", "--runs", "1", "--keep", str(place))
    assert done.returncode == 0, done.stderr
    assert "GB of state" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*.pt")} == before


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    done = bench("--size", "900000GB", "--keep", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}: must have " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_odd_size_is_refused() -> None:
    done = bench("--size", "2 pounds")
    assert done.returncode == 2
    assert "must be a size such as 64MiB or 2GB" in done.stderr
