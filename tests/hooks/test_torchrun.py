"""A plain loop under torchrun: killed or preempted, it goes on and ends with the same bits."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.hooks.manager import CheckpointManager

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "examples" / "train_resume.py"
pytestmark = pytest.mark.slow
STEPS = 11
EVERY = 3
LIMIT_S = 120
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_resume", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(directory: str, steps: int, every: int, plain: bool) -> int:
    """Train, or go on, on the ranks that are here."""
    module = example()
    module.train(
        argparse.Namespace(
            directory=directory,
            steps=steps,
            every=every,
            plain=plain,
            kill_at=None,
            text=module.TEXT,
        )
    )
    return dist.get_rank()


def torchrun(directory: Path, *options: str) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [
        *(sys.executable, *launcher, str(SCRIPT), str(directory)),
        *("--every", str(EVERY), *options),
    ]


def objects(directory: Path, step: int) -> dict[str, object]:
    """Return what is saved beside tensors: scheduler, place in the data, random generators."""
    opened = api.open_checkpoint(directory / f"step-{step:010d}")
    return {key: opened.manifest.objects[key] for key in ("training", "per_rank_state")}


def assert_same(first: Path, second: Path, step: int, other: int) -> None:
    """Compare all that two runs saved of a step, and show that another step's differs."""
    names = [f"step-{number:010d}" for number in (step, other)]
    assert not api.diff(first / names[0], first / names[1]).equal
    assert objects(first, step) != objects(first, other)
    assert api.diff(first / names[0], second / names[0]).equal
    assert objects(first, step) == objects(second, step)


def test_a_run_that_is_killed_goes_on_from_a_step_before_and_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    through, killed = tmp_path / "through", tmp_path / "killed"
    run_ranks(train, 2, str(through), STEPS, EVERY, False)
    command = torchrun(killed, "--steps", str(STEPS), "--kill-at", "7")
    done = subprocess.run(
        command, env=ENVIRONMENT, check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode != 0
    assert "step 7  loss" in done.stdout
    assert "step 8  loss" not in done.stdout
    # What was being written when it was killed, or the one before.
    assert CheckpointManager(killed, preemption_signals=()).latest() in {3, 6}
    run_ranks(train, 2, str(killed), STEPS, EVERY, False)
    assert_same(through, killed, STEPS, 9)


@pytest.mark.soak
def test_a_run_that_is_told_to_end_saves_its_step_and_goes_on_with_the_same_bits(
    tmp_path: Path,
) -> None:
    through, ended = tmp_path / "through", tmp_path / "ended"
    command = torchrun(ended, "--plain", "--steps", "1000000")
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"step 4 "):
                process.send_signal(signal.SIGTERM)
                break
        said = process.communicate(timeout=LIMIT_S)[0].decode()
    (found,) = re.findall(r"^saved step (\d+) before the end$", said, re.MULTILINE)
    saved = int(found)
    for directory in (through, ended):
        run_ranks(train, 2, str(directory), saved + 2, saved + 1, True)
    assert_same(through, ended, saved + 2, saved + 1)
