"""Megatron's own functions must split layers as we do, and number them as we do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from peers.megatron_runs import needs_megatron

from ckpttools.errors import LayoutError
from ckpttools.layout.pipeline import Pipeline, Split, split_layers

# Megatron warns of old torch functions and missing extensions when it is imported.
pytestmark = [*needs_megatron, pytest.mark.filterwarnings("ignore")]

SIZES = [
    Split(first, last, embedding, loss)
    for first, last in itertools.product((None, 1, 2, 3, 4), repeat=2)
    for embedding, loss in itertools.product((False, True), repeat=2)
]


def ours(layers: int, pp: int, vpp: int, split: Split) -> Pipeline | None:
    try:
        return split_layers(layers, pp, vpp, split)
    except LayoutError:
        return None


def config_of(layers: int, pp: int, vpp: int, split: Split, layout: str | None = None) -> Any:
    """Return Megatron's configuration.

    Raises:
        ValueError: Megatron refuses it.
    """
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.embedding,
        account_for_loss_in_pipeline_split=split.loss,
        pipeline_model_parallel_layout=layout,
    )


def theirs(config: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield (stage, chunk, first layer, layers) of each chunk as Megatron builds it."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    vpp = config.virtual_pipeline_model_parallel_size
    try:  # a layout by hand asks the parallel state
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
        for p in range(config.pipeline_model_parallel_size):
            parallel_state.set_pipeline_model_parallel_rank(p)
            for v in range(vpp or 1):
                stage = v if vpp else None
                count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=p)
                yield p, v, get_transformer_layer_offset(config, vp_stage=stage, pp_rank=p), count
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def chunks(pipeline: Pipeline) -> list[tuple[int, int, int, int]]:
    return [(p, v, pipeline.first_layer(p, v), pipeline.counts[p][v]) for p, v in pipeline.chunks()]


def accepted(layers: int, pp: int, vpp: int, split: Split) -> list[tuple[int, int, int, int]]:
    """Return Megatron's chunks; none where it refuses, fails, or would not build the model."""
    try:
        built = list(theirs(config_of(layers, pp, vpp, split)))
    except (ValueError, AssertionError, ZeroDivisionError):
        return []
    counts = [count for *_, count in built]
    return built if sum(counts) == layers and min(counts) >= 0 else []


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), *itertools.product((2, 3, 4), (1, 2, 3))])
def test_megatron_splits_and_numbers_layers_as_we_do_and_refuses_what_we_refuse(
    pp: int, vpp: int
) -> None:
    # One stage can't be uneven: Megatron looks at the numbers all the same, and reads one of two.
    splits = [split for split in SIZES if pp > 1 or not split.uneven]
    compared = 0
    for layers, split in itertools.product(range(1, 15), splits):
        made = ours(layers, pp, vpp, split)
        expected = accepted(layers, pp, vpp, split)
        assert (chunks(made) if made else []) == expected, (layers, split)
        compared += bool(expected)
    assert compared > 2


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Ett|tttt|tL", ((2,), (4,), (1,))),
        ("E|t*3|ttL", ((0,), (3,), (2,))),
        ("Ettt|t||tttL", ((3, 0), (1, 3))),
        ("Et|tt|ttt|t|tt|L", ((1, 3, 2), (2, 1, 0))),
    ],
)
def test_megatron_numbers_the_layers_of_stages_cut_by_hand_as_we_do(
    layout: str, counts: tuple[tuple[int, ...], ...]
) -> None:
    pipeline = Pipeline(counts)
    config = config_of(pipeline.num_layers, pipeline.pp, pipeline.vpp, Split(), layout)
    assert list(theirs(config)) == chunks(pipeline)
