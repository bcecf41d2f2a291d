"""Every ordered pair of a family's checkpoints: A taken to B's topology must be B's own file.

All checkpoints of a family were saved by Megatron from one and the same state, so what Megatron
itself wrote for B judges what we write from A, byte for byte, padding and gaps included.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import oracle_megatron as oracle
import pytest

from ckpttools import api
from ckpttools.api import Target

ARGS_THAT_MAY_DIFFER = {"save"}

CASES = {case.name: case for case in oracle.cases()}


def _family(case: oracle.Case) -> tuple[str, str]:
    """Files are comparable key by key only between checkpoints of one writer."""
    return case.family, case.writer


PAIRS = [(a, b) for a, b in permutations(CASES, 2) if _family(CASES[a]) == _family(CASES[b])]


def target_of(case: oracle.Case) -> Target:
    """Return the target that names a fixture's topology and buckets."""
    return Target(
        tp=case.tp,
        pp=case.pp,
        vpp=case.vpp,
        dp=case.dp,
        bucket_size=case.bucket_size or "none",
    )


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_resharding_a_to_the_topology_of_b_gives_the_file_that_megatron_wrote_for_b(
    a: str, b: str, tmp_path: Path
) -> None:
    src, dst = CASES[a], CASES[b]
    ranks_move = (src.tp, src.pp) != (dst.tp, dst.pp)
    api.reshard(src.directory, tmp_path / "out", target=target_of(dst))
    differences = oracle.compare_files(
        tmp_path / "out", dst.directory, ignore_args=ARGS_THAT_MAY_DIFFER
    )
    # One generator state copied to new ranks would give them all the same dropout.
    left_out = [
        f"{file.relative_to(dst.directory)}: .rng_state: only in the second"
        for file in sorted(dst.directory.rglob("model_optim_rng.pt"))
    ]
    assert differences == (left_out if ranks_move else [])
