"""Twenty rows on eight ranks, as torch.chunk cuts them: shares of 3, one of 2, and a rank of none.

What each rank wrote is judged by the readers of safetensors and of torch, not by ours.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from general_models import differences, state_of, train
from gloo_ranks import run_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training_runs import KINDS, Run

from ckpttools.hooks import load_general, load_sharded, save_general, save_sharded
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.hooks.step_directory import step_name
from ckpttools.optimizer import (
    DistributedFusedAdam,
    DistributedOptimizer,
    OptimizerConfig,
    ShardedOptimizer,
)
from ckpttools.testing import assert_resume_exact

RANKS = 8
SHARES = [3, 3, 3, 3, 3, 3, 2, 0]
STARTS = [0, 3, 6, 9, 12, 15, 18]
SAVED_AT = 2
# Form, asynchronous, and whether the last rank writes something after all: each pair of two once.
SAVES = [
    ("sharded", False, True),
    ("sharded", True, False),
    ("dcp", False, False),
    ("dcp", True, True),
]


class Cut(nn.Module):
    """Twenty rows, and twenty columns; ``shared`` adds parameters that all ranks have whole."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.rows = nn.Linear(3, 20)
        self.columns = nn.Parameter(torch.arange(40.0).reshape(2, 20))
        if shared:
            self.whole = nn.ParameterList(torch.arange(4.0) + number for number in range(9))


def build(*, shared: bool, mesh: DeviceMesh | None) -> tuple[Cut, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Cut(shared=shared)
    if mesh is not None:
        # Seconds that the ranks of other tests here needn't spend.
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor

        fully_shard(model.rows, mesh=mesh)
        model.columns = nn.Parameter(
            distribute_tensor(model.columns.detach(), mesh, [Shard(1)], src_data_rank=None)
        )
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)


def save_all(folder: str) -> list[list[int]]:
    """Save in each way; return the lengths that this rank holds of its tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = []
    for form, asynchronous, shared in SAVES:
        model, optimizer = build(shared=shared, mesh=mesh)
        train(model, optimizer, 0, SAVED_AT)
        local: Any = [model.rows.weight, model.rows.bias, model.columns]
        held += [part.to_local().shape[dim] for part, dim in zip(local, (0, 0, 1), strict=True)]
        with CheckpointManager(
            Path(folder) / f"{form}-{asynchronous}",
            format=form,
            asynchronous=asynchronous,
            preemption_signals=(),
        ) as manager:
            manager.save(SAVED_AT, model, optimizer)
            train(model, optimizer, 7, 8)  # what was saved are the values of before
    return held


def load_all(folder: str, *, cut: bool) -> list[Any]:
    """Load each on this number of ranks; return what isn't as in a run that was never cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if cut else None
    found: list[Any] = []
    for form, asynchronous, shared in SAVES:
        alone, reference = build(shared=shared, mesh=None)
        train(alone, reference, 0, SAVED_AT)
        expected = state_of(alone, reference)
        model, optimizer = build(shared=shared, mesh=mesh)
        assert differences(state_of(model, optimizer), expected)
        place = Path(folder) / f"{form}-{asynchronous}"
        with CheckpointManager(place, preemption_signals=()) as manager:
            restored = manager.restore(model, optimizer)
        odd = [note for note in restored.notes if not note.startswith("rng: not restored")]
        odd += differences(state_of(model, optimizer), expected)
        found += [(form, asynchronous, one) for one in odd]
    return found


def saved_and_loaded(folder: str) -> list[Any]:
    return [save_all(folder), load_all(folder, cut=True)]


def loaded(folder: str, cut: bool) -> list[Any]:
    return load_all(folder, cut=cut)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shares")
    found = run_ranks(saved_and_loaded, RANKS, str(place), timeout_s=200)
    assert [held for held, _ in found] == [[share] * 3 * len(SAVES) for share in SHARES]
    assert [odd for _, odd in found] == [[]] * RANKS
    return place


@pytest.mark.parametrize(("ranks", "cut"), [(3, True), (1, True), (1, False)])
def test_what_eight_ranks_saved_goes_to_fewer_bit_for_bit(
    ranks: int, cut: bool, folder: Path
) -> None:
    assert run_ranks(loaded, ranks, str(folder), cut) == [[]] * ranks


TENSORS = ("rows.weight", "rows.bias", "columns")
SLOTS = ("weight", "exp_avg", "exp_avg_sq")


def boxes(name: str) -> list[tuple[list[int], list[int]]]:
    """Return offsets and lengths of the chunks of a tensor, one for each rank that has one."""
    cut = list(zip(STARTS, SHARES, strict=False))
    if name == "rows.weight":
        return [([start, 0], [share, 3]) for start, share in cut]
    if name == "rows.bias":
        return [([start], [share]) for start, share in cut]
    return [([0, start], [2, share]) for start, share in cut]


@pytest.mark.parametrize(("asynchronous", "shared"), [one[1:] for one in SAVES[:2]])
def test_files_of_chunks_hold_exactly_those_shares(
    asynchronous: bool, shared: bool, folder: Path
) -> None:
    step = folder / f"sharded-{asynchronous}" / step_name(SAVED_AT)
    document = json.loads((step / "manifest.json").read_text())
    names = sorted(path.name for path in step.glob("*.safetensors"))
    assert (
        names == [f"rank-{rank:05d}.safetensors" for rank in range(RANKS)] == [*document["files"]]
    )
    found: dict[str, list[Any]] = {}
    for name in names:
        stated = document["files"][name]["keys"]
        with safe_open(step / name, "pt") as file:
            stored = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118  # it is no dict
        assert stored == {key: one["lengths"] for key, one in stated.items()}
        for one in stated.values():
            tensor = document["tensors"][one["tensor"]]
            chunks = found.setdefault(f"{tensor['name']}:{tensor['slot']}", [])
            chunks.append((one["offsets"], one["lengths"]))
    for name, slot in product(TENSORS, SLOTS):
        assert found[f"{name}:{slot}"] == boxes(name)
    # The last rank has nothing that is cut: it writes a file without tensors, or shared ones alone.
    assert bool(stored) == shared
    assert all(key.startswith("whole.") for key in stored)


@pytest.mark.parametrize(("asynchronous", "shared"), [one[1:] for one in SAVES[2:]])
def test_checkpoints_of_torch_hold_exactly_those_shares(
    asynchronous: bool, shared: bool, folder: Path
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    step = folder / f"dcp-{asynchronous}" / step_name(SAVED_AT)
    metadata = FileSystemReader(step).read_metadata()
    for name, slot in product(TENSORS, SLOTS):
        key = f"model.{name}" if slot == "weight" else f"optimizer.state.{name}.{slot}"
        found: Any = metadata.state_dict_metadata[key]
        told = sorted((list(chunk.offsets), list(chunk.sizes)) for chunk in found.chunks)
        assert told == sorted(boxes(name))
        files = {
            tuple(index.offset): info.relative_path
            for index, info in metadata.storage_data.items()
            if index.fqn == key
        }
        assert [files[tuple(start)] for start, _ in boxes(name)] == [
            f"__{rank}_0.distcp" for rank in range(RANKS - 1)
        ]
    assert len(list(step.glob("*.distcp"))) == RANKS - (not shared)


# ---- our own optimizers ----------------------------------------------------------------------


def tiny(kind: str) -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1))
    if kind == "zero1":
        return model, DistributedOptimizer(model, OptimizerConfig(lr=0.1, clip_grad=0.0))
    return model, DistributedFusedAdam(model, lr=0.1)


def optimizer_state(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return weights, and on rank 0 the whole state."""
    optimizer.finish_param_sync()
    found: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    gathered = optimizer.gather_torch_state_dict()
    for number, entry in (gathered or {"state": {}})["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(value) for key, value in entry.items()}
    return found


OWN_FORMS = {
    "zero1": [("sharded", False), ("dcp", True), ("gathered", False)],
    "zero2": [("sharded", True), ("dcp", False), ("gathered", False)],
}


def save_own(folder: str, kind: str) -> tuple[int, dict[str, Any]]:
    """Save a run of a tiny model; return the elements that this rank owns, and the state."""
    model, optimizer = tiny(kind)
    for _ in range(SAVED_AT):
        optimizer.zero_grad()
        model(torch.arange(4.0)).sum().backward()
        optimizer.step()
    for form, asynchronous in OWN_FORMS[kind]:
        place = Path(folder) / f"{kind}-{form}-{asynchronous}"
        with CheckpointManager(
            place, format=form, asynchronous=asynchronous, preemption_signals=()
        ) as manager:
            manager.save(SAVED_AT, model, optimizer, rng=False)
    owned = sum(piece.range.param.size for piece in optimizer.pieces)
    return owned, optimizer_state(model, optimizer)


def load_own(folder: str, kind: str) -> list[dict[str, Any]]:
    found = []
    for form, asynchronous in OWN_FORMS[kind]:
        model, optimizer = tiny(kind)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        place = Path(folder) / f"{kind}-{form}-{asynchronous}"
        with CheckpointManager(place, preemption_signals=()) as manager:
            manager.restore(model, optimizer, rng=False)
        found.append(optimizer_state(model, optimizer))
    return found


def own_saved_and_loaded(folder: str) -> list[Any]:
    return [(save_own(folder, kind), load_own(folder, kind)) for kind in KINDS]


def own_loaded(folder: str) -> list[Any]:
    return [load_own(folder, kind) for kind in KINDS]


def test_a_tiny_model_of_which_most_ranks_hold_nothing_goes_to_as_many_and_to_fewer(
    tmp_path: Path,
) -> None:
    found = run_ranks(own_saved_and_loaded, RANKS, str(tmp_path), timeout_s=200)
    for number in range(len(KINDS)):
        owned = [rank[number][0][0] for rank in found]
        assert sum(owned) == 26
        assert owned.count(0) >= 4, owned
        saved = found[0][number][0][1]  # rank 0 has the whole state
        assert len(saved) > len(list(tiny("zero1")[0].parameters()))
        for back in found[0][number][1]:
            assert differences(back, saved) == []
    for number, states in enumerate(run_ranks(own_loaded, 3, str(tmp_path))[0]):
        for back in states:
            assert differences(back, found[0][number][0][1]) == []


# ---- a group of other ranks than the first ---------------------------------------------------


def on_the_last_two(folder: str) -> list[str]:
    """Save in each form on global ranks 2 and 3 and go on there; the others do nothing."""
    group = dist.new_group([2, 3])
    if dist.get_rank() not in {2, 3}:
        return []
    done = []
    for kind, form, asynchronous in [(k, *one) for k in KINDS for one in OWN_FORMS[k]]:
        settings: dict[str, Any] = {"format": form, "asynchronous": asynchronous}
        name = f"{kind}-{form}-{asynchronous}"
        assert_resume_exact(
            lambda kind=kind, settings=settings: Run(kind, "fp32", group, **settings),
            Path(folder) / name,
            save_at=2,
            stop_at=4,
            barrier=lambda: dist.barrier(group),
        )
        done.append(name)
    for kind in KINDS:
        run, other = Run(kind, "bf16", group), Run(kind, "bf16", group)
        run.train(0, 2)
        save_sharded(Path(folder) / f"{kind}-alone", run.optimizer)
        load_sharded(Path(folder) / f"{kind}-alone", other.optimizer)
        assert differences(weights(run), weights(other)) == []
    return [*done, *general_on(folder, group)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in run.model.named_parameters()}


def general_on(folder: str, group: Any) -> list[str]:
    """Save and load a cut model with an optimizer of torch's."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model, optimizer = build(shared=True, mesh=mesh)
    train(model, optimizer, 0, SAVED_AT)
    save_general(Path(folder) / "general", model, optimizer, group=group)
    fresh, other = build(shared=True, mesh=mesh)
    assert differences(state_of(fresh, other), state_of(model, optimizer))
    load_general(Path(folder) / "general", fresh, other, group=group)
    assert differences(state_of(fresh, other), state_of(model, optimizer)) == []
    return ["general"]


def test_a_group_of_other_ranks_than_the_first_saves_and_goes_on_in_every_form(
    tmp_path: Path,
) -> None:
    found = run_ranks(on_the_last_two, 4, str(tmp_path), timeout_s=200)
    assert [len(one) for one in found] == [0, 0, 7, 7]
    assert found[2] == found[3]
    assert sorted(path.name for path in (tmp_path / "general").iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
