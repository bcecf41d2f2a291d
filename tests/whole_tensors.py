"""How does a test get a consolidated source with tensors of its own choice?

The safetensors library writes them; only ``state.json`` is made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from safetensors.torch import save_file

from ckpttools.dtypes import BY_NAME
from ckpttools.formats.consolidated.state import FORMAT, FORMAT_VERSION
from ckpttools.manifest import WEIGHT
from ckpttools.storage.sealed_json import serialize, sha256

CHUNK = 48
"""Bytes of a chunk where tests ask for many: twelve fp32 elements."""


def bits(shape: tuple[int, ...], kind: str, seed: int = 5) -> torch.Tensor:
    """Return a tensor of random bits, NaN and infinity among them."""
    size = int(np.prod(shape, dtype=np.int64)) * BY_NAME[kind].itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if kind == "bool":
        data %= 2
    if not size:  # torch can't view what is empty
        return torch.zeros(shape, dtype=getattr(torch, kind))
    return torch.from_numpy(data).view(getattr(torch, kind)).reshape(shape)


EDGES: dict[tuple[str, str], torch.Tensor] = {
    ("scalar", WEIGHT): bits((), "float32"),
    ("bf16_scalar", WEIGHT): bits((), "bfloat16"),
    ("empty", WEIGHT): bits((0,), "float32"),
    ("no_rows", WEIGHT): bits((0, 5), "bfloat16"),
    ("no_columns", WEIGHT): bits((5, 0, 3), "float32"),
    ("one", WEIGHT): bits((1,), "int8"),
    ("zeros", WEIGHT): torch.zeros(13, 3),
    ("negative_zeros", WEIGHT): torch.zeros(13, 3).neg(),
    ("ragged", WEIGHT): bits((11, 3), "float32"),
    ("whole", WEIGHT): bits((12, 3), "float32"),
    ("deep", WEIGHT): bits((7, 2, 3, 5), "bfloat16"),
    ("wide", WEIGHT): bits((3, 101), "float32"),
    ("ragged", "step"): bits((), "float32", seed=7),
    ("ragged", "exp_avg"): bits((11, 3), "float32", seed=11),
    **{(f"kind_{kind}", WEIGHT): bits((11, 3), kind, seed=13) for kind in BY_NAME},
}


def whole(root: Path, tensors: Mapping[tuple[str, str], torch.Tensor]) -> Path:
    """Write a consolidated directory with these tensors, by the safetensors library."""
    root.mkdir()
    stored = {f"{name}.{slot}": tensor for (name, slot), tensor in tensors.items()}
    save_file(stored, root / "all.safetensors")
    data = (root / "all.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    entries = {}
    for (name, slot), tensor in tensors.items():
        first, last = header[f"{name}.{slot}"]["data_offsets"]
        entries[f"{name}.{slot}"] = {
            "name": name,
            "slot": slot,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": "all.safetensors",
            "crc32c": f"{google_crc32c.value(data[start + first : start + last]):08x}",
        }
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tensors": entries,
        "headers": {"all.safetensors": sha256(data[:start])},
        "files": {},
    }
    (root / "state.json").write_bytes(serialize(document))
    return root
