"""How the peer tests ask Megatron: load a checkpoint or train on, and tell what it then holds.

Each call runs ``megatron/megatron_oracle.py``: real megatron-core, one process per rank, on CPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from safetensors import safe_open


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_megatron = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not installed("megatron-core"), reason="megatron-core is not installed: `make peers`"
    ),
]

PROGRAM = Path(__file__).parent / "megatron" / "megatron_oracle.py"
MODELS = PROGRAM.parent / "models"
GQA, TIED, DEEP = "gqa", "tied", "deep"


@dataclass(frozen=True, slots=True)
class Topology:
    """The run that loads: sizes, and the bucket size where gradient reduction overlaps."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    bucket_size: int | None = None
    dtype: str = "bf16"

    def options(self) -> list[str]:
        sizes = ["--tp", self.tp, "--pp", self.pp, "--dp", self.dp, "--dtype", self.dtype]
        bucket = [] if self.bucket_size is None else ["--bucket", self.bucket_size]
        return [str(option) for option in (*sizes, *bucket)]

    @classmethod
    def of(cls, case: oracle.Case) -> Topology:
        return cls(case.tp, case.pp, case.dp, case.bucket_size, case.dtype)


@dataclass(frozen=True, slots=True)
class Held:
    """What Megatron held: the logical tensors, and the facts beside them."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def run(command: str, root: Path, model: str, topology: Topology, extra: Sequence[str]) -> Held:
    out = Path(extra[extra.index("--out") + 1])
    arguments = [command, str(root), "--model", str(MODELS / f"{model}.json")]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, *topology.options(), *extra],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with safe_open(out, "pt") as held:
        facts = {key: json.loads(value) for key, value in held.metadata().items()}
        return Held({key: held.get_tensor(key) for key in held.keys()}, facts)  # noqa: SIM118


def load(root: Path, model: str, topology: Topology, scratch: Path) -> Held:
    """Let Megatron load ``root`` under ``topology`` and return what it then holds."""
    return run("load", root, model, topology, ["--out", str(scratch / "held.safetensors")])


def step(root: Path, model: str, topology: Topology, scratch: Path, *, steps: int = 1) -> Held:
    """Let Megatron load ``root``, train ``steps`` steps on fixed data, and return the rest."""
    out = ["--out", str(scratch / "later.safetensors")]
    return run("step", root, model, topology, ["--steps", str(steps), *out])


def assert_same_state(
    held: Held, truth: dict[str, torch.Tensor], vocab_size: int, *, padding: bool
) -> None:
    """Equal bits in every logical element, and in the padding rows too where asked for."""
    tensors = held.tensors
    if not padding:
        tensors, truth = (oracle.logical_rows(t, vocab_size) for t in (tensors, truth))
    assert oracle.tensor_differences(tensors, truth) == []
    assert held.facts["step"] == [3.0]
    assert held.facts["weights_unlike_main_params"] == []
