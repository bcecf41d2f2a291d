"""State that is zero is read into where it is, and is zero again if any rank fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hooks.test_fused_topologies import dtype_of, fused_of
from hooks.test_topologies import build, optimizer_of, train

from ckpttools.errors import CkptError, StorageError
from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.hooks.landing import Landing
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.storage.local import FilePool

HUGE = (5 << 20) // 4 + 3
"""So many float32 take memory of huge pages."""


# --- one piece of memory --------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1000, HUGE])
def test_memory_is_zero_and_whole_whatever_its_size(numel: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        flat = Landing().place(numel, dtype)
        assert (flat.dtype, flat.shape) == (dtype, (numel,))
        assert not flat.any()
        assert flat.is_contiguous()
        flat.fill_(3.0)
        assert flat.double().sum() == 3.0 * numel


@pytest.mark.parametrize("numel", [7, HUGE])
@pytest.mark.parametrize("value", [1e-45, -0.0, float("nan")])
@pytest.mark.parametrize("at", [0, -1])
def test_live_memory_is_taken_only_where_every_bit_is_zero(
    numel: int, value: float, at: int
) -> None:
    live = torch.zeros(numel)
    assert Landing().place(numel, torch.float32, live) is live
    live[at] = value
    before = live.clone()
    landing = Landing()
    fresh = landing.place(numel, torch.float32, live)
    assert fresh.data_ptr() != live.data_ptr()
    fresh.fill_(5.0)
    landing.undo()
    assert torch.equal(live.view(torch.int32), before.view(torch.int32))


def test_live_memory_of_another_dtype_or_with_gaps_is_not_taken() -> None:
    assert Landing().place(6, torch.float32, torch.zeros(6).half()).dtype == torch.float32
    gaps = torch.zeros(12)[::2]
    assert Landing().place(6, torch.float32, gaps) is not gaps


def test_what_was_read_into_live_memory_is_undone() -> None:
    live, other = torch.zeros(9), torch.zeros(4)
    landing = Landing()
    landing.place(9, torch.float32, live).fill_(2.0)
    landing.place(4, torch.float32, other)[1] = -7.0
    landing.undo()
    assert not live.any()
    assert not other.any()


# --- a run ----------------------------------------------------------------------------------


def make(kind: str) -> ShardedOptimizer:
    if kind == "zero1":
        return optimizer_of(build(torch.float32), torch.float32)
    return fused_of(build(dtype_of(kind)), kind)


def bits(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """Return a copy of all that a rank holds."""
    tensors = [managed.param.data for managed in optimizer.managed]
    tensors += [tensor for shard in optimizer.shards for tensor in shard.slots().values()]
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fail_on_one(folder: str, kind: str, fails_at: int, *, begun: bool) -> dict[str, Any]:
    """Let rank 1 fail at its n-th read; then load what it had failed to."""
    saved = make(kind)
    model_of = [managed.param for managed in saved.managed]
    train(torch.nn.ParameterList(model_of), saved, 0, 3)  # type: ignore[arg-type]
    save_sharded(folder, saved, iteration=3)
    live = make(kind)
    if begun:
        train(torch.nn.ParameterList([m.param for m in live.managed]), live, 5, 6)  # type: ignore[arg-type]
    before, places = bits(live), [t.data_ptr() for s in live.shards for t in s.slots().values()]
    read, calls = FilePool.read_into, []

    def read_into(pool: FilePool, file: int, offset: int, buffer: memoryview) -> None:
        read(pool, file, offset, buffer)
        calls.append(len(buffer))
        if dist.get_rank() == 1 and len(calls) == fails_at:
            raise StorageError("a disk: can't read it: gone")

    error = ""
    with patch.object(FilePool, "read_into", read_into):
        try:
            load_sharded(Path(folder), live)
        except CkptError as caught:
            error = str(caught)
    untouched = same(bits(live), before) and set(live.steps.values()) == {1 if begun else 0}
    load_sharded(Path(folder), live)
    return {
        "error": error,
        "reads": len(calls),
        "untouched": untouched,
        "loaded": same(bits(live), bits(saved)) and not same(bits(live), before),
        "in place": places == [t.data_ptr() for s in live.shards for t in s.slots().values()],
    }


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("kind", ["zero1", "fp32", "remainders"])
@pytest.mark.parametrize("fails_at", [1, 9])
def test_an_error_on_one_rank_leaves_every_bit_of_all_as_it_was(
    kind: str, fails_at: int, begun: bool, tmp_path: Path
) -> None:
    found = run_ranks(fail_on_one_of, 2, str(tmp_path / "a"), kind, fails_at, begun)
    assert [rank["untouched"] for rank in found] == [True, True]
    assert all("can't read it: gone" in rank["error"] for rank in found)
    assert found[1]["reads"] == fails_at
    assert [rank["loaded"] for rank in found] == [True, True]
    assert [rank["in place"] for rank in found] == [True, True]


def fail_on_one_of(folder: str, kind: str, fails_at: int, begun: bool) -> dict[str, Any]:
    return fail_on_one(folder, kind, fails_at, begun=begun)
