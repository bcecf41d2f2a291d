"""What schedulers, loaders and generators hold comes back as it was, without a pickle."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from training_runs import Run

from ckpttools.errors import FormatError, MismatchError
from ckpttools.hooks.plain_state import from_plain, to_plain
from ckpttools.hooks.random_state import random_state, set_random_state
from ckpttools.storage.inert_decoder import decode
from ckpttools.storage.inert_encoder import encode


def there_and_back(value: object) -> Any:
    text = json.dumps(encode(to_plain(value, "it"), where="it"))
    return from_plain(decode(json.loads(text), where="it"), "it")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_equal_and_of_the_same_types(value: object) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 is not 1.0, and a tuple no list


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.get_rng_state(),
    ],
    ids=["transposed", "a number", "empty", "truth values", "a generator's"],
)
def test_tensors_and_arrays_come_back_bit_for_bit(tensor: torch.Tensor) -> None:
    found = there_and_back({"a": [tensor]})["a"][0]
    assert torch.equal(found, tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    if tensor.dtype != torch.bfloat16:
        array = there_and_back(tensor.numpy())
        assert type(array) is np.ndarray
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())


def test_counters_ordered_dicts_numpys_numbers_and_dtypes_come_back() -> None:
    value = {
        "counter": Counter({3: 2, 7: 1}),
        "ordered": OrderedDict([("b", 1), ("a", (2.5, {3}))]),
        "dtype": torch.bfloat16,
        "inf": float("inf"),
    }
    found = there_and_back(value)
    assert found == value
    assert {key: type(part) for key, part in found.items()} == {
        key: type(part) for key, part in value.items()
    }
    assert type(there_and_back(np.float64(2.5))) is float
    assert type(there_and_back(np.int32(2))) is int


def test_what_is_no_data_is_named_with_its_path() -> None:
    with pytest.raises(FormatError, match=r"it\.a\[1\]\.b: must be plain data, got Linear"):
        to_plain({"a": [0, {"b": torch.nn.Linear(1, 1)}]}, "it")
    with pytest.raises(FormatError, match="it: must be a real number, got complex"):
        to_plain(np.complex64(1j), "it")


def draw() -> tuple[float, float, float, float]:
    numpys = float(np.random.rand())  # noqa: NPY002  # it is what is tested
    return random.random(), random.gauss(0, 1), numpys, float(torch.rand(1))  # noqa: S311


def test_generators_go_on_where_they_stood_and_reading_them_draws_nothing() -> None:
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002  # it is what is tested
    torch.manual_seed(3)
    draw()
    random.gauss(0, 1)  # leaves one drawn ahead
    state = there_and_back(random_state())
    assert there_and_back(random_state()) == state
    expected = draw()
    assert draw() != expected
    assert set_random_state(state, "rng") == ()
    assert draw() == expected


def test_a_broken_state_of_generators_sets_none_of_them() -> None:
    good = random_state()
    before = random_state()
    name, keys, *rest = good["numpy"]  # type: ignore[misc]
    for bad in (
        {},
        {**good, "torch": b"short"},
        {**good, "numpy": (name, keys[:-4], *rest)},  # type: ignore[has-type]
        {**good, "python": (3, b"", None)},
    ):
        with pytest.raises((FormatError, MismatchError), match="rng: "):
            set_random_state(bad, "rng")
        assert random_state() == before


class Loader:
    """A data loader that counts batches of its rank, or samples of the whole run."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def save_loaders(folder: str) -> bool:
    rank = dist.get_rank()
    run = Run(asynchronous=False)
    torch.manual_seed(rank)
    for name, loader in (("own", Loader(100 + rank)), ("common", Loader(7))):
        with run.manager(Path(folder) / name) as manager:
            manager.save(1, run.model, run.optimizer, dataloader=loader, extra={name: loader.count})
    return True


def load_loaders(folder: str) -> list[tuple[str, int, Any, float, tuple[str, ...]]]:
    found = []
    for name in ("own", "common"):
        run, loader = Run(), Loader(-1)
        with run.manager(Path(folder) / name) as manager:
            try:
                restored = manager.restore(run.model, run.optimizer, dataloader=loader)
            except MismatchError as error:
                found.append((str(error), loader.count, None, 0.0, ()))
                continue
        extra = restored.objects.get("extra")
        found.append(("", loader.count, extra, float(torch.rand(1)), restored.notes))
    return found


def test_what_differs_between_ranks_goes_to_the_same_ranks_and_what_is_common_to_any(
    tmp_path: Path,
) -> None:
    assert all(run_ranks(save_loaders, 2, str(tmp_path)))
    drawn = []
    for rank, (own, common) in enumerate(run_ranks(load_loaders, 2, str(tmp_path))):
        assert own[:3] == ("", 100 + rank, {"own": 100 + rank})
        assert common[:3] == ("", 7, {"common": 7})
        torch.manual_seed(rank)
        assert own[3] == common[3] == float(torch.rand(1))
        drawn.append(own[3])
    assert drawn[0] != drawn[1]
    for own, common in run_ranks(load_loaders, 3, str(tmp_path)):
        assert "dataloader: must be equal on all ranks, or go to as many ranks" in own[0]
        assert own[1] == -1
        assert common[:3] == ("", 7, {"common": 7})
        assert "rng: not restored, since the number of ranks is another" in common[4]
        assert any("2 ranks saved it and 3 go on with it" in note for note in common[4])
