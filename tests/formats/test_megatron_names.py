"""Local names of stages and global names of the model must be one and the same set."""

from __future__ import annotations

import re

import oracle_megatron as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import FormatError
from ckpttools.formats.megatron.names import to_global, to_local


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_names_in_the_files_become_the_names_of_the_live_model_and_back(case: oracle.Case) -> None:
    layers = case.model["num_layers"] // case.pp
    for rank in case.layout():
        for param in (p for buffer in rank["buffers"] for p in buffer["params"]):
            name = to_global(param["name"], stage=rank["pp"], layers=layers, where="f")
            assert name == param["canon"]
            for stage in range(case.pp):
                local = to_local(name, stage=stage, stages=case.pp, layers=layers)
                assert local == (param["name"] if stage == rank["pp"] else None)


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_every_layer_is_in_one_stage_and_comes_back(
    stages: int, layers: int, data: st.DataObject
) -> None:
    layer = data.draw(st.integers(0, stages * layers - 1))
    rest = data.draw(st.sampled_from(["", ".mlp", ".mlp.linear_fc1._extra_state"]))
    name = f"decoder.layers.{layer}{rest}"
    local = [to_local(name, stage=s, stages=stages, layers=layers) for s in range(stages)]
    ((stage, found),) = [(s, n) for s, n in enumerate(local) if n is not None]
    assert stage == layer // layers
    assert to_global(found, stage=stage, layers=layers, where="f") == name


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("embedding", [0]),
        ("embedding.word_embeddings.weight", [0]),
        ("embedding.position_embeddings.weight", [0]),
        ("decoder.final_layernorm.weight", [2]),
        ("decoder.final_layernorm._extra_state", [2]),
        ("output_layer.weight", [2]),
        ("output_layer", [2]),
        ("", [0, 1, 2]),  # a module's own entry in _metadata
        ("decoder", [0, 1, 2]),
        ("decoder.layers", [0, 1, 2]),
        ("rotary_pos_emb", [0, 1, 2]),
        ("embeddings.weight", [0, 1, 2]),
        ("output_layers.weight", [0, 1, 2]),
        ("decoder.final_layernorms", [0, 1, 2]),
    ],
)
def test_what_is_no_layer_is_where_its_module_is(name: str, where: list[int]) -> None:
    local = [to_local(name, stage=s, stages=3, layers=2) for s in range(3)]
    assert local == [name if s in where else None for s in range(3)]
    assert to_global(name, stage=1, layers=2, where="f") == name


def test_one_stage_has_everything() -> None:
    for name in ("embedding.a", "decoder.layers.0.a", "output_layer.weight", "x"):
        assert to_local(name, stage=0, stages=1, layers=1) == name


@pytest.mark.parametrize("number", ["2", "10", "01", "00", "9" * 30, "0" * 5000])
def test_a_layer_that_the_stage_has_not_is_refused(number: str) -> None:
    name = f"decoder.layers.{number}.mlp"
    message = f"f.pt: {name:.200}: the layer must be below 2, got {number:.40}"
    with pytest.raises(FormatError, match=re.escape(message)):
        to_global(name, stage=0, layers=2, where="f.pt")


def test_a_newline_doesnt_hide_a_layer() -> None:
    assert to_global("decoder.layers.0.a\nb", stage=1, layers=2, where="f") == (
        "decoder.layers.2.a\nb"
    )
