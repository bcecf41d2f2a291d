"""The flat pieces of all ranks of a sharded optimizer hold each tensor exactly once.

The oracle cuts numpy arrays: a rank's tensor is its part of each sub-block, joined; values are
element numbers of the whole tensor, so that a swap shows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.errors import LayoutError
from ckpttools.layout import pipeline
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.flat import FlatRange
from ckpttools.layout.megatron import VARIANTS, Cuts
from ckpttools.layout.rules import Split
from ckpttools.layout.sharded import ModelFacts, ShardedLayout, ShardedParam, Topology
from ckpttools.layout.sharded_document import from_document, to_document
from ckpttools.layout.sharded_pieces import FlatPiece, flat_pieces, whole_regions

SLOTS = {
    "bfloat16": {"weight": "bfloat16", "fp32_param": "float32", "exp_avg": "float32"},
    "float32": {"weight": "float32", "exp_avg": "float32"},
}


def local_tensor(param: ShardedParam, tp: int, tp_size: int) -> np.ndarray:
    """Cut a rank's tensor out of the whole one, whose values are its element numbers."""
    whole = np.arange(prod(param.shape)).reshape(param.shape)
    if param.split is None:
        return whole
    dim, weights = param.split.dim, param.split.blocks.weights
    unit = param.shape[dim] // sum(weights)
    bounds = np.cumsum([w * unit for w in weights])[:-1]
    blocks = np.split(whole, bounds, axis=dim)
    return np.concatenate([np.split(b, tp_size, axis=dim)[tp] for b in blocks], axis=dim)


@st.composite
def params(draw: st.DrawFn, tp: int, name: str) -> ShardedParam:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    split = None
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        weights = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        shape[dim] = sum(weights) * tp * draw(st.integers(0, 3))
        split = Split(dim, Blocks(weights))
    return ShardedParam(
        name,
        tuple(shape),
        draw(st.sampled_from(["bfloat16", "float32"])),
        split,
        trainable=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def fills(
    draw: st.DrawFn, model: list[ShardedParam], chunks: dict[tuple[int, int], tuple[int, ...]]
) -> dict[tuple[int, int, str], tuple[tuple[int, ...], ...]]:
    """Draw an order of filling for some buffers, some of it in buckets of its own."""
    found = {}
    for (pp, vpp), chunk in chunks.items():
        for dtype in SLOTS:
            mine = [i for i in chunk if model[i].trainable and model[i].dtype == dtype]
            if mine and draw(st.booleans()):
                order = draw(st.permutations(mine))
                at = draw(st.integers(0, len(mine)))
                found[pp, vpp, dtype] = (tuple(order[:at]), tuple(order[at:]))
    return found


@st.composite
def layouts(draw: st.DrawFn) -> ShardedLayout:
    topology = Topology(
        tp=draw(st.integers(1, 3)),
        pp=draw(st.integers(1, 2)),
        vpp=draw(st.integers(1, 2)),
        dp=draw(st.sampled_from([1, 2, 3, 5, 7])),
    )
    count = draw(st.integers(1, 6))
    model = [draw(params(topology.tp, f"p{i}")) for i in range(count)]
    keys = [(p, v) for p in range(topology.pp) for v in range(topology.vpp)]
    homes = [draw(st.sampled_from(keys)) for _ in model]
    if draw(st.booleans()):
        model.append(replace(model[0], name="copy", tied_to="p0"))
        homes.append(draw(st.sampled_from(keys)))
    chunks = {key: tuple(i for i, home in enumerate(homes) if home == key) for key in keys}
    if draw(st.booleans()):
        return ShardedLayout(
            "zero2",
            topology,
            tuple(model),
            chunks,
            SLOTS,
            fixed={dtype: FixedBuckets(draw(st.integers(1, 200)), 16) for dtype in SLOTS},
            fills=draw(fills(model, chunks)),
        )
    cuts = {
        (tp, *key, dtype): Cuts(draw(st.integers(1, 200)))
        for tp in range(topology.tp)
        for key in keys
        for dtype in SLOTS
        if draw(st.booleans())
    }
    return ShardedLayout("zero1", topology, tuple(model), chunks, SLOTS, cuts=cuts)


def regions_of(
    layout: ShardedLayout, rank: int, piece: FlatPiece
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return (parameter, element numbers by the region, element numbers by the local tensor)."""
    tp, size = layout.topology.place_of(rank).tp, layout.topology.tp
    found = []
    for cut in piece.slices:
        param = layout.params[cut.param]
        whole = np.arange(prod(param.shape)).reshape(param.shape)
        flat = local_tensor(param, tp, size).reshape(-1)[cut.start : cut.stop].copy()
        for part in whole_regions(param, tp=tp, tp_size=size, start=cut.start, stop=cut.stop):
            if isinstance(part.region, FlatRange):
                inside = whole[part.region.within.slices].reshape(-1)
                region = inside[part.region.start : part.region.stop]
                stored = flat[part.at : part.at + part.region.numel]
            else:
                region = whole[part.region.slices]
                assert part.strides is not None
                strides = [s * flat.itemsize for s in part.strides]
                stored = np.lib.stride_tricks.as_strided(
                    flat[part.at :], region.shape, strides, writeable=False
                )
            found.append((cut.param, region, stored))
    return found


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_the_pieces_of_all_ranks_hold_each_trainable_tensor_exactly_once(
    layout: ShardedLayout,
) -> None:
    counts = [np.zeros(prod(p.shape), dtype=int) for p in layout.params]
    replicas = [np.zeros(prod(p.shape), dtype=int) for p in layout.params]
    for rank in range(layout.topology.world_size):
        tp = layout.topology.place_of(rank).tp
        for piece in flat_pieces(layout, rank):
            for index, region, stored in regions_of(layout, rank, piece):
                assert np.array_equal(region, stored)
                first = layout.replica_of(index, tp) == 0
                np.add.at((counts if first else replicas)[index], region.reshape(-1), 1)
    for param, mine, copies in zip(layout.params, counts, replicas, strict=True):
        first = param.trainable and not param.tied_to
        assert (mine == first).all()
        others = layout.topology.tp if param.split is None else 1
        assert (copies == (others - first if param.trainable else 0)).all()


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_the_pieces_of_a_bucket_are_equal_and_tile_it(layout: ShardedLayout) -> None:
    for rank in range(layout.topology.world_size):
        place = layout.topology.place_of(rank)
        assert layout.topology.rank_of(tp=place.tp, dp=place.dp, pp=place.pp) == rank
        for piece in flat_pieces(layout, rank):
            buffer = layout.buffers(place.tp, place.pp, piece.vpp)[piece.dtype]
            size = buffer.bucket_stops[piece.bucket] - buffer.bucket_starts[piece.bucket]
            assert piece.numel * layout.topology.dp == size
            assert piece.start == buffer.bucket_starts[piece.bucket] + place.dp * piece.numel
            ends = [0]
            for cut in piece.slices:
                assert cut.at >= ends[-1]
                ends.append(cut.at + cut.stop - cut.start)
            assert ends[-1] <= piece.numel


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_a_layout_comes_back_equal_from_its_document(layout: ShardedLayout) -> None:
    document = json.loads(json.dumps(to_document(layout)))
    assert from_document(document, where="here") == layout


def test_a_layout_with_every_fact_comes_back_equal() -> None:
    layout = ShardedLayout(
        "zero1",
        Topology(tp=2, pp=2, dp=3),
        (
            ShardedParam(
                "e", (128, 4), "bfloat16", Split(0, Blocks((1,))), 100, "first", vocabulary=True
            ),
            ShardedParam("l", (8,), "bfloat16", stage="layer", layer=7, trainable=False),
            ShardedParam(
                "o",
                (128, 4),
                "bfloat16",
                Split(0, Blocks((1,))),
                100,
                "last",
                None,
                "e",
                vocabulary=True,
            ),
        ),
        {(0, 0): (0,), (1, 0): (1, 2)},
        SLOTS,
        variant="core-0.12",
        busbw=True,
        cuts={(1, 1, 0, "bfloat16"): Cuts(after=frozenset({"o", "e"}))},
        grad_dtypes={"bfloat16": "float32"},
        facts=ModelFacts(16, 4, pipeline.Split(first=1, last=2)),
    )
    fused = replace(
        layout,
        kind="zero2",
        busbw=False,
        cuts={},
        fixed={"bfloat16": FixedBuckets(600, 32)},
        fills={(0, 0, "bfloat16"): ((0,),)},
    )
    assert from_document(json.loads(json.dumps(to_document(fused))), where="here") == fused
    document = json.loads(json.dumps(to_document(layout)))
    again = from_document(document, where="here")
    assert again == layout
    assert document["params"][1]["layer"] == 7
    assert again.facts.pipeline.last == 2


def test_ranks_that_own_only_padding_have_pieces_without_slices() -> None:
    layout = ShardedLayout(
        "zero1",
        Topology(dp=5),
        (ShardedParam("w", (3,), "float32"),),
        {(0, 0): (0,)},
        SLOTS,
    )
    pieces = [flat_pieces(layout, rank)[0] for rank in range(5)]
    assert [piece.numel for piece in pieces] == [128] * 5
    assert [len(piece.slices) for piece in pieces] == [1, 0, 0, 0, 0]


def test_a_tied_embedding_has_buckets_of_its_own_with_several_stages_only() -> None:
    def layout(pp: int) -> ShardedLayout:
        vocabulary = ShardedParam("e", (64,), "float32")
        return ShardedLayout(
            "zero1",
            Topology(pp=pp),
            (
                vocabulary,
                ShardedParam("w", (64,), "float32"),
                replace(vocabulary, name="o", tied_to="e"),
            ),
            {(0, 0): (0, 1)} if pp == 1 else {(0, 0): (0, 1), (1, 0): (2,)},
            SLOTS,
        )

    assert len(layout(1).buffers(0, 0, 0)["float32"].bucket_stops) == 1
    assert len(layout(2).buffers(0, 0, 0)["float32"].bucket_stops) == 2
    assert layout(2).replica_of(2, 0) == 1


def test_buffers_follow_the_variant_and_the_first_seen_order_of_dtypes() -> None:
    layout = ShardedLayout(
        "zero1",
        Topology(dp=2),
        (
            ShardedParam("a", (70,), "float32"),
            ShardedParam("b", (3,), "bfloat16"),
            ShardedParam("c", (10,), "float32"),
        ),
        {(0, 0): (0, 1, 2)},
        SLOTS,
    )
    assert list(layout.buffers(0, 0, 0)) == ["float32", "bfloat16"]
    starts = {
        name: replace(layout, variant=name).buffers(0, 0, 0)["float32"].starts for name in VARIANTS
    }
    assert starts["core-0.13"] == (64, 0)
    assert starts["core-0.7"] == (10, 0)


W = ShardedParam("w", (8, 2), "float32", Split(0, Blocks((1, 1))))
V = ShardedParam("v", (8, 2), "float32")
RULE = FixedBuckets(600, 32)
FUSED: dict[str, object] = {"kind": "zero2", "fixed": {"float32": RULE}}
LAYOUT = ShardedLayout("zero1", Topology(tp=2), (W, V), {(0, 0): (0, 1)}, SLOTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "zero9"}, "layout: kind must be one of zero1, zero2, got 'zero9'"),
        ({"variant": "core-9"}, "layout: must be one of core-0.13, .*, got 'core-9'"),
        ({"params": (W, W)}, "parameters must have names of their own, got one twice"),
        ({"topology": Topology(tp=3)}, "must divide dim 0|must divide by 3"),
        ({"topology": Topology(pp=2)}, "a model chunk for each of 2 stages x 1, got 1"),
        ({"chunks": {(0, 0): (0, 2)}}, "chunks must hold indices below 2"),
        ({"chunks": {(0, 0): (0, 0)}}, "must be in one model chunk, got one in two"),
        ({"chunks": {(0, 0): (0,)}}, "v: must be in a model chunk, got none"),
        ({"params": (W, replace(V, tied_to="x"))}, "like its original 'x' .*, got none"),
        ({"params": (W, replace(V, tied_to="w"))}, "like its original 'w' .*, got another"),
        ({"cuts": {(2, 0, 0, "float32"): Cuts()}}, "cuts must be of a buffer, got tp 2"),
        ({"slots": {"bfloat16": SLOTS["bfloat16"]}}, "w: slots must be known for float32"),
        ({"slots": {"float32": {"exp_avg": "float32"}}}, "must have the weight in float32"),
        (
            {"slots": {"float32": {"weight": "float32", "fp32_param": "float32"}}},
            "no master where that is float32",
        ),
        ({"slots": {"float32": {"weight": "float32", "m": "f"}}}, "'m' must have a dtype, got 'f'"),
        ({"fixed": {"float32": RULE}}, "zero1 has no buckets of one size, got a zero2 layout's"),
        ({"kind": "zero2"}, "w: the size of buckets must be known for float32, got none"),
        ({**FUSED, "busbw": True}, "zero2 has buckets of one size, got a zero1 layout's cuts"),
        (
            {**FUSED, "fills": {(0, 0, "float32"): ((0,),)}},
            "float32: buckets must be filled with each parameter of the buffer once, got .0.",
        ),
        ({**FUSED, "fills": {(1, 0, "float32"): ()}}, "pp 1, vpp 0, float32: buckets must be"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(LAYOUT, **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "must have a name, got none"),
        ({"shape": (-1,)}, r"sizes must be at least 0, got \(-1,\)"),
        ({"dtype": "float33"}, "dtype must be one of .*, got 'float33'"),
        ({"stage": "middle"}, "stage must be one of first, last, layer or unknown"),
        ({"stage": "layer"}, "got 'layer' and None"),
        ({"layer": 3}, "got None and 3"),
        ({"stage": "layer", "layer": -1}, "layer must be at least 0, got -1"),
        ({"vocab_rows": 3}, "vocab_rows must be rows of a vocabulary tensor"),
        ({"vocab_rows": 9, "vocabulary": True}, "got 9"),
    ],
)
def test_a_parameter_that_cant_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(V, **fields)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), 1, "here: kind must be text, got 1"),
        (("kind",), "zero3", "here: kind must be one of zero1, zero2, got 'zero3'"),
        (("topology", "tp"), 0, "topology: tp must be at least 1, got 0"),
        (("topology", "tp"), True, "here: topology: tp must be a natural number, got True"),
        (("topology", "tp"), 1 << 70, "tp must be a natural number"),
        (("params",), {}, "here: params must be a list"),
        (("params", 1, "shape"), [1.0], r"here: params\[1\]: shape must be natural numbers"),
        (("params", 0, "blocks"), None, r"params\[0\]: dim and blocks must be there together"),
        (("params", 0, "name"), None, r"params\[0\]: name must be text, got None"),
        (("params", 0), [], r"params\[0\]: must have name, shape, .*, got list"),
        (("chunks", 0, "extra"), 1, r"chunks\[0\]: must have pp, vpp, params, got"),
        (("slots", "float32"), {"weight": 3}, "slots: float32 must map texts to texts"),
        (("busbw",), 1, "busbw must be true or false, got 1"),
        (("facts", "heads"), 0, "model: heads must be at least 1, got 0"),
        (("facts", "pipeline", "loss"), 0, "pipeline: loss must be true or false"),
        (("cuts",), [{"tp": 0}], r"cuts\[0\]: must have tp, pp, vpp, dtype, size, after"),
    ],
)
def test_a_document_that_is_no_layout_is_refused_with_its_place(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    document = json.loads(json.dumps(to_document(LAYOUT)))
    inside = document
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(LayoutError, match=message):
        from_document(document, where="here")


def test_a_chunk_or_a_cut_that_is_there_twice_is_refused() -> None:
    document = to_document(LAYOUT)
    chunks = document["chunks"]
    assert isinstance(chunks, list)
    with pytest.raises(LayoutError, match=r"entries must be there once, got \(0, 0\) twice"):
        from_document({**document, "chunks": [*chunks, *chunks]}, where="here")


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank: must be in 0..1, got 2"):
        flat_pieces(LAYOUT, 2)
