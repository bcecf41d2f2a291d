"""What the fused ZeRO-2 optimizer saved on any number of ranks, both optimizers take over.

As in ``test_topologies``: a run that stopped and went on elsewhere, in whichever of the two
optimizers, must end where one that never stopped ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hooks.test_topologies import (
    DTYPES,
    ENDS_AT,
    SAVED_AT,
    SIZES,
    build,
    groups_by_size,
    pairs,
    same,
    train,
    weights,
)
from hooks.test_topologies import optimizer_of as flat_of
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.hooks import load_sharded, save_gathered, save_sharded
from ckpttools.optimizer import DistributedFusedAdam, ParallelGroups, ShardedOptimizer

FORMS = ("fp32", "bf16", "remainders")


def dtype_of(form: str) -> torch.dtype:
    return DTYPES.get(form, torch.bfloat16)


def fused_of(
    model: torch.nn.Module, form: str, group: Any = None, cap: float = 0.0005
) -> DistributedFusedAdam:
    return DistributedFusedAdam(
        model,
        lr=0.02,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        grad_sync_dtype=torch.float32,
        param_sync_dtype=torch.bfloat16 if form == "remainders" else None,
        bucket_cap_mb=cap,
        store_params=form != "remainders",
        store_param_remainders=form == "remainders",
        groups=ParallelGroups(dp=group),
    )


def masters(optimizer: ShardedOptimizer) -> torch.Tensor:
    """Return the masters of a group of one rank, in the order of names."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for piece in optimizer.pieces:
        slot = "fp32_param"
        part = piece.range.param
        values = (
            piece.values(slot)
            if slot in piece.logical_slots()
            else piece.slot.param.data.reshape(-1)[part.start : part.end]
        )
        parts.setdefault(piece.name, {})[part.start] = values.clone()
    return torch.cat([parts[n][at] for n in sorted(parts) for at in sorted(parts[n])])


def save_all(folder: str, form: str) -> bool:
    """Save with 1 to 4 ranks; say whether all of them ended at the same weights."""
    groups, ends = groups_by_size(), []
    for size in SIZES:
        if dist.get_rank() < size:
            model = build(dtype_of(form))
            optimizer = fused_of(model, form, groups[size])
            train(model, optimizer, 0, SAVED_AT)
            save_sharded(f"{folder}/native{size}", optimizer, iteration=SAVED_AT)
            if size == 3:
                save_gathered(f"{folder}/whole", optimizer, iteration=SAVED_AT)
                other = build(dtype_of(form))
                flat = flat_of(other, dtype_of(form), groups[size])
                train(other, flat, 0, SAVED_AT)
                save_sharded(f"{folder}/flat", flat, iteration=SAVED_AT)
            train(model, optimizer, SAVED_AT, ENDS_AT)
            ends.append(weights(model))
        dist.barrier()
    return all(same(ends[0], end) for end in ends)


def load_all(folder: str, form: str, names: list[str]) -> list[str]:
    """Go on from every checkpoint on 1 to 4 ranks, in both; return what did not end right."""
    groups, wrong = groups_by_size(), []
    expected: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        for kind in ("zero1", "zero2"):
            model = build(dtype_of(form))
            alone = make(kind, model, form, groups[1])
            train(model, alone, 0, ENDS_AT)
            expected[kind] = masters(alone)
        if not torch.equal(expected["zero1"], expected["zero2"]):
            wrong.append("the two optimizers differ without a stop")
    for size in SIZES:
        for name in names:
            for kind in ("zero1", "zero2"):
                if dist.get_rank() < size:
                    fresh = build(dtype_of(form))
                    with torch.no_grad():
                        for param in fresh.parameters():
                            param.zero_()
                    optimizer = make(kind, fresh, form, groups[size], cap=0.001)
                    load_sharded(Path(folder) / name, optimizer)
                    train(fresh, optimizer, SAVED_AT, ENDS_AT)
                    if size == 1 and not torch.equal(masters(optimizer), expected[kind]):
                        wrong.append(f"{name} in {kind} on one rank: masters")
                    save_sharded(f"{folder}/end-{kind}-{name}-{size}", optimizer)
            dist.barrier()
    return wrong


def make(
    kind: str, model: torch.nn.Module, form: str, group: Any, cap: float = 0.0005
) -> ShardedOptimizer:
    if kind == "zero1":
        return flat_of(model, dtype_of(form), group, bucket_size=None)
    return fused_of(model, form, group, cap)


@pytest.fixture(scope="module", params=FORMS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints of 1 to 4 ranks."""
    folder = tmp_path_factory.mktemp(f"saved-{request.param}")
    assert all(run_ranks(save_all, max(SIZES), str(folder), request.param, timeout_s=240))
    return request.param, folder


def state_of(path: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the optimizer's whole tensors, read by the safetensors library."""
    api.gather(path, scratch / path.name, cross_check=False)
    return load_file(scratch / path.name / "optimizer.safetensors")


def test_what_either_saved_goes_on_in_both_on_any_number_of_ranks(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    form, folder = saved
    names = ["native1", "native4", "flat", "whole"]
    found = run_ranks(load_all, max(SIZES), str(folder), form, names, timeout_s=400)
    assert [wrong for rank in found for wrong in rank] == []
    ends = sorted(folder.glob("end-*"))
    assert len(ends) == 2 * len(names) * len(SIZES)
    first = state_of(ends[0], tmp_path)
    for end in ends[1:]:
        other = state_of(end, tmp_path)
        assert other.keys() == first.keys()
        assert [key for key in first if not torch.equal(first[key], other[key])] == [], end.name


def test_what_two_kinds_and_all_sizes_saved_is_the_same_state(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = saved
    paths = [*(folder / f"native{size}" for size in SIZES), folder / "whole", folder / "flat"]
    first, *others = (state_of(path, tmp_path) for path in paths)
    for other in others:
        assert [key for key in first if not torch.equal(first[key], other[key])] == []
    assert api.verify(folder / "native3", against=folder / "native2").ok


def test_resharding_what_a_ranks_saved_gives_byte_for_byte_what_b_ranks_save(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    form, folder = saved
    for a, b in pairs():
        out = tmp_path / f"{a}to{b}"
        api.reshard(folder / f"native{a}", out, target=api.Target(dp=b))
        theirs = folder / f"native{b}"
        assert api.verify(out, against=theirs).ok, (a, b)
        if form == "remainders":  # written offline it has whole masters
            continue
        for path in theirs.iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes(), (a, b, path.name)
