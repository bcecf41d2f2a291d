"""What one number of ranks saved, any other number takes over, bit for bit.

Gradients are small whole numbers over eight, the same on every rank, so sums and means are exact
and a run is the same for any number of ranks: a run that stopped and went on elsewhere must end
where one that never stopped ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from ckpttools import api
from ckpttools.hooks import load_sharded, save_gathered, save_sharded
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, ParallelGroups

SIZES = (1, 2, 3, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAVED_AT, ENDS_AT = 3, 6


def build(dtype: torch.dtype) -> torch.nn.Module:
    """Build a model of odd sizes: one parameter is smaller than the number of ranks."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 29), torch.nn.Tanh(), torch.nn.Linear(29, 3), torch.nn.Linear(3, 1)
    ).to(dtype)
    model[0].bias.requires_grad_(requires_grad=False)  # frozen: a weight without state
    return model


def optimizer_of(
    model: torch.nn.Module, dtype: torch.dtype, group: Any = None, bucket_size: int | None = 100
) -> DistributedOptimizer:
    config = OptimizerConfig(
        lr=0.02,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        bucket_size=bucket_size,
    )
    return DistributedOptimizer(model, config, groups=ParallelGroups(dp=group))


def train(model: torch.nn.Module, optimizer: DistributedOptimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for param in model.parameters():
            values = torch.randint(-8, 9, param.shape, generator=generator) / 8
            if param.requires_grad:
                param.grad = values.to(param.dtype)
        optimizer.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def groups_by_size() -> dict[int, Any]:
    """Return a group of the first n ranks for each n; only their members may use it."""
    return {size: dist.new_group(list(range(size))) for size in SIZES}


def save_all(folder: str, kind: str) -> bool:
    """Save with 1 to 4 ranks; say whether all of them ended at the same weights."""
    dtype, groups, ends = DTYPES[kind], groups_by_size(), []
    for size in SIZES:
        if dist.get_rank() < size:
            model = build(dtype)
            optimizer = optimizer_of(model, dtype, groups[size])
            train(model, optimizer, 0, SAVED_AT)
            save_sharded(f"{folder}/native{size}", optimizer, iteration=SAVED_AT)
            for form in ("safetensors", "zarr"):
                save_gathered(f"{folder}/{form}{size}", optimizer, to=form, iteration=SAVED_AT)
            train(model, optimizer, SAVED_AT, ENDS_AT)
            ends.append(weights(model))
        dist.barrier()
    return all(same(ends[0], end) for end in ends)


def load_all(folder: str, kind: str, names: list[str]) -> list[str]:
    """Go on from every checkpoint with 1 to 4 ranks; return what did not end right."""
    dtype, groups, wrong = DTYPES[kind], groups_by_size(), []
    model = build(dtype)
    alone = optimizer_of(model, dtype, groups[1]) if dist.get_rank() == 0 else None
    expected = torch.zeros(0)
    if alone is not None:
        train(model, alone, 0, ENDS_AT)
        expected = torch.cat([w.reshape(-1) for w in weights(model)])
        cold = build(dtype)
        train(cold, optimizer_of(cold, dtype, groups[1]), SAVED_AT, ENDS_AT)
        if same(weights(cold), weights(model)):
            wrong.append("a cold start ends at the same weights")
    for size in SIZES:
        for name in names:
            if dist.get_rank() < size:
                fresh = build(dtype)
                with torch.no_grad():
                    for param in fresh.parameters():
                        param.zero_()
                optimizer = optimizer_of(fresh, dtype, groups[size], bucket_size=None)
                load_sharded(Path(folder) / name, optimizer)
                train(fresh, optimizer, SAVED_AT, ENDS_AT)
                got = torch.cat([w.reshape(-1) for w in weights(fresh)])
                if dist.get_rank() == 0 and not torch.equal(got, expected):
                    wrong.append(f"{name} on {size} ranks")
            dist.barrier()
    return wrong


@pytest.fixture(scope="module", params=list(DTYPES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of 1 to 4 ranks in three forms."""
    folder = tmp_path_factory.mktemp(f"saved-{request.param}")
    assert all(run_ranks(save_all, max(SIZES), str(folder), request.param, timeout_s=240))
    return request.param, folder


def pairs() -> Iterator[tuple[int, int]]:
    yield from ((a, b) for a in SIZES for b in SIZES if a != b)


def test_what_any_number_of_ranks_saved_goes_on_with_any_other_as_if_it_had_never_stopped(
    saved: tuple[str, Path],
) -> None:
    kind, folder = saved
    names = [f"{form}{size}" for form in ("native", "safetensors", "zarr") for size in SIZES]
    found = run_ranks(load_all, max(SIZES), str(folder), kind, names, timeout_s=400)
    assert [wrong for rank in found for wrong in rank] == []


def test_every_form_of_every_size_has_the_same_content(saved: tuple[str, Path]) -> None:
    _, folder = saved
    whole = {api.digest(path)[0] for path in sorted(folder.iterdir()) if "native" not in path.name}
    native = {api.digest(path)[0] for path in sorted(folder.iterdir()) if "native" in path.name}
    assert len(whole) == 1
    assert native == whole


def test_resharding_what_a_ranks_saved_gives_byte_for_byte_what_b_ranks_save(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = saved
    for a, b in pairs():
        out = tmp_path / f"{a}to{b}"
        api.reshard(folder / f"native{a}", out, target=api.Target(dp=b))
        theirs = folder / f"native{b}"
        files = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in out.iterdir()) == files
        for name in files:
            assert (out / name).read_bytes() == (theirs / name).read_bytes(), (a, b, name)


def test_a_saved_run_verifies_and_equals_what_was_gathered(saved: tuple[str, Path]) -> None:
    _, folder = saved
    result = api.verify(folder / "native3", against=folder / "safetensors2")
    assert (result.damage, result.differences) == ((), ())
