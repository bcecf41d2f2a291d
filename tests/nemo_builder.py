"""How does a test get NeMo files of any ranks? By torch.save, from a model of its own choice.

Cuts, layer numbers and optimizer numbers are written out here by hand, apart from the code under
test. The model is a gated GPT with fused norms, biases in qkv, and odd sizes.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from ckpttools.manifest import MASTER, WEIGHT, Manifest

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "nemo"
DISTRIBUTED = FIXTURES / "megatron_gpt--step=4-consumed_samples=8.0"
LEGACY = FIXTURES / "legacy"
NAME = "megatron_gpt--val_loss=2.00-step=9.ckpt"
TENSORS = ("param", "exp_avg", "exp_avg_sq")
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"

HIDDEN, FFN, VOCAB = 12, 20, 44
SHAPES = {
    "self_attention.linear_qkv.weight": (36, HIDDEN),
    "self_attention.linear_qkv.bias": (36,),
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
}
CUT = {
    "word_embeddings.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
    "output_layer.weight": 0,
}

State = dict[str, dict[str, torch.Tensor]]


def truth() -> State:
    """Return what the live run of the fixture held: slot → tensor, by name."""
    found: State = {}
    for key, tensor in load_file(FIXTURES / "truth.safetensors").items():
        name, _, kind = key.removeprefix("model.").rpartition(".")
        slot = {"bf16": WEIGHT, "param": MASTER}.get(kind, kind)
        found.setdefault(name, {})[slot] = tensor
    return found


def half_away(master: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, ties away from zero, by numpy on the bits."""
    bits = master.contiguous().reshape(-1).numpy().view(np.uint32)
    high = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    return torch.from_numpy(high.view(np.int16)).view(torch.bfloat16).reshape(master.shape)


def model(layers: int = 4, *, tied: bool = False, seed: int = 3) -> State:
    """Return a model's state: weights are masters rounded, ties included."""
    shapes = {EMBEDDING: (VOCAB, HIDDEN)}
    for i in range(layers):
        shapes |= {f"decoder.layers.{i}.{rest}": shape for rest, shape in SHAPES.items()}
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    if not tied:
        shapes[OUTPUT] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for name, shape in shapes.items():
        slots = {s: torch.randn(shape, generator=generator) for s in (MASTER, *TENSORS[1:])}
        bits = slots[MASTER].view(torch.int32)
        bits.reshape(-1)[::3] &= -0x10000
        bits.reshape(-1)[::3] |= 0x8000  # ties: the two roundings differ in every second one
        state[name] = {WEIGHT: half_away(slots[MASTER]), **slots}
    return state


def part(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return a tensor rank's part; gate and up are cut each by itself."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    dim = next((dim for suffix, dim in CUT.items() if name.endswith(suffix)), None)
    return tensor.clone() if dim is None else tensor.chunk(tp, dim)[rank].clone()


def decays(name: str, tensor: torch.Tensor, rule: str) -> bool:
    """Say whether a parameter has weight decay, by one of NeMo's rules."""
    if rule == "all":
        return True
    if rule == "one-dimensional":
        return not name.endswith("bias") and tensor.ndim > 1
    if rule == "norm-modules":
        return not name.endswith("bias") and "layernorm.weight" not in name
    return not name.endswith("bias")


def legacy(
    root: Path,
    state: State,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    rule: str = "one-dimensional",
    prefix: str = "model.",
    config: dict[str, Any] | None = None,
    extra: bool = False,
    edit: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> Path:
    """Write the files of all ranks, as NeMo's data-parallel rank 0 of each does."""
    layers = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    each = layers // (pp * vpp)
    tied = OUTPUT not in state
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "share_embeddings_and_output_weights": tied,
    }
    for p in range(pp):
        for t in range(tp):
            tree = _lightning({**sizes, **(config or {})})
            mine: list[tuple[str, dict[str, torch.Tensor]]] = []
            for v in range(vpp):
                first = (v * pp + p) * each
                ends = (p == v == 0, (p, v) == (pp - 1, vpp - 1))
                chunk: OrderedDict[str, Any] = OrderedDict()
                for local, name in _chunk_names(state, first, each, ends, tied=tied and pp > 1):
                    cut = {s: part(name, x, tp, t) for s, x in state[name].items()}
                    chunk[(prefix if vpp == 1 else "") + local] = cut.pop(WEIGHT)
                    mine.append((local, cut))
                if extra:
                    for i in range(each):
                        key = f"decoder.layers.{i}.mlp.linear_fc1._extra_state"
                        chunk[(prefix if vpp == 1 else "") + key] = io.BytesIO(b"")
                tree["state_dict" if vpp == 1 else f"model{v}"] = chunk
            tree["optimizer_states"] = [_optimizer(mine, rule)]
            if edit is not None:
                edit(t, p, tree)
            folder = root
            if pp > 1:
                folder = root / f"tp_rank_{t:02d}_pp_rank_{p:03d}"
            elif tp > 1:
                folder = root / f"mp_rank_{t:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(tree, folder / NAME)
    return root


def _lightning(config: dict[str, Any]) -> dict[str, Any]:
    """Return Lightning's dict without weights and optimizer."""
    return {
        "epoch": 1,
        "global_step": 9,
        "pytorch-lightning_version": "2.0.7",
        "state_dict": OrderedDict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "optimizer_states": [],
        "lr_schedulers": [{"last_epoch": 9, "_last_lr": [0.5, 0.5]}],
        "hyper_parameters": {"cfg": config},
    }


def _chunk_names(
    state: State, first: int, each: int, ends: tuple[bool, bool], *, tied: bool
) -> list[tuple[str, str]]:
    """Return (local name, name) of a model chunk's parameters in module order."""
    found = [(EMBEDDING, EMBEDDING)] if ends[0] else []
    for i in range(each):
        found += [
            (f"decoder.layers.{i}.{rest}", f"decoder.layers.{first + i}.{rest}") for rest in SHAPES
        ]
    if ends[1]:
        found.append(("decoder.final_layernorm.weight",) * 2)
        if OUTPUT in state:
            found.append((OUTPUT, OUTPUT))
        elif tied:
            found.append((OUTPUT, EMBEDDING))
    return found


def _optimizer(mine: Sequence[tuple[str, dict[str, torch.Tensor]]], rule: str) -> dict[str, Any]:
    """Return Apex's format 2 of a rank."""
    state: dict[Any, Any] = {"step": 9}
    groups = []
    for wanted in (True, False):
        members = [slots for name, slots in mine if decays(name, slots[MASTER], rule) == wanted]
        if not members:
            continue
        numbers = list(range(len(state) - 1, len(state) - 1 + len(members)))
        for number, slots in zip(numbers, members, strict=True):
            state[number] = {key: slots[MASTER if key == "param" else key] for key in TENSORS}
        decay = {"weight_decay": 0.1} if wanted else {"weight_decay": 0.0}
        common = {
            "is_expert": False,
            "lr": 0.5,
            "bias_correction": True,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
        }
        groups.append({**(common | decay if wanted else decay | common), "params": numbers})
    return {"state": state, "param_groups": groups, "format": 2}


def zarr(root: Path, state: State, tp: int = 1) -> Path:
    """Write a distributed directory with one zarr v2 array a key, as megatron-core did."""
    root.mkdir()
    layers = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    keys: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, slots in state.items():
        pieces = name.split(".")
        stacked = ".".join([*pieces[:2], *pieces[3:]]) if ".layers." in name else name
        keys.setdefault(stacked, []).append(slots)
    for key, stack in keys.items():
        for slot in stack[0]:
            whole = [slots[slot] for slots in stack]
            array = torch.stack(whole) if len(stack) == layers and ".layers." in key else whole[0]
            prefix = ""
            if slot != WEIGHT:
                kind = "param" if slot == MASTER and "linear_fc1.weight" in key else slot
                prefix = f"optimizer.state.{kind}."
            cut = next((d for s, d in {**CUT, "fc1.weight": 0}.items() if key.endswith(s)), None)
            chunks = list(array.shape)
            if ".layers." in key:
                chunks[0] = 1
            if cut is not None:
                dim = cut + (".layers." in key)
                chunks[dim] //= 2 * tp if "linear_fc1" in key else tp
            zarr_array(root / f"{prefix}model.{key}", array, chunks)
    tree = {
        "epoch": 1,
        "global_step": 9,
        "pytorch-lightning_version": "2.0.7",
        "state_dict": {},
        "optimizer_states": [_optimizer([(n, s) for n, s in state.items()], "one-dimensional")],
        "lr_schedulers": [],
    }
    optimizer = tree["optimizer_states"][0]
    optimizer["state"] = {"step": 9}
    for group in optimizer["param_groups"]:
        del group["params"]
    torch.save(tree, root / "common.pt")
    backend = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (root / "metadata.json").write_text(json.dumps(backend))
    return root


def zarr_array(place: Path, tensor: torch.Tensor, chunks: Sequence[int]) -> None:
    """Write one array; what hangs over its edge is filled with sevens."""
    place.mkdir()
    bfloat16 = tensor.dtype == torch.bfloat16
    array = tensor.view(torch.int16).numpy() if bfloat16 else tensor.numpy()
    document = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": "bfloat16" if bfloat16 else "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(tensor.shape),
        "zarr_format": 2,
    }
    (place / ".zarray").write_text(json.dumps(document, indent=4))
    counts = [-(-n // c) for n, c in zip(tensor.shape, chunks, strict=True)]
    for index in np.ndindex(*counts):
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))
        full = np.full(chunks, 77, array.dtype)
        piece = array[box]
        full[tuple(slice(0, n) for n in piece.shape)] = piece
        (place / ".".join(map(str, index))).write_bytes(full.tobytes())


def content(manifest: Manifest) -> State:
    """Return every tensor of a Manifest by name and slot, read by its own places with numpy."""
    found: State = {}
    for spec, chunks in zip(manifest.tensors, manifest.by_tensor(), strict=True):
        whole = np.zeros(spec.stored_shape, spec.dtype.carrier)
        for chunk in chunks:
            if chunk.replica_id:
                continue
            part = chunk.parts[0]
            file = Path(manifest.root, manifest.files[part.extent.file].path)
            data = file.read_bytes()[part.extent.offset :]
            region = chunk.region
            strides = part.strides and tuple(s * spec.dtype.itemsize for s in part.strides)
            box = np.ndarray(region.lengths, spec.dtype.carrier, data, 0, strides)
            whole[
                tuple(slice(o, o + n) for o, n in zip(region.offsets, region.lengths, strict=True))
            ] = box
        tensor = torch.from_numpy(whole.view("<i2") if spec.dtype.name == "bfloat16" else whole)
        if spec.dtype.name == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        found.setdefault(spec.name, {})[spec.slot] = tensor
    return found


def differences(found: State, expected: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Return what differs, bit for bit, names and slots included."""
    keys = {(name, slot) for name, slots in found.items() for slot in slots}
    wanted = {(name, slot) for name, slots in expected.items() for slot in slots}
    odd = [f"{name} {slot}: on one side" for name, slot in sorted(keys ^ wanted)]
    for name, slot in sorted(keys & wanted):
        a, b = found[name][slot], expected[name][slot]
        same = a.dtype == b.dtype and a.shape == b.shape
        width = {2: torch.int16, 4: torch.int32}[a.element_size()]
        if not same or not torch.equal(a.view(width), b.view(width)):
            odd.append(f"{name} {slot}")
    return odd


def flat(tree: object, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return a tree's leaves and types by path; a tensor is its dtype, shape and bits."""
    if isinstance(tree, torch.Tensor):
        bits = tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: (str(tree.dtype), tuple(tree.shape), tree.untyped_storage().nbytes(), bits)}
    if isinstance(tree, dict):
        found: dict[tuple[Any, ...], Any] = {path: (type(tree), list(tree))}
        for key, value in tree.items():
            found |= flat(value, (*path, key))
        return found
    if isinstance(tree, (list, tuple)):
        found = {path: (type(tree), len(tree))}
        for i, value in enumerate(tree):
            found |= flat(value, (*path, i))
        return found
    return {path: (type(tree), tree.getvalue() if isinstance(tree, io.BytesIO) else tree)}
