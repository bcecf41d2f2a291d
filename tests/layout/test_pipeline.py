"""Layers over stages and chunks: each once, numbered chunk by chunk, as the options split them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout.pipeline import Pipeline, Split, split_layers


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    pp, vpp = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    chunk = st.integers(0, 4)
    return Pipeline(tuple(tuple(draw(chunk) for _ in range(vpp)) for _ in range(pp)))


def layers_of(pipeline: Pipeline, p: int, v: int) -> range:
    first = pipeline.first_layer(p, v)
    return range(first, first + pipeline.counts[p][v])


@given(pipelines())
def test_chunks_hold_each_layer_once_in_the_order_of_chunks_then_stages(pipeline: Pipeline) -> None:
    dealt = [
        layer
        for v in range(pipeline.vpp)
        for p in range(pipeline.pp)
        for layer in layers_of(pipeline, p, v)
    ]
    assert dealt == list(range(pipeline.num_layers))


@given(pipelines())
def test_both_orders_visit_every_chunk_once_and_layer_order_is_that_of_the_layers(
    pipeline: Pipeline,
) -> None:
    by_stage, by_layer = list(pipeline.chunks()), list(pipeline.in_layer_order())
    everything = {(p, v) for p in range(pipeline.pp) for v in range(pipeline.vpp)}
    assert by_stage == sorted(everything)
    assert set(by_layer) == everything
    assert len(by_layer) == len(by_stage)
    firsts = [pipeline.first_layer(p, v) for p, v in by_layer]
    assert firsts == sorted(firsts)


@given(pipelines())
def test_embeddings_lie_in_the_first_chunk_and_the_output_in_the_last(pipeline: Pipeline) -> None:
    order = list(pipeline.in_layer_order())
    assert [chunk for chunk in order if pipeline.is_first(*chunk)] == order[:1]
    assert [chunk for chunk in order if pipeline.is_last(*chunk)] == order[-1:]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_an_even_split_gives_all_chunks_the_same(each: int, pp: int, vpp: int) -> None:
    pipeline = split_layers(each * pp * vpp, pp, vpp, Split())
    assert pipeline.counts == ((each,) * vpp,) * pp
    assert str(pipeline) == f"{each} layers a chunk"


@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_a_split_either_keeps_every_promise_or_is_refused(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, embedding: bool, loss: bool
) -> None:
    split = Split(first, last, embedding, loss)
    try:
        pipeline = split_layers(layers, pp, vpp, split)
    except LayoutError:
        return
    assert (pipeline.pp, pipeline.vpp, pipeline.num_layers) == (pp, vpp, layers)
    assert first in (None, sum(pipeline.counts[0]))
    assert last in (None, sum(pipeline.counts[-1]))
    filled = [list(stage) for stage in pipeline.counts]
    filled[0][0] += embedding
    filled[-1][-1] += loss
    assert all(len(set(stage)) == 1 for stage in filled), "a stage's chunks are equal"
    middle = filled[0 if first is None else 1 : pp if last is None else pp - 1]
    assert len({tuple(stage) for stage in middle}) <= 1, "stages that nobody named are equal"


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split", "counts"),
    [
        (7, 3, 1, Split(first=1), ((1,), (3,), (3,))),
        (7, 3, 1, Split(last=3), ((2,), (2,), (3,))),
        (7, 3, 1, Split(first=2, last=1), ((2,), (4,), (1,))),
        (7, 2, 1, Split(first=5, last=2), ((5,), (2,))),
        (12, 3, 2, Split(first=2, last=4), ((1, 1), (3, 3), (2, 2))),
        (7, 2, 1, Split(embedding=True), ((3,), (4,))),
        (7, 4, 1, Split(loss=True), ((2,), (2,), (2,), (1,))),
        (6, 4, 2, Split(embedding=True, loss=True), ((0, 1), (1, 1), (1, 1), (1, 0))),
    ],
)
def test_splits_are_those_of_the_options(
    layers: int, pp: int, vpp: int, split: Split, counts: tuple[tuple[int, ...], ...]
) -> None:
    assert split_layers(layers, pp, vpp, split).counts == counts


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "split", "message"),
    [
        (7, 3, 1, Split(), "pipeline: 7 layers must divide over 3 stages, got a rest"),
        (7, 2, 1, Split(first=3, last=3), "pipeline: 1 layers must divide over 0 stages"),
        (7, 3, 1, Split(first=8), "pipeline: -1 layers must divide over 2 stages"),
        (7, 1, 1, Split(first=3, last=4), "pipeline: 0 layers must divide over 0 stages"),
        (9, 3, 2, Split(), "must divide over 2 model chunks, got [3, 3, 3]"),
        (8, 2, 1, Split(first=3, loss=True), "can't also count embedding or loss as layers"),
        (3, 3, 1, Split(first=2, last=1), "0 layers must divide over 1 stages, got a rest or noth"),
        (8, 2, 2, Split(first=2, last=6), "others between an uneven first and last one, got 2"),
        (1, 2, 2, Split(embedding=True), "must divide over 2 model chunks, got [1, 1]"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(
    layers: int, pp: int, vpp: int, split: Split, message: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        split_layers(layers, pp, vpp, split)


@pytest.mark.parametrize("counts", [(), ((),), ((1,), (1, 2)), ((1,), (-1,))])
def test_stages_must_have_as_many_chunks_with_no_less_than_no_layers(
    counts: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(LayoutError, match="every stage must have the same number of model chunks"):
        Pipeline(counts)
