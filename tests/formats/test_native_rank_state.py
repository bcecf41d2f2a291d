"""One rank's own file is described as the part that it is, and refused where all are needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_edit as edit
import pytest
import torch

from ckpttools import api
from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats import DescribesParts
from ckpttools.formats.native import Zero1Format
from ckpttools.formats.native.rank_state import read_rank_file
from ckpttools.optimizer import DistributedFusedAdam

Change = Callable[[dict[str, Any]], object]


def rank_state() -> dict[str, Any]:
    """What a rank's ``optimizer.state_dict()`` gives."""
    slots = {slot: torch.arange(10.0) for slot in ("fp32_param", "exp_avg", "exp_avg_sq")}
    return {
        "format": "ckpttools-rank-state",
        "format_version": 1,
        "kind": "zero1",
        "rank": 3,
        "world_size": 8,
        "dp_rank": 1,
        "dp_size": 2,
        "tp_rank": 1,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 2,
        "names": ["w", "v"],
        "state": {"w": {"shape": [5, 4], "start": 10, "stop": 20, **slots}},
        "param_groups": [{"lr": 0.1, "params": ["w", "v"]}],
        "steps": {"w": 7, "v": 7},
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "optimizer_shard_rank3.pt"
    torch.save(rank_state(), path)
    return path


def changed(tmp_path: Path, change: Change) -> Path:
    state = rank_state()
    change(state)
    torch.save(state, tmp_path / "changed.pt")
    return tmp_path / "changed.pt"


def test_inspect_says_which_rank_it_is_what_it_holds_and_who_is_missing(file: Path) -> None:
    outcome = edit.run_cli("inspect", file)
    assert outcome.code == 0, outcome
    for text in (
        "TP2 PP2 DP2 (8 ranks)",
        "the state of one rank, pieces of 1 of 2 parameters",
        "the state of rank 3 of 8 alone (tp 1 of 2, pp 0 of 2, dp 1 of 2)",
        "missing ranks: 0-2, 4-7",
        "optimizer step 7",
        "exp_avg_sq",
    ):
        assert text in outcome.out


def test_inspect_gives_the_pieces_as_data(file: Path) -> None:
    found = api.inspect(file)
    assert (found["rank"], found["world_size"]) == (3, 8)
    assert found["slots"] == {
        slot: {"tensors": 1, "bytes": 40} for slot in ("fp32_param", "exp_avg", "exp_avg_sq")
    }
    tensors = found["tensors"]
    assert isinstance(tensors, list)
    assert (tensors[0]["start"], tensors[0]["stop"], tensors[0]["shape"]) == (10, 20, [5, 4])


@pytest.mark.parametrize("verb", ["reshard", "verify", "digest", "gather"])
def test_every_other_verb_refuses_it_and_names_the_missing_ranks(
    file: Path, verb: str, tmp_path: Path
) -> None:
    paths = (file, tmp_path / "out") if verb in ("reshard", "gather") else (file,)
    outcome = edit.run_cli(verb, *paths)
    assert outcome.code == 1
    assert (
        "must be the state of all 8 ranks, got rank 3 alone; missing ranks: 0-2, 4-7" in outcome.err
    )
    assert not (tmp_path / "out").exists()


def test_the_only_rank_misses_none(tmp_path: Path) -> None:
    def alone(state: dict[str, Any]) -> None:
        for name in ("dp", "tp", "pp"):
            state |= {f"{name}_rank": 0, f"{name}_size": 1}
        state |= {"rank": 0, "world_size": 1}

    assert read_rank_file(changed(tmp_path, alone)).missing == "none"


def test_a_directory_is_no_part(tmp_path: Path) -> None:
    fmt = Zero1Format()
    assert isinstance(fmt, DescribesParts)
    assert fmt.describe_part(tmp_path) is None


def test_other_torch_files_are_of_no_known_format(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "w.pt")
    assert not Zero1Format().detect(tmp_path / "w.pt")


def entry(**fields: object) -> Change:
    return lambda state: state["state"]["w"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format_version=2), "format_version must be 1, got 2"),
        (lambda s: s.update(names=None), "must have kind, names and state, got others"),
        (lambda s: s.update(rank=2), "rank must follow from its places"),
        (lambda s: s.update(world_size=9), "rank must follow from its places"),
        (lambda s: s.update(tp_rank=2), "tp_rank must be below tp_size, got 2 and 2"),
        (lambda s: s.update(dp_size="2"), "dp_rank must be below dp_size"),
        (lambda s: s["state"].update(w=[1]), "'w': must be a dict by name, got int"),
        (lambda s: s["state"].update({3: {}}), "3: must be a dict by name"),
        (entry(stop=21), "start and stop must be elements of shape"),
        (entry(start=-1), "start and stop must be elements of shape"),
        (entry(shape=[5, -4]), "start and stop must be elements of shape"),
        (entry(shape="5"), "start and stop must be elements of shape"),
        (entry(start=9), r"must be 1-D of 11 elements, got \(10,\)"),
        (entry(exp_avg=torch.zeros(2, 5)), r"'exp_avg' must be 1-D of 10 elements, got \(2, 5\)"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    change: Change, message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(FormatError, match=message):
        api.inspect(path, format="zero1")


def test_a_file_of_another_kind_that_is_named_zero1_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "w.pt")
    with pytest.raises(FormatError, match="format must be 'ckpttools-rank-state', got another"):
        api.inspect(tmp_path / "w.pt", format="zero1")


def test_damage_is_found_by_verify(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises((FormatError, UnsupportedError)):
        api.open_checkpoint(file, format="zero1")
    assert Zero1Format().check(file) != []


@pytest.mark.parametrize("steps", [{"w": 7, "v": 8}, {}, [7], {"w": "7", "v": "7"}, None])
def test_a_step_is_told_where_all_parameters_have_one(steps: object, tmp_path: Path) -> None:
    path = changed(tmp_path, lambda state: state.update(steps=steps))
    assert api.inspect(path)["step"] is None


def test_the_fused_optimizer_s_own_state_tells_of_its_parts(tmp_path: Path) -> None:
    model = torch.nn.Linear(13, 29)
    optimizer = DistributedFusedAdam(model, lr=0.1, bucket_cap_mb=0.0005)
    model(torch.ones(13)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "rank0.pt")
    found = api.inspect(tmp_path / "rank0.pt")
    assert (found["format"], found["step"]) == ("zero2", 1)
    tensors = found["tensors"]
    assert isinstance(tensors, list)
    parts = sorted((t["start"], t["stop"]) for t in tensors if t["name"] == "weight")
    assert len(parts) > 4  # in several buckets
    assert sum(stop - start for start, stop in parts) == 2 * 13 * 29  # of two moments
    with pytest.raises(UnsupportedError, match="must be the state of all 1 ranks, got rank 0"):
        api.read_manifest(tmp_path / "rank0.pt")
