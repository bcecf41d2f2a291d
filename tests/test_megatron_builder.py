"""The builder's files must have the geometry of those that Megatron wrote for the same run."""

from __future__ import annotations

from typing import Any

import megatron_buffers as buffers
import megatron_builder as builder
import oracle_megatron as oracle
import pytest
import torch
from oracle_torch_files import compare_objects

CASES = oracle.cases()
NOT_TOLD = {"save", "load"}
"""Arguments of the fixtures that name directories of the machine that wrote them."""


def describe(case: oracle.Case) -> builder.Run:
    """Describe a fixture's run to the builder."""
    m = case.model
    old = not case.writer.startswith("megatron-core 0.16")
    model = builder.Model(
        layers=m["num_layers"],
        hidden=m["hidden_size"],
        heads=m["num_attention_heads"],
        groups=m["num_query_groups"],
        head_dim=m["kv_channels"],
        ffn=m["ffn_hidden_size"],
        gated=m["gated_linear_unit"],
        biases=m["add_bias_linear"],
        norm_biases=m["normalization"] == "LayerNorm",
        tied=m["tie_embeddings"],
        qk_norms=m["qk_layernorm"],
        learned=m["max_sequence_length"] if "learned" in m["position_embedding_type"] else 0,
        vocab=m["vocab_size"],
        divisor=m["make_vocab_size_divisible_by"],
        dtype=case.dtype,
    )
    each = m["num_layers"] // (case.pp * case.vpp)
    return builder.Run(
        model=model,
        stages=((each,) * case.vpp,) * case.pp,
        tp=case.tp,
        dp=case.dp,
        bucket=case.bucket_size,
        writer="megadlms" if old else "0.16",
        rule="0.12" if old else "0.13",
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_buffers_are_those_that_the_live_run_recorded(case: oracle.Case) -> None:
    run = describe(case)
    compared = 0
    for rank in case.layout():
        for live in rank["buffers"]:
            p, v = rank["pp"], live["model_chunk"]
            dtype = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}[live["param_dtype"]]
            made, starts = buffers.buffer(run, rank["tp"], p, v, dtype)
            stops = [bucket.start + len(bucket.cells) for bucket in made]
            assert [[b.start, s] for b, s in zip(made, stops, strict=True)] == live[
                "bucket_indices"
            ]
            assert [bucket.content for bucket in made] == live["bucket_numel_unpadded"]
            assert stops[-1] == live["numel"]
            assert starts == {param["name"]: param["start"] for param in live["params"]}
            compared += 1
    assert compared


@pytest.mark.parametrize("case", CASES, ids=str)
def test_files_have_the_entries_shapes_and_places_that_megatron_wrote(case: oracle.Case) -> None:
    run = describe(case)
    for p in range(case.pp):
        for tp in range(case.tp):
            place = oracle.rank_directory(case.directory, tp, p, pipeline=case.pp > 1)
            written = oracle.read(place / "model_optim_rng.pt")
            built = builder.model_file(run, tp, p)
            for key in (key for key in written if key.startswith("model")):
                assert tensors(built[key]) == tensors(written[key])
            for chunks in buffers.owners(run):
                theirs = oracle.read(place / "distrib_optim.pt")
                assert flats(builder.saved_buffers(run, tp, p, chunks)) == flats(theirs)


@pytest.mark.parametrize("case", [c for c in CASES if describe(c).by_key], ids=str)
def test_arguments_and_groups_are_those_that_megatron_wrote(case: oracle.Case) -> None:
    run = describe(case)
    for p in range(case.pp):
        for tp in range(case.tp):
            place = oracle.rank_directory(case.directory, tp, p, pipeline=case.pp > 1)
            written = oracle.read(place / "model_optim_rng.pt")
            built = builder.model_file(run, tp, p)
            assert list(built) == list(written)
            assert compare_objects(built["optimizer"], written["optimizer"]) == []
            mine, theirs = vars(built["args"]), vars(written["args"])
            assert list(mine) == list(theirs)
            for key in theirs.keys() - NOT_TOLD:
                assert mine[key] == builder.plain(theirs[key]), key


def tensors(model: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names, dtypes, shapes, and where each tensor lies in a storage of which length."""
    return [
        (name, None)
        if tensor is None
        else (
            name,
            (tensor.dtype, tensor.shape, tensor.storage_offset(), tensor.untyped_storage().size()),
        )
        for name, tensor in model.items()
    ]


def flats(state: dict[Any, Any]) -> list[tuple[Any, ...]]:
    """Keys of an optimizer's dict, and the lengths under them."""
    found: list[tuple[Any, ...]] = []
    for number, buffer in state.items():
        if number == "buckets_coalesced":
            found.append((number, buffer))
            continue
        for key, entry in buffer.items():
            found += [
                (number, key, name, flat.shape if isinstance(flat, torch.Tensor) else flat)
                for name, flat in entry.items()
            ]
    return found


def test_values_tell_every_element_and_slot_apart_and_the_weight_is_a_rounding() -> None:
    run = builder.Run(model=builder.Model(biases=True), stages=((4,),))
    held = builder.truth(run)
    masters = torch.cat([held[key].reshape(-1) for key in held if key[1] == "param"])
    assert masters.unique().numel() == masters.numel()
    everything = torch.cat([held[key].reshape(-1) for key in held if key[1] != "weight"])
    assert everything.unique().numel() == everything.numel()
    rounded = torch.cat([held[key].reshape(-1) for key in held if key[1] == "weight"])
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded.to(torch.float32), masters)
