"""A v1 state of any ranks, time and layout is put together by its own table of fragments."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import apex_files as files
import google_crc32c
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttools import api
from ckpttools.api import ReadOptions
from ckpttools.errors import EvidenceError, FormatError, UnsupportedError, UsageError

SHAPES = {"a": (13, 17), "b": (1,), "c": (7, 5, 3), "d": (211,), "e": (2, 3, 5, 7), "f": ()}
HISTORY = ("2022-07", "2022-11", "2023-01", "2023-09")
BF16 = (torch.float32, torch.bfloat16, torch.bfloat16)


def params() -> list[files.Param]:
    return [
        files.random_param(name, shape, seed, group=seed % 2)
        for seed, (name, shape) in enumerate(SHAPES.items())
    ]


def remainders() -> list[files.Param]:
    found = params()
    for param in found:
        param.weight = files.half_away(param.state["param"])
        param.dtypes, param.keep = BF16, "param_remainders_shard"
    return found


def options(path: Path) -> ReadOptions:
    return ReadOptions(names_path=str(path.with_suffix(".json")))


def digests(state: dict[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], object]:
    return {
        key: (
            tuple(t.shape),
            google_crc32c.value(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()),
        )
        for key, t in state.items()
    }


def assert_equal(run: files.Run, path: Path, told: ReadOptions | None = None) -> None:
    """The files hold what the run held, in every slot and bit."""
    _, found = api.digest(path, options=told or options(path))
    assert {(d.name, d.slot): (d.shape, d.crc32c) for d in found} == digests(run.truth())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("make", [params, remainders])
def test_any_number_of_ranks_gives_the_state_of_the_run(
    make: Callable[[], list[files.Param]], ranks: int, tmp_path: Path
) -> None:
    run = files.Run(make(), ranks, cap=331)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(1, 6),
    cap=st.integers(1, 900),
    order=st.permutations(range(len(SHAPES))),
    closed=st.sets(st.integers(0, 5)),
    alignment=st.sampled_from([16, 32, 64, 128]),
)
def test_neither_order_nor_buckets_change_what_is_read(
    ranks: int,
    cap: int,
    order: list[int],
    closed: set[int],
    alignment: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = files.Run(params(), ranks, cap, alignment, order=order, closed_after=sorted(closed))
    assert_equal(run, files.save_run(run, tmp_path_factory.mktemp("v1") / "run"))


@pytest.mark.parametrize("fields", HISTORY)
def test_files_of_every_time_are_read(fields: str, tmp_path: Path) -> None:
    run = files.Run(params(), 3, fields=fields)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_a_bucket_of_other_dtypes_that_took_a_parameter_in_tells_its_own(tmp_path: Path) -> None:
    """Apex's look-up of the last bucket ends at bucket 0 whatever dtypes it has."""
    found = params()
    for param in found[:3]:
        param.dtypes = BF16
    run = files.Run(found, 2, cap=2000)
    places = run.places()
    assert {run.params[p[0]].dtypes for p in places if p[3] == 0} == {found[0].dtypes, BF16[:1] * 3}
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_fragments_without_elements_are_passed_over(tmp_path: Path) -> None:
    run = files.Run(params(), 2)
    path = files.save_run(run, tmp_path / "run")
    for rank in range(2):
        state = files.load(path / f"rank{rank}.pt")
        for bucket in state["state"]["buckets"]:
            waits = files.DistributedFusedAdam.ParameterFragment(
                param_group_id=0,
                param_id=0,
                bucket_id=0,
                param_range=(221, 221),
                bucket_range=(bucket.bucket_size, bucket.bucket_size),
                in_local_shard=False,
                shard_range=None,
                shard_bucket_range=None,
                shard_param_range=None,
            )
            bucket.fragments.append(waits)
        state["state"][0]["fragments"].append(waits)
        files.save(state, path / f"rank{rank}.pt")
    assert_equal(run, path)


def test_a_parameter_without_elements_has_no_fragments(tmp_path: Path) -> None:
    found = [*params(), files.random_param("none", (0, 3), 9)]
    run = files.Run(found, 2)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_a_rank_that_owns_nothing_is_no_gap(tmp_path: Path) -> None:
    run = files.Run([files.random_param("small", (5,), 1)], 4)
    path = files.save_run(run, tmp_path / "run")
    assert_equal(run, path)
    for rank in (1, 2, 3):
        (path / f"rank{rank}.pt").unlink()
    assert_equal(run, path)


def test_a_master_that_is_nowhere_else_is_the_weight(tmp_path: Path) -> None:
    found = params()
    for param in found:
        param.keep = "nothing"
    run = files.Run(found, 2)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_remainders_are_put_together_with_the_weights_of_the_model(tmp_path: Path) -> None:
    """Every sign of the low half, and ties of both parities."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    high = torch.tensor([0x3F80, 0x3F81, 0xBF80, 0x0000, 0x7F7F, 0x7F80])
    pattern = ((high[:, None] << 16) + low).to(torch.int64).reshape(-1)
    signed = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern)
    master = signed.to(torch.int32).view(torch.float32)
    param = files.random_param("w", (36,), 1, dtypes=BF16, keep="param_remainders_shard")
    param.state["param"], param.weight = master, files.half_away(master)
    run = files.Run([param], 3, cap=40, alignment=16)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_a_parameter_goes_on_at_the_start_of_a_bucket_only(tmp_path: Path) -> None:
    run = files.Run([files.random_param("a", (32,), 1), files.random_param("b", (10,), 2)], 1)
    run.order = [0, 1]
    path = files.save_run(run, tmp_path / "run")
    state = files.load(path / "rank0.pt")
    second = state["state"]["buckets"][0].fragments[1]
    second.param_id, second.param_range, second.shard_param_range = 0, (32, 42), (32, 42)
    files.save(state, path / "rank0.pt")
    with pytest.raises(FormatError, match="parameter 0 must go on at the start of another bucket"):
        api.open_checkpoint(path, options=options(path))


# --- channels-last ------------------------------------------------------------------------


def channels_last(shape: tuple[int, ...]) -> files.Run:
    param = files.random_param("conv", shape, 3)
    param.weight = param.weight.to(memory_format=torch.channels_last)
    return files.Run([files.random_param("bias", (5,), 4), param], 3, cap=130)


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 2, 3, 1), (4, 1, 3, 3), (3, 5, 1, 1)])
def test_strides_of_the_weights_tell_the_order_of_elements(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    run = channels_last(shape)
    assert_equal(run, files.save_run(run, tmp_path / "run"))


def test_channels_last_state_is_not_taken_for_contiguous(tmp_path: Path) -> None:
    run = channels_last((2, 3, 5, 7))
    path = files.save_run(run, tmp_path / "run")
    torch.save({k: v.contiguous() for k, v in run.model().items()}, path / "model.pt")
    with pytest.raises(EvidenceError, match="conv: the weight must be its master"):
        api.open_checkpoint(path, options=options(path))


def test_weights_without_strides_are_refused_where_the_order_matters(tmp_path: Path) -> None:
    run = channels_last((2, 3, 5, 7))
    path = files.save_run(run, tmp_path / "run")
    (path / "model.pt").unlink()
    whole = {name: weight.contiguous() for name, weight in run.model().items()}
    save_file(whole, path / "model.safetensors")
    with pytest.raises(UsageError, match="conv: whether it was channels-last must show") as caught:
        api.open_checkpoint(path, options=options(path))
    assert "torch file" in caught.value.hint
    same = channels_last((4, 1, 3, 3))
    path = files.save_run(same, tmp_path / "same")
    (path / "model.pt").unlink()
    save_file({k: v.contiguous() for k, v in same.model().items()}, path / "model.safetensors")
    assert_equal(same, path)


def test_weights_in_another_order_are_refused(tmp_path: Path) -> None:
    run = files.Run([files.random_param("w", (3, 5), 1)], 2)
    path = files.save_run(run, tmp_path / "run")
    torch.save({"w": run.params[0].weight.t().contiguous().t()}, path / "model.pt")
    with pytest.raises(FormatError, match=r"w: must be contiguous or channels-last, got strides"):
        api.open_checkpoint(path, options=options(path))


# --- gathered -------------------------------------------------------------------------------


def told(path: Path, run: files.Run) -> ReadOptions:
    """Options for a single file, with names and weights beside it."""
    names, model = path.with_suffix(".json"), path.with_suffix(".model")
    names.write_text(json.dumps(run.names()))
    torch.save(run.model(), model)
    return ReadOptions(names_path=str(names), model_path=str(model))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("make", [params, remainders])
def test_a_gathered_file_is_read_where_its_zips_lie(
    make: Callable[[], list[files.Param]], ranks: int, tmp_path: Path
) -> None:
    run, path = files.Run(make(), ranks), tmp_path / "gathered.pt"
    torch.save(files.gather_run(run), path)
    assert_equal(run, path, told(path, run))
    manifest = api.read_manifest(path, options=told(path, run))
    assert [file.path for file in manifest.files][:1] == ["gathered.pt"]
    assert len(manifest.files) == 2


def test_gathered_ranks_must_stand_in_their_order(tmp_path: Path) -> None:
    run, path = files.Run(params(), 3), tmp_path / "gathered.pt"
    tree = files.gather_run(run)
    tree["gathered_states"].reverse()
    torch.save(tree, path)
    with pytest.raises(
        FormatError, match=r"gathered_states\[0\]: must be the state of rank 0, got"
    ):
        api.open_checkpoint(path, options=told(path, run))


def test_a_gathered_file_must_hold_all_ranks(tmp_path: Path) -> None:
    run, path = files.Run(params(), 3), tmp_path / "gathered.pt"
    tree = files.gather_run(run)
    tree["gathered_states"].pop()
    torch.save(tree, path)
    with pytest.raises(FormatError, match="must have a state for each of 3 ranks, got 2"):
        api.open_checkpoint(path, options=told(path, run))


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_bytes_of_2022_are_read_where_the_pickle_holds_them_raw(
    kind: Callable[[bytes], bytes], protocol: int, tmp_path: Path
) -> None:
    run, path = files.Run(params(), 2, fields="2022-07"), tmp_path / "gathered.pt"
    states = [kind(s.numpy().tobytes()) for s in files.gather_run(run)["gathered_states"]]
    torch.save({"gathered_states": states}, path, pickle_protocol=protocol)
    if protocol > 2:
        assert_equal(run, path, told(path, run))
        return
    with pytest.raises(UnsupportedError, match="bytes must stand raw in the pickle") as caught:
        api.open_checkpoint(path, format="apex", options=told(path, run))
    assert "torch.frombuffer" in caught.value.hint


@pytest.mark.parametrize("tagged", [True, False])
def test_a_state_with_or_without_a_tag_is_of_its_kind(tagged: bool, tmp_path: Path) -> None:
    run = files.Run(params(), 1)
    path = files.save_run(run, tmp_path / "run")
    state = run.rank_state(0)
    if not tagged:
        del state["format"]
    files.save(state, path / "rank0.pt")
    assert_equal(run, path)


@pytest.mark.parametrize("step", [torch.tensor([9], dtype=torch.int32), 9])
def test_a_capturable_run_keeps_numbers_as_tensors(step: object, tmp_path: Path) -> None:
    run = dataclasses.replace(files.Run(params(), 2), step=step)
    path = files.save_run(run, tmp_path / "run")
    for rank in range(2):
        state = files.load(path / f"rank{rank}.pt")
        for group in state["param_groups"]:
            group["lr"] = torch.tensor(group["lr"])
        files.save(state, path / f"rank{rank}.pt")
    manifest = api.read_manifest(path, options=options(path))
    assert manifest.objects["step"] == 9
    group, _ = manifest.objects["param_groups"]
    assert group.settings["lr"] == 0.009999999776482582
    assert_equal(run, path)
