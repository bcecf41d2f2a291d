"""Local names of model chunks and global names of the model must be one and the same set."""

from __future__ import annotations

import re

import oracle_megatron as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import FormatError
from ckpttools.formats.megatron.names import count_layers, to_global, to_local
from ckpttools.layout.pipeline import Pipeline

EVEN = Pipeline(((2,), (2,), (2,)))


def local_names(name: str, pipeline: Pipeline) -> dict[tuple[int, int], str]:
    """Return the name that a global entry has in each chunk that holds it."""
    found = {(p, v): to_local(name, pipeline, p, v) for p, v in pipeline.chunks()}
    return {chunk: local for chunk, local in found.items() if local is not None}


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_names_in_the_files_become_the_names_of_the_live_model_and_back(case: oracle.Case) -> None:
    each = case.model["num_layers"] // (case.pp * case.vpp)
    pipeline = Pipeline(((each,) * case.vpp,) * case.pp)
    seen = set()
    for rank in case.layout():
        for param in (p for buffer in rank["buffers"] for p in buffer["params"]):
            chunk = rank["pp"], param["chunk"]
            name = to_global(param["name"], pipeline, *chunk, where="f")
            assert name == param["canon"]
            assert local_names(name, pipeline) == {chunk: param["name"]}
            seen.add(chunk)
    assert seen == set(pipeline.chunks())


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    layers = st.integers(0, 4)
    return Pipeline(tuple(tuple(draw(layers) for _ in range(vpp)) for _ in range(pp)))


@given(pipelines().filter(lambda pipeline: pipeline.num_layers), st.data())
def test_every_layer_is_in_one_chunk_and_comes_back(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    layer = data.draw(st.integers(0, pipeline.num_layers - 1))
    rest = data.draw(st.sampled_from(["", ".mlp", ".mlp.linear_fc1._extra_state"]))
    name = f"decoder.layers.{layer}{rest}"
    ((chunk, local),) = local_names(name, pipeline).items()
    # Megatron's numbering, layer by layer: chunks 0 of all stages, then chunks 1, and so on.
    dealt = [
        ((p, v), i)
        for v in range(pipeline.vpp)
        for p in range(pipeline.pp)
        for i in range(pipeline.counts[p][v])
    ]
    assert (chunk, local) == (dealt[layer][0], f"decoder.layers.{dealt[layer][1]}{rest}")
    assert to_global(local, pipeline, *chunk, where="f") == name


def test_a_layer_that_the_model_has_not_is_in_no_chunk() -> None:
    assert local_names("decoder.layers.6.mlp", EVEN) == {}


ANYWHERE = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("embedding", [(0, 0)]),
        ("embedding.word_embeddings.weight", [(0, 0)]),
        ("embedding.position_embeddings.weight", [(0, 0)]),
        ("decoder.final_layernorm.weight", [(2, 1)]),
        ("decoder.final_layernorm._extra_state", [(2, 1)]),
        ("output_layer.weight", [(2, 1)]),
        ("output_layer", [(2, 1)]),
        ("", ANYWHERE),  # a module's own entry in _metadata
        ("decoder", ANYWHERE),
        ("decoder.layers", ANYWHERE),
        ("rotary_pos_emb", ANYWHERE),
        ("embeddings.weight", ANYWHERE),
        ("output_layers.weight", ANYWHERE),
        ("decoder.final_layernorms", ANYWHERE),
    ],
)
def test_what_is_no_layer_is_where_its_module_is(name: str, where: list[tuple[int, int]]) -> None:
    interleaved = Pipeline(((1, 1), (1, 1), (1, 1)))
    assert local_names(name, interleaved) == dict.fromkeys(where, name)
    assert to_global(name, interleaved, 1, 0, where="f") == name
    flat = Pipeline(((2,), (2,), (2,)))  # without interleaving: chunk 0 of the same stages
    last = [(p, 0) for p, v in where if v == 1]
    stages = last if where == [(2, 1)] else [(p, v) for p, v in where if v == 0]
    assert local_names(name, flat) == dict.fromkeys(stages, name)


def test_one_stage_has_everything() -> None:
    for name in ("embedding.a", "decoder.layers.0.a", "output_layer.weight", "x"):
        assert to_local(name, Pipeline(((1,),)), 0, 0) == name


@pytest.mark.parametrize("number", ["2", "10", "01", "00", "9" * 30, "0" * 5000])
def test_a_layer_that_the_chunk_has_not_is_refused(number: str) -> None:
    name = f"decoder.layers.{number}.mlp"
    message = f"f.pt: {name:.200}: the layer must be below 2, got {number:.40}"
    with pytest.raises(FormatError, match=re.escape(message)):
        to_global(name, EVEN, 0, 0, where="f.pt")


def test_a_newline_doesnt_hide_a_layer() -> None:
    assert to_global("decoder.layers.0.a\nb", EVEN, 1, 0, where="f") == "decoder.layers.2.a\nb"


def test_layers_of_a_chunk_are_counted_by_their_numbers() -> None:
    assert count_layers([]) == count_layers(["output_layer.weight", "decoder.layers"]) == 0
    names = ["decoder.layers.0.a", "decoder.layers.2.a\nb", "decoder.layers.2.b", "embedding.x"]
    assert count_layers(names) == 3
