"""Kinds of runs that no fixture shows: what we read and write must be what the builder builds.

Each case is a run and others of the same state. The builder writes the first; every slot that we
read there must be the truth; taken to the topology of each other run it must give the files that
the builder writes for that run: entries and their order, dtypes, shapes, payloads, places in
storages, arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_builder import SLOTS, Model, Run, build, truth
from oracle_torch_files import compare_files, read, same_bits
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.api import ReadOptions, Resources, Target
from ckpttools.errors import UsageError

SMALL = Model()
DEEP = Model(layers=6)
SEVEN = Model(layers=7)
FULL = Model(biases=True, norm_biases=True, learned=5, qk_norms=True, gated=False, tied=True)
TIED = Model(tied=True)
PRIME = Model(
    layers=3, hidden=11, heads=3, groups=1, head_dim=5, ffn=7, vocab=17, divisor=1, biases=True
)
JUNK = 7.0
ONE = Resources(budget_bytes=1 << 20, workers=1)


def even(model: Model, pp: int, vpp: int = 1, **facts: Any) -> Run:
    """A run with as many layers in every chunk; its gaps hold junk, as older Megatron's do."""
    each, rest = divmod(model.layers, pp * vpp)
    assert not rest
    return Run(model=model, stages=((each,) * vpp,) * pp, **{"junk": JUNK, **facts})


def uneven(model: Model, *stages: Sequence[int] | int, **facts: Any) -> Run:
    """A run with these layers in its stages' chunks."""
    counts = tuple((stage,) if isinstance(stage, int) else tuple(stage) for stage in stages)
    return Run(model=model, stages=counts, **{"junk": JUNK, **facts})


def target_of(run: Run) -> Target:
    """Name a run's topology."""
    return Target(
        tp=run.tp,
        pp=run.pp,
        vpp=run.vpp,
        dp=run.dp,
        bucket_size=run.bucket or "none",
        first_stage_layers=run.first,
        last_stage_layers=run.last,
    )


def written_from(src: Run, dst: Run) -> Run:
    """``dst`` as a writer with the state of ``src`` makes it: v2, one storage, zeros in gaps."""
    return replace(
        dst,
        filled=src.model.padded(src.tp),
        junk=0.0,
        version="v2",
        one_storage=True,
        told_bucket=src.told_bucket,
    )


def assert_same_files(ours: Path, src: Run, dst: Run, tmp: Path) -> None:
    """Compare with what the builder builds for ``dst``; generator states don't follow ranks."""
    theirs = build(tmp, written_from(src, dst))
    moved = (src.tp, src.pp) != (dst.tp, dst.pp)
    left_out = ["rng_state"] if moved else []
    if moved and src.writer == "megadlms":
        left_out.insert(0, "rerun_state_machine")
    files = sorted(str(f.relative_to(theirs)) for f in theirs.rglob("model_optim_rng.pt"))
    expected = [f"{file}: .{key}: only in the second" for file in files for key in left_out]
    assert compare_files(ours, theirs) == expected
    for file in files:
        assert storages(ours / file) == storages(theirs / file)


def storages(path: Path) -> list[Any]:
    """Each weight's place in its storage, what the whole storage holds, and the modules."""
    found: list[Any] = []
    for key, model in read(path).items():
        if not key.startswith("model"):
            continue
        found.append(model._metadata)
        for name, t in model.items():
            if t is not None:
                storage = torch.tensor([], dtype=t.dtype).set_(t.untyped_storage())
                content = storage.view(torch.uint8).numpy().tobytes()
                found.append((name, t.storage_offset(), t.requires_grad, content))
    return found


def assert_reads_truth(root: Path, run: Run, tmp: Path, options: ReadOptions | None = None) -> None:
    """Every slot of every parameter must be there, bit for bit, and nothing else."""
    api.gather(root, tmp, options=options, resources=ONE)
    weights = load_file(tmp / "model.safetensors")
    state = load_file(tmp / "optimizer.safetensors")
    expected = truth(run)
    names = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    held = {(name, "weight"): tensor for name, tensor in weights.items()}
    keys = {f"state.{n}.{names[slot]}": (n, slot) for n, slot in expected if slot in SLOTS}
    assert state.keys() == keys.keys()
    held |= {keys[key]: tensor for key, tensor in state.items()}
    assert held.keys() == expected.keys()
    assert [key for key in expected if not same_bits(held[key], expected[key])] == []


def check(src: Run, others: Sequence[Run], tmp: Path, options: ReadOptions | None = None) -> None:
    root = build(tmp / "source", src)
    assert_reads_truth(root, src, tmp / "gathered", options)
    for number, dst in enumerate(others):
        ours = tmp / f"out{number}"
        api.reshard(root, ours, target=target_of(dst), options=options, resources=ONE)
        assert_same_files(ours, src, dst, tmp / f"built{number}")


MIXED = replace(SMALL, norm_dtype="fp32", biases=True)
LOSS_AND_EMBEDDING: dict[str, Any] = {"count_embedding": True, "count_loss": True}

CASES: dict[str, tuple[Run, list[Run]]] = {
    "interleaved": (
        even(SMALL, 2, 2, dp=2),
        [even(SMALL, 1, tp=2), even(SMALL, 2, tp=2, dp=3), even(SMALL, 2, 2, tp=4)],
    ),
    "to interleaved": (even(SMALL, 1, tp=2, dp=2), [even(SMALL, 2, 2), even(SMALL, 2, 2, dp=5)]),
    "interleaved, chunks told in layers": (
        even(SMALL, 2, 2, told_chunks="layers"),
        [even(SMALL, 2, 2, dp=3, told_chunks="layers"), even(SMALL, 4), even(SMALL, 2)],
    ),
    "interleaved, chunks told in stages": (
        even(Model(layers=8), 2, 2, told_chunks="stages"),
        [even(Model(layers=8), 2, 4, told_chunks="stages"), even(Model(layers=8), 1)],
    ),
    "7 layers, first stage short": (
        uneven(SEVEN, 1, 3, 3, first=1, dp=2),
        [
            uneven(SEVEN, 3, 3, 1, last=1),
            uneven(SEVEN, 2, 4, 1, first=2, last=1, tp=2),
            even(SEVEN, 1, dp=7),
            uneven(SEVEN, 1, 3, 3, first=1, tp=2, dp=3),
        ],
    ),
    "uneven and interleaved": (
        uneven(Model(layers=8), (1, 1), (2, 2), (1, 1), first=2, last=2, tp=2),
        [
            uneven(Model(layers=8), (2, 2), (1, 1), (1, 1), first=4),
            even(Model(layers=8), 2, 2),
            uneven(Model(layers=8), 6, 2, first=6, last=2),
        ],
    ),
    "embedding and loss counted": (
        uneven(DEEP, (1, 2), (2, 1), told_chunks="layers", **LOSS_AND_EMBEDDING),
        [
            uneven(DEEP, (1, 2), (2, 1), told_chunks="layers", tp=2, **LOSS_AND_EMBEDDING),
            uneven(
                DEEP, (0, 1), (1, 1), (1, 1), (1, 0), told_chunks="layers", **LOSS_AND_EMBEDDING
            ),
            uneven(DEEP, 3, 3, **LOSS_AND_EMBEDDING),
            uneven(DEEP, 1, 2, 2, 1, **LOSS_AND_EMBEDDING),
            uneven(DEEP, 2, 4, first=2),
        ],
    ),
    "a stage of embeddings alone": (
        uneven(replace(SEVEN, layers=3), 0, 1, 1, 1, count_embedding=True, dp=2),
        [uneven(replace(SEVEN, layers=3), 1, 2, count_embedding=True, tp=2)],
    ),
    "a stage of the loss alone, tied": (
        uneven(replace(TIED, layers=3), 1, 1, 1, 0, count_loss=True, dp=2),
        [even(replace(TIED, layers=3), 1, count_loss=True, tp=2)],
    ),
    "stages by hand": (
        uneven(SEVEN, 2, 4, 1, pipeline="Ett|tttt|tL"),
        [
            uneven(SEVEN, 2, 4, 1, pipeline="Ett|tttt|tL", dp=5),
            uneven(SEVEN, 2, 4, 1, pipeline="Ett|tttt|tL", tp=2),
            even(SEVEN, 1),
            uneven(SEVEN, 3, 4, first=3),
        ],
    ),
    "stages by hand, interleaved": (
        uneven(SEVEN, (3, 0), (1, 3), pipeline="Ettt|t||tttL"),
        [uneven(SEVEN, (3, 0), (1, 3), pipeline="Ettt|t||tttL", dp=2), even(SEVEN, 1)],
    ),
    "more tensor ranks than query groups": (
        even(replace(SMALL, groups=1, head_dim=6), 1, tp=4, dp=2),
        [even(replace(SMALL, groups=1, head_dim=6), 2, tp=t) for t in (1, 2)],
    ),
    "from fewer tensor ranks than query groups": (
        even(replace(SMALL, groups=2), 1),
        [even(replace(SMALL, groups=2), 1, tp=4)],
    ),
    "biases, learned positions, layer norms, tied": (
        even(FULL, 2, tp=2),
        [even(FULL, 1, dp=2), even(FULL, 2, 2, tp=4)],
    ),
    "gated with biases": (
        even(replace(SMALL, biases=True), 1, tp=2),
        [even(replace(SMALL, biases=True), 1, tp=4), even(replace(SMALL, biases=True), 4)],
    ),
    "Transformer Engine's names": (
        even(replace(FULL, fused_norms=True), 2, tp=2),
        [even(replace(FULL, fused_norms=True), 1, tp=4, dp=2)],
    ),
    "fp32": (
        even(replace(FULL, dtype="fp32"), 2, dp=2),
        [even(replace(FULL, dtype="fp32"), 1, tp=2)],
    ),
    "fp16 with a loss scale": (
        even(replace(SMALL, dtype="fp16"), 2, dp=2),
        [even(replace(SMALL, dtype="fp16"), 1, tp=2)],
    ),
    "fp32 norms beside bf16": (
        even(MIXED, 2, dp=2),
        [even(MIXED, 1, tp=2), even(MIXED, 2, 2), even(MIXED, 2, dp=7)],
    ),
    "fp32 norms beside bf16, interleaved, chained": (
        even(MIXED, 2, 2, chained=True, tp=2),
        [even(MIXED, 2, 2, chained=True, dp=2), even(MIXED, 1, chained=True)],
    ),
    "several rates by key": (
        even(SMALL, 2, groups="lr_mult"),
        [even(SMALL, 1, groups="lr_mult", tp=2), even(SMALL, 2, 2, groups="lr_mult")],
    ),
    "decoupled rate by key": (
        even(SMALL, 2, groups="decoupled"),
        [even(SMALL, 1, groups="decoupled", tp=2), even(SMALL, 4, groups="decoupled")],
    ),
    "decoupled rate by position": (
        even(SMALL, 4, groups="decoupled", writer="megadlms", rule="0.12"),
        [even(SMALL, pp, groups="decoupled", writer="megadlms", rule="0.12") for pp in (1, 2)],
    ),
    "groups by position, interleaved, chained": (
        even(TIED, 2, 2, writer="megadlms", rule="0.12", dp=2, chained=True),
        [even(TIED, 1, writer="megadlms", rule="0.12", tp=2, chained=True)],
    ),
    "chained optimizers": (
        even(DEEP, 2, 3, chained=True, dp=2),
        [
            even(DEEP, 2, 3, chained=True, dp=3),
            even(DEEP, 3, 2, chained=True, tp=2),
            even(DEEP, 1, chained=True),
        ],
    ),
    "to chained optimizers": (even(DEEP, 1, chained=True), [even(DEEP, 2, 3, chained=True)]),
    # Threes, since a factor of two is in the 128 elements that a bucket's end is rounded to.
    "three optimizer instances": (
        even(SMALL, 2, dp=6, instances=3),
        [even(SMALL, 1, dp=3, instances=3, tp=2), even(SMALL, 2, dp=15, instances=3)],
    ),
    "three context ranks": (
        even(SMALL, 2, dp=2, cp=3),
        [even(SMALL, 1, dp=1, cp=3, tp=2), even(SMALL, 2, tp=2, dp=5, cp=3)],
    ),
    "three instances over context ranks": (
        even(SMALL, 1, dp=5, cp=3, instances=3),
        [even(SMALL, 2, dp=1, cp=3, instances=3)],
    ),
    "padded for bandwidth": (
        even(TIED, 2, dp=2, busbw=True),
        [even(TIED, 2, dp=3, busbw=True), even(TIED, 1, tp=2, busbw=True, bucket=700)],
    ),
    "tied over interleaved stages": (
        even(TIED, 2, 2, dp=2),
        [even(TIED, 1), even(TIED, 4, tp=2), even(TIED, 2, 2, tp=2)],
    ),
    "to tied over interleaved stages": (even(TIED, 1, tp=2), [even(TIED, 2, 2, dp=3)]),
    "prime sizes, odd cuts": (
        even(PRIME, 1, dp=3, bucket=331),
        [
            even(PRIME, 1, dp=5, bucket=97),
            even(PRIME, 3, dp=7, bucket=500),
            even(PRIME, 1),
            even(PRIME, 3, dp=2, bucket=1),
        ],
    ),
    "tied, odd cuts": (
        even(FULL, 2, dp=5, bucket=150),
        [even(FULL, 2, 2, dp=3, bucket=90), even(FULL, 1, dp=2, bucket=300)],
    ),
    "tensors with storages of their own": (
        even(PRIME, 1, dp=3, bucket=331, told_bucket=331, one_storage=False),
        [even(PRIME, 1, dp=2, bucket=331), even(PRIME, 3)],
    ),
    "tensors with storages of their own, no cuts, default size": (
        even(PRIME, 1, dp=3, told_bucket=0, one_storage=False),
        [even(PRIME, 3, dp=2)],
    ),
    **{
        f"DP {dp} to {other}": (
            even(replace(FULL, tied=False, layers=2), 1, dp=dp, bucket=260),
            [even(replace(FULL, tied=False, layers=2), 1, dp=other, bucket=260)],
        )
        for dp, other in itertools.pairwise((1, 2, 3, 5, 7, 1))
    },
}


@pytest.mark.parametrize(("src", "others"), CASES.values(), ids=list(CASES))
def test_what_is_read_is_the_truth_and_what_is_written_is_what_megatron_would_write(
    src: Run, others: list[Run], tmp_path: Path
) -> None:
    check(src, others, tmp_path)


def old(run: Run, version: str, rule: str) -> Run:
    """The same run by an older Megatron; before v1c weights had storages of their own."""
    apart = version != "v1c"
    return replace(run, version=version, rule=rule, writer="megadlms", one_storage=not apart)


OLD = {
    "v0": old(even(PRIME, 3, dp=5), "v0", "0.5"),
    "v0 interleaved": old(even(SMALL, 2, 2, dp=3), "v0", "0.5"),
    "v1a": old(even(PRIME, 1, dp=3, bucket=331), "v1a", "0.5"),
    "v1b": old(even(FULL, 2, dp=3, bucket=331, tp=2), "v1b", "0.5"),
    "v1b, tied embedding apart": old(even(FULL, 2, dp=3, bucket=331, tp=2), "v1b", "0.6"),
    "v1c": old(even(TIED, 2, dp=5, bucket=331), "v1c", "0.6"),
    "v1c, padded to 128": old(even(FULL, 2, dp=3, bucket=331), "v1c", "0.7"),
    "v2, no alignment": old(even(FULL, 2, dp=3, bucket=331), "v2", "0.7"),
    "v2, padded to DP alone": old(even(TIED, 2, 2, dp=5, bucket=331), "v2", "0.6"),
}


@pytest.mark.parametrize("src", OLD.values(), ids=list(OLD))
def test_files_of_older_releases_are_read_and_written_as_v2(src: Run, tmp_path: Path) -> None:
    options = ReadOptions(layout=f"core-{src.rule}")
    others = [replace(src, dp=2, bucket=200), replace(src, stages=((src.model.layers,),), dp=7)]
    check(src, others, tmp_path, options)


@pytest.mark.parametrize("name", ["v1a", "v1b, tied embedding apart", "v1c, padded to 128"])
def test_the_layout_of_an_older_release_follows_from_its_files(name: str, tmp_path: Path) -> None:
    root = build(tmp_path / "source", OLD[name])
    assert f"core-{OLD[name].rule}" in api.open_checkpoint(root, resources=ONE).layouts
    assert_reads_truth(root, OLD[name], tmp_path / "gathered")


@pytest.mark.parametrize(("version", "notes"), [("v0", 1), ("v1a", 1), ("v1c", 1), ("v2", 0)])
def test_inspect_says_that_files_before_v2_are_experimental(
    version: str, notes: int, tmp_path: Path
) -> None:
    root = build(tmp_path / "source", old(even(SMALL, 2, tp=2), version, "0.5"))
    known = f"distrib_optim.pt is of version {version[:2]}: read by its description, experimental"
    assert api.inspect(root)["notes"] == [known] * notes


def test_stages_can_be_joined_and_cut_again(tmp_path: Path) -> None:
    src, whole, dst = even(DEEP, 3, dp=2), even(DEEP, 1), even(DEEP, 2, tp=2, dp=3)
    root = build(tmp_path / "source", src)
    api.reshard(root, tmp_path / "whole", target=target_of(whole), resources=ONE)
    api.reshard(tmp_path / "whole", tmp_path / "cut", target=target_of(dst), resources=ONE)
    theirs = build(tmp_path / "built", written_from(src, dst))
    lost = [
        f"iter_0000003/mp_rank_{tp:02d}_{p:03d}/model_optim_rng.pt: .rng_state: only in the second"
        for tp in range(2)
        for p in range(2)
    ]
    assert compare_files(tmp_path / "cut", theirs) == lost


def test_several_rates_by_position_are_carried_only_where_stages_stay(tmp_path: Path) -> None:
    src = even(SMALL, 2, groups="lr_mult", writer="megadlms", rule="0.12")
    check(src, [replace(src, dp=3)], tmp_path)
    for dst in (replace(src, tp=2), even(SMALL, 1)):
        with pytest.raises(UsageError, match="its parameter group must be known"):
            api.reshard(tmp_path / "source", tmp_path / "out", target=target_of(dst), resources=ONE)


def test_a_target_on_which_the_fitting_layouts_differ_is_refused_until_one_is_named(
    tmp_path: Path,
) -> None:
    # Both rules agree on one stage; on two the older one counts padding before the embedding.
    src = even(TIED, 1, writer="megadlms", rule="0.12")
    dst = even(TIED, 2, dp=3, writer="megadlms", rule="0.12")
    root = build(tmp_path / "source", src)
    with pytest.raises(UsageError, match=r"layout: must follow from the source, got .* differ"):
        api.reshard(root, tmp_path / "out", target=target_of(dst), resources=ONE)
    options = ReadOptions(layout="core-0.12")
    api.reshard(root, tmp_path / "out", target=target_of(dst), options=options, resources=ONE)
    assert_same_files(tmp_path / "out", src, dst, tmp_path / "built")


def test_a_bucket_size_that_nothing_tells_is_found_by_what_it_makes(tmp_path: Path) -> None:
    # Only the length of what was saved shows these cuts: the next parameter starts where it would.
    root = build(tmp_path / "source", even(PRIME, 1, dp=1, bucket=331))
    assert "saved lengths" in str(api.inspect(root)["buckets"])
    assert_reads_truth(root, even(PRIME, 1), tmp_path / "gathered")
