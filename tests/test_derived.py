"""A view holds what its codec says, and a conversion from one proves and reports just that."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_tensors import BF16, F16, F32, Store, expected, random_bits
from safetensors.torch import load_file

from ckpttools import api, conversion, job
from ckpttools.api import Resources
from ckpttools.comparison import compare, count_differences
from ckpttools.derived import widened, with_half_away_weights, with_nearest_even_weights
from ckpttools.errors import LayoutError, PlanError, StorageError
from ckpttools.formats import Candidate, Draft, Problem, Reading, ReadOptions, Target, known
from ckpttools.formats.consolidated import ConsolidatedFormat
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import IDENTITY, MASTER, WEIGHT, Manifest, TensorSpec
from ckpttools.storage.journal import Done, Journal

SHAPE = (11, 7)
WHOLE = Box.whole(SHAPE)
HALVES = (FlatRange(0, 30, WHOLE), FlatRange(30, 77, WHOLE))
SMALL = Resources(budget_bytes=3 * 4096, workers=1)


def spec(name: str, slot: str, kind: str) -> TensorSpec:
    return TensorSpec(name, slot, {"bf16": BF16, "f16": F16, "f32": F32}[kind], SHAPE)


@dataclass(frozen=True, slots=True)
class Run:
    """A checkpoint with a tensor of each kind, and what its masters are."""

    manifest: Manifest
    stored: np.ndarray  # masters in float32
    joined: np.ndarray  # masters in two parts
    weights: np.ndarray  # of the stored masters
    halves: np.ndarray  # a moment in bfloat16


def ties(random: np.random.Generator, size: int = 77) -> np.ndarray:
    """Return numbers of which a third lies in the middle between two of bfloat16."""
    bits = random.integers(0x3A000000, 0x47000000, size).astype("<u4")
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000
    return bits.reshape(SHAPE)


def run(root: Path, **objects: object) -> Run:
    """Store ``a`` with a stored master, ``b`` with remainders, ``c`` in float32, 16-bit moments."""
    random = np.random.default_rng(7)
    store, a, b = Store(root), ties(random), ties(random)
    weights = expected("nearest_even", [a])
    hi, lo = expected("half_away", [b]), (b & 0xFFFF).astype("<u2")
    halves = random_bits(SHAPE, BF16, random) & 0x3FFF
    c = random_bits(SHAPE, F32, random) & 0x3FFFFFFF
    store.add(spec("a", WEIGHT, "bf16"), "widened_bf16", [weights])
    store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    store.add(spec("a", MASTER, "f32"), "identity", [a], HALVES)
    store.add(spec("b", WEIGHT, "bf16"), "widened_bf16", [hi])
    high = store.chunks[-1].parts[0]
    store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    store.add(spec("b", MASTER, "f32"), "remainder", [hi, lo])
    low = store.chunks[-1].parts[1]
    store.chunks[-1] = replace(store.chunks[-1], parts=(high, low))  # the weight's own bytes
    store.add(spec("c", WEIGHT, "f32"), "identity", [c])
    store.add(spec("c", MASTER, "f32"), "identity", [c])
    for name, kind in (("a", "bf16"), ("b", "f16")):
        store.add(spec(name, "exp_avg", kind), f"widened_{kind}", [halves])
        store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    return Run(store.manifest({"step": 13, **objects}), a, b, weights, halves)


def codecs_of(manifest: Manifest) -> dict[tuple[str, str], str]:
    return {manifest.tensors[c.tensor].key: c.codec for c in manifest.chunks}


# --- views --------------------------------------------------------------------------------


def test_weights_with_stored_masters_are_rounded_half_away_and_no_others(tmp_path: Path) -> None:
    source = run(tmp_path).manifest
    view = with_half_away_weights(source)
    expected_codecs = codecs_of(source) | {("a", WEIGHT): "half_away"}
    assert codecs_of(view) == expected_codecs
    assert view.tensors == source.tensors
    assert {c.region for c in view.by_tensor()[0]} == set(HALVES)  # it lies as its master does
    assert compare(source, view, SMALL).same is False
    assert set(count_differences(source, view, [("a", WEIGHT), ("b", WEIGHT)], SMALL)) == {
        ("a", WEIGHT),
        ("b", WEIGHT),
    }


def test_weights_are_rounded_to_nearest_even_from_either_kind_of_master(tmp_path: Path) -> None:
    made = run(tmp_path)
    view = with_nearest_even_weights(made.manifest)
    found = {key: codec for key, codec in codecs_of(view).items() if codec != IDENTITY}
    assert found == {
        ("a", WEIGHT): "nearest_even",
        ("b", WEIGHT): "bf16_remainder_nearest_even",
        ("b", MASTER): "bf16_remainder",
    }
    even, away = (expected(way, [made.joined]) for way in ("nearest_even", "half_away"))
    counts = count_differences(made.manifest, view, [("a", WEIGHT), ("b", WEIGHT)], SMALL)
    assert counts == {("a", WEIGHT): 0, ("b", WEIGHT): int((even != away).sum())}
    assert counts["b", WEIGHT] > 5


def test_sixteen_bit_slots_are_widened_and_the_rest_stays(tmp_path: Path) -> None:
    source = run(tmp_path).manifest
    view = widened(source, ["exp_avg", MASTER])
    changed = {
        b.key: (a.dtype.name, b.dtype.name)
        for a, b in zip(source.tensors, view.tensors, strict=True)
        if a != b
    }
    assert changed == {
        ("a", "exp_avg"): ("bfloat16", "float32"),
        ("b", "exp_avg"): ("float16", "float32"),
    }
    assert {codecs_of(view)[key] for key in changed} == {"widened"}
    assert widened(source, ["exp_avg_sq"]) is source
    assert widened(view, ["exp_avg"]) is view  # nothing is left to widen


def test_views_go_on_top_of_each_other_but_no_codec_on_another(tmp_path: Path) -> None:
    source = run(tmp_path).manifest
    both = widened(with_half_away_weights(source), ["exp_avg"])
    assert codecs_of(both)["a", WEIGHT] == "half_away"
    assert codecs_of(both)["a", "exp_avg"] == "widened"
    message = "a (weight): must be stored under the codec identity to be widened, got half_away"
    with pytest.raises(LayoutError, match=re.escape(message)):
        widened(both, [WEIGHT])


@pytest.mark.parametrize("view", [with_half_away_weights, with_nearest_even_weights])
def test_a_scaled_master_is_not_rounded(
    view: Callable[[Manifest], Manifest], tmp_path: Path
) -> None:
    store, zeros = Store(tmp_path), np.zeros(SHAPE, "<u2")
    store.add(spec("a", WEIGHT, "bf16"), "widened_bf16", [zeros])
    store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    store.add(spec("a", MASTER, "f32"), "scaled_f16", [zeros, np.ones(SHAPE, "<u4")])
    message = "a (weight): must have a master that can be rounded, got one under the codec scaled"
    with pytest.raises(LayoutError, match=re.escape(message)):
        view(store.manifest())


@pytest.mark.parametrize("view", [with_half_away_weights, with_nearest_even_weights])
def test_a_weight_that_is_its_master_or_has_none_stays(
    view: Callable[[Manifest], Manifest], tmp_path: Path
) -> None:
    store, zeros = Store(tmp_path), np.zeros(SHAPE, "<u2")
    for name in ("a", "b"):
        store.add(spec(name, WEIGHT, "bf16"), "widened_bf16", [zeros])
        store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    parts = store.chunks[0].parts
    store.add(spec("a", MASTER, "f32"), "widened_bf16", [zeros])
    store.chunks[-1] = replace(store.chunks[-1], parts=parts)
    source = store.manifest()
    assert view(source) is source


# --- conversions from a view --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """Stands in for a format whose reader finds one Manifest."""

    manifest: Manifest
    name: str = "known"
    about: str = "for tests"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        return str(path) == self.manifest.root

    def read(self, path: Path, options: ReadOptions) -> Reading:
        del path, options
        return Reading((Candidate(("one",), self.manifest),))

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        raise NotImplementedError

    def check(self, path: Path) -> list[Problem]:
        del path
        return []


@dataclass(frozen=True, slots=True)
class Through:
    """Writes whole tensors from a view of the source."""

    view: Callable[[Manifest], Manifest]
    name: str = "through"
    about: str = "for tests"
    takes: frozenset[str] = frozenset()

    def detect(self, path: Path) -> bool:
        del path
        return False

    def read(self, path: Path, options: ReadOptions) -> Reading:
        return ConsolidatedFormat().read(path, options)

    def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
        view = self.view(source)
        return replace(ConsolidatedFormat().lay_out(view, target, root), source=view)

    def check(self, path: Path) -> list[Problem]:
        return ConsolidatedFormat().check(path)


def both_views(source: Manifest) -> Manifest:
    return widened(with_half_away_weights(source), ["exp_avg"])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = run(tmp_path / "src", weight_rounding=("nearest_even",))
    formats = {"known": Known(made.manifest), "through": Through(both_views)}
    monkeypatch.setattr(known, "registry", lambda: formats)
    return made


def tensors_in(root: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in root.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            width = "<u2" if tensor.dtype == torch.bfloat16 else "<u4"
            found[key] = tensor.view(torch.uint8).numpy().view(width)
    return found


def test_what_is_written_is_the_view_and_the_report_says_what_differs(
    made: Run, tmp_path: Path
) -> None:
    report = api.reshard(made.manifest.root, tmp_path / "out", to="through", resources=SMALL)
    away = expected("half_away", [made.stored])
    found = tensors_in(tmp_path / "out")
    assert (found["a"] == away).all()
    assert (found["b"] == expected("half_away", [made.joined])).all()
    assert (found["state.b.fp32_param"] == made.joined).all()
    assert (found["state.a.exp_avg"] == expected("widened_bf16", [made.halves])).all()
    assert (found["state.b.exp_avg"] == expected("widened_f16", [made.halves])).all()
    count = int((away != made.weights).sum())
    assert count > 5
    rounded, wide = report.findings
    assert rounded == (
        "weight: 1 tensors are their masters rounded half away from zero; "
        f"{count} of 77 elements differ from the source's"
    )
    assert wide == "exp_avg: 2 tensors are widened from bfloat16 and float16 to float32, exactly"
    assert report.proof[0] == "layout one: 2 weights equal their masters, rounded"
    assert report.proof[1].endswith(
        "equal the source bit for bit, 3 of them once rounded or widened"
    )


def test_a_dry_run_tells_the_same_and_writes_nothing(made: Run, tmp_path: Path) -> None:
    source, out = made.manifest.root, tmp_path / "out"
    dry = api.reshard(source, out, to="through", resources=SMALL, dry_run=True)
    assert not out.exists()
    report = api.reshard(source, out, to="through", resources=SMALL)
    assert dry.findings == report.findings
    assert dry.plan == report.plan
    assert api.plan_reshard(made.manifest, Target(), to="through").read_bytes == dry.read_bytes


@contextmanager
def full_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the disk be full once so many tiles are finished."""
    add = Journal.add

    def full(self: Journal, done: Done) -> None:
        if self.count == count:
            raise StorageError("disk: full")
        add(self, done)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", full)
        with pytest.raises(StorageError, match="disk: full"):
            yield


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_conversion_from_a_view_goes_on_where_it_was_stopped(
    count: int, made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = made.manifest.root, tmp_path / "out"
    api.reshard(source, tmp_path / "whole", to="through", resources=SMALL)
    with full_after(count, monkeypatch):
        api.reshard(source, out, to="through", resources=SMALL)
    report = api.reshard(source, out, to="through", resources=SMALL, resume=True)
    assert f"resumed: {count} tiles of an earlier run were still right" in report.findings
    found, whole = (
        {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (out, tmp_path / "whole")
    )
    assert found == whole


def test_work_from_another_view_is_other_work(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = made.manifest.root, tmp_path / "out"
    with full_after(1, monkeypatch):
        api.reshard(source, out, to="through", resources=SMALL)
    other = {"known": Known(made.manifest), "through": Through(_nearest_even)}
    monkeypatch.setattr(known, "registry", lambda: other)
    report = api.reshard(source, out, to="through", resources=SMALL, resume=True)
    assert any("is of other work, left alone" in line for line in report.findings)
    assert not any("resumed" in line for line in report.findings)


def test_another_codec_of_the_same_bytes_makes_other_work_of_it(tmp_path: Path) -> None:
    store, masters = Store(tmp_path), ties(np.random.default_rng(3))
    store.add(spec("a", WEIGHT, "bf16"), "widened_bf16", [expected("half_away", [masters])])
    store.chunks[-1] = replace(store.chunks[-1], codec=IDENTITY)
    store.add(spec("a", MASTER, "f32"), "identity", [masters])
    source, names = store.manifest(), set()
    for view in (with_half_away_weights, with_nearest_even_weights):
        draft = Through(view).lay_out(source, Target(), "")
        plan = conversion.plan_of(source, draft)
        names.add(job.job_of((), draft, plan, SMALL))
    assert len(names) == 2


def _nearest_even(source: Manifest) -> Manifest:
    return widened(with_nearest_even_weights(source), ["exp_avg"])


def test_a_view_of_other_files_or_with_a_tensor_hidden_is_refused(
    made: Run, tmp_path: Path
) -> None:
    source = made.manifest
    draft = ConsolidatedFormat().lay_out(source, Target(), "")
    elsewhere = replace(source, root=str(tmp_path / "other"))
    message = f"must be of the source's files, got {elsewhere.root}"
    with pytest.raises(PlanError, match=re.escape(message)):
        conversion.plan_of(source, replace(draft, source=elsewhere))
    last = len(source.tensors) - 1
    fewer = replace(
        source,
        tensors=source.tensors[:-1],
        chunks=tuple(c for c in source.chunks if c.tensor != last),
    )
    smaller = ConsolidatedFormat().lay_out(fewer, Target(), "")
    message = "b (exp_avg): must be in the view or left out, got neither"
    with pytest.raises(PlanError, match=re.escape(message)):
        conversion.plan_of(source, replace(smaller, source=fewer))
    told = replace(smaller, source=fewer, left_out=(("b", "exp_avg"),))
    assert len(conversion.plan_of(source, told).tensors) == last


def test_what_may_be_lost_is_told_to_the_target(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[frozenset[str]] = []

    @dataclass(frozen=True, slots=True)
    class Asking(Through):
        def lay_out(self, source: Manifest, target: Target, root: str) -> Draft:
            seen.append(target.accept_loss)
            return Through.lay_out(self, source, Target(), root)

    formats = {"known": Known(made.manifest), "through": Asking(both_views)}
    monkeypatch.setattr(known, "registry", lambda: formats)
    for accepted in ((), ("optimizer",)):
        api.reshard(
            made.manifest.root,
            tmp_path / f"out{len(accepted)}",
            to="through",
            options=ReadOptions(accept_loss=frozenset(accepted)),
        )
    assert seen == [frozenset(), frozenset({"optimizer"})]
