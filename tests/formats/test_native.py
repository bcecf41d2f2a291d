"""The native form must hold what each rank of a live run held, and take it to any topology."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_edit as edit
import numpy as np
import oracle_megatron as oracle
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from whole_tensors import bits, whole

from ckpttools import api
from ckpttools.api import Selection, Target
from ckpttools.errors import MismatchError, UsageError
from ckpttools.formats import ParamGroup
from ckpttools.formats.native.files import rank_files
from ckpttools.formats.native.manifest_file import StatedFile, manifest_document
from ckpttools.formats.native.places import build_manifest
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.box import Box
from ckpttools.layout.rules import Split
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import MASTER, WEIGHT, boxes_of
from ckpttools.storage.crc import crc32
from ckpttools.storage.sealed_json import sha256

CASES = oracle.cases()
SLOTS = {"model": WEIGHT, "param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PLAIN = oracle.case("gqa_tp2_pp1_dp2")
FP32 = oracle.case("tied_tp1_pp1_dp2_fp32")


def tensors_of(directory: Path, rank: int) -> dict[str, torch.Tensor]:
    return load_file(directory / f"rank-{rank:05d}.safetensors")


def live_pieces(case: oracle.Case) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield what each live rank owned: its number, the key, and its piece of the bucket.

    Places come from ``layout.json``, which the run wrote; values from its own files.
    """
    for rank in case.layout():
        folder = oracle.rank_directory(case.directory, rank["tp"], rank["pp"], pipeline=case.pp > 1)
        local = dict(
            [
                *oracle._weights(oracle.read(folder / "model_optim_rng.pt"), rank),
                *oracle._optimizer_state(oracle.read(folder / "distrib_optim.pt"), rank, ""),
            ]
        )
        number = rank["tp"] + case.tp * (rank["dp"] + case.dp * rank["pp"])
        for buffer in rank["buffers"]:
            chunk = buffer["params"][0]["chunk"]
            for prefix, slot in SLOTS.items():
                first = local[f"{prefix}/{buffer['params'][0]['canon']}"]
                live = torch.zeros(buffer["bucket_indices"][-1][1], dtype=first.dtype)
                for param in buffer["params"]:
                    values = local[f"{prefix}/{param['canon']}"].reshape(-1)
                    live[param["start"] : param["end"]] = values
                for k, (low, high) in enumerate(buffer["bucket_indices"]):
                    size = (high - low) // case.dp
                    piece = live[low + rank["dp"] * size :][:size]
                    yield number, f"{chunk}-{DTYPES[case.dtype]}.{k}.{slot}", piece


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_file_holds_what_the_live_rank_owned_bit_for_bit(
    case: oracle.Case, tmp_path: Path
) -> None:
    buckets = Target(bucket_size=case.bucket_size or "none")
    api.reshard(case.directory, tmp_path / "out", to="zero1", target=buckets)
    ranks = range(case.tp * case.pp * case.dp)
    found = {rank: tensors_of(tmp_path / "out", rank) for rank in ranks}
    left = {rank: set(tensors) for rank, tensors in found.items()}
    for rank, name, piece in live_pieces(case):
        key = name.replace(MASTER, WEIGHT) if case.dtype == "fp32" else name
        assert oracle.same_bits(found[rank][key], piece), key
        left[rank].discard(key)
    assert not any(left.values())


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture in the native form, TP 2 and DP 3; not to be changed."""
    path = tmp_path_factory.mktemp("native") / "out"
    api.reshard(PLAIN.directory, path, to="zero1", target=Target(dp=3))
    return path


# --- topologies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        Target(tp=1, dp=1),
        Target(tp=4, dp=5),
        Target(tp=1, pp=2, dp=2, bucket_size=700),
        Target(world=14, bucket_size="none"),
    ],
    ids=str,
)
def test_a_native_checkpoint_on_another_topology_has_the_same_content(
    native: Path, target: Target, tmp_path: Path
) -> None:
    report = api.reshard(native, tmp_path / "out", target=target)
    assert report.dst_format == "zero1"
    found = api.verify(tmp_path / "out", against=PLAIN.directory)
    assert (found.ok, found.unchecked) == (True, ())
    assert api.digest(tmp_path / "out")[0] == api.digest(PLAIN.directory)[0]


def test_going_there_and_back_gives_the_same_bytes(native: Path, tmp_path: Path) -> None:
    api.reshard(native, tmp_path / "a", target=Target(tp=1, pp=2, dp=1))
    api.reshard(tmp_path / "a", tmp_path / "b", target=Target(tp=2, pp=1, dp=3))
    names = sorted(path.name for path in native.iterdir())
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == names
    for name in names:
        assert (tmp_path / "b" / name).read_bytes() == (native / name).read_bytes(), name


def test_buckets_stay_while_only_the_data_parallel_size_changes(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp2_bucket6000")
    api.reshard(case.directory, tmp_path / "a", to="zero1")
    api.reshard(tmp_path / "a", tmp_path / "b", target=Target(dp=3))
    api.reshard(tmp_path / "a", tmp_path / "c", target=Target(tp=2))
    keys = [
        sum(key.endswith(".exp_avg") for key in tensors_of(tmp_path / name, 0)) for name in "abc"
    ]
    assert keys[0] == keys[1] > keys[2] == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(tp=3), "--tp: must divide the 4 attention heads, got 3"),
        (Target(vpp=2), "--vpp: needs more than one pipeline stage, got 2"),
        (Target(pp=3), "--pp 3 --vpp 1: pipeline: 2 layers must divide over 3 stages"),
        (Target(world=7), "--world: must be TP 2 x PP 1 x DP, got 7"),
        (Target(world=4, dp=3), "--world: must be TP 2 x PP 1 x DP, got 4"),
        (Target(dp=0), "--dp: must be at least 1, got 0"),
    ],
)
def test_a_topology_that_the_model_cant_have_is_refused(
    native: Path, target: Target, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        api.reshard(native, tmp_path / "out", target=target)


def test_named_stages_are_kept_and_known_after_reading(tmp_path: Path) -> None:
    case = oracle.case("deep_tp1_pp1_dp2")
    api.reshard(
        case.directory, tmp_path / "a", to="zero1", target=Target(pp=2, first_stage_layers=1)
    )
    assert api.inspect(tmp_path / "a")["layers"] == "1 3"
    api.reshard(tmp_path / "a", tmp_path / "b", target=Target(dp=1))
    assert api.inspect(tmp_path / "b")["layers"] == "1 3"


def test_a_vocabulary_is_padded_by_the_rule_of_its_family(native: Path, tmp_path: Path) -> None:
    api.reshard(native, tmp_path / "out", target=Target(tp=4))
    rows = {
        t["name"]: (t["shape"][0], t["padding_rows"])
        for t in api.inspect(tmp_path / "out")["tensors"]  # type: ignore[attr-defined]
    }
    assert rows[oracle.EMBEDDING] == (100, 28)


# --- float32: the master is the weight ----------------------------------------------------------


def test_a_float32_master_is_stored_once_and_read_as_both(tmp_path: Path) -> None:
    api.reshard(FP32.directory, tmp_path / "out", to="zero1", target=Target(dp=3))
    manifest = api.read_manifest(tmp_path / "out")
    index, chunks = manifest.index(), manifest.by_tensor()
    places = [
        [(c.region, c.parts) for c in chunks[index[oracle.EMBEDDING, slot]]]
        for slot in (WEIGHT, MASTER)
    ]
    assert places[0] == places[1] != []
    assert not any(MASTER in key for key in tensors_of(tmp_path / "out", 0))
    assert api.diff(FP32.directory, tmp_path / "out").equal


def test_a_float32_master_that_is_not_its_weight_is_refused(tmp_path: Path) -> None:
    source = edit.copy_of(FP32.name, tmp_path / "src")

    def change(tree: Any) -> None:
        (buffer,) = tree[0].values()
        edit.values(buffer["param"])[200] = 7.0

    edit.edit_all(source, edit.OPTIMIZER, change)
    with pytest.raises(MismatchError, match=r"\(fp32_param\): 1 of .* elements differ") as raised:
        api.reshard(source, tmp_path / "out", to="zero1", cross_check=False)
    assert raised.value.hint == "a float32 master is stored as its weight, which it must equal"
    assert not (tmp_path / "out").exists()


def test_a_float32_source_without_masters_gains_none_but_in_name(tmp_path: Path) -> None:
    values = {("w", slot): bits((5, 3), "float32", seed=n) for n, slot in enumerate((WEIGHT, "m"))}
    source = whole(tmp_path / "src", values)
    api.reshard(source, tmp_path / "a", to="zero1", target=Target(dp=2))
    assert api.read_manifest(tmp_path / "a").slots() == (WEIGHT, MASTER, "m")
    api.gather(tmp_path / "a", tmp_path / "b", selection=Selection(exclude=(f"*:{MASTER}",)))
    assert api.diff(source, tmp_path / "b").equal


# --- other sources ---------------------------------------------------------------------------


def test_whole_tensors_become_one_tensor_rank_with_any_number_of_data_ranks(tmp_path: Path) -> None:
    api.gather(PLAIN.directory, tmp_path / "whole")
    api.reshard(tmp_path / "whole", tmp_path / "out", to="zero1", target=Target(dp=5))
    found = api.verify(
        tmp_path / "out", against=tmp_path / "whole", require=frozenset({"optimizer"})
    )
    assert found.ok
    assert api.inspect(tmp_path / "out")["topology"] == {"tp": 1, "pp": 1, "dp": 5}


def test_weights_without_state_beside_trained_ones_are_frozen_and_written_once(
    tmp_path: Path,
) -> None:
    tensors = {
        ("a", WEIGHT): bits((3, 7), "bfloat16"),
        ("b", WEIGHT): bits((11,), "bfloat16", seed=2),
        ("b", "exp_avg"): bits((11,), "float32", seed=3),
        ("c", WEIGHT): bits((), "int64", seed=4),
        ("d", WEIGHT): bits((0, 3), "bool", seed=4),
    }
    source = whole(tmp_path / "src", tensors)
    api.reshard(source, tmp_path / "out", to="zero1", target=Target(dp=2))
    keys = [set(tensors_of(tmp_path / "out", rank)) for rank in range(2)]
    trained = {"0-bfloat16.0.exp_avg", "0-bfloat16.0.weight"}
    assert [mine - trained for mine in keys] == [{"frozen.c", "frozen.d"}, {"frozen.a"}]
    assert api.diff(source, tmp_path / "out").equal


@pytest.mark.parametrize(
    ("tensors", "target", "message"),
    [
        ({("w", WEIGHT): "float32"}, Target(tp=2), "--tp: must be 1, since the source doesn't"),
        ({("w", WEIGHT): "float32"}, Target(pp=2), "w: its pipeline stage must be known"),
        ({("w", "exp_avg"): "float32"}, Target(), "w: must have its weight, got other slots alone"),
        (
            {
                ("w", WEIGHT): "float32",
                ("w", "m"): "float32",
                ("v", WEIGHT): "float32",
                ("v", "n"): "float32",
            },
            Target(),
            "v: must have the slots of w|w: must have the slots of v",
        ),
        (
            {("w", WEIGHT): "float32", ("w", MASTER): "float32"},
            Target(),
            "fp32_param: the master of a float32 parameter must be float32 and stand beside",
        ),
    ],
)
def test_a_source_that_lacks_a_fact_is_refused_with_the_fact(
    tensors: dict[tuple[str, str], str], target: Target, message: str, tmp_path: Path
) -> None:
    source = whole(tmp_path / "src", {key: torch.ones(4, 2) for key in tensors})
    with pytest.raises(UsageError, match=message):
        api.reshard(source, tmp_path / "out", to="zero1", target=target)


# --- the other verbs ---------------------------------------------------------------------------


def test_gathering_it_gives_what_gathering_its_source_gives(native: Path, tmp_path: Path) -> None:
    api.gather(native, tmp_path / "a")
    api.gather(PLAIN.directory, tmp_path / "b")
    for name in ("model.safetensors", "optimizer.safetensors", "objects/args.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    documents = [json.loads((tmp_path / x / "state.json").read_text()) for x in "ab"]
    for key in ("iteration", "step", "param_groups", "tensors"):
        assert documents[0][key] == documents[1][key]


def test_stripping_it_leaves_the_weights_and_says_what_is_lost(
    native: Path, tmp_path: Path
) -> None:
    report = api.strip(native, tmp_path / "out")
    assert set(tensors_of(tmp_path / "out", 0)) == {"0-bfloat16.0.weight"}
    assert "step: no state of the optimizer is written" in report.lost
    assert api.inspect(tmp_path / "out")["step"] is None


def test_stripping_one_slot_leaves_the_others(native: Path, tmp_path: Path) -> None:
    api.strip(native, tmp_path / "out", slots=("exp_avg_sq",))
    assert set(api.read_manifest(tmp_path / "out").slots()) == {WEIGHT, "exp_avg", MASTER}
    assert api.inspect(tmp_path / "out")["step"] == 3


def test_objects_come_back_exactly_types_included(native: Path) -> None:
    objects = api.read_manifest(native).objects
    source = api.read_manifest(PLAIN.directory).objects
    groups, expected = objects["param_groups"], source["param_groups"]
    assert groups == expected
    assert isinstance(groups, tuple)
    assert groups[0].settings["betas"] == (0.9, 0.95)
    assert isinstance(objects["step"], float)
    assert objects["opt_param_scheduler"] == source["opt_param_scheduler"]


def test_what_belongs_to_ranks_is_reported_as_lost(tmp_path: Path) -> None:
    report = api.reshard(PLAIN.directory, tmp_path / "out", to="zero1")
    assert report.lost == ("rng_state: it belongs to the source's ranks",)


# --- files --------------------------------------------------------------------------------------


def test_every_file_starts_its_data_at_a_page_and_names_its_rank(native: Path) -> None:
    for rank in range(6):
        path = native / f"rank-{rank:05d}.safetensors"
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + length) % 4096 == 0
        with safe_open(path, "np") as file:
            assert file.metadata()["rank"] == str(rank)
            assert file.metadata()["world_size"] == "6"


W = ShardedParam("w", (6, 8), "bfloat16", Split(1, Blocks((1, 1))))
LAYOUT = ShardedLayout(
    "zero1",
    Topology(tp=2, dp=3),
    (W, ShardedParam("frozen", (5,), "float32", trainable=False)),
    {(0, 0): (0, 1)},
    {"bfloat16": {"weight": "bfloat16", "fp32_param": "float32"}},
)


def test_a_rank_that_makes_its_file_alone_and_a_manifest_of_all_are_a_checkpoint(
    tmp_path: Path,
) -> None:
    """What a training run does: no rank sees another's tensors."""
    master = np.arange(48, dtype=np.float32).reshape(6, 8)
    stated = []
    for rank in range(6):
        tp = LAYOUT.topology.place_of(rank).tp
        gate, up = np.split(master, 2, axis=1)
        local = np.concatenate([np.split(half, 2, axis=1)[tp] for half in (gate, up)], axis=1)
        (file,) = rank_files(LAYOUT, rank)
        data = bytearray(file.size_bytes)
        data[: len(file.header)] = file.header
        crcs = {}
        for entry in file.entries:
            values = np.zeros(entry.numel, np.float32)
            if entry.piece is None:
                values[:] = range(5)
            for cut in entry.piece.slices if entry.piece else ():
                values[cut.at :][: cut.stop - cut.start] = local.reshape(-1)[cut.start : cut.stop]
            wide = values.view("<u4")
            stored = (wide >> 16).astype("<u2") if entry.dtype.name == "bfloat16" else wide
            data[entry.offset : entry.offset + entry.length] = stored.tobytes()
            crcs[entry.key] = crc32(stored.tobytes())
        assert len(data) == file.size_bytes
        (tmp_path / file.path).write_bytes(data)
        stated.append(StatedFile(file.path, sha256(file.header), crcs))
    groups = (ParamGroup({"lr": 0.1, "betas": (0.9, 0.99)}, ("w",)),)
    objects = {"step": {"w": 4}, "param_groups": groups}
    (tmp_path / "manifest.json").write_bytes(manifest_document(LAYOUT, stated, objects, {}))
    assert api.verify(tmp_path).ok
    whole_path = tmp_path.with_name("gathered")
    api.gather(tmp_path, whole_path)
    found = load_file(whole_path / "model.safetensors")
    assert torch.equal(found["w"].float(), torch.from_numpy(master))
    assert found["frozen"].tolist() == [0, 1, 2, 3, 4]
    read = api.read_manifest(tmp_path)
    assert (read.objects["step"], read.objects["param_groups"]) == (4, groups)


def test_a_rank_with_too_many_keys_gets_further_files(tmp_path: Path) -> None:
    files = rank_files(LAYOUT, 0, max_header_bytes=1)
    assert [file.path for file in files] == [
        f"rank-00000-{i + 1:05d}.safetensors" for i in range(3)
    ]
    whole_file = rank_files(LAYOUT, 0)
    keys = [entry.key for file in files for entry in file.entries]
    assert keys == [entry.key for entry in whole_file[0].entries]
    others = [file for rank in range(1, 6) for file in rank_files(LAYOUT, rank)]
    manifest = build_manifest(LAYOUT, [*files, *others], str(tmp_path), {}, with_aliases=True)
    assert len(manifest.files) == 8


def test_wide_elements_come_first_so_that_every_key_is_aligned() -> None:
    odd = replace(LAYOUT, topology=Topology(tp=2, dp=128))
    for entry in rank_files(odd, 1)[0].entries:
        assert entry.offset % entry.dtype.itemsize == 0


def test_a_strided_part_of_a_rank_tensor_reaches_its_columns(tmp_path: Path) -> None:
    files = [file for rank in range(6) for file in rank_files(LAYOUT, rank)]
    manifest = build_manifest(LAYOUT, files, str(tmp_path), {}, with_aliases=True)
    boxes = [
        box
        for chunk in manifest.by_tensor()[0]
        for box in boxes_of(chunk.region)
        if isinstance(chunk.region, Box)
    ]
    assert len(boxes) > 0
    assert all(box.lengths[1] <= 2 for box in boxes)
