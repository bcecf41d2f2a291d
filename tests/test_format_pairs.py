"""Every format to every other: what the live run held is in the files, slot for slot, bit for bit.

Checkpoints of the original tools are taken to a format and from there to each other one. What is
in the result is read twice where that is possible: by `gather` and the safetensors library, and by
torch alone. It is held against what the runs themselves recorded, with names, groups and roundings
worked out here again, apart from the code under test. A pair that is refused is listed with its
message; there are no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import apex_files as apex
import oracle_megatron as megatron
import pytest
import torch
from apex_files import half_away
from held_state import (
    DISTRIBUTED,
    LEGACY,
    MASTER,
    TORCH,
    WEIGHT,
    Held,
    assert_same,
    nearest_even,
    of_apex,
    of_megatron,
    of_nemo,
    of_torch,
    read_apex,
    read_legacy,
    read_nemo,
    read_torch,
    settings_of,
    slot_of,
)
from safetensors.torch import load_file

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import UsageError

ALL = (
    "megatron",
    "apex",
    "nemo",
    "nemo-legacy",
    "zero1",
    "zero2",
    "sharded",
    "safetensors",
    "zarr",
    "dcp",
)
ROUNDED = ("apex", "nemo", "nemo-legacy", "zero1", "zero2")
NEMO = ("nemo", "nemo-legacy")
MASTERED = ("apex", "zero1", "zero2")
"""These list a float32 weight as its own master."""


@dataclass(frozen=True)
class Family:
    """A checkpoint, what its run held, and what must be said of it to be read."""

    path: Callable[[Path], Path]
    held: Held
    options: ReadOptions


def with_ties(root: Path) -> Path:
    """Write Apex's state with every third master half way between two bf16 numbers."""
    root.mkdir()
    source = apex.FIXTURES / "fp32_l2mode_ws2"
    tree = torch.load(source / "v2.pt")
    names = json.loads(apex.NAMES.read_text())
    for number, name in names.items():
        tree["state"][int(number)]["param"] = TIES.held.state[name, MASTER].clone()
    torch.save(tree, root / "v2.pt")
    weights = {name: TIES.held.tensors[name, WEIGHT] for name in names.values()}
    torch.save(weights, root / "model.pt")
    return root


def tied_held() -> Held:
    held = of_apex("fp32_l2mode_ws2")
    state = {key: tensor.clone() for key, tensor in held.state.items()}
    for (_, slot), tensor in state.items():
        if slot == MASTER:
            bits = tensor.view(torch.int32).reshape(-1)[::3]
            bits &= -0x10000
            bits |= 0x8000
            bits ^= 0x10000 * (torch.arange(len(bits), dtype=torch.int32) % 2)
    return replace(held, state=state, weight=half_away)


NAMED = ReadOptions(names_path=str(apex.NAMES))
TIES = Family(with_ties, tied_held(), NAMED)


def fixture_of_apex(variant: str, file: str) -> Family:
    model = apex.FIXTURES / variant / "model.pt"
    mode = apex.meta(variant)["adam_w_mode"]
    options = replace(NAMED, model_path=str(model), adam_w_mode=mode)
    return Family(lambda _: apex.FIXTURES / variant / file, of_apex(variant), options)


def fixture_of_megatron(name: str) -> Family:
    path = megatron.case(name).directory
    return Family(lambda _: path, of_megatron(name), ReadOptions())


FAMILIES = {
    "gqa": fixture_of_megatron("gqa_tp2_pp2_dp1"),
    "tied": fixture_of_megatron("tied_tp1_pp2_dp2"),
    "fp32": fixture_of_megatron("tied_tp2_pp1_dp1_fp32"),
    "ties": TIES,
    "v1": fixture_of_apex("bf16_rem_ws2", "v1_gathered.pt"),
    "bf16": fixture_of_apex("bf16_allbf16_ws2", "v2.pt"),
    "bare": Family(
        lambda _: apex.FIXTURES / "fp32_l2mode_ws2" / "v2.pt",
        replace(of_apex("fp32_l2mode_ws2"), weight=None),
        replace(NAMED, adam_w_mode=False),
    ),
    "nemo": Family(lambda _: DISTRIBUTED, of_nemo(), ReadOptions(adam_w_mode=True)),
    "legacy": Family(lambda _: LEGACY, of_nemo(), ReadOptions(adam_w_mode=True)),
    "torch": Family(lambda _: TORCH / "fsdp2_ws4", of_torch(), ReadOptions()),
}


# --- one conversion -------------------------------------------------------------------------


def target_of(family: str, a: str | None, b: str) -> Target:
    """Name a topology where the source tells how tensors are cut; what Apex's run keeps."""
    if b == "apex":
        stored = family in ("gqa", "tied", "fp32") or a in ("zero1", "nemo")
        return Target(masters="stored" if stored else "remainders")
    if b == "nemo-legacy":
        return Target(tp=1, pp=1)
    if b in ("zero1", "zero2"):
        return Target(dp=2, bucket_size=9000 if b == "zero2" else None)
    if b == "megatron":
        return Target(tp=2, pp=2, dp=1) if family == "gqa" else Target(tp=2, pp=1, dp=1)
    return Target()


def expected_of(held: Held, target: Target, b: str) -> Held:
    """Return what must be there after a conversion."""
    if held.plain and b in MASTERED:
        held = held.with_masters()
    sixteen = held.weight in (half_away, nearest_even)
    if sixteen and (b in NEMO or target.masters == "remainders"):
        held = replace(held, weight=half_away)
    elif sixteen and (b == "megatron" or target.masters == "stored"):
        held = replace(held, weight=nearest_even)
    return held.renamed() if b == "nemo" else held


class Sources:
    """Every family in every format, made once from the original."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[tuple[str, str], tuple[Path, Held]] = {}
        self._originals: dict[str, Path] = {}

    def original(self, family: str) -> Path:
        if family not in self._originals:
            self._originals[family] = FAMILIES[family].path(self.root / family)
        return self._originals[family]

    def get(self, family: str, fmt: str) -> tuple[Path, Held]:
        """Return a family in a format, and what must be in it."""
        if (family, fmt) not in self._made:
            place = self.root / f"{family}-{fmt}"
            self._made[family, fmt] = place, self.take(family, None, fmt, place)
        return self._made[family, fmt]

    def take(self, family: str, a: str | None, b: str, out: Path) -> Held:
        """Take a family from a format, or from the original, to another; say what must be there."""
        known, target, options = FAMILIES[family], target_of(family, a, b), ReadOptions()
        source, held = self.original(family), known.held
        if a is not None:
            source, held = self.get(family, a)
        elif known.options != options:
            options = replace(known.options, adam_w_mode=held.adam_w_mode)
        api.reshard(source, out, to=b, target=target, options=options)
        return expected_of(held, target, b)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


# --- what is in the result ------------------------------------------------------------------


def assert_gathered(path: Path, held: Held, where: Path) -> None:
    """Read a checkpoint through `gather` and the safetensors library."""
    if not (path / "optimizer.safetensors").is_file():
        api.gather(path, where)
        path = where
    found = {
        (key, WEIGHT) if file.stem == "model" else slot_of(key): tensor
        for file in path.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    assert_same(found, held.tensors)
    told = json.loads((path / "state.json").read_text())
    assert told["step"] == held.step
    assert {
        name: settings_of(group["settings"])
        for group in told["param_groups"]
        for name in group["params"]
    } == held.settings
    modes = {told.get("adam_w_mode")} - {None} or {
        group["settings"].get("decoupled_weight_decay") for group in told["param_groups"]
    }
    assert modes == {held.adam_w_mode}


BY_TORCH = {"apex": read_apex, "nemo": read_nemo, "nemo-legacy": read_legacy, "dcp": read_torch}


def check(path: Path, fmt: str, held: Held, where: Path) -> None:
    """Hold a result against what the run held."""
    assert_gathered(path, held, where)
    if fmt in BY_TORCH:
        found, step, settings = BY_TORCH[fmt](path)
        assert_same(found, held.tensors, rows=100 if megatron.EMBEDDING in settings else None)
        assert step == held.step
        assert type(step) is int
        assert settings == held.settings


# --- the pairs ------------------------------------------------------------------------------

NEVER = "needs a source with Megatron's arguments, got format "
BARE = "embedding.word.weight: must have its weight, got "

PART = "embed.weight: must have the optimizer's tensors that others have, none, got exp_avg"

REFUSED = {
    ("gqa", "nemo", "megatron"): NEVER + "nemo",
    ("gqa", "nemo-legacy", "megatron"): NEVER + "nemo-legacy",
    ("gqa", "safetensors", "megatron"): NEVER + "safetensors",
    ("gqa", "zarr", "megatron"): NEVER + "zarr",
    ("v1", None, "megatron"): NEVER + "apex",
    ("bf16", None, "megatron"): NEVER + "apex",
    ("bare", None, "megatron"): NEVER + "apex",
    ("nemo", None, "megatron"): NEVER + "nemo",
    ("legacy", None, "megatron"): NEVER + "nemo-legacy",
    ("bare", None, "nemo"): BARE + "none",
    ("bare", None, "nemo-legacy"): BARE + "none",
    ("bare", None, "dcp"): "embedding.word.weight.fp32_param: must be state of a weight, got none",
    ("torch", None, "megatron"): NEVER + "dcp",
    ("torch", None, "nemo"): PART,
    ("torch", None, "nemo-legacy"): PART,
    ("bare", None, "zero1"): BARE + "other slots alone",
    ("bare", None, "zero2"): BARE + "other slots alone",
}

NEVER_TORCH = ("megatron", *NEMO)

PAIRS = [
    *[("gqa", None, b) for b in ALL],
    *[("gqa", a, b) for a in ALL for b in ALL if a != b],
    *[("ties", a, b) for a in ROUNDED for b in ROUNDED if a != b],
    *[("bare", None, b) for b in ALL],
    *[(family, None, b) for family in ("tied", "fp32") for b in ("apex", "nemo", "zero2", "dcp")],
    *[
        (family, None, b)
        for family in ("v1", "bf16")
        for b in ("apex", "nemo", "zero2", "dcp", "megatron")
    ],
    *[
        ("nemo", None, b)
        for b in ("apex", "nemo-legacy", "zero2", "safetensors", "dcp", "megatron")
    ],
    *[("legacy", None, b) for b in ("apex", "nemo", "zero1", "dcp", "megatron")],
    *[("torch", None, b) for b in ALL],
    *[("torch", a, b) for a in ALL if a not in NEVER_TORCH for b in ("dcp", "sharded") if a != b],
]


@pytest.mark.parametrize(("family", "a", "b"), [p for p in PAIRS if p not in REFUSED])
def test_what_the_run_held_is_in_the_result(
    family: str, a: str | None, b: str, sources: Sources, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    held = sources.take(family, a, b, out)
    check(out, b, held, tmp_path / "gathered")
    if (family, b) == ("gqa", "megatron"):  # the original's own files, but for random state
        assert all(
            line.endswith(".rng_state: only in the second")
            for line in megatron.compare_files(out, sources.original(family), ignore_args={"save"})
        )


@pytest.mark.parametrize(("family", "a", "b"), REFUSED)
def test_what_a_target_cannot_hold_is_refused(
    family: str, a: str | None, b: str, sources: Sources, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if a is not None:
        sources.get(family, a)
    with pytest.raises(UsageError, match=re.escape(REFUSED[family, a, b])):
        sources.take(family, a, b, out)
    assert not out.exists()
