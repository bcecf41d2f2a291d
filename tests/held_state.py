"""What did a run hold when it was saved, and what do files hold? By torch alone.

Nothing here imports ckpttools. What a run held is taken from what it recorded of itself; names,
groups and roundings of other formats are worked out here again. Files are read by ``torch.load``
and torch's own distributed checkpoints.
"""

from __future__ import annotations

import json
import re
import warnings
from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import apex_files as apex
import oracle_megatron as megatron
import torch
import torch.distributed.checkpoint as dcp
from apex_files import half_away
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

NEMO = apex.FIXTURES.parent / "nemo"
TORCH = apex.FIXTURES.parent / "dcp"
DISTRIBUTED, LEGACY = NEMO / "megatron_gpt--step=4-consumed_samples=8.0", NEMO / "legacy"
WEIGHT, MASTER = "weight", "fp32_param"
SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


Tensors = dict[tuple[str, str], torch.Tensor]


def nearest_even(master: torch.Tensor) -> torch.Tensor:
    """Round as torch does."""
    return master.bfloat16()


# --- what the runs held ---------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a run held: optimizer state by (name, slot), and what it trained with.

    ``weight`` makes a weight of its master; None where the files have no weights. ``settings`` are
    those of each parameter by name. ``plain`` are weights that have no master, and buffers.
    """

    state: Mapping[tuple[str, str], torch.Tensor]
    weight: Callable[[torch.Tensor], torch.Tensor] | None
    step: int
    settings: Mapping[str, tuple[object, ...]]
    adam_w_mode: bool
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Tensors:
        found = {**self.state, **{(name, WEIGHT): t for name, t in self.plain.items()}}
        for (name, slot), master in self.state.items():
            if slot == MASTER and self.weight is not None:
                found[name, WEIGHT] = self.weight(master)
        return found

    def renamed(self) -> Held:
        """Return the same under the names that NeMo's distributed form has for norms."""
        return replace(
            self,
            state={(fused(name), slot): tensor for (name, slot), tensor in self.state.items()},
            settings={fused(name): settings for name, settings in self.settings.items()},
        )

    def with_masters(self) -> Held:
        """Return the same for a run that lists trained weights as their own masters."""
        trained = {name for name, slot in self.state if slot != MASTER}
        masters = {(n, MASTER): tensor for n, tensor in self.plain.items() if n in trained}
        return replace(self, state={**self.state, **masters}, weight=torch.clone)


def fused(name: str) -> str:
    for own, other in FUSED.items():
        name = re.sub(rf"(layers\.\d+\.){re.escape(own)}", rf"\g<1>{other}", name)
    return name


def of_megatron(name: str) -> Held:
    """Return what Megatron's own optimizers held when a fixture was saved."""
    case = megatron.case(name)
    state: Tensors = {}
    for key, tensor in case.truth_tensors().items():
        slot, _, param = key.partition("/")
        if slot != "model":
            rows = 100 if param in megatron.VOCABULARY else tensor.shape[0]
            state[param, MASTER if slot == "param" else slot] = tensor[:rows]
    groups = megatron.read(next(case.directory.rglob("model_optim_rng.pt")))["optimizer"][
        "optimizer"
    ]["param_groups"]
    of = {bool(group["wd_mult"]): settings_of(group) for group in groups}
    settings = {
        param: of[tensor.ndim > 1 and not param.endswith("bias")]
        for (param, slot), tensor in state.items()
        if slot == MASTER
    }
    weight = nearest_even if case.dtype == "bf16" else torch.clone
    return Held(state, weight, case.step, settings, adam_w_mode=True)


def settings_of(group: Mapping[str, Any]) -> tuple[object, ...]:
    found = {"bias_correction": True, **group}
    return tuple(tuple(v) if isinstance(v := found[key], list) else v for key in SETTINGS)


def of_apex(variant: str) -> Held:
    """Return what Apex's optimizer held when a fixture was saved."""
    meta = apex.meta(variant)
    state = {key: tensor for key, tensor in apex.truth(variant).items() if key[1] != WEIGHT}
    settings = {name: settings_of(g) for g in meta["param_groups"] for name in g["params"]}
    kept = meta["opt_kwargs"].get("store_param_remainders", False)
    weight: Callable[[torch.Tensor], torch.Tensor] = half_away if kept else nearest_even
    if meta["opt_kwargs"].get("dtype") == "bfloat16":  # masters are weights
        state, weight = {key: tensor.bfloat16() for key, tensor in state.items()}, torch.clone
    elif meta["model_dtype"] == "float32":
        weight = torch.clone
    return Held(state, weight, meta["step_value"], settings, meta["adam_w_mode"])


def of_torch() -> Held:
    """Return what a run of torch's AdamW held, fp32, when it was saved with torch's own tools."""
    state: Tensors = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(TORCH / "truth_fp32.safetensors").items():
        if key.startswith("model."):
            plain[key.removeprefix("model.")] = tensor
        elif not key.endswith(".step"):
            state[slot_of(key.removeprefix("optim."))] = tensor
    told = json.loads((TORCH / "truth_objects.json").read_text())
    group = {k.rpartition(".")[2]: literal_eval(v) for k, v in told.items() if "groups.0" in k}
    settings = dict.fromkeys(group["params"], settings_of(group))
    return Held(state, None, 2, settings, adam_w_mode=True, plain=plain)


def of_nemo() -> Held:
    """Return what NeMo's optimizer held when the fixture was saved."""
    state: Tensors = {}
    for key, tensor in load_file(DISTRIBUTED.parent / "truth.safetensors").items():
        name, _, slot = key.removeprefix("model.").rpartition(".")
        if slot != "bf16":
            state[name, MASTER if slot == "param" else slot] = tensor
    common = torch.load(DISTRIBUTED / "common.pt", weights_only=True)
    decay, no_decay = map(settings_of, common["optimizer_states"][0]["param_groups"])
    settings = {
        name: decay if tensor.ndim > 1 and not name.endswith("bias") else no_decay
        for (name, slot), tensor in state.items()
        if slot == MASTER
    }
    return Held(state, half_away, 4, settings, adam_w_mode=True)


# --- what is in files ---


def assert_same(found: Tensors, expected: Tensors, rows: int | None = None) -> None:
    """Check names, dtypes, shapes and bits; of vocabularies the true ``rows`` only."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        mine = found[key]
        if rows is not None and key[0] in megatron.VOCABULARY:
            mine = mine[:rows]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), key
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, tensor))
        assert torch.equal(a, b), key


def slot_of(key: str) -> tuple[str, str]:
    name, _, slot = key.removeprefix("state.").rpartition(".")
    return name, slot


def read_apex(path: Path) -> tuple[Tensors, int, dict[str, tuple[object, ...]]]:
    tree = torch.load(path / "optimizer.pt", weights_only=True)
    names = json.loads((path / "ckpttools.json").read_text())["names"]
    model = path / "model.pt"
    weights = torch.load(model, weights_only=True) if model.exists() else {}
    found: Tensors = {(name, WEIGHT): tensor for name, tensor in weights.items()}
    for number, name in enumerate(names):
        for slot, tensor in tree["state"][number].items():
            found[name, MASTER if slot == "param" else slot] = tensor
    settings = {names[n]: settings_of(g) for g in tree["param_groups"] for n in g["params"]}
    return found, tree["state"]["step"], settings


def read_nemo(path: Path) -> tuple[Tensors, int, dict[str, tuple[object, ...]]]:
    reader = FileSystemReader(path)
    listed = reader.read_metadata().state_dict_metadata
    tensors = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in listed.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.load(tensors, storage_reader=reader)
    found: Tensors = {}
    for key, tensor in tensors.items():
        slot, name = WEIGHT, key
        if match := re.fullmatch(r"optimizer\.state\.(\w+)\.(.+)", key):
            slot, name = match.groups()
            slot = MASTER if slot == "param" else slot
        name = name.removeprefix("model.")
        if "decoder.layers." in name and not re.search(r"layers\.\d", name):
            for layer, one in enumerate(tensor):
                found[name.replace("layers.", f"layers.{layer}."), slot] = one
        else:
            found[name, slot] = tensor
    optimizer = torch.load(path / "common.pt", weights_only=True)["optimizer_states"][0]
    names = [name for name, slot in found if slot == WEIGHT]
    return found, optimizer["state"]["step"], by_rule(found, names, optimizer["param_groups"])


def read_torch(path: Path) -> tuple[Tensors, int, dict[str, tuple[object, ...]]]:
    """Read a directory of torch's as torch itself turns it into one file."""
    file = path.with_suffix(".pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp_to_torch_save(path, file)
    tree = torch.load(file, weights_only=True)
    optimizer = tree["optimizer" if "optimizer" in tree else "optim"]
    found: Tensors = {(name, WEIGHT): tensor for name, tensor in tree["model"].items()}
    steps = set()
    for name, state in optimizer["state"].items():
        steps.add(state.pop("step"))
        found |= {(name, slot): tensor for slot, tensor in state.items()}
    settings = {
        n: settings_of(group) for group in optimizer["param_groups"] for n in group["params"]
    }
    (step,) = {int(step) for step in steps}
    return found, step, settings


def by_rule(
    found: Tensors, names: list[str], groups: list[dict[str, Any]]
) -> dict[str, tuple[object, ...]]:
    """Return the settings of each parameter by NeMo's rule: biases and vectors don't decay."""
    decay, no_decay = map(settings_of, groups)
    return {
        name: decay if found[name, WEIGHT].ndim > 1 and not name.endswith("bias") else no_decay
        for name in names
    }


def read_legacy(path: Path) -> tuple[Tensors, int, dict[str, tuple[object, ...]]]:
    (place,) = path.glob("*.ckpt")
    tree = torch.load(place, weights_only=True)
    weights = {k.removeprefix("model."): t for k, t in tree["state_dict"].items()}
    found: Tensors = {(name, WEIGHT): tensor for name, tensor in weights.items()}
    optimizer = tree["optimizer_states"][0]
    decays = {n: t.ndim > 1 and not n.endswith("bias") for n, t in weights.items()}
    ordered = [n for n in weights if decays[n]] + [n for n in weights if not decays[n]]
    assert [n for g in optimizer["param_groups"] for n in g["params"]] == list(range(len(ordered)))
    for number, name in enumerate(ordered):
        for slot, tensor in optimizer["state"][number].items():
            found[name, MASTER if slot == "param" else slot] = tensor
    settings = by_rule(found, ordered, optimizer["param_groups"])
    return found, optimizer["state"]["step"], settings
