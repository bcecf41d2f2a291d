"""Write a Megatron ``torch`` checkpoint from a description, as plainly as possible.

Nothing here imports ckpttools: what the product reads and writes is judged by these files. Where
each element lies is found cell by cell in :mod:`megatron_buffers`; every slot's value is a function
of the element's tag; torch saves the result.
"""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_buffers import (
    EMBEDDING,
    GAP,
    OUTPUT,
    Model,
    Param,
    Run,
    buffer,
    dtypes_of,
    local_entries,
    owners,
    params,
)
from oracle_torch_files import StandIn, read

__all__ = ["EMBEDDING", "OUTPUT", "SLOTS", "Model", "Run", "build", "truth"]

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"
TEMPLATES = {"0.16": "gqa_tp1_pp1_dp2", "megadlms": "megadlms_gqa_tp1_pp1_dp2_bucket6000"}
SLOTS = ("param", "exp_avg", "exp_avg_sq")
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# --- values -----------------------------------------------------------------------------


def value(slot: str, tags: Any, junk: float = 0.0) -> torch.Tensor:
    """The fp32 values of a slot: exact, unlike each other, zero for the tag 0."""
    cells = torch.as_tensor(tags, dtype=torch.float64)
    scaled = cells / 1024
    known = {"param": scaled, "exp_avg": -scaled - 2.0**-12, "exp_avg_sq": scaled * 2.0**-30}
    values = torch.where(cells == GAP, torch.tensor(junk, dtype=torch.float64), known[slot])
    values = torch.where(cells == 0, torch.zeros_like(values), values)
    single = values.to(torch.float32)
    assert torch.equal(single.to(torch.float64), values)
    return single


def truth(run: Run) -> dict[tuple[str, str], torch.Tensor]:
    """The logical tensors by (name, slot); ``weight`` is the master rounded to its dtype."""
    found = {}
    for name, param in params(run).items():
        if param is None or (name == OUTPUT and run.model.tied):
            continue
        rows = run.model.vocab if param.filled is not None else param.shape[0]
        tags = param.tags()[:rows]
        for slot in SLOTS:
            found[name, slot] = value(slot, tags)
        found[name, "weight"] = found[name, "param"].to(TORCH[param.dtype])
    return found


# --- files ------------------------------------------------------------------------------


def weights(run: Run, tp: int, p: int, v: int) -> OrderedDict[str, Any]:
    """One chunk's ``model``: views of one storage per buffer, or tensors of their own."""
    entries = local_entries(run, p, v)
    live, places = {}, {}
    for dtype in dtypes_of(run, p, v):
        buckets, starts = buffer(run, tp, p, v, dtype)
        cells = [cell for bucket in buckets for cell in bucket.cells]
        live[dtype] = value("param", cells, run.junk).to(TORCH[dtype])
        places |= starts
    model: OrderedDict[str, Any] = OrderedDict()
    for name, param in entries.items():
        if param is None:
            model[name] = None
            continue
        shape = param.local(tp, run.tp).shape
        flat = live[param.dtype][places[name] : places[name] + int(np.prod(shape))]
        model[name] = flat.view(shape) if run.one_storage else flat.clone().view(shape)
    modules = dict.fromkeys(["", *(["embedding"] if (p, v) == (0, 0) else [])])
    modules |= dict.fromkeys(["rotary_pos_emb", "decoder", "decoder.layers"])
    for name in entries:
        parts = name.split(".")[:-1]
        modules |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)))
    vars(model)["_metadata"] = OrderedDict((name, {"version": 1}) for name in modules)
    return model


def saved_buffers(run: Run, tp: int, p: int, chunks: range) -> dict[Any, Any]:
    """One optimizer's dict in ``distrib_optim.pt``."""
    state: dict[Any, Any] = {"buckets_coalesced": True} if run.version == "v2" else {}
    number = 0
    for v in chunks:
        for dtype in dtypes_of(run, p, v):
            buckets, _ = buffer(run, tp, p, v, dtype)
            pair = (TORCH[dtype], torch.float32)
            pieces = [bucket.cells for bucket in buckets]
            if run.version == "v2":
                pieces = [[c for bucket in buckets for c in bucket.cells[: bucket.content]]]
            assert len(pieces) == 1 or run.version != "v0"
            entry: dict[str, Any] = {}
            for slot in SLOTS:
                flats = [value(slot, piece, run.junk) for piece in pieces]
                entry[slot] = flats if run.version.startswith("v1") else flats[0]
            if run.version == "v2":
                entry["numel_unpadded"] = len(pieces[0])
            state[number] = {pair if run.version in ("v2", "v1c") else torch.float32: entry}
            if run.version in ("v1b", "v1c"):
                (key,) = state[number]
                sizes = state.setdefault("per_bucket_numel", [])
                sizes.append({key: [len(b.cells) for b in buckets]})
                sizes = state.setdefault("per_bucket_numel_unpadded", [])
                sizes.append({key: [b.content for b in buckets]})
            number += 1
    return state


@cache
def template(writer: str) -> dict[str, Any]:
    place = FIXTURES / TEMPLATES[writer] / "torch/iter_0000003/mp_rank_00/model_optim_rng.pt"
    content: dict[str, Any] = read(place)
    vars(content["args"]).update({k: plain(v) for k, v in vars(content["args"]).items()})
    return {key: plain(kept) for key, kept in content.items()}


def plain(kept: Any) -> Any:
    """Replace what only Megatron could pickle by its text."""
    if isinstance(kept, StandIn):
        return repr(kept)
    if type(kept) is dict:
        return {key: plain(inner) for key, inner in kept.items()}
    return kept


def group_key(run: Run, name: str, param: Param) -> tuple[float, bool, float]:
    """Weight decay, decoupled rate and rate factor of a parameter."""
    decays = len(param.shape) > 1 and not name.endswith(".bias")
    decoupled = run.groups == "decoupled" and name in (EMBEDDING, OUTPUT)
    factor = 0.5 if run.groups == "lr_mult" and "linear_fc2" in name else 1.0
    return (1.0 if decays else 0.0), decoupled, factor


def param_groups(run: Run, p: int, chunks: range) -> list[dict[str, Any]]:
    """The groups that one optimizer of a stage lists, in its Megatron's order."""
    like = template(run.writer)["optimizer"]["optimizer"]["param_groups"]
    everywhere = params(run).items()
    known = sorted({group_key(run, n, x) for n, x in everywhere if x}, reverse=True)
    if not run.by_key:
        mine = [x for v in chunks for x in local_entries(run, p, v).values() if x]
        known = list(dict.fromkeys(group_key(run, x.name, x) for x in mine))
    listed = []
    for decay, decoupled, factor in known:
        group = copy.deepcopy(next(g for g in like if g["wd_mult"] == decay))
        rate = group["lr"] * (0.25 if decoupled else factor)
        group |= {"is_decoupled_lr": decoupled, "lr_mult": factor, "lr": rate, "step": run.step}
        listed.append(group)
    return listed


def arguments(run: Run, tp: int, p: int) -> argparse.Namespace:
    """The template's arguments with this run's sizes; none is added that it doesn't have."""
    m = run.model
    args = copy.copy(template(run.writer)["args"])
    args.__dict__ = dict(vars(args))
    world = run.tp * run.pp * run.dp * run.cp
    interleaved = run.vpp > 1
    told: dict[str, Any] = {
        "num_layers": m.layers,
        "hidden_size": m.hidden,
        "ffn_hidden_size": m.ffn,
        "num_attention_heads": m.heads,
        "num_query_groups": m.groups,
        "kv_channels": m.head_dim,
        "group_query_attention": m.groups != m.heads,
        "swiglu": m.gated,
        "add_bias_linear": m.biases,
        "normalization": "LayerNorm" if m.norm_biases else "RMSNorm",
        "position_embedding_type": "learned_absolute" if m.learned else "rope",
        "add_position_embedding": bool(m.learned),
        "untie_embeddings_and_output_weights": not m.tied,
        "vocab_size": m.vocab,
        "make_vocab_size_divisible_by": m.divisor,
        "padded_vocab_size": m.padded(run.tp),
        "bf16": m.dtype == "bf16",
        "fp16": m.dtype == "fp16",
        "params_dtype": TORCH[m.dtype],
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "context_parallel_size": run.cp,
        "data_parallel_size": run.dp,
        "world_size": world,
        "inprocess_active_world_size": world,
        "rank": tp + run.tp * run.dp * run.cp * p,
        "local_rank": tp + run.tp * run.dp * run.cp * p,
        "virtual_pipeline_model_parallel_size": run.vpp if interleaved else None,
        "decoder_first_pipeline_num_layers": run.first,
        "decoder_last_pipeline_num_layers": run.last,
        "account_for_embedding_in_pipeline_split": run.count_embedding,
        "account_for_loss_in_pipeline_split": run.count_loss,
        "pipeline_model_parallel_layout": run.pipeline,
        "overlap_grad_reduce": run.told_bucket is not None,
        "ddp_bucket_size": run.told_bucket or None,
        "ddp_pad_buckets_for_high_nccl_busbw": run.busbw,
        "num_distributed_optimizer_instances": run.instances,
        "overlap_param_gather_with_optimizer_step": run.chained,
    }
    counted = m.layers + run.count_embedding + run.count_loss
    if interleaved and run.told_chunks == "layers":
        told["num_layers_per_virtual_pipeline_stage"] = counted // run.pp // run.vpp
    if interleaved and run.told_chunks == "stages":
        told["num_virtual_stages_per_pipeline_rank"] = run.vpp
    vars(args).update({key: v for key, v in told.items() if key in vars(args)})
    return args


def model_file(run: Run, tp: int, p: int) -> dict[str, Any]:
    """The content of ``model_optim_rng.pt``, with the template's entries in their order."""
    optimizers = [
        {"optimizer": {"param_groups": param_groups(run, p, chunks)}} for chunks in owners(run)
    ]
    if run.model.dtype == "fp16":
        scaler = {"scale": torch.tensor([65536.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
        optimizers = [{**one, "grad_scaler": scaler} for one in optimizers]
    content: dict[str, Any] = {}
    for key, kept in template(run.writer).items():
        if key == "args":
            content[key] = arguments(run, tp, p)
        elif key == "model":
            for v in range(run.vpp):
                content["model" if run.vpp == 1 else f"model{v}"] = weights(run, tp, p, v)
        elif key == "optimizer":
            content[key] = optimizers if len(optimizers) > 1 else optimizers[0]
        else:
            content[key] = kept
    return content


def build(root: Path, run: Run) -> Path:
    """Write the checkpoint and return its directory."""
    for p in range(run.pp):
        for tp in range(run.tp):
            name = f"mp_rank_{tp:02d}" if run.pp == 1 else f"mp_rank_{tp:02d}_{p:03d}"
            place = root / "iter_0000003" / name
            place.mkdir(parents=True)
            torch.save(model_file(run, tp, p), place / "model_optim_rng.pt")
            states = [saved_buffers(run, tp, p, chunks) for chunks in owners(run)]
            torch.save(states if len(states) > 1 else states[0], place / "distrib_optim.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root
