"""A run that is saved and goes on, on any number of ranks and with either optimizer, is exact."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from training_runs import DTYPES, KINDS, Run

from ckpttools.hooks import CheckpointManager
from ckpttools.hooks.step_directory import step_name
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig
from ckpttools.testing import assert_resume_exact

SIZES = (1, 2, 3, 4)


def on_first(size: int, groups: dict[int, Any], kind: str, precision: str, **settings: Any) -> Any:
    """Return what makes a run on the first ranks; None on the others."""

    def make() -> Run | None:
        if dist.get_rank() >= size:
            return None
        return Run(kind, precision, groups[size], **settings)

    return make


def resume_everywhere(folder: str, precision: str, kind: str, pairs: list[tuple[int, int]]) -> int:
    """Save on a ranks and go on on b, with the same optimizer and with the other."""
    world = dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in SIZES if size <= world}
    count = 0
    for (a, b), other in product(pairs, KINDS):
        asynchronous = (a + b) % 2 == 0
        assert_resume_exact(
            on_first(a, groups, kind, precision, asynchronous=asynchronous),
            Path(folder) / f"{a}-{b}-{other}",
            save_at=2,
            stop_at=4,
            make_resumed=on_first(b, groups, other, precision),
            barrier=dist.barrier,
        )
        count += 1
    return count


@pytest.mark.parametrize(("precision", "kind"), [("fp32", "zero1"), ("bf16", "zero2")])
def test_a_run_goes_on_exactly_on_other_numbers_of_ranks_and_with_either_optimizer(
    precision: str, kind: str, tmp_path: Path
) -> None:
    pairs = [(3, 2), (1, 3)]
    found = run_ranks(resume_everywhere, 3, str(tmp_path), precision, kind, pairs)
    assert found == [4] * 3


def resume_on_the_last_two(folder: str) -> bool:
    """Save and go on where the group's ranks are not the job's; the others do nothing."""
    group = dist.new_group([2, 3])
    if dist.get_rank() in {2, 3}:
        assert_resume_exact(
            lambda: Run("zero2", "bf16", group),
            folder,
            save_at=2,
            stop_at=4,
            barrier=lambda: dist.barrier(group),
        )
    return True


def test_a_group_of_other_ranks_than_the_first_saves_and_goes_on(tmp_path: Path) -> None:
    assert all(run_ranks(resume_on_the_last_two, 4, str(tmp_path)))
    assert sorted(path.name for path in (tmp_path / step_name(2)).iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def save_twenty_elements(folder: str) -> tuple[int, bool]:
    """Save and load what leaves ranks with little or nothing."""
    model = torch.nn.Linear(4, 5, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(20.0).reshape(5, 4))
    optimizer = DistributedOptimizer(model, OptimizerConfig(lr=0.1))
    own = sum(piece.range.param.size for piece in optimizer.pieces)
    with CheckpointManager(folder, preemption_signals=()) as manager:
        manager.save(1, model, optimizer)
        with torch.no_grad():
            model.weight.zero_()
        manager.restore(model, optimizer)
    return own, torch.equal(model.weight.detach(), torch.arange(20.0).reshape(5, 4))


def test_ranks_that_own_little_or_nothing_save_and_load(tmp_path: Path) -> None:
    found = run_ranks(save_twenty_elements, 5, str(tmp_path))
    shares = [own for own, _ in found]
    assert sum(shares) == 20
    assert 0 in shares
    assert all(equal for _, equal in found)


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "kind"), list(product(DTYPES, KINDS)))
def test_a_run_goes_on_exactly_from_any_number_of_ranks_to_any_other(
    precision: str, kind: str, tmp_path: Path
) -> None:
    pairs = list(product(SIZES, SIZES))
    size = max(SIZES)
    found = run_ranks(resume_everywhere, size, str(tmp_path), precision, kind, pairs, timeout_s=400)
    assert found == [len(pairs) * len(KINDS)] * size
