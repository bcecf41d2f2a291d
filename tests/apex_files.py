"""Files as Apex's DistributedFusedAdam writes them: the fixtures, and others laid out from scratch.

Nothing here imports ckpttools. Placement follows Apex's own rules written down a second time, one
element range after the other, and torch.save writes the files, with stand-ins for Apex's classes
that live as long as the call.
"""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "apex"
VARIANTS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
NAMES = FIXTURES / "names.json"
SLOTS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
MODULE = "apex.contrib.optimizers.distributed_fused_adam"


def meta(variant: str) -> dict[str, Any]:
    """What is known of the run that wrote a fixture."""
    known: dict[str, Any] = json.loads((FIXTURES / variant / "meta.json").read_text())
    return known


def truth(variant: str) -> dict[tuple[str, str], torch.Tensor]:
    """The state of the run that wrote a fixture by name and slot, all float32; its weights too."""
    found = load_file(FIXTURES / variant / "ground_truth.safetensors")
    state = {
        (name, SLOTS[slot]): tensor
        for key, tensor in found.items()
        for name, _, slot in [key.rpartition(".")]
    }
    weights = torch.load(FIXTURES / variant / "model.pt")
    return state | {(name, "weight"): tensor for name, tensor in weights.items()}


def gathered(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Read what `gather` wrote with another library."""
    found = {(k, "weight"): v for k, v in load_file(path / "model.safetensors").items()}
    for key, tensor in load_file(path / "optimizer.safetensors").items():
        name, _, slot = key.removeprefix("state.").rpartition(".")
        found[name, slot] = tensor
    return found


# --- Apex's classes ----------------------------------------------------------------------


class _Record:
    """A stand-in with attributes, pickled by the name that it has in Apex."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class DistributedFusedAdam:
    """Stands in for Apex's class of the name."""

    class StateBucket(_Record):
        """Stands in for Apex's class of the name."""

    class ParameterFragment(_Record):
        """Stands in for Apex's class of the name."""


for _cls in (
    DistributedFusedAdam,
    DistributedFusedAdam.StateBucket,
    DistributedFusedAdam.ParameterFragment,
):
    _cls.__module__ = MODULE


@contextmanager
def apex_installed() -> Iterator[None]:
    """Let the classes be found where they say they are, as if Apex were there."""
    parts = MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    modules = {name: types.ModuleType(name) for name in names}
    modules[MODULE].DistributedFusedAdam = DistributedFusedAdam  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def save(tree: object, path: Path | io.BytesIO, **options: Any) -> None:
    """Save as a run with Apex would."""
    with apex_installed():
        torch.save(tree, path, **options)


def load(path: Path | io.BytesIO) -> Any:
    """Load as a run with Apex would that trusts its files."""
    with apex_installed():
        return torch.load(path, weights_only=False, map_location="cpu")


# --- a run of our own ----------------------------------------------------------------------


@dataclass
class Param:
    """A parameter: its weight, and its state in the weight's own (logical) order of elements."""

    name: str
    weight: torch.Tensor
    state: dict[str, torch.Tensor]
    group: int = 0
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3
    keep: str = "params_shard"


@dataclass
class Run:
    """A run on ``ranks`` ranks; ``order`` is that in which parameters were placed."""

    params: list[Param]
    ranks: int
    cap: int = 600
    alignment: int = 32
    step: Any = 7
    fields: str = "2023-09"
    order: list[int] | None = None
    closed_after: Sequence[int] = ()
    buckets: list[Any] = field(default_factory=list)

    @property
    def shard(self) -> int:
        return max(self.alignment, self.cap // self.ranks // self.alignment * self.alignment)

    def places(self) -> list[tuple[int, int, int, int, int]]:
        """Where each run of elements lies: parameter, first, last, bucket, place in the bucket."""
        size = self.shard * self.ranks
        filled: list[int] = []
        kinds: list[tuple[torch.dtype, ...]] = []
        is_open: list[bool] = []
        found = []
        order = self.order or list(reversed(range(len(self.params))))
        for turn, index in enumerate(order):
            param = self.params[index]
            at, total = 0, param.weight.numel()
            while at < total:
                same = [b for b, kind in enumerate(kinds) if kind == param.dtypes]
                # Apex's look-up ends at bucket 0 whatever its dtypes are.
                last = same[-1] if same else (0 if kinds else -1)
                start = -(-filled[last] // self.alignment) * self.alignment if kinds else size
                if last < 0 or not is_open[last] or start >= size:
                    kinds.append(param.dtypes)
                    filled.append(0)
                    is_open.append(True)
                    continue
                count = min(total - at, size - start)
                found.append((index, at, at + count, last, start))
                filled[last], at = start + count, at + count
            if turn in self.closed_after:
                is_open = [False] * len(is_open)
        self.buckets = kinds
        return found

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What `state_dict(state_dict_format=1, gather_on_root=False)` gives on a rank."""
        places, shard = self.places(), self.shard
        numbers = self._numbers()
        buckets = [self._bucket(number, kind, rank) for number, kind in enumerate(self.buckets)]
        state: dict[Any, Any] = {"buckets": buckets, "step": self.step}
        for index in self.order or reversed(range(len(self.params))):
            group, member, flat = numbers[index]
            state[flat] = {"fragments": []}
            for _, first, last, bucket, start in (p for p in places if p[0] == index):
                low = max(start, rank * shard)
                high = min(start + last - first, (rank + 1) * shard)
                local = low < high
                fragment = DistributedFusedAdam.ParameterFragment(
                    param_group_id=group,
                    param_id=member,
                    bucket_id=bucket,
                    param_range=(first, last),
                    bucket_range=(start, start + last - first),
                    in_local_shard=local,
                    shard_range=(low - rank * shard, high - rank * shard) if local else None,
                    shard_bucket_range=(low, high) if local else None,
                    shard_param_range=(low - start + first, high - start + first)
                    if local
                    else None,
                )
                state[flat]["fragments"].append(fragment)
                buckets[bucket].fragments.append(fragment)
                self._fill(buckets[bucket], fragment, index)
        for bucket in buckets:
            if bucket.fragments and hasattr(bucket, "filled_size"):
                bucket.filled_size = bucket.fragments[-1].bucket_range[1]
        return {"state": state, "param_groups": self.groups(), "format": 1}

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as every format has them."""
        found: list[dict[str, Any]] = []
        numbers = self._numbers()
        betas = (0.9, 0.95)
        for group in range(1 + max(param.group for param in self.params)):
            mine = [f for i, (g, _, f) in numbers.items() if g == group]
            found.append(
                {
                    "lr": 0.01 * (group + 1),
                    "bias_correction": True,
                    "betas": betas,
                    "eps": 1e-8,
                    "weight_decay": 0.1 if group == 0 else 0.0,
                    "params": sorted(mine),
                }
            )
        return found

    def names(self) -> list[str]:
        """Names by number."""
        numbers = self._numbers()
        by_flat = {flat: self.params[i].name for i, (_, _, flat) in numbers.items()}
        return [by_flat[i] for i in range(len(by_flat))]

    def truth(self) -> dict[tuple[str, str], torch.Tensor]:
        """The logical state by name and slot."""
        found = {}
        for param in self.params:
            found[param.name, "weight"] = param.weight
            for slot, tensor in param.state.items():
                found[param.name, SLOTS[slot]] = tensor
        return found

    def model(self) -> dict[str, torch.Tensor]:
        """The model's weights by name."""
        return {param.name: param.weight for param in self.params}

    def _numbers(self) -> dict[int, tuple[int, int, int]]:
        """For each parameter its group, its place in it, and its number."""
        numbers: dict[int, tuple[int, int, int]] = {}
        for group in range(1 + max(param.group for param in self.params)):
            mine = [i for i, param in enumerate(self.params) if param.group == group]
            for member, index in enumerate(mine):
                numbers[index] = group, member, len(numbers)
        return numbers

    def _bucket(self, number: int, kind: tuple[torch.dtype, ...], rank: int) -> Any:
        """An empty bucket with the fields of its time."""
        owner = next(p for p in self.params if p.dtypes == kind)
        dtype, shard = kind[0], self.shard
        fields: dict[str, Any] = {
            "params_shard": torch.zeros(shard, dtype=dtype),
            "exp_avg_shard": torch.zeros(shard, dtype=dtype),
            "exp_avg_sq_shard": torch.zeros(shard, dtype=dtype),
            "fragments": [],
        }
        if owner.keep != "params_shard":
            fields["params_shard"] = None
        if self.fields >= "2022-11":
            remains = owner.keep == "param_remainders_shard"
            fields["param_remainders_shard"] = (
                torch.zeros(shard, dtype=torch.int16) if remains else None
            )
        if self.fields >= "2023-01":
            size = shard * self.ranks
            fields |= {"bucket_size": size, "shard_size": shard, "filled_size": 0}
            fields["contiguous_buffer_offset"] = number * size
        if self.fields >= "2023-09":
            fields |= {"dtype": kind[0], "grad_sync_dtype": kind[1], "param_sync_dtype": kind[2]}
            fields["able_to_fill"] = True
        del rank
        return DistributedFusedAdam.StateBucket(**fields)

    def _fill(self, bucket: Any, fragment: Any, index: int) -> None:
        """Copy what a rank owns into its shard."""
        if not fragment.in_local_shard:
            return
        param = self.params[index]
        to, of = slice(*fragment.shard_range), slice(*fragment.shard_param_range)
        for slot in ("exp_avg", "exp_avg_sq"):
            getattr(bucket, f"{slot}_shard")[to] = flat(param.state[slot], param.weight)[of]
        master = flat(param.state["param"], param.weight)[of]
        if bucket.params_shard is not None:
            bucket.params_shard[to] = master
        elif getattr(bucket, "param_remainders_shard", None) is not None:
            bucket.param_remainders_shard[to] = master.view(torch.int32).to(torch.int16)


def flat(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Elements in the order in which Apex flattens a parameter with this weight."""
    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return (tensor.permute(0, 2, 3, 1) if last else tensor).reshape(-1)


def half_away(master: torch.Tensor) -> torch.Tensor:
    """The bfloat16 weight that stands beside remainders."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    signed = torch.where(high >= 0x8000, high - 0x10000, high)
    return signed.to(torch.int16).view(torch.bfloat16)


def random_param(name: str, shape: tuple[int, ...], seed: int, **options: Any) -> Param:
    """A parameter whose state differs in every element; the weight is its master."""
    generator = torch.Generator().manual_seed(seed)
    state = {slot: torch.randn(shape, generator=generator) for slot in SLOTS}
    state["exp_avg_sq"] = state["exp_avg_sq"].abs()
    return Param(name, state["param"].clone(), state, **options)


def save_run(run: Run, path: Path) -> Path:
    """Write a file for each rank, the weights and the names."""
    path.mkdir()
    for rank in range(run.ranks):
        save(run.rank_state(rank), path / f"rank{rank}.pt")
    torch.save(run.model(), path / "model.pt")
    path.with_suffix(".json").write_text(json.dumps(run.names()))
    return path


def gather_run(run: Run) -> dict[str, Any]:
    """What `state_dict(state_dict_format=1)` gives on rank 0."""
    states = []
    for rank in range(run.ranks):
        state = run.rank_state(rank)
        del state["format"]
        buffer = io.BytesIO()
        save(state, buffer)
        states.append(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    return {"gathered_states": states, "format": 1}
