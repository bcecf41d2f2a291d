"""A tree of inert objects comes back from JSON as it was, and no document runs anything."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import FormatError
from ckpttools.formats.megatron.trees import fingerprint
from ckpttools.storage.inert import UNSET, Inert, InertType
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode
from ckpttools.storage.torchzip import (
    StorageRef,
    TensorRef,
    load_small_payloads,
    read_torch_file,
)

NAMES = st.builds(InertType, st.text(max_size=5), st.text(max_size=5))
KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5), NAMES,
    st.tuples(st.integers(), st.text(max_size=3)),
)  # fmt: skip
LEAVES = st.one_of(
    KEYS,
    st.floats(),
    st.binary(max_size=9).map(bytearray),
    st.frozensets(st.integers(), max_size=3),
    st.sets(st.text(max_size=3), max_size=3),
)


def calls(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.lists(st.tuples(inner, inner), max_size=2)
    return st.builds(
        Inert,
        NAMES,
        st.lists(inner, max_size=3).map(tuple),
        st.sampled_from(["reduce", "newobj"]),
        st.dictionaries(KEYS, inner, max_size=2),
        st.one_of(st.just(UNSET), inner),
        pairs,
        st.lists(inner, max_size=2),
    )


TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        calls(inner),
    ),
    max_leaves=20,
)


def through_json(tree: object) -> Any:
    return decode(json.loads(json.dumps(encode(tree, where="tree"))), where="tree")


def as_text(tree: object) -> str:
    """Describe a tree with every type and every bit of a float, in the order of iteration."""
    if isinstance(tree, float):
        return f"float {math.copysign(1, tree)} {tree.hex()}"
    if isinstance(tree, dict):
        inside = [f"{as_text(k)}: {as_text(v)}" for k, v in tree.items()]
        return f"{type(tree).__name__} {inside} {vars(tree) if hasattr(tree, '__dict__') else ''}"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__} {[as_text(item) for item in tree]}"
    if isinstance(tree, (set, frozenset)):
        return f"{type(tree).__name__} {sorted(map(as_text, tree))}"
    if isinstance(tree, Inert):
        parts = [tree.callee, tree.args, tree.kwargs, tree.items, tree.appended, tree.state]
        return f"call {tree.via} {[as_text(part) for part in parts]}"
    return f"{type(tree).__name__} {tree!r}"


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_a_tree_comes_back_with_every_type_and_bit(tree: object) -> None:
    assert as_text(through_json(tree)) == as_text(tree)


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_what_megatron_wrote_comes_back_with_equal_payloads(case: oracle.Case) -> None:
    path = next(case.directory.glob("*/*/model_optim_rng.pt"))
    file = read_torch_file(path)
    assert isinstance(file.tree, dict)
    tree = {key: value for key, value in file.tree.items() if not key.startswith("model")}
    load_small_payloads(file, tree)
    again = through_json(tree)
    assert fingerprint(again) == fingerprint(tree)
    assert as_text(again["args"]) == as_text(tree["args"])
    assert as_text(again["optimizer"]) == as_text(tree["optimizer"])


def test_nan_and_infinity_keep_their_bits() -> None:
    values = [math.inf, -math.inf, math.nan, -0.0, 5e-324]
    assert [v.hex() for v in through_json(values)] == [v.hex() for v in values]
    json.dumps(encode(values, where="x"), allow_nan=False)


def test_what_is_shared_is_still_shared(tmp_path: Path) -> None:
    values = torch.arange(6.0)
    torch.save({"a": values, "b": values[2:4], "c": [values]}, tmp_path / "x.pt")
    file = read_torch_file(tmp_path / "x.pt")
    load_small_payloads(file, file.tree)
    again = through_json(file.tree)
    assert again["a"].storage is again["b"].storage
    assert again["c"][0] is again["a"]
    assert (again["b"].offset, again["b"].shape, again["b"].strides) == (2, (2,), (1,))
    assert again["a"].storage.payload == values.numpy().tobytes()


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "bfloat16", "bool", "int64"])
def test_a_parameter_of_any_dtype_comes_back(kind: str, tmp_path: Path) -> None:
    tensor = torch.zeros(3, dtype=getattr(torch, kind))
    torch.save(torch.nn.Parameter(tensor, requires_grad=False), tmp_path / "x.pt")
    file = read_torch_file(tmp_path / "x.pt")
    load_small_payloads(file, file.tree)
    again = through_json(file.tree)
    assert isinstance(file.tree, TensorRef)
    assert again.dtype == BY_NAME[kind]
    assert as_text(again.parameter) == as_text(file.tree.parameter)


def test_attributes_of_an_ordered_dict_come_back() -> None:
    tree: OrderedDict[str, object] = OrderedDict(a=1)
    vars(tree)["_metadata"] = {"": {"version": 1}}
    assert vars(through_json(tree)) == {"_metadata": {"": {"version": 1}}}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (object(), "tree: must hold only plain and inert objects, got object"),
        (1 << 2040, "an integer must have at most 255 bytes, got a longer one"),
        (
            TensorRef(StorageRef(BY_NAME["int8"], 3), 0, (3,), (1,)),
            "must have its payload, got none",
        ),
        (
            StorageRef(BY_NAME["int8"], (1 << 20) + 1, payload=bytes((1 << 20) + 1)),
            "must have at most 1048576 bytes, got more",
        ),
    ],
)
def test_what_json_cant_stand_for_is_refused(tree: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode(tree, where="tree")


def test_a_tree_in_itself_and_one_too_deep_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="must not contain themselves"):
        encode(loop, where="tree")
    deep: object = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FormatError, match="depth must be at most 100, got more"):
        encode(deep, where="tree")
    with pytest.raises(FormatError, match="depth must be at most 100"):
        decode(deep, where="tree")


B64 = base64.b64encode(b"123").decode()
STORAGE = {"storage": B64, "dtype": "int8", "location": "cpu", "untyped": False}
TENSOR: dict[str, object] = {
    "tensor": STORAGE,
    "offset": 0,
    "shape": [3],
    "strides": [1],
    "requires_grad": False,
    "hooks": None,
    "cast": None,
    "parameter": None,
}
CALL: dict[str, object] = {"call": {"name": ["os", "system"]}, "args": [], "via": "reduce"}


def test_a_call_that_a_document_names_is_data() -> None:
    again = decode(CALL, where="tree")
    assert isinstance(again, Inert)
    assert again.callee == InertType("os", "system")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "must be plain or have a known tag"),
        ({"eval": 1}, "must be plain or have a known tag, got {'eval': 1}"),
        ({"map": [1]}, "a map must be an object"),
        ({"map": {}, "x": 1}, "a node must have map"),
        ({"dict": [[1]]}, "must be a list of pairs"),
        ({"dict": [[1, 2], [1, 3]]}, "a key must be there once, got 1"),
        (
            {"dict": [[[1], 2]]},
            r"a key must be a name, a number or a short tuple of them, got \[1\]",
        ),
        ({"dict": [[{"tuple": [0] * 70}, 2]]}, "a key must be .* a short tuple"),
        ({"set": [[1]]}, "a key must be a name"),
        ({"tuple": {}}, "must be a list, got {}"),
        ({"tuple": [], "set": []}, "a node must have one tag"),
        ({"bytes": "?"}, "must be base64, got '\\?'"),
        ({"bytes": 1}, "must be base64, got 1"),
        ({"bytes": "", "x": 1}, "a node must have one tag"),
        ({"float": "00"}, "a float must have 16 hexadecimal digits, got '00'"),
        ({"float": "zz"}, "a float must have 16 hexadecimal digits"),
        ({"name": ["a"]}, r"a name must be two texts, got \['a'\]"),
        ({"ref": 0}, "a ref must be of an object that stood earlier, got 0"),
        ([{"ref": 0}], "a ref must be of an object that stood earlier"),
        ({"ordered": [], "attributes": {"map": {"items": 1}}}, "names that hide no method"),
        ({**CALL, "via": "eval"}, "via must be reduce or newobj, got 'eval'"),
        ({**CALL, "call": "os.system"}, "what is called must be a name, got 'os.system'"),
        ({**CALL, "args": {}}, "must be a list"),
        ({**CALL, "more": 1}, "a node must have args, call, via"),
        ({**STORAGE, "dtype": "int9"}, "a storage must have a dtype"),
        ({**STORAGE, "dtype": "int16"}, "a storage of int16 must hold whole elements, got 3"),
        ({**TENSOR, "tensor": 1}, "a tensor must have a storage"),
        ({**TENSOR, "shape": 3}, "a tensor must have a storage"),
        ({**TENSOR, "cast": "int9"}, "a tensor must have a storage"),
        ({**TENSOR, "shape": [4]}, "a view must lie inside its 3 elements, got index 3"),
        ({**TENSOR, "shape": ["x"]}, "natural numbers as offset, sizes and strides"),
        ({**TENSOR, "parameter": [1]}, "a parameter must be a name and its arguments"),
    ],
)
def test_a_document_that_encode_doesnt_make_is_refused(document: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode(document, where="tree")


TAGS = "map dict tuple set ordered attributes ref call args via name bytes float tensor storage"


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(TAGS.split()), inner, max_size=4),
        ),
        max_leaves=12,
    )
)
def test_any_document_is_decoded_or_refused(document: object) -> None:
    with contextlib.suppress(FormatError):
        decode(document, where="tree")
