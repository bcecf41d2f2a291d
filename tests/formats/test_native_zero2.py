"""The native form in buckets of one size: every byte where a walk over fragments puts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracle_megatron as oracle
import pytest
import torch
from fused_buckets import shares, walk
from safetensors.torch import load_file
from whole_tensors import bits, whole

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import FormatError, UsageError
from ckpttools.executor import Resources
from ckpttools.formats import ParamGroup
from ckpttools.formats.native.files import rank_files
from ckpttools.formats.native.manifest_file import StatedFile, manifest_document
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.storage.crc import crc32
from ckpttools.storage.sealed_json import sha256

CASES = {case.name: case for case in oracle.cases()}
PLAIN = CASES["gqa_tp2_pp1_dp2"]
SHAPES = {"a": (7, 5), "b": (131,), "c": (3, 2, 11), "d": (1,), "e": (41, 3)}


# --- places ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", [64, 97, 10_000])
def test_each_rank_file_holds_its_share_of_every_fragment(
    ranks: int, kind: str, cap: int, tmp_path: Path
) -> None:
    slots = {"weight": kind, "exp_avg": "float32", "exp_avg_sq": "float32"}
    if kind == "bfloat16":
        slots["fp32_param"] = "float32"
    tensors = {
        (name, slot): bits(shape, dtype, seed=len(slot) + ord(name))
        for name, shape in SHAPES.items()
        for slot, dtype in slots.items()
    }
    if kind == "bfloat16":
        for name in SHAPES:
            tensors[name, "fp32_param"] = tensors[name, "weight"].float()
    source = whole(tmp_path / "whole", tensors)
    target = Target(dp=ranks, bucket_size=cap)
    api.reshard(source, tmp_path / "out", to="zero2", target=target)
    alignment = 128 // (4 if kind == "float32" else 2)
    size = max(alignment, cap // ranks // alignment * alignment) * ranks
    numels = [int(np.prod(shape)) for shape in SHAPES.values()]
    (buckets,) = walk(numels, [[4, 3, 2, 1, 0]], size, alignment)
    files = [load_file(tmp_path / "out" / f"rank-{rank:05d}.safetensors") for rank in range(ranks)]
    left = {(rank, key) for rank, file in enumerate(files) for key in file}
    for number, rank, numel, parts in shares(buckets, size, alignment, ranks):
        for slot, dtype in slots.items():
            expected = torch.zeros(numel, dtype=getattr(torch, dtype))
            for part in parts:
                flat = tensors[list(SHAPES)[part.param], slot].reshape(-1)
                expected[part.at :][: part.stop - part.start] = flat[part.start : part.stop]
            key = f"0-{kind}.{number}.{slot}"
            assert oracle.same_bits(files[rank][key], expected), (rank, key)
            left.discard((rank, key))
    assert not left


# --- to and fro ------------------------------------------------------------------------------


def other(number: int, case: oracle.Case) -> Target:
    """Return a topology that isn't the case's own."""
    if case.name.startswith(
        "v0.12.3"
    ):  # its padding rows hold values, which a smaller TP can't take
        return Target(tp=2, pp=2, dp=3, bucket_size=999)
    targets = (
        Target(tp=1, pp=1, vpp=1, dp=7, bucket_size=999),
        Target(tp=2, pp=1, vpp=1, dp=1),
        Target(tp=1, pp=2, vpp=1, dp=3, bucket_size=100),
        Target(tp=2, pp=2, vpp=1, dp=2),
    )
    return targets[number % len(targets)]


@pytest.mark.parametrize("name", CASES)
def test_from_megatron_through_both_kinds_and_back_its_own_files_return(
    name: str, tmp_path: Path
) -> None:
    case, number = CASES[name], list(CASES).index(name)
    api.reshard(case.directory, tmp_path / "fused", to="zero2", target=other(number, case))
    api.reshard(tmp_path / "fused", tmp_path / "flat", to="zero1", target=other(number + 1, case))
    own = Target(
        tp=case.tp, pp=case.pp, vpp=case.vpp, dp=case.dp, bucket_size=case.bucket_size or "none"
    )
    api.reshard(tmp_path / "flat", tmp_path / "back", to="megatron", target=own)
    per_rank = (".rng_state: only in the second", ".rerun_state_machine: only in the second")
    found = oracle.compare_files(tmp_path / "back", case.directory, ignore_args={"save"})
    assert [line for line in found if not line.endswith(per_rank)] == []


def test_what_is_not_named_stays(tmp_path: Path) -> None:
    target = Target(tp=1, dp=3, bucket_size=999)
    api.reshard(PLAIN.directory, tmp_path / "a", to="zero2", target=target)
    report = api.reshard(tmp_path / "a", tmp_path / "b", target=Target(dp=2))
    assert "plan: buckets: at most 960 elements, filled in backward order" in report.plan
    api.reshard(tmp_path / "b", tmp_path / "c", target=Target(dp=3))
    for path in sorted((tmp_path / "a").iterdir()):
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes(), path.name
    assert api.inspect(tmp_path / "b")["buckets"] == "at most 960 elements"
    assert api.verify(tmp_path / "b", against=PLAIN.directory).ok


def test_one_bucket_for_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a number of elements for zero2, got none"):
        api.reshard(PLAIN.directory, tmp_path / "a", to="zero2", target=Target(bucket_size="none"))


# --- values in parts -------------------------------------------------------------------------


def stored(root: Path, layout: ShardedLayout, values: Mapping[str, np.ndarray]) -> Path:
    """Write a directory whose keys hold ``values``, as a training run would."""
    root.mkdir()
    stated = []
    for rank in range(layout.topology.world_size):
        for file in rank_files(layout, rank):
            body = bytearray(file.size_bytes - len(file.header))
            crcs = {}
            for entry in file.entries:
                data = values[f"{rank}:{entry.key}"].tobytes()
                assert len(data) == entry.length, entry.key
                at = entry.offset - len(file.header)
                body[at : at + len(data)] = data
                crcs[entry.key] = crc32(data)
            (root / file.path).write_bytes(file.header + body)
            stated.append(StatedFile(file.path, sha256(file.header), crcs))
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    groups = (ParamGroup(settings, tuple(SHAPES)),)
    objects = {"step": 3, "param_groups": groups}
    (root / "manifest.json").write_bytes(manifest_document(layout, stated, objects, {}))
    return root


def cut(
    whole_values: Mapping[str, np.ndarray], size: int, ranks: int
) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return each rank's share of each bucket, and the names of its slices in order."""
    numels = [int(np.prod(shape)) for shape in SHAPES.values()]
    (buckets,) = walk(numels, [[4, 3, 2, 1, 0]], size, 64)
    found = {}
    for number, rank, numel, parts in shares(buckets, size, 64, ranks):
        first = next(iter(whole_values.values()))
        share = np.zeros(numel, first.dtype)
        for part in parts:
            flat = whole_values[list(SHAPES)[part.param]].reshape(-1)
            share[part.at :][: part.stop - part.start] = flat[part.start : part.stop]
        found[f"{rank}:0-bfloat16.{number}."] = share, [list(SHAPES)[p.param] for p in parts]
    return found


def layout_of(slots: Mapping[str, str], ranks: int) -> ShardedLayout:
    params = tuple(ShardedParam(name, shape, "bfloat16") for name, shape in SHAPES.items())
    chunks = {(0, 0): tuple(range(len(params)))}
    fixed = {"bfloat16": FixedBuckets(300, 64)}
    return ShardedLayout(
        "zero2", Topology(dp=ranks), params, chunks, {"bfloat16": dict(slots)}, fixed=fixed
    )


def half_away(value: int) -> tuple[int, int]:
    """Split the bits of an fp32 number in those of the nearest bfloat16 and what is left."""
    low = value & 0xFFFF
    signed = low - 0x10000 if low & 0x8000 else low
    return ((value - signed) >> 16) & 0xFFFF, signed


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_are_joined_of_weights_and_remainders(ranks: int, tmp_path: Path) -> None:
    masters = {
        name: bits(shape, "float32", seed=ord(name)).view(torch.int32).numpy().view(np.uint32)
        for name, shape in SHAPES.items()
    }
    for name in SHAPES:  # halfway between two weights: the rules round it to different ones
        masters[name].reshape(-1)[0] = 0x3F808000
    halves = {
        name: [half_away(int(v)) for v in values.reshape(-1)] for name, values in masters.items()
    }
    high = {n: np.array([h for h, _ in pairs], np.uint16) for n, pairs in halves.items()}
    low = {n: np.array([r for _, r in pairs], np.int16) for n, pairs in halves.items()}
    slots = {
        "weight": "bfloat16",
        "param_remainder": "int16",
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
    }
    size = max(64, 300 // ranks // 64 * 64) * ranks
    values = {}
    for slot, source in (
        ("weight", high),
        ("param_remainder", low),
        ("exp_avg", masters),
        ("exp_avg_sq", masters),
    ):
        values |= {key + slot: share for key, (share, _) in cut(source, size, ranks).items()}
    root = stored(tmp_path / "src", layout_of(slots, ranks), values)
    api.reshard(root, tmp_path / "flat", to="zero1", target=Target(dp=3))
    again = api.reshard(root, tmp_path / "fused", target=Target(dp=3))
    assert again.src_format == again.dst_format == "zero2"
    for path in (root, tmp_path / "flat", tmp_path / "fused"):
        api.gather(path, tmp_path / f"{path.name}-whole")
        found = load_file(tmp_path / f"{path.name}-whole" / "optimizer.safetensors")
        weights = load_file(tmp_path / f"{path.name}-whole" / "model.safetensors")
        for name, shape in SHAPES.items():
            expected = torch.from_numpy(masters[name].view(np.int32)).view(torch.float32)
            assert oracle.same_bits(found[f"state.{name}.fp32_param"], expected.reshape(shape))
            mine = weights[name].view(torch.int16).numpy().view(np.uint16).reshape(-1)
            assert np.array_equal(mine, high[name])
    assert api.verify(root).ok
    assert len({api.digest(p)[0] for p in (root, tmp_path / "flat", tmp_path / "fused")}) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_scaled_values_are_multiplied_by_the_scale_of_their_slice(
    ranks: int, tmp_path: Path
) -> None:
    slots = {"weight": "bfloat16"}
    for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
        slots |= {slot: "float16", f"{slot}_scale": "float32"}
    size = max(64, 300 // ranks // 64 * 64) * ranks
    numbers = {
        name: np.arange(1, 1 + np.prod(shape), dtype=np.float16).reshape(shape) / 3
        for name, shape in SHAPES.items()
    }
    values: dict[str, np.ndarray] = {}
    expected: dict[str, list[tuple[np.ndarray, np.float32]]] = {name: [] for name in SHAPES}
    zeros = {name: np.zeros(shape, np.uint16) for name, shape in SHAPES.items()}
    for number, (key, (share, names)) in enumerate(cut(numbers, size, ranks).items()):
        scales = (np.arange(len(names), dtype=np.float32) + 1 + number) / 7
        for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
            values |= {f"{key}{slot}": share, f"{key}{slot}_scale": scales}
        values[f"{key}weight"] = cut(zeros, size, ranks)[key][0]
        for name, scale in zip(names, scales, strict=True):
            expected[name].append((share, scale))
    root = stored(tmp_path / "src", layout_of(slots, ranks), values)
    api.gather(root, tmp_path / "whole", cross_check=False)
    found = load_file(tmp_path / "whole" / "optimizer.safetensors")
    # Which scale an element has follows from the walk: found again slice by slice.
    numels = [int(np.prod(shape)) for shape in SHAPES.values()]
    (buckets,) = walk(numels, [[4, 3, 2, 1, 0]], size, 64)
    for number, rank, _, parts in shares(buckets, size, 64, ranks):
        scales = values[f"{rank}:0-bfloat16.{number}.exp_avg_scale"]
        for part, scale in zip(parts, scales, strict=True):
            name = list(SHAPES)[part.param]
            stored_values = numbers[name].reshape(-1)[part.start : part.stop]
            wanted = stored_values.astype(np.float32) * scale
            for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
                got = found[f"state.{name}.{slot}"].reshape(-1)[part.start : part.stop]
                assert np.array_equal(got.numpy(), wanted), (name, slot)


def test_a_piece_of_a_part_in_another_form_is_refused(tmp_path: Path) -> None:
    layout = layout_of({"weight": "bfloat16", "param_remainder": "int16"}, 1)
    with pytest.raises(Exception, match="must be int16, beside bfloat16 weights"):
        replace(layout, slots={"bfloat16": {"weight": "bfloat16", "param_remainder": "int8"}})
    api.reshard(PLAIN.directory, tmp_path / "a", to="zero2", target=Target(tp=1, dp=1))
    text = (tmp_path / "a" / "manifest.json").read_text().replace('"zero2"', '"zero1"')
    (tmp_path / "a" / "manifest.json").write_text(text)
    with pytest.raises(FormatError, match="SHA-256"):
        api.read_manifest(tmp_path / "a", resources=Resources())
