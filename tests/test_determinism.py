"""The same conversion gives the same bytes, whatever the hash seed, workers and memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "fixtures" / "megatron" / "gqa_tp2_pp2_dp1"


def listing(root: Path) -> dict[str, str]:
    """Return the SHA-256 of every file."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "command",
    [
        ["reshard", "--tp", "1", "--pp", "1", "--dp", "3"],
        ["gather"],
        ["gather", "--to", "zarr"],
    ],
    ids=" ".join,
)
def test_bytes_depend_on_neither_hash_seed_nor_workers_nor_memory(
    command: list[str], tmp_path: Path
) -> None:
    found = []
    for seed, workers, memory in (("0", "1", "1GiB"), ("1", "2", "40kB"), ("77", "8", "256KiB")):
        out = tmp_path / f"out{seed}"
        subprocess.run(
            [
                *(sys.executable, "-c", "from ckpttools.cli.main import main; main()"),
                *(command[0], str(SOURCE / "torch"), str(out), *command[1:]),
                *("--workers", workers, "--memory", memory),
            ],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.append(listing(out))
    assert found[0]
    assert found[0] == found[1] == found[2]
