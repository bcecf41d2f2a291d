"""Files that are damaged, or not what Apex writes, are refused, and the message says where."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apex_files as files
import pytest
import torch

from ckpttools import api
from ckpttools.api import ReadOptions
from ckpttools.errors import (
    CkptError,
    FormatError,
    UnsupportedError,
)

Change = Callable[[dict[str, Any]], object]
VARIANT = files.FIXTURES / "fp32_store_ws2"
V2, MODEL = VARIANT / "v2.pt", VARIANT / "model.pt"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A directory with the states of two ranks and the weights, to be changed."""
    path = tmp_path / "ranks"
    path.mkdir()
    for rank in range(2):
        shutil.copy(VARIANT / f"v1_local_rank{rank}.pt", path)
    shutil.copy(MODEL, path)
    return path


TOLD = ReadOptions(names_path=str(files.NAMES))


def refused(path: Path, error: type[CkptError], rule: str) -> None:
    with pytest.raises(error, match=rule) as caught:
        api.open_checkpoint(path, format="apex", options=TOLD)
    assert "\n" not in str(caught.value)


def changed(path: Path, change: Change) -> None:
    """Change a state and save it again, as a forger would."""
    tree = files.load(path)
    change(tree)
    files.save(tree, path)


# --- states that are not what Apex writes ----------------------------------------------------


def bucket(tree: dict[str, Any], number: int = 1) -> Any:
    return tree["state"]["buckets"][number]


def shift(fragment: Any, name: str, by: int) -> None:
    low, high = getattr(fragment, name)
    setattr(fragment, name, (low + by, high + by))


V1_FAULTS: dict[str, tuple[Change, str]] = {
    "local range of another rank": (
        lambda t: shift(bucket(t).fragments[-1], "shard_bucket_range", 288),
        "local fragments must be in the shards of one rank, got those of ranks",
    ),
    "local range shifted": (
        lambda t: shift(bucket(t).fragments[-1], "shard_range", 1),
        r"buckets\[1\]: ranges of a fragment must be those of rank 0",
    ),
    "local range left out": (
        lambda t: setattr(bucket(t).fragments[-1], "shard_param_range", None),
        "a local fragment must have its ranges",
    ),
    "not local": (
        lambda t: setattr(bucket(t, 0).fragments[0], "in_local_shard", False),
        r"buckets\[0\]: ranges of a fragment must be those of rank 0",
    ),
    "out of the bucket": (
        lambda t: shift(bucket(t, 2).fragments[-1], "bucket_range", 1 << 20),
        "fragments must lie in its 576 elements, got",
    ),
    "overlap": (
        lambda t: shift(bucket(t).fragments[1], "bucket_range", -32),
        "fragments must follow each other without overlap",
    ),
    "another bucket's": (
        lambda t: setattr(bucket(t).fragments[1], "bucket_id", 3),
        r"buckets\[1\]: its fragments must name it, got bucket 3",
    ),
    "unequal ranges": (
        lambda t: setattr(bucket(t).fragments[1], "param_range", (0, 5)),
        "param_range and bucket_range must be equally long",
    ),
    "descending range": (
        lambda t: setattr(bucket(t).fragments[1], "param_range", (5, 0)),
        "param_range must be two ascending numbers, got",
    ),
    "short shard": (
        lambda t: setattr(bucket(t), "exp_avg_sq_shard", torch.zeros(287)),
        r"buckets\[1\]: exp_avg_sq_shard must have the 288 elements of a shard, got 287",
    ),
    "no moment": (
        lambda t: setattr(bucket(t), "exp_avg_shard", None),
        r"buckets\[1\]: exp_avg_shard must be a tensor, got none",
    ),
    "shard of two dimensions": (
        lambda t: setattr(bucket(t), "exp_avg_shard", torch.zeros(2, 144)),
        "exp_avg_shard: must be a flat tensor",
    ),
    "size that is none": (
        lambda t: setattr(bucket(t), "shard_size", -1),
        "shard_size must be a natural number, got -1",
    ),
    "sizes of other ranks": (
        lambda t: setattr(bucket(t), "bucket_size", 864),
        "bucket_size must be the same multiple of shard_size in all buckets",
    ),
    "filled otherwise": (
        lambda t: setattr(bucket(t), "filled_size", 3),
        "fragments must end at filled_size 3, got",
    ),
    "not a bucket": (
        lambda t: t["state"]["buckets"].__setitem__(1, {"shard_size": 3}),
        r"buckets\[1\]: must be a StateBucket of Apex, got dict",
    ),
    "fragment for a bucket": (
        lambda t: t["state"]["buckets"].__setitem__(1, bucket(t).fragments[0]),
        r"must be a StateBucket of Apex, got apex.contrib.optimizers.distributed_fused_adam",
    ),
    "buckets no list": (
        lambda t: t["state"].update(buckets={}),
        "buckets must be a list, got {}",
    ),
    "fragments no list": (
        lambda t: setattr(bucket(t), "fragments", None),
        "fragments must be a list, got None",
    ),
    "own fragments left out": (
        lambda t: t["state"].pop(4),
        "parameter 4 must have its fragments, got none",
    ),
    "own fragments others": (
        lambda t: t["state"].update({4: t["state"][5]}),
        "parameter 4 must list the fragments that the buckets have of it, got others",
    ),
    "step": (lambda t: t["state"].update(step=-1), "step must be a natural number, got -1"),
    "no step": (lambda t: t["state"].pop("step"), "step must be a natural number, got None"),
    "numbers": (
        lambda t: t["param_groups"][0]["params"].reverse(),
        "members of the groups must be numbered from 0 on",
    ),
    "no groups": (lambda t: t.update(param_groups=[]), r"param_groups must be a list, got \[\]"),
    "a group that is none": (
        lambda t: t["param_groups"].__setitem__(0, 3),
        r"param_groups\[0\]: must be a dict of settings, got 3",
    ),
    "members that are none": (
        lambda t: t["param_groups"][0].update(params=["a"]),
        r"param_groups\[0\]: params must be numbers",
    ),
    "a tensor that is no number": (
        lambda t: t["param_groups"][0].update(lr=torch.zeros(2)),
        r"param_groups\[0\]: lr: a tensor must be one number, got float32 of shape \[2\]",
    ),
    "a tag of v2": (
        lambda t: t.update(format=2),
        "format must be 1 for what it holds, got 2",
    ),
}


@pytest.mark.parametrize("fault", V1_FAULTS)
def test_a_v1_state_that_breaks_a_rule_is_refused(fault: str, ranks: Path) -> None:
    change, rule = V1_FAULTS[fault]
    changed(ranks / "v1_local_rank0.pt", change)
    refused(ranks, FormatError, rule)


def shift_all(fragment: Any, names: str, by: int) -> None:
    for name in names.split():
        if getattr(fragment, name) is not None:
            shift(fragment, name, by)


IN_BUCKET = "bucket_range shard_range shard_bucket_range"
IN_PARAM = "param_range shard_param_range"

TABLE_FAULTS: dict[str, tuple[Change, str]] = {
    "gap in a parameter": (
        lambda t: shift_all(bucket(t, 0).fragments[0], IN_PARAM, 1),
        "fragments of parameter 6 must cover each element once, got one from 1 where 0 is next",
    ),
    "overlap in a parameter": (
        lambda t: shift_all(bucket(t, 1).fragments[0], IN_PARAM, -1),
        "fragments of parameter 6 must cover each element once, got one from 575 where 576 is next",
    ),
    "no such member": (
        lambda t: setattr(bucket(t).fragments[1], "param_id", 99),
        "a fragment must be of a member of a group, got member 99 of group 1",
    ),
    "no such group": (
        lambda t: setattr(bucket(t).fragments[1], "param_group_id", 2),
        "a fragment must be of a member of a group, got member 6 of group 2",
    ),
    "unaligned": (
        lambda t: [
            shift_all(bucket(t, -1).fragments[-1], IN_BUCKET, 1),
            setattr(bucket(t, -1), "filled_size", bucket(t, -1).filled_size + 1),
        ],
        "fragments must start where the one before ends, rounded up to one of 16, 32, 64, 128",
    ),
    "in another order": (
        lambda t: bucket(t).fragments.reverse(),
        "fragments must follow each other without overlap",
    ),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_table_that_all_ranks_have_and_that_breaks_a_rule_is_refused(
    fault: str, ranks: Path
) -> None:
    change, rule = TABLE_FAULTS[fault]
    for path in ranks.glob("v1*.pt"):
        changed(path, change)
    refused(ranks, FormatError, rule)


RANK_FAULTS: dict[str, tuple[Change, str]] = {
    "another step": (
        lambda t: t["state"].update(step=6),
        "step must be as in .*rank0.pt, got 6 and 5",
    ),
    "other settings": (
        lambda t: t["param_groups"][1].update(lr=0.5),
        "parameter groups must be as in",
    ),
    "fewer buckets": (lambda t: t["state"]["buckets"].pop(), "the number of buckets must be as in"),
    "another dtype": (
        lambda t: setattr(bucket(t), "exp_avg_shard", torch.zeros(288, dtype=torch.float64)),
        r"buckets\[1\] must have the sizes and fragments that it has in .*rank0.pt, got others",
    ),
}


@pytest.mark.parametrize("fault", RANK_FAULTS)
def test_ranks_must_be_of_one_moment_and_layout(fault: str, ranks: Path) -> None:
    change, rule = RANK_FAULTS[fault]
    changed(ranks / "v1_local_rank1.pt", change)
    refused(ranks, FormatError, rule)


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    shutil.copytree(files.FIXTURES / "fp32_store_2x2", path)
    for name in ("v2.pt", "v1_gathered.pt"):
        (path / name).unlink(missing_ok=True)
    changed(path / "v1_local_rank3.pt", lambda t: bucket(t).exp_avg_shard.add_(1))
    found = api.verify(path, options=TOLD)
    assert "copies must be equal" in found.damage[0]


V2_FAULTS: dict[str, tuple[Change, str]] = {
    "a slot is missing": (
        lambda t: t["state"][3].pop("exp_avg"),
        "parameter 3: must have param, exp_avg, exp_avg_sq, got",
    ),
    "a slot more": (
        lambda t: t["state"][3].update(max_exp_avg_sq=torch.ones(1)),
        "parameter 3: must have param, exp_avg, exp_avg_sq, got",
    ),
    "a parameter is missing": (
        lambda t: t["state"].pop(3),
        "parameter 3: must have param, exp_avg, exp_avg_sq, got None",
    ),
    "a parameter more": (
        lambda t: t["state"].update({14: t["state"][3]}),
        "state must be of the 14 members of the groups, got 14",
    ),
    "no tensor": (
        lambda t: t["state"][3].update(exp_avg=1.0),
        "parameter 3: exp_avg must be a tensor, got 1.0",
    ),
    "another shape": (
        lambda t: t["state"][3].update(exp_avg=torch.ones(816)),
        r"parameter 3: exp_avg must have the shape of its param \[16, 51\], got \[816\]",
    ),
    "a boolean step": (
        lambda t: t["state"].update(step=True),
        "step must be a natural number, got True",
    ),
    "names for some": (
        lambda t: t["param_groups"][0].update(param_names=["a"]),
        r"param_names must be a name for each of 7 members, got \['a'\]",
    ),
}


@pytest.mark.parametrize("fault", V2_FAULTS)
def test_a_v2_state_that_breaks_a_rule_is_refused(fault: str, tmp_path: Path) -> None:
    change, rule = V2_FAULTS[fault]
    path = tmp_path / "v2.pt"
    shutil.copy(V2, path)
    changed(path, change)
    refused(path, FormatError, rule)


def test_a_later_format_is_not_supported(tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    shutil.copy(V2, path)
    changed(path, lambda t: t.update(format=3))
    refused(path, UnsupportedError, "format must be 1 or 2, got 3")


def test_a_file_of_the_first_week_has_no_tag(tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    shutil.copy(V2, path)
    changed(path, lambda t: t.pop("format"))
    assert api.digest(path, options=TOLD) == api.digest(V2, options=TOLD)


GATHERED_FAULTS: dict[str, tuple[Change, str]] = {
    "empty": (lambda t: t.update(gathered_states=[]), r"gathered_states must be a list, got \[\]"),
    "a number": (
        lambda t: t["gathered_states"].__setitem__(1, 4),
        r"gathered_states\[1\]: must be the bytes of a torch file, got 4",
    ),
    "floats": (
        lambda t: t["gathered_states"].__setitem__(1, torch.zeros(9)),
        r"gathered_states\[1\]: must be a flat tensor of uint8, got float32 of shape \[9\]",
    ),
    "no zip": (
        lambda t: t["gathered_states"].__setitem__(1, torch.zeros(99, dtype=torch.uint8)),
        "must be a zip archive",
    ),
    "cut short": (
        lambda t: t["gathered_states"].__setitem__(1, t["gathered_states"][1][:-9].clone()),
        "must end with a zip end record",
    ),
    "one rank's bytes over and over": (
        lambda t: t.update(gathered_states=t["gathered_states"][:1] * 100_000),
        "gathered_states must be a torch file of its own for each rank, got two that share bytes",
    ),
    "one rank twice": (
        lambda t: t["gathered_states"].__setitem__(1, t["gathered_states"][0].clone()),
        r"gathered_states\[1\]: must be the state of rank 1, got rank 0",
    ),
}


@pytest.mark.parametrize("fault", GATHERED_FAULTS)
def test_a_gathered_file_that_breaks_a_rule_is_refused(fault: str, tmp_path: Path) -> None:
    change, rule = GATHERED_FAULTS[fault]
    path = tmp_path / "gathered.pt"
    shutil.copy(VARIANT / "v1_gathered.pt", path)
    changed(path, change)
    refused(path, FormatError, rule)


def test_a_flipped_bit_of_a_nested_file_is_found_and_placed(tmp_path: Path) -> None:
    path = tmp_path / "gathered.pt"
    content = bytearray((VARIANT / "v1_gathered.pt").read_bytes())
    zips = [i for i in range(len(content)) if content[i : i + 4] == b"PK\5\6"]
    content[zips[0] - 3000] ^= 1
    path.write_bytes(content)
    options = ReadOptions(names_path=str(files.NAMES), model_path=str(MODEL))
    found = api.verify(path, options=options)
    assert any("CRC-32" in line for line in found.damage)


@pytest.mark.parametrize("keep", [0, 1, 1000, 40_000, 64_500])
def test_a_file_cut_short_is_damage_and_never_a_crash(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "v2.pt"
    path.write_bytes(V2.read_bytes()[:keep])
    with pytest.raises(CkptError):
        api.open_checkpoint(path, format="apex", options=TOLD)
    found = api.verify(path, format="apex", options=TOLD)
    assert found.damage


class Evil:
    """What runs a command where a pickle is trusted."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.trace}",)


def test_what_a_pickle_asks_to_run_is_not_run(ranks: Path, tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    changed(ranks / "v1_local_rank0.pt", lambda t: t["state"]["buckets"].__setitem__(0, evil))
    refused(ranks, FormatError, r"buckets\[0\]: must be a StateBucket of Apex, got posix.system")
    assert not evil.trace.exists()
