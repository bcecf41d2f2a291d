"""A directory that is damaged, hostile or of another kind is refused in one line; nothing runs."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import CkptError, FormatError, UnsupportedError
from ckpttools.storage.sealed_json import serialize

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
CANARY = "canary"


class Gun:
    """Makes a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return open, (CANARY, "w")


def copy(tmp_path: Path, case: str = "fsdp2_ws2") -> Path:
    return Path(shutil.copytree(FIXTURES / case, tmp_path / "src"))


def edit(root: Path, change: Callable[[Any], object]) -> Path:
    """Change the metadata of a directory."""
    metadata = pickle.loads((root / ".metadata").read_bytes())  # torch's own
    change(metadata)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    return root


def save(root: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.save(state, checkpoint_id=str(root))
    return root


def chunk_of(metadata: Any, key: str, number: int = 0) -> Any:
    return metadata.state_dict_metadata[key].chunks[number]


def move(metadata: Any, path: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = path


def twice(metadata: Any) -> None:
    """List a row of a matrix in a second chunk."""
    key = "model.embed.weight"
    size = torch.Size([1, 16])
    metadata.state_dict_metadata[key].chunks.append(ChunkStorageMetadata(torch.Size([3, 0]), size))
    found = metadata.storage_data[MetadataIndex(key, [0, 0])]
    metadata.storage_data[MetadataIndex(key, [3, 0])] = found


def taller(metadata: Any) -> None:
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([38, 16])


def members(metadata: Any) -> None:
    """Let the members of the group be what stands under another key."""
    keys = ("optim.param_groups.0.params", "optim.param_groups.0.lr")
    first, second = (metadata.storage_data[MetadataIndex(key)] for key in keys)
    metadata.storage_data[MetadataIndex(keys[0])] = second
    metadata.storage_data[MetadataIndex(keys[1])] = first


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "outside": (lambda m: move(m, "../x.distcp"), "a file must be named by a plain relative path"),
    "absolute": (lambda m: move(m, "/etc/passwd"), "a file must be named by a plain relative path"),
    "beyond the end": (
        lambda m: m.storage_data.update(
            {MetadataIndex("model.up.bias", [0]): _StorageInfo("__0_0.distcp", 1 << 40, 1577)}
        ),
        r"__0_0\.distcp at 1099511627776: part must lie in 41222 bytes",
    ),
    "twice": (twice, r"chunks must|got float32|must hold float32"),
    "a row that nobody has": (taller, "exactly once, got a hole"),
    "members that are none": (members, "members must be names of weights"),
    "another dtype": (
        lambda m: setattr(
            m.state_dict_metadata["model.up.bias"].properties, "dtype", torch.float64
        ),
        r"must hold float64 \[12\] as the metadata says, got float32",
    ),
    "another shape": (
        lambda m: setattr(chunk_of(m, "model.up.bias"), "sizes", torch.Size([11])),
        r"must hold float32 \[11\] as the metadata says, got float32 \[12\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_tells_what_is_not_so_is_refused(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    root = edit(copy(tmp_path), change)
    with pytest.raises(FormatError, match=message) as refused:
        api.read_manifest(root)
    assert "\n" not in str(refused.value)
    assert api.verify(root).damage != ()


def test_metadata_that_is_a_call_is_refused_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = copy(tmp_path)
    (root / ".metadata").write_bytes(pickle.dumps(Gun()))
    with pytest.raises(FormatError, match="must hold a Metadata, got 'io.open'"):
        api.read_manifest(root)
    assert not (tmp_path / CANARY).exists()
    pickle.loads((root / ".metadata").read_bytes()).close()  # it is loaded
    assert (tmp_path / CANARY).exists()


def test_a_call_among_what_a_script_saved_is_told_of_not_carried_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"model": {"w": torch.arange(3.0)}, "note": [Gun()], "epoch": 3}
    root = save(tmp_path / "src", state)
    opened = api.open_checkpoint(root)
    assert "not carried: note: it is no plain data" in opened.notes
    api.reshard(root, tmp_path / "out")
    assert not (tmp_path / CANARY).exists()
    keys = set(dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata)
    assert keys == {"model.w", "epoch"}


def test_a_call_in_a_setting_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {
        "state": {"w": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 0.5, "odd": Gun(), "params": ["w"]}],
    }
    root = save(tmp_path / "src", {"model": {"w": torch.arange(3.0)}, "optim": state})
    note = "not carried: optim.param_groups.0.odd: it is no plain data"
    assert note in api.open_checkpoint(root).notes
    api.reshard(root, tmp_path / "out", target=Target(world=1))
    assert not (tmp_path / CANARY).exists()
    (group,) = api.read_manifest(tmp_path / "out").objects["param_groups"]
    assert group.settings == {"lr": 0.5}


def test_large_tensors_beside_model_and_optimizer_are_told_of(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(1 << 19)}, "seed": 5}
    root = save(tmp_path / "src", state)
    opened = api.open_checkpoint(root)
    assert [spec.name for spec in opened.manifest.tensors] == ["w"]
    assert any(note.startswith("not carried: ema.w: a tensor beside") for note in opened.notes)
    small = save(tmp_path / "small", {"model": {"w": torch.ones(2)}, "rng": {"cpu": torch.ones(7)}})
    api.reshard(small, tmp_path / "out")
    rng = {"rng": {"cpu": torch.zeros(7)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(rng, checkpoint_id=str(tmp_path / "out"))
    assert torch.equal(rng["rng"]["cpu"], torch.ones(7))


def test_strides_of_a_stored_tensor_are_followed(tmp_path: Path) -> None:
    turned = torch.arange(35, dtype=torch.float64).reshape(5, 7).t()
    images = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    root = save(tmp_path / "src", {"model": {"turned": turned, "images": images}})
    api.gather(root, tmp_path / "out")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["turned"], turned)
    assert torch.equal(found["images"], images)
    assert any(
        part.strides is not None for chunk in api.read_manifest(root).chunks for part in chunk.parts
    )


def test_a_safetensors_container_must_hold_what_the_metadata_says(tmp_path: Path) -> None:
    root = copy(tmp_path, "fs_safetensors_ws2")
    (root / "__0_0.distcp").unlink()
    save_file({"model.embed.weight": torch.zeros(19, 16)}, root / "__0_0.distcp")
    with pytest.raises(FormatError, match=r"__0_0\.distcp: .*: must hold .*, got no such key"):
        api.read_manifest(root)


def test_a_container_behind_objects_is_refused_by_name(tmp_path: Path) -> None:
    root = copy(tmp_path, "fs_safetensors_ws2")
    file = root / "__0_0.distcp"
    file.write_bytes(b"PK\x03\x04" + bytes(60) + file.read_bytes())

    def later(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            if info.relative_path == file.name:
                info.offset += 64

    with pytest.raises(UnsupportedError, match="must be torch archives, got a safetensors"):
        api.read_manifest(edit(root, later))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ('{"model.up.bias": {"saved_offsets": [0, 0]}}', "must have 2 saved_offsets|must have 1"),
        ('{"model.up.bias": {"saved_offsets": [-1]}}', "saved_offsets"),
        ("[]", "DCP_SHARDING_INFO must be a JSON object"),
        ("{", "DCP_SHARDING_INFO must be a JSON object"),
    ],
)
def test_offsets_of_the_writer_for_hugging_face_must_be_offsets(
    offsets: str, message: str, tmp_path: Path
) -> None:
    place = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"model.up.bias": torch.ones(3)}, place, {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(FormatError, match=message):
        api.read_manifest(tmp_path, format="dcp")


def test_what_stands_beside_our_files_vouches_for_itself(tmp_path: Path) -> None:
    root = tmp_path / "out"
    api.reshard(FIXTURES / "fsdp2_ws2", root, target=Target(world=2))
    place = root / "ckpttools.json"
    sound = place.read_bytes()
    document = json.loads(sound)
    faults = {
        b'"ranks": 2': (b'"ranks": 3', "must have the SHA-256 that it states"),
        b'"ckpttools-dcp"': (b'"ckpttools-abc"', "format must be 'ckpttools-dcp'"),
        b'"format_version": 1': (b'"format_version": 7', "format_version must be 1, got 7"),
    }
    for old, (new, message) in faults.items():
        assert sound.count(old) == 1
        place.write_bytes(sound.replace(old, new))
        _refused(root, message)
    changes: dict[str, tuple[object, str]] = {
        "ranks": (0, "ranks must be a number of at least 1, got 0"),
        "padding": ([["a", "weight", 0]], "padding must be name, slot and rows"),
        "objects": ({"step": 3}, "objects must be iteration, .*, got 'step'"),
        "carried": ([], "objects and carried must be objects"),
        "layout": (7, "layout"),
        "metadata": ("0" * 64, r"must be of the \.metadata beside it"),
    }
    for key, (value, message) in changes.items():
        place.write_bytes(serialize({**document, key: value}))
        _refused(root, message)
    place.write_bytes(serialize({**document, "padding": [["up.bias", "weight", 25]]}))
    _refused(root, r"model\.up\.bias: must have 25 rows of padding, got the shape \[24\]")
    place.write_bytes(sound)
    assert api.verify(root).damage == ()


def _refused(root: Path, message: str) -> None:
    with pytest.raises(CkptError, match=message):
        api.read_manifest(root)
    assert api.verify(root).damage != ()
