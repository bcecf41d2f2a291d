"""The digests that ranks take while they save are those of the content, whoever holds which part.

The judge reads the files that were written, as any reader does, and sums whole tensors; so do the
bytes of the live tensors where a test has them. Every topology trains the same model, so all must
come to the same numbers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
import torch.distributed as dist
from general_models import OPTIMIZERS, build, train
from gloo_ranks import run_ranks
from hooks.test_fused_topologies import fused_of
from hooks.test_general_meshes import cut
from hooks.test_model_parallel import TOPOLOGIES, groups_of, run
from hooks.test_model_parallel import train as train_parts
from hooks.test_save_dcp_sharded import save_scaled
from hooks.test_topologies import build as build_flat
from hooks.test_topologies import groups_by_size
from hooks.test_topologies import train as train_flat
from torch import nn
from training_runs import KINDS, Run

from ckpttools import api
from ckpttools.errors import MismatchError
from ckpttools.formats import Target
from ckpttools.hooks import background, file_content, save_sharded
from ckpttools.hooks.manager import CheckpointManager
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.rules import Split
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, Sharding
from ckpttools.storage.crc import crc32
from ckpttools.storage.safetensors_header import read_header
from ckpttools.storage.sealed_json import serialize

Digests = dict[tuple[str, str], int]
FUSED = ("fp32", "bf16", "remainders")


def taken(place: Path) -> Digests:
    """Return the digests that a save states, once they are those of its content."""
    manifest = api.read_manifest(place)
    stated = manifest.objects["digests"]
    _, found = api.digest(place)
    assert stated == {(one.name, one.slot): one.crc32c for one in found}
    assert len(set(stated.values())) > 2
    return dict(stated)


def step_of(folder: Path) -> Path:
    (place,) = folder.glob("step-*")
    return place


# ---- our optimizers --------------------------------------------------------------------------


def saved_by_runs(folder: str, kind: str, precision: str) -> bool:
    for name, settings in (
        ("now", {"asynchronous": False}),
        ("behind", {}),
        ("torch", {"format": "dcp"}),
        ("torch-now", {"format": "dcp", "asynchronous": False}),
    ):
        one = Run(kind, precision, **settings)
        one.train(1, 3)
        one.save(Path(folder) / name, 2)
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # bf16 under zero2: with remainders
@pytest.mark.parametrize("kind", KINDS)
def test_saves_at_once_and_behind_the_training_in_either_container_take_the_same_digests(
    kind: str, precision: str, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 3):
        folder = tmp_path / str(ranks)
        assert all(run_ranks(saved_by_runs, ranks, str(folder), kind, precision))
        for name in ("now", "behind", "torch", "torch-now"):
            found.append(taken(step_of(folder / name)))
    native, containers = found[0], found[2]
    assert found == [native, native, containers, containers] * 2
    assert native.items() >= containers.items()
    slots = {slot for _, slot in native}
    assert slots == {"weight", "fp32_param", "exp_avg", "exp_avg_sq"}


def saved_fused(folder: str, form: str) -> bool:
    groups = groups_by_size()
    for size in (1, 2, 4):
        if dist.get_rank() < size:
            model = build_flat(torch.float32 if form == "fp32" else torch.bfloat16)
            optimizer = fused_of(model, form, groups[size])
            train_flat(model, optimizer, 0, 2)
            save_sharded(f"{folder}/{size}", optimizer)
        dist.barrier()
    return True


@pytest.mark.parametrize("form", FUSED)
def test_a_fused_optimizers_values_are_digested_decoded_on_any_number_of_ranks(
    form: str, tmp_path: Path
) -> None:
    assert all(run_ranks(saved_fused, 4, str(tmp_path), form))
    first, *others = (taken(tmp_path / str(size)) for size in (1, 2, 4))
    assert others == [first, first]
    assert any(slot == "fp32_param" for _, slot in first)


def test_scaled_moments_are_digested_as_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    assert run_ranks(save_scaled, 2, str(tmp_path)) == [1] * 2
    native, containers = taken(tmp_path / "native"), taken(step_of(tmp_path / "dcp"))
    assert native == containers
    plain = (tmp_path / "native" / "manifest.json").read_text()
    assert "exp_avg_scale" in plain


def saved_topologies(folder: str) -> bool:
    for name, sizes in TOPOLOGIES.items():
        groups = groups_of(sizes)
        if groups is not None:
            optimizer = run(groups, sizes)
            train_parts(optimizer, groups, 0, 2)
            save_sharded(f"{folder}/{name}", optimizer)
            with CheckpointManager(f"{folder}/dcp-{name}", format="dcp") as manager:
                manager.save(2, nn.Module(), optimizer, rng=False, force=True)
            with CheckpointManager(f"{folder}/behind-{name}") as manager:
                manager.save(2, nn.Module(), optimizer, rng=False, force=True)
        dist.barrier()
    return True


def test_tensor_and_pipeline_ranks_come_to_the_digests_of_one_rank(tmp_path: Path) -> None:
    assert all(run_ranks(saved_topologies, 4, str(tmp_path), timeout_s=240))
    first = taken(tmp_path / "tp1")
    for name in TOPOLOGIES:
        assert taken(tmp_path / name) == first
        assert taken(step_of(tmp_path / f"behind-{name}")) == first
        containers = taken(step_of(tmp_path / f"dcp-{name}"))
        assert first.items() >= containers.items()
        assert set(first) - set(containers) == {key for key in first if key[1] == "fp32_param"}


ROWS, TRUE_ROWS = 8, 5


def saved_vocabulary(folder: str) -> int | None:
    """Save a padded embedding, cut over two tensor ranks; return the CRC of its true rows."""
    groups = groups_of((2, 1, 2))
    assert groups is not None
    values = torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3) + 1
    mine = values.chunk(2)[groups.rank("tp")].clone()
    optimizer = DistributedOptimizer(
        [("embedding", nn.Parameter(mine))],
        OptimizerConfig(lr=0.1, clip_grad=0.0),
        groups=groups,
        shardings={
            "embedding": Sharding(split=Split(0, Blocks((1,))), vocab_rows=TRUE_ROWS),
        },
    )
    save_sharded(folder, optimizer)
    return int(google_crc32c.value(values[:TRUE_ROWS].numpy().tobytes()))


def test_the_padding_of_a_vocabulary_is_not_counted(tmp_path: Path) -> None:
    place = tmp_path / "run"
    expected = run_ranks(saved_vocabulary, 4, str(place))
    (spec,) = (one for one in api.read_manifest(place).tensors if one.slot == "weight")
    assert (spec.shape, spec.padding_rows) == ((TRUE_ROWS, 3), ROWS - TRUE_ROWS)
    stated = api.read_manifest(place).objects["digests"]
    assert [stated["embedding", "weight"]] * 4 == expected
    assert api.verify(place).ok


# ---- any optimizer ---------------------------------------------------------------------------

CUTS = ["plain", "fsdp", "tp", "fsdp x tp", "hsdp"]


def saved_by_torchs(folder: str) -> bool:
    for kind in CUTS:
        for form, behind in (("sharded", True), ("sharded", False), ("dcp", True)):
            model = cut(kind)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            train(model, optimizer, 0, 2)
            place = f"{folder}/{kind}-{form}-{behind}"
            with CheckpointManager(place, format=form, asynchronous=behind) as manager:
                manager.save(2, model, optimizer, rng=False, force=True)
    return True


def test_replicas_and_pieces_of_a_mesh_come_to_the_digests_of_the_whole_model(
    tmp_path: Path,
) -> None:
    assert all(run_ranks(saved_by_torchs, 4, str(tmp_path), timeout_s=240))
    model = build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 0, 2)
    expected = {
        (name, slot): int(google_crc32c.value(value.detach().numpy().tobytes()))
        for name, param in model.named_parameters()
        for slot, value in {"weight": param, **optimizer.state[param]}.items()
        if slot != "step"
    }
    places = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(places) == 3 * len(CUTS)
    for place in places:
        assert taken(step_of(place)) == expected, place.name


def test_elements_that_lie_apart_in_memory_are_digested_in_the_order_of_the_tensor(
    tmp_path: Path,
) -> None:
    model = nn.Module()
    model.across = nn.Parameter(torch.arange(35.0).reshape(5, 7).t())
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    model.one = nn.Parameter(torch.tensor(3.5))
    model.wide = nn.Parameter(torch.randn(3, 2, 1, 5).to(torch.bfloat16))
    for name, behind in (("a", True), ("b", False)):
        with CheckpointManager(tmp_path / name, asynchronous=behind) as manager:
            manager.save(1, model, None, rng=False, force=True)
        stated = taken(step_of(tmp_path / name))
        across = model.across.detach().contiguous().numpy().tobytes()
        assert stated["across", "weight"] == google_crc32c.value(across)
        assert stated["nothing", "weight"] == 0


# ---- where they are taken --------------------------------------------------------------------


def test_nothing_is_summed_on_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def told(module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def summed(*args: Any, **named: Any) -> Any:
            seen.append(threading.current_thread().name)
            return real(*args, **named)

        monkeypatch.setattr(module, name, summed)

    told(background, "write_image")
    told(file_content, "extended_crc32c")
    told(file_content, "box_share")
    for form in ("sharded", "dcp"):
        one = Run("zero2", "bf16", format=form)
        one.train(1, 2)
        one.save(tmp_path / form, 1)
    assert len(seen) > 20
    assert set(seen) == {"ckpttools-save-1"}


# ---- what they are good for ------------------------------------------------------------------


def native(folder: Path, **settings: Any) -> Path:
    one = Run("zero1", "bf16", **settings)
    one.train(1, 3)
    with one.manager(folder) as manager:
        manager.save(2, one.model, one.optimizer, force=True)
    return step_of(folder)


def general(folder: Path) -> Path:
    model = build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 0, 2)
    with CheckpointManager(folder) as manager:
        manager.save(2, model, optimizer, force=True)
    return step_of(folder)


def edited(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a ``manifest.json``, and seal it again."""
    path = place / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_bytes(serialize(document))


def flipped(place: Path, key: str) -> None:
    """Flip the lowest bit of a key's first element, and repair every sum of its file."""
    file = next(iter(sorted(place.glob("rank-*.safetensors"))))
    stored = next(one for one in read_header(file).tensors if one.key == key)
    data = bytearray(file.read_bytes())
    data[stored.offset] ^= 1
    file.write_bytes(data)
    crc = f"{crc32(bytes(data[stored.offset : stored.offset + stored.length])):08x}"

    def repair(document: dict[str, Any]) -> None:
        entry = document["files"][file.name]
        if "keys" in entry:
            entry["keys"][key]["crc32"] = crc
        else:
            entry["crc32"][key] = crc

    edited(place, repair)


CASES = [
    (native, "0-bfloat16.0.exp_avg", "exp_avg"),
    (general, "2.weight:exp_avg_sq", "exp_avg_sq"),
]


@pytest.mark.parametrize(("make", "key", "slot"), CASES, ids=["native", "general"])
def test_a_changed_element_is_found_although_every_checksum_was_repaired(
    make: Callable[[Path], Path], key: str, slot: str, tmp_path: Path
) -> None:
    place = make(tmp_path / "run")
    assert api.verify(place).ok
    flipped(place, key)
    (damage,) = api.verify(place).damage
    assert f"({slot}): CRC-32C must be " in damage
    with pytest.raises(MismatchError, match=rf"\({slot}\): content must have the CRC-32C") as error:
        api.reshard(place, tmp_path / "other", target=Target(dp=2))
    assert error.value.hint == "the source is damaged, or was changed since"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_conversion_says_of_how_many_tensors_the_digests_are_equal(tmp_path: Path) -> None:
    place = general(tmp_path / "run")
    count = len(api.read_manifest(place).tensors)
    line = f"content of {count} tensors equals the digests taken when it was saved"
    for to in ("sharded", "zero1", "safetensors", "dcp", "zarr"):
        report = api.reshard(place, tmp_path / to, to=to, cross_check=False)
        assert line in report.proof, to
        assert taken(tmp_path / to).items() >= taken(place).items()
    assert "digests" not in "".join(api.reshard(place, tmp_path / "apex", to="apex").proof)


@pytest.mark.parametrize("make", [native, general], ids=["native", "general"])
def test_what_is_left_of_a_step_has_its_digests_and_no_others(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    place = make(tmp_path / "run")
    whole = taken(place)
    report = api.strip(place, tmp_path / "weights")
    weights = {key: crc for key, crc in whole.items() if key[1] == "weight"}
    assert taken(tmp_path / "weights") == weights
    assert any(line.startswith(f"content of {len(weights)} tensors") for line in report.proof)


def test_a_stripped_step_of_torchs_container_has_the_digests_of_its_weights(
    tmp_path: Path,
) -> None:
    model = build()
    with CheckpointManager(tmp_path, format="dcp", keep_optimizer_last=1) as manager:
        for step in (1, 2):
            manager.save(step, model, OPTIMIZERS["adamw"](model.parameters()), force=True)
    old, new = (taken(manager.directory.path(step)) for step in (1, 2))
    assert old == {key: crc for key, crc in new.items() if key[1] == "weight"}


def test_a_checkpoint_without_digests_is_read_and_claims_nothing(tmp_path: Path) -> None:
    for place in (native(tmp_path / "a"), general(tmp_path / "b")):
        edited(place, lambda document: document.pop("digests"))
        assert "digests" not in api.read_manifest(place).objects
        assert api.verify(place).damage == ()
        report = api.reshard(place, tmp_path / f"{place.parent.name}-again")
        assert "digests" not in "".join(report.proof)
        taken(tmp_path / f"{place.parent.name}-again")


def test_digests_of_other_tensors_than_there_are_are_refused(tmp_path: Path) -> None:
    for place in (native(tmp_path / "a"), general(tmp_path / "b")):
        edited(place, lambda document: document["digests"]["2.weight"].pop("weight"))
        (damage,) = api.verify(place).damage
        assert (
            "digests must be there for each tensor, got a difference: 2.weight (weight)" in damage
        )
        edited(place, lambda document: document["digests"]["2.weight"].update(weight="12 34567"))
        (damage,) = api.verify(place).damage
        assert "digests: 2.weight (weight): must be eight hexadecimal digits" in damage


def test_a_run_hands_no_digests_on_of_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    place = native(tmp_path / "a")
    one = Run("zero1", "bf16")
    carry = api.read_manifest(place).objects
    assert carry["digests"]
    save_sharded(tmp_path / "b", one.optimizer, carry=carry)
    assert taken(tmp_path / "b") != carry["digests"]
