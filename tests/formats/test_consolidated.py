"""The consolidated form must hold what the live run held, in files that other tools read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpttools import api
from ckpttools.api import Target
from ckpttools.dtypes import dtype
from ckpttools.errors import CkptError, FormatError, UsageError
from ckpttools.formats.consolidated import write
from ckpttools.formats.consolidated.read import check_directory
from ckpttools.formats.consolidated.state import parse, plain
from ckpttools.formats.consolidated.write import key_of, lay_out_directory
from ckpttools.layout.box import Box
from ckpttools.manifest import MASTER, WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec
from ckpttools.storage.sealed_json import serialize, sha256

CASES = oracle.cases()
SMALL = oracle.case("gqa_tp2_pp2_dp1")
SLOTS = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fixture's consolidated form; not to be changed."""
    path = tmp_path_factory.mktemp("gathered") / "out"
    api.gather(SMALL.directory, path)
    return path


@pytest.fixture
def copy(gathered: Path, tmp_path: Path) -> Path:
    """A consolidated directory that may be changed."""
    return Path(shutil.copytree(gathered, tmp_path / "copy"))


def state_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "state.json").read_text())
    return document


def change_state(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``state.json`` and sign it anew, as a forger would."""
    document = state_of(path)
    change(document)
    (path / "state.json").write_bytes(serialize(document))


# --- content -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gathering_a_fixture_gives_its_truth_bit_for_bit(case: oracle.Case, tmp_path: Path) -> None:
    api.gather(case.directory, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    slots = load_file(tmp_path / "out" / "optimizer.safetensors")
    found = {f"model/{name}": tensor for name, tensor in weights.items()}
    for truth, slot in SLOTS.items():
        for name in weights:
            found[f"{truth}/{name}"] = slots.pop(f"state.{name}.{slot}")
    assert slots == {}
    vocab_size = case.model["vocab_size"]
    # An older writer's arguments may not tell the vocabulary's size: then padding is content.
    stored = weights[oracle.EMBEDDING].shape[0]
    assert stored in (vocab_size, case.padded_vocab)
    expected = case.truth_tensors()
    if stored == vocab_size:
        expected = oracle.logical_rows(expected, vocab_size)
    assert oracle.tensor_differences(found, expected) == []


def test_a_vocabulary_of_named_size_loses_its_padding(tmp_path: Path) -> None:
    options = api.ReadOptions(vocab_size=100)
    api.gather(SMALL.directory, tmp_path / "out", options=options)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_slice(oracle.EMBEDDING).get_shape() == [100, 32]
        assert file.metadata() == {"format": "pt"}


def test_all_checkpoints_of_a_family_have_one_consolidated_content(tmp_path: Path) -> None:
    options = api.ReadOptions(vocab_size=100)
    paths = []
    for case in oracle.cases("gqa"):
        paths.append(tmp_path / case.name)
        api.gather(case.directory, paths[-1], options=options)
    assert len(paths) == 8
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert len({(path / name).read_bytes() for path in paths}) == 1, name


def test_dtypes_are_those_of_the_source_and_masters_are_fp32(gathered: Path) -> None:
    weights = load_file(gathered / "model.safetensors")
    slots = load_file(gathered / "optimizer.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert {t.dtype for t in slots.values()} == {torch.float32}
    assert len(slots) == 3 * len(weights)


def test_state_tells_names_groups_step_and_what_was_not_carried(gathered: Path) -> None:
    state = state_of(gathered)
    assert (state["format"], state["format_version"]) == ("ckpttools-consolidated", 1)
    assert state["source"] == {
        "format": "megatron",
        "topology": {"tp": 2, "pp": 2, "dp": 1, "cp": 1},
    }
    assert (state["iteration"], state["step"]) == (3, 3)
    weights = load_file(gathered / "model.safetensors")
    assert [g["settings"]["wd_mult"] for g in state["param_groups"]] == [1.0, 0.0]
    assert [g["settings"]["betas"] for g in state["param_groups"]] == [[0.9, 0.95]] * 2
    members = [name for g in state["param_groups"] for name in g["params"]]
    assert sorted(members) == sorted(weights)
    assert set(state["param_groups"][1]["params"]) == {n for n in weights if weights[n].ndim == 1}
    entry = state["tensors"]["state.output_layer.weight.exp_avg"]
    assert entry["name"] == "output_layer.weight"
    assert entry["slot"] == "exp_avg"
    assert entry["file"] == "optimizer.safetensors"
    assert any(line.startswith("rng_state: ") for line in state["not_carried"])
    args = json.loads((gathered / "objects" / "args.json").read_text())
    assert args["num_layers"] == 2
    lost = [line for line in state["not_carried"] if line.startswith("args.")]
    assert lost
    assert not {line[5:].split(":")[0] for line in lost} & set(args)
    assert not any(b"\x80\x04" in path.read_bytes()[:2] for path in gathered.rglob("*.json"))


# --- round trip ----------------------------------------------------------------------------------


def test_the_form_is_read_back_and_gathered_to_itself(gathered: Path, tmp_path: Path) -> None:
    opened = api.open_checkpoint(gathered)
    assert opened.format.name == "safetensors"
    assert api.verify(gathered, against=SMALL.directory).ok
    assert api.diff(gathered, SMALL.directory).same
    assert api.digest(gathered)[0] == api.digest(SMALL.directory)[0]
    api.gather(gathered, tmp_path / "again")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (gathered / name).read_bytes()
    again, first = state_of(tmp_path / "again"), state_of(gathered)
    for key in ("iteration", "step", "param_groups", "tensors", "headers"):
        assert again[key] == first[key]


@pytest.mark.parametrize(
    "value",
    [{}, {"a": [1, 2.5, None, True, "ü\ud800"]}, {"a": {"b": [[], {}]}, "c": 10**30, "d": 1e-300}],
)
def test_a_document_survives_its_own_bytes(value: dict[str, object]) -> None:
    document = {"format": "ckpttools-consolidated", "format_version": 1, **value}
    data = serialize(document)
    parsed = parse(data, "f")
    assert {k: v for k, v in parsed.items() if k != "sha256"} == document
    assert serialize(parsed) == data


def test_only_plain_data_is_taken_into_a_document() -> None:
    assert plain({"a": (1, (2.5, None)), "b": [True, "x"]}) == {
        "a": [1, [2.5, None]],
        "b": [True, "x"],
    }
    for value in (float("nan"), float("inf"), {1: 2}, {1, 2}, b"x", object(), [object()]):
        with pytest.raises(TypeError):
            plain(value)


# --- several files -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 5_000, 40_000])
def test_large_forms_are_split_with_an_index_as_others_write_it(
    limit: int, gathered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MAX_FILE_BYTES", limit)
    path = tmp_path / "out"
    api.gather(SMALL.directory, path)
    for stem in ("model", "optimizer"):
        whole = load_file(gathered / f"{stem}.safetensors")
        index = json.loads((path / f"{stem}.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(t.nbytes for t in whole.values())}
        names = sorted(set(index["weight_map"].values()))
        count = len(names)
        assert names == [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert count > 1
        joined = {}
        for name in names:
            part = load_file(path / name)
            assert {key: index["weight_map"][key] for key in part} == dict.fromkeys(part, name)
            assert sum(t.nbytes for t in part.values()) <= limit or len(part) == 1
            joined.update(part)
        assert oracle.tensor_differences(joined, whole) == []
    assert not (path / "model.safetensors").exists()
    assert api.verify(path, against=gathered).ok
    assert check_directory(path) == []


# --- damage --------------------------------------------------------------------------------------


def test_any_changed_byte_of_a_small_file_is_found(copy: Path) -> None:
    assert check_directory(copy) == []
    for name in ("state.json", "objects/args.json"):
        data = bytearray((copy / name).read_bytes())
        for at in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[at] ^= 1
            (copy / name).write_bytes(changed)
            (problem,) = check_directory(copy)
            assert name.rsplit("/", 1)[-1] in str(problem)
        (copy / name).write_bytes(data)
    assert check_directory(copy) == []


def test_a_changed_header_is_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "other"})
    with pytest.raises(FormatError, match=re.escape(f"{path}: the header must have the SHA-256")):
        api.open_checkpoint(copy)


def test_a_changed_element_is_damage(copy: Path) -> None:
    path = copy / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first element
    path.write_bytes(data)
    result = api.verify(copy)
    assert not result.ok
    (line,) = result.damage
    assert re.fullmatch(r".*: CRC-32C must be [0-9a-f]{8}, got [0-9a-f]{8}", line)


@pytest.mark.parametrize("name", ["model.safetensors", "objects/args.json"])
def test_a_missing_file_is_damage(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert any(name in str(problem) for problem in check_directory(copy))


FIRST = "decoder.final_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "state.json: format must be 'ckpttools-consolidated'"),
        (lambda d: d.update(format_version=2), "state.json: format_version must be 1, got 2"),
        (lambda d: d.update(tensors=[]), "state.json: tensors must be an object, got []"),
        (lambda d: d.pop("headers"), "state.json: headers must be an object, got None"),
        (lambda d: d["headers"].update({"../x": ""}), "headers must lie in the directory, got"),
        (lambda d: d["headers"].update({"/x": ""}), "headers must lie in the directory, got '/x'"),
        (lambda d: d["headers"].update({"a/../../x": ""}), "headers must lie in the directory"),
        (lambda d: d["headers"].update({"": ""}), "headers must lie in the directory, got ''"),
        (lambda d: d["headers"].update({"a\0b": ""}), "headers must lie in the directory, got 'a"),
        (lambda d: d["tensors"].pop(FIRST), f"{FIRST}: must be in state.json, got no entry"),
        (lambda d: d["tensors"].update(x={}), "x: must be in a safetensors file, got none"),
        (
            lambda d: d["tensors"][FIRST].update(file="other"),
            f"{FIRST}: must be in state.json, got no entry",
        ),
        (
            lambda d: d["tensors"][FIRST].update(shape=[8, 4]),
            f"{FIRST}: must be bfloat16 [8, 4] as in state.json, got bfloat16 [32]",
        ),
        (lambda d: d["tensors"][FIRST].update(crc32c=None), "must be eight hexadecimal digits"),
        (lambda d: d["tensors"][FIRST].update(crc32c="-1"), "must be eight hexadecimal digits"),
        (
            lambda d: d["tensors"][FIRST].update(name=None),
            f"{FIRST}: must have a name and a slot, got None and 'weight'",
        ),
        (
            lambda d: d["tensors"][FIRST].update(name="output_layer.weight"),
            "output_layer.weight (weight): a name and slot must be there once, got it twice",
        ),
    ],
)
def test_a_forged_state_is_refused(
    copy: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change_state(copy, change)
    with pytest.raises(CkptError, match=re.escape(message)):
        api.open_checkpoint(copy, format="safetensors")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b'{"format": 1}'])
def test_a_state_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="^f: "):
        parse(data, "f")


def test_a_state_with_a_space_more_is_not_what_was_written() -> None:
    data = serialize({"format": "ckpttools-consolidated", "format_version": 1})
    assert parse(data, "f")
    for other in (data + b" ", data.replace(b'"format"', b' "format"', 1)):
        with pytest.raises(FormatError, match="f: must have the SHA-256 that it states"):
            parse(other, "f")


def test_a_newer_version_has_a_hint() -> None:
    data = serialize({"format": "ckpttools-consolidated", "format_version": 7})
    with pytest.raises(FormatError) as caught:
        parse(data, "f")
    assert caught.value.hint == "a newer ckpttools wrote it"


# --- laying out ----------------------------------------------------------------------------------


def manifest(*specs: TensorSpec) -> Manifest:
    chunks = tuple(
        Chunk(i, Box.whole(s.shape), (Part(Extent(0, 0, s.size_bytes), s.dtype),))
        for i, s in enumerate(specs)
    )
    return Manifest("test", "", (File("f", 1 << 20),), specs, chunks)


def test_wide_elements_come_first_so_that_every_tensor_is_aligned() -> None:
    sizes = (("uint8", 3), ("float64", 5), ("bfloat16", 7), ("float32", 0), ("float32", 1))
    specs = [TensorSpec(f"t{i}", WEIGHT, dtype(kind), (n,)) for i, (kind, n) in enumerate(sizes)]
    draft = lay_out_directory(manifest(*specs), Target(), "root")
    for chunk in draft.manifest.chunks:
        (part,) = chunk.parts
        assert part.extent.offset % part.dtype.itemsize == 0
    assert draft.manifest.tensors == tuple(specs)


def test_two_tensors_of_one_key_are_refused() -> None:
    specs = [
        TensorSpec("a", "exp_avg", dtype("float32"), (2,)),
        TensorSpec("state.a.exp_avg", WEIGHT, dtype("float32"), (2,)),
    ]
    assert key_of(specs[0]) == key_of(specs[1])
    message = (
        "--to safetensors: keys must be unique, got state.a.exp_avg for a (exp_avg) and "
        "state.a.exp_avg (weight)"
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        lay_out_directory(manifest(*specs), Target(), "root")


def test_a_topology_is_refused() -> None:
    message = "--to safetensors: whole tensors have no topology, got sizes for one"
    with pytest.raises(UsageError, match=re.escape(message)):
        lay_out_directory(manifest(), Target(tp=2), "root")


def test_sha256_is_the_known_one() -> None:
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
