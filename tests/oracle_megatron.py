"""What does a Megatron ``torch`` checkpoint hold, decoded without ckpttools?

The oracle imports nothing of what it checks. Where each parameter lies it takes from a
``layout.json``, which records the *live* buffers and ranges of the run that wrote a fixture, so
no layout formula is computed here. Values come from ``torch.load``; classes of packages that
are not installed are replaced by stand-ins, which is fine for trusted fixtures only.

The optimizer file holds the buckets of a buffer joined without their end padding, hence a
parameter of bucket k that starts at ``start`` in the buffer starts in the file at
``start - sum over j < k of (padded_j - unpadded_j)``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle_torch_files import compare_files, read, same_bits, tensor_differences
from safetensors.torch import load_file

__all__ = [
    "Case",
    "Decoded",
    "OracleError",
    "case",
    "cases",
    "compare_files",
    "decode",
    "logical_rows",
    "read",
    "same_bits",
    "tensor_differences",
]

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"
SLOTS = ("param", "exp_avg", "exp_avg_sq")
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VOCABULARY = (EMBEDDING, OUTPUT)


# --- the fixtures -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One fixture: a checkpoint that a real run wrote, and what that run held."""

    name: str
    family: str
    writer: str
    dtype: str
    tp: int
    pp: int
    dp: int
    bucket_size: int | None
    padded_vocab: int
    truth: str
    model: Mapping[str, Any]
    step: int
    vpp: int = 1

    @property
    def directory(self) -> Path:
        """The checkpoint root, with ``latest_checkpointed_iteration.txt``."""
        return FIXTURES / self.name / "torch"

    def layout(self) -> list[dict[str, Any]]:
        """The live buffers, ranges and groups of every rank."""
        layout: list[dict[str, Any]] = json.loads(
            (FIXTURES / self.name / "layout.json").read_text()
        )
        return layout

    def truth_tensors(self) -> dict[str, torch.Tensor]:
        """The logical tensors that the live run held, by ``<slot>/<name>``."""
        return load_file(FIXTURES / self.truth / "truth.safetensors")

    def __str__(self) -> str:
        return self.name


def cases(family: str | None = None) -> list[Case]:
    """List the fixtures, all of them or one family's."""
    index = json.loads((FIXTURES / "families.json").read_text())
    return [
        Case(name, key, dtype=entry["dtype"], model=entry["model"], step=entry["step"], **case)
        for key, entry in index.items()
        if family in (None, key)
        for name, case in entry["cases"].items()
    ]


def case(name: str) -> Case:
    """Return one fixture by its folder's name."""
    return next(c for c in cases() if c.name == name)


def iteration_directory(root: Path) -> Path:
    """Return the ``iter_*`` directory that the tracker names, or ``root`` itself if it is one."""
    tracker = root / "latest_checkpointed_iteration.txt"
    return root / f"iter_{int(tracker.read_text()):07d}" if tracker.is_file() else root


def rank_directory(root: Path, tp: int, pp: int, *, pipeline: bool) -> Path:
    """Return the directory of one model-parallel rank; the PP part is there where PP > 1."""
    name = f"mp_rank_{tp:02d}_{pp:03d}" if pipeline else f"mp_rank_{tp:02d}"
    return iteration_directory(root) / name


# --- decoding ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """The logical content of a checkpoint.

    ``tensors`` is keyed ``param/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` (fp32) and
    ``model/<name>`` (the model's dtype), by global name, merged over TP and PP.
    """

    tensors: dict[str, torch.Tensor]
    step: int | float
    param_groups: list[dict[str, Any]]
    args: argparse.Namespace


@dataclass(frozen=True, slots=True)
class _Split:
    """How a parameter is cut over TP; ``dim`` None is a replica on every rank."""

    dim: int | None
    gated: bool


class OracleError(Exception):
    """The checkpoint contradicts the layout or itself."""


def decode(root: Path, layout: list[dict[str, Any]]) -> Decoded:
    """Decode a checkpoint whose files are cut as ``layout`` says.

    The files don't depend on the data-parallel size as long as there is one bucket, so a layout
    of another DP size serves too. Copies (TP replicas, tied embeddings) must be equal.

    Raises:
        OracleError: sizes differ from the layout's, or copies differ, or ranks disagree.
    """
    pipeline = max(rank["pp"] for rank in layout) > 0
    parts: dict[str, dict[int, torch.Tensor]] = {}  # key -> TP rank -> local tensor
    heads: list[tuple[Any, Any]] = []
    args: Any = None
    for rank in layout:
        if rank["dp"] != 0:
            continue
        folder = rank_directory(root, rank["tp"], rank["pp"], pipeline=pipeline)
        model_file = read(folder / "model_optim_rng.pt")
        local = [
            *_weights(model_file, rank),
            *_optimizer_state(read(folder / "distrib_optim.pt"), rank, str(folder)),
        ]
        for key, tensor in local:
            parts.setdefault(key, {})[rank["tp"]] = tensor
        heads.append((_groups(model_file), folder))
        args = args or model_file["args"]
    tensors = _merge(parts, _splits(layout, gated=bool(args.swiglu)))
    if not args.untie_embeddings_and_output_weights:
        _drop_tied_copy(tensors)
    groups, step = _agree(heads)
    return Decoded(tensors, step, groups, args)


def _weights(
    model_file: dict[str, Any], rank: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of one rank by global name, in its own cut."""
    chunks = {p["chunk"] for b in rank["buffers"] for p in b["params"]}
    for buffer in rank["buffers"]:
        for param in buffer["params"]:
            state = model_file["model" if len(chunks) == 1 else f"model{param['chunk']}"]
            weight = state[param["name"]]
            if list(weight.shape) != param["shape"]:
                raise OracleError(
                    f"{param['name']}: shape must be {param['shape']}, got {weight.shape}"
                )
            yield f"model/{param['canon']}", weight


def _optimizer_state(
    state: dict[Any, Any], rank: dict[str, Any], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the slots of one rank by global name, cut out of the joined buckets."""
    for buffer in rank["buffers"]:
        (entry,) = state[buffer["gbuf"]].values()
        unpadded = buffer["bucket_numel_unpadded"]
        if entry["numel_unpadded"] != sum(unpadded):
            raise OracleError(
                f"{where}: numel_unpadded must be {sum(unpadded)}, got {entry['numel_unpadded']}"
            )
        padded = [stop - start for start, stop in buffer["bucket_indices"]]
        for param in buffer["params"]:
            k = param["bucket"]
            start = param["start"] - sum(padded[:k]) + sum(unpadded[:k])
            stop = start + param["end"] - param["start"]
            for slot in SLOTS:
                values = entry[slot]
                if values.shape != (sum(unpadded),):
                    raise OracleError(
                        f"{where}: {slot} must hold {sum(unpadded)} elements, got {values.shape}"
                    )
                yield f"{slot}/{param['canon']}", values[start:stop].view(param["shape"])


def _groups(model_file: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = model_file["optimizer"]["optimizer"]["param_groups"]
    return groups


def _agree(heads: list[tuple[Any, Any]]) -> tuple[list[dict[str, Any]], int | float]:
    """Return the groups and the step, which all ranks must have alike."""
    groups = heads[0][0]
    for other, folder in heads[1:]:
        if other != groups:
            raise OracleError(
                f"{folder}: param_groups must be those of the first rank, got {other}"
            )
    steps = {group["step"] for group in groups if "step" in group}
    if len(steps) != 1:
        raise OracleError(f"param_groups must have one step, got {sorted(steps)}")
    return groups, steps.pop()


def _splits(layout: list[dict[str, Any]], *, gated: bool) -> dict[str, _Split]:
    """Read from the live shards along which dimension each parameter is cut."""
    return {
        shard["canon"]: _Split(shard["tp_split_dim"], gated and "linear_fc1" in shard["canon"])
        for rank in layout
        for shard in rank["shards"]
    }


def _merge(
    parts: dict[str, dict[int, torch.Tensor]], splits: dict[str, _Split]
) -> dict[str, torch.Tensor]:
    merged = {}
    for key, by_rank in parts.items():
        local = [by_rank[tp] for tp in sorted(by_rank)]
        split = splits[key.split("/", 1)[1]]
        if len(local) == 1 or split.dim is None:
            if not all(same_bits(tensor, local[0]) for tensor in local):
                raise OracleError(f"{key}: replicas must be equal, got a difference")
            merged[key] = local[0].contiguous()
            continue
        if split.gated:  # each rank holds [gate; up], the whole is all gates, then all ups
            halves = [tensor.chunk(2, split.dim) for tensor in local]
            local = [gate for gate, _ in halves] + [up for _, up in halves]
        merged[key] = torch.cat(local, split.dim)
    return merged


def _drop_tied_copy(tensors: dict[str, torch.Tensor]) -> None:
    """Keep a tied embedding once; the last stage's copy must equal it."""
    for prefix in (*SLOTS, "model"):
        copy = tensors.pop(f"{prefix}/{OUTPUT}", None)
        if copy is not None and not same_bits(copy, tensors[f"{prefix}/{EMBEDDING}"]):
            raise OracleError(f"{prefix}/{OUTPUT}: must equal {EMBEDDING}, got a difference")


def logical_rows(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """Cut the padding rows off the vocabulary tensors."""
    return {
        key: tensor[:vocab_size] if key.endswith(VOCABULARY) else tensor
        for key, tensor in tensors.items()
    }
