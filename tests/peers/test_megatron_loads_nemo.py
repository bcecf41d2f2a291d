"""megatron-core must load the distributed NeMo form that we wrote, on any ranks, as its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nemo_builder import DISTRIBUTED
from peers.megatron_runs import needs_megatron
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.api import Target

pytestmark = needs_megatron

PROGRAM = Path(__file__).parent / "megatron" / "nemo_oracle.py"


def held(directory: Path, out: Path, tp: int) -> tuple[dict[str, torch.Tensor], object]:
    """Return what megatron-core holds after a load in the parts of ranks, and the common state."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(directory), str(out), str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(f"{out}.safetensors"), json.loads(Path(f"{out}.json").read_text())


@pytest.mark.parametrize(("written", "loaded"), [(1, 1), (2, 1), (4, 2)])
def test_megatron_core_holds_the_same_from_our_files_as_from_the_originals(
    written: int, loaded: int, tmp_path: Path
) -> None:
    api.reshard(DISTRIBUTED, tmp_path / "ours", to="nemo", target=Target(tp=written))
    ours, common = held(tmp_path / "ours", tmp_path / "a", loaded)
    theirs, expected = held(DISTRIBUTED, tmp_path / "b", loaded)
    assert common == expected
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert ours[key].view(torch.uint8).equal(tensor.view(torch.uint8)), key
