"""Megatron itself must load a checkpoint, and must hold what the truth says.

Each test runs ``megatron/megatron_oracle.py``: real megatron-core, one process per rank, on CPU.
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


pytestmark = [
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


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gqa_tp1_pp1_dp2", GQA),
        ("gqa_tp1_pp1_dp2_bucket6000", GQA),
        ("gqa_tp2_pp2_dp1", GQA),
        ("megadlms_gqa_tp1_pp1_dp2_bucket6000", GQA),
        ("tied_tp1_pp2_dp2", TIED),
        ("tied_tp2_pp1_dp1_fp32", TIED),
        ("deep_tp1_pp1_dp2", DEEP),
        ("v0.12.3_tied_tp2_pp1_dp1", TIED),
    ],
)
def test_megatron_holds_the_truth_of_a_fixture(name: str, model: str, tmp_path: Path) -> None:
    case = oracle.case(name)
    held = load(case.directory, model, Topology.of(case), tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=True)


def test_two_layouts_of_a_family_load_the_same_logical_state(tmp_path: Path) -> None:
    split, whole = oracle.case("gqa_tp2_pp2_dp1"), oracle.case("gqa_tp1_pp1_dp2")
    held = load(split.directory, GQA, Topology.of(split), tmp_path)
    assert oracle.tensor_differences(held.tensors, whole.truth_tensors()) != []
    assert_same_state(held, whole.truth_tensors(), whole.model["vocab_size"], padding=False)


def test_another_dp_size_loads_the_same_state(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp1")
    held = load(case.directory, GQA, Topology(dp=4), tmp_path)
    assert_same_state(held, case.truth_tensors(), case.model["vocab_size"], padding=True)


def test_the_same_state_trains_to_the_same_bits_whatever_files_it_came_from(tmp_path: Path) -> None:
    whole, cut = oracle.case("gqa_tp1_pp1_dp2"), oracle.case("gqa_tp1_pp1_dp1")
    first = step(whole.directory, GQA, Topology(dp=2), tmp_path, steps=2)
    second = step(cut.directory, GQA, Topology(dp=2), tmp_path, steps=2)
    assert first.facts["step"] == [5.0]
    assert len(first.facts["losses"]) == 2
    assert oracle.tensor_differences(first.tensors, whole.truth_tensors()) != []
    assert oracle.tensor_differences(first.tensors, second.tensors) == []
    assert first.facts["losses"] == second.facts["losses"]


def test_megatron_refuses_the_files_of_another_topology(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp2_pp1_dp2")
    with pytest.raises(AssertionError, match="tensor_model_parallel_size is 2 in the checkpoint"):
        load(case.directory, GQA, Topology(), tmp_path)
