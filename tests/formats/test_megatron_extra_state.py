"""Extra state of modules (Transformer Engine's) moves with its layer, or is refused by name."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_edit import MODEL, copy_of, edit_all, flat_tensor, rank_files
from oracle_torch_files import read

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.dtypes import BY_NAME
from ckpttools.errors import UsageError
from ckpttools.storage.inert import Inert, new_global
from ckpttools.storage.torchzip import StorageRef, TensorRef


def empty_tensor() -> TensorRef:
    return TensorRef(StorageRef(BY_NAME["uint8"], 0, payload=b""), 0, (0,), (1,))


def bytes_io(content: bytes) -> Inert:
    return Inert(new_global("_io", "BytesIO"), (), "newobj", state=(content, 0, None))


def with_extra_state(root: Path, value: Any) -> Path:
    """Give every module of a copied fixture extra state, made by ``value(name, number)``."""
    number = iter(range(10_000))

    def fill(tree: Any) -> None:
        for name in tree["model"]:
            if name.endswith("._extra_state"):
                tree["model"][name] = value(name, next(number))

    return edit_all(copy_of("gqa_tp2_pp1_dp2", root), MODEL, fill)


def extra_states(root: Path) -> dict[str, Any]:
    return {
        f"{path.parent.name} {name}": value
        for path in rank_files(root, MODEL)
        for name, value in read(path)["model"].items()
        if name.endswith("._extra_state")
    }


@pytest.mark.parametrize("make", [empty_tensor, lambda: bytes_io(b""), lambda: None])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_empty_extra_state_fits_every_topology(make: Any, tp: int, tmp_path: Path) -> None:
    source = with_extra_state(tmp_path / "source", lambda _name, _number: make())
    api.reshard(source, tmp_path / "out", target=Target(tp=tp, pp=2, dp=1))
    found = extra_states(tmp_path / "out")
    assert len(found) == tp * 9
    for value in found.values():
        if isinstance(value, torch.Tensor):
            assert value.numel() == 0
        elif isinstance(value, io.BytesIO):
            assert value.getvalue() == b""
        else:
            assert value is None


def test_extra_state_stays_with_its_layer_and_tensor_rank(tmp_path: Path) -> None:
    def numbered(_name: str, number: int) -> TensorRef:
        return flat_tensor(np.full(3, number, dtype=np.float32))

    source = with_extra_state(tmp_path / "source", numbered)
    before = extra_states(source)
    api.reshard(source, tmp_path / "out", target=Target(pp=2, dp=1))
    after = extra_states(tmp_path / "out")
    for t in (0, 1):
        for layer in (0, 1):
            for module in ("mlp.linear_fc1", "self_attention.linear_qkv"):
                old = before[f"mp_rank_{t:02d} decoder.layers.{layer}.{module}._extra_state"]
                new = after[f"mp_rank_{t:02d}_{layer:03d} decoder.layers.0.{module}._extra_state"]
                assert torch.equal(old, new)
    assert len({value[0].item() for value in after.values()}) == len(before)


def test_extra_state_with_content_is_refused_where_tensor_ranks_change(tmp_path: Path) -> None:
    source = with_extra_state(tmp_path / "source", lambda _name, n: bytes_io(b"scale %d" % n))
    message = "must be empty where TP changes, got extra state of each of the 2 tensor ranks"
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        api.reshard(source, tmp_path / "out", target=Target(tp=1))
    assert caught.value.hint == "give --accept-loss extra_state to leave it out"
    options = ReadOptions(accept_loss=frozenset({"extra_state"}))
    report = api.reshard(source, tmp_path / "out", target=Target(tp=1), options=options)
    assert "extra_state (fp8 scales): it belongs to the old tensor ranks" in report.lost
    assert set(extra_states(tmp_path / "out").values()) == {None}


def test_gather_says_that_extra_state_is_left_behind(tmp_path: Path) -> None:
    source = with_extra_state(tmp_path / "source", lambda _name, n: bytes_io(b"scale %d" % n))
    report = api.gather(source, tmp_path / "out")
    assert any(line.startswith("extra_state: it belongs to ranks") for line in report.lost)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(UsageError, match="must be one of .*extra_state, optimizer, got momentum"):
        ReadOptions(accept_loss=frozenset({"momentum"}))
