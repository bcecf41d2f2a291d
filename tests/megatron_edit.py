"""How does a test get a Megatron checkpoint that is broken in one chosen way and sound elsewhere?

It copies a fixture, changes the objects or the elements of its torch files, and writes them with
right checksums, so that what is refused is the change and not its traces.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import oracle_megatron as oracle
import torch

from ckpttools.cli.main import main
from ckpttools.dtypes import BY_NAME
from ckpttools.storage.inert import Inert, new_global
from ckpttools.storage.torchzip import StorageRef, TensorRef, read_torch_file
from ckpttools.storage.torchzip_writer import lay_out_torch_file, seal

MODEL = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"
ITERATION = "iter_0000003"
TRACKER = "latest_checkpointed_iteration.txt"
Change = Callable[[Path], object]
SLOTS = ("weight", "param", "exp_avg", "exp_avg_sq")


def copy_of(name: str, destination: Path) -> Path:
    """Copy the fixture ``name`` and return its root."""
    return Path(shutil.copytree(oracle.case(name).directory, destination))


def rank_files(root: Path, file: str) -> list[Path]:
    """Return the files of that name, by rank."""
    return sorted(root.glob(f"*/*/{file}"))


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """Lend the tree of a torch file, payloads loaded and writable, and save it afterwards."""
    file = read_torch_file(path)
    data = path.read_bytes()
    for storage in file.storages.values():
        offset, length = file.payload(storage)
        storage.payload = bytearray(data[offset : offset + length])
    yield file.tree
    save(path, file.tree, file.prefix)


def save(path: Path, tree: object, prefix: str | None = None) -> None:
    """Write a torch file that holds ``tree``; its storages have their payloads."""
    path.write_bytes(torch_bytes(tree, prefix or path.stem))


def torch_bytes(tree: object, prefix: str) -> bytes:
    """Return the bytes of a torch file that holds ``tree``."""
    draft = lay_out_torch_file(prefix, tree)
    data = bytearray(draft.size)
    for offset, piece in [*draft.pieces, *seal(draft, {})]:
        data[offset : offset + len(piece)] = piece
    return bytes(data)


def elements(storage: StorageRef) -> np.ndarray:
    """View a loaded storage's elements as unsigned integers of their size; writable."""
    return np.frombuffer(storage.payload, f"<u{storage.dtype.itemsize}")


def values(tensor: TensorRef) -> np.ndarray:
    """View a dense loaded tensor's elements, flat; writable."""
    return elements(tensor.storage)[tensor.offset : tensor.offset + tensor.numel]


def edit_all(root: Path, file: str, change: Callable[[Any], None]) -> Path:
    """Apply ``change`` to the tree of that file on every rank; return the root."""
    for path in rank_files(root, file):
        with edited(path) as tree:
            change(tree)
    return root


def set_args(root: Path, **settings: object) -> Path:
    """Set arguments on every rank; return the root."""
    return edit_all(root, MODEL, lambda tree: tree["args"].state.update(settings))


def ranges(case: oracle.Case, tp: int, pp: int) -> dict[str, tuple[int, int, int]]:
    """Return by global name: element in the live buffer, in the saved one, and the count.

    They are those of the live run, in its one buffer.
    """
    rank = next(r for r in case.layout() if (r["tp"], r["pp"], r["dp"]) == (tp, pp, 0))
    (buffer,) = rank["buffers"]
    unpadded = buffer["bucket_numel_unpadded"]
    padded = [stop - start for start, stop in buffer["bucket_indices"]]
    found = {}
    for param in buffer["params"]:
        k = param["bucket"]
        saved = param["start"] - sum(padded[:k]) + sum(unpadded[:k])
        found[param["canon"]] = param["start"], saved, param["end"] - param["start"]
    return found


@contextmanager
def slot_values(case: oracle.Case, root: Path, tp: int, pp: int, slot: str) -> Iterator[Any]:
    """Lend a function from a parameter's global name to its elements on one rank, writable."""
    where = oracle.rank_directory(root, tp, pp, pipeline=case.pp > 1)
    places = ranges(case, tp, pp)
    with edited(where / (MODEL if slot == "weight" else OPTIMIZER)) as tree:
        if slot == "weight":
            flat = elements(next(iter(weights(tree).values())).storage)
            column = 0
        else:
            flat = values(next(iter(tree[0].values()))[slot])
            column = 1

        def find(name: str) -> np.ndarray:
            start, count = places[name][column], places[name][2]
            return flat[start : start + count]

        yield find


def chunks(tree: Any) -> list[str]:
    """Return the keys of a model file's chunks: ``model``, or ``model0``, ``model1`` …."""
    return [key for key in tree if re.fullmatch("model[0-9]*", key)]


def weights(tree: Any, chunk: str = "model") -> dict[str, TensorRef]:
    """Return the tensors of a model chunk, by the names in the file."""
    return {k: v for k, v in tree[chunk].items() if isinstance(v, TensorRef)}


def with_own_storages(root: Path) -> Path:
    """Give every weight a storage of its own, as files have them that another tool wrote."""

    def detach(tree: Any) -> None:
        for key in chunks(tree):
            for name, tensor in weights(tree, key).items():
                storage = StorageRef(tensor.dtype, tensor.numel, tensor.storage.location)
                storage.payload = values(tensor).tobytes()
                tree[key][name] = replace(tensor, storage=storage, offset=0)

    return edit_all(root, MODEL, detach)


# --- changes, as functions of a checkpoint's root --------------------------------------------


def iteration(root: Path) -> Path:
    return root / ITERATION


def one(file: str, rank: int, change: Callable[[Any], object]) -> Change:
    """Change the tree of one rank's file."""

    def apply(root: Path) -> None:
        with edited(rank_files(root, file)[rank]) as tree:
            change(tree)

    return apply


def every(change: Callable[[Any], object]) -> Change:
    """Change the trees of all model files."""
    return lambda root: edit_all(root, MODEL, change)


def args(**settings: object) -> Change:
    return lambda root: set_args(root, **settings)


def remove(*names: str) -> Change:
    def apply(root: Path) -> None:
        for name in names:
            place = iteration(root) / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink()

    return apply


def again(name: str, *others: str) -> Change:
    """Copy a rank's directory to other names."""

    def apply(root: Path) -> None:
        for other in others:
            shutil.copytree(iteration(root) / name, iteration(root) / other)

    return apply


def renamed(old: str, new: str) -> Change:
    return lambda root: (iteration(root) / old).rename(iteration(root) / new)


def cut(file: str, length: int) -> Change:
    def apply(root: Path) -> None:
        place = rank_files(root, file)[-1]
        place.write_bytes(place.read_bytes()[:length])

    return apply


def longer(root: Path) -> None:
    place = rank_files(root, MODEL)[-1]
    place.write_bytes(place.read_bytes() + b"\0")


def tracker(text: str) -> Change:
    return lambda root: (root / TRACKER).write_text(text)


def groups(tree: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tree["optimizer"]["optimizer"]["param_groups"]
    return found


def step(value: object) -> Callable[[Any], object]:
    return lambda tree: groups(tree)[0].update(step=value)


# --- a checkpoint as small as can be ------------------------------------------------------

TINY_ARGS: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "data_parallel_size": 1,
    "world_size": 1,
    "rank": 0,
    "num_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 6,
    "make_vocab_size_divisible_by": 4,
    "padded_vocab_size": 8,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
}
_LAYER = "decoder.layers.0"
TINY_SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    f"{_LAYER}.input_layernorm.weight": (4,),
    f"{_LAYER}.self_attention.linear_proj.weight": (4, 4),
    f"{_LAYER}.self_attention.linear_qkv.weight": (12, 4),
    f"{_LAYER}.pre_mlp_layernorm.weight": (4,),
    f"{_LAYER}.mlp.linear_fc1.weight": (4, 4),
    f"{_LAYER}.mlp.linear_fc2.weight": (4, 2),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (8, 4),
}


def tiny(root: Path) -> Path:
    """Write a sound checkpoint of one layer with few arguments, and return its root.

    Parameters start at multiples of 64 in reverse module order, the buffer ends at one of 128.
    """
    folder = root / ITERATION / "mp_rank_00"
    folder.mkdir(parents=True)
    (root / TRACKER).write_text("3")
    flats, weights = tiny_values()
    end = len(flats["param"])
    model = tiny_model(weights)
    groups = [{"wd_mult": mult, "lr_mult": 1.0, "lr": 0.01, "step": 3} for mult in (1.0, 0.0)]
    args = Inert(new_global("argparse", "Namespace"), state=dict(TINY_ARGS))
    tree = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": model,
        "optimizer": {"optimizer": {"param_groups": groups}},
    }
    save(folder / MODEL, tree)
    saved: dict[str, object] = {slot: flat_tensor(flat) for slot, flat in flats.items()}
    kinds = new_global("torch", "bfloat16"), new_global("torch", "float32")
    inner = {kinds: {**saved, "numel_unpadded": end}}
    save(folder / OPTIMIZER, {"buckets_coalesced": True, 0: inner})
    return root


def tiny_starts() -> tuple[dict[str, int], int]:
    """Return where each parameter starts in the buffer, and the saved buffer's length."""
    starts, end = {}, 0
    for name, shape in reversed(TINY_SHAPES.items()):
        starts[name] = -(-end // 64) * 64
        end = starts[name] + prod(shape)
    return starts, end


def tiny_values() -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Return the flat fp32 slots, and the buffer of the masters rounded by torch."""
    starts, end = tiny_starts()
    random = np.random.default_rng(11)
    flats = {slot: np.zeros(end, "<f4") for slot in SLOTS[1:]}
    weights = torch.zeros(-(-end // 128) * 128, dtype=torch.bfloat16)
    for name, shape in TINY_SHAPES.items():
        mine = slice(starts[name], starts[name] + prod(shape))
        for flat in flats.values():
            flat[mine] = random.standard_normal(prod(shape))
        weights[mine] = torch.from_numpy(flats["param"][mine]).to(torch.bfloat16)
    return flats, weights


def tiny_model(weights: torch.Tensor | None = None) -> dict[str, object]:
    """Return the ``model`` of the tiny checkpoint; without weights all are zero."""
    starts, end = tiny_starts()
    if weights is None:
        weights = torch.zeros(-(-end // 128) * 128, dtype=torch.bfloat16)
    buffer = StorageRef(BY_NAME["bfloat16"], len(weights))
    buffer.payload = weights.view(torch.uint8).numpy().tobytes()
    return OrderedDict(
        (name, TensorRef(buffer, starts[name], shape, row_major(shape)))
        for name, shape in TINY_SHAPES.items()
    )


def flat_tensor(numbers: np.ndarray) -> TensorRef:
    """Return fp32 numbers as a tensor with a storage of its own."""
    storage = StorageRef(BY_NAME["float32"], len(numbers))
    storage.payload = numbers.astype("<f4").tobytes()
    return TensorRef(storage, 0, (len(numbers),), (1,))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


# --- the command line ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


def run_cli(*arguments: object) -> Outcome:
    """Run ``ckpttools`` with these arguments in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["ckpttools", *map(str, arguments)]
    with (
        patch.object(sys, "argv", argv),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def assert_refused(source: Path, message: str, *options: object, hint: str = "") -> None:
    """Resharding ends with 1 and the line, and nothing new lies beside the source."""
    before = sorted(source.parent.iterdir())
    outcome = run_cli("reshard", source, source.parent / "out", *options)
    assert (outcome.code, outcome.out) == (1, ""), outcome
    lines = outcome.err.splitlines()
    assert re.fullmatch(f"error: {message}", lines[0]), lines[0]
    assert lines[1:] == ([f"hint: {hint}"] if hint else [])
    assert sorted(source.parent.iterdir()) == before
