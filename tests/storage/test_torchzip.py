"""Our reader and torch's own loader see the same tensors in the same bytes."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from storage.torch_cases import CASES, OLD, REAL, x

from ckpttools.dtypes import BY_NAME, dtype
from ckpttools.errors import FormatError, StorageError
from ckpttools.storage.inert import Inert, is_global, qualified_name
from ckpttools.storage.torchzip import (
    StorageRef,
    TensorRef,
    TorchFile,
    load_small_payloads,
    new_tensor,
    read_torch_file,
    tensors,
)


def flat(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of what torch loaded, in the order of first mention."""
    found: dict[int, torch.Tensor] = {}
    todo = [tree]
    while todo:
        obj = todo.pop()
        if isinstance(obj, torch.Tensor):
            found.setdefault(id(obj), obj)
        elif isinstance(obj, dict):
            todo.extend(reversed(list(obj.values())))
        elif isinstance(obj, (list, tuple)):
            todo.extend(reversed(obj))
        elif hasattr(obj, "__dict__"):
            todo.append(vars(obj))
    return list(found.values())


def gathered(data: bytes, file: TorchFile, tensor: TensorRef) -> bytes:
    """Return the elements of a view, row-major, by walking its indices one by one."""
    start, _ = file.payload(tensor.storage)
    width = tensor.dtype.itemsize
    result = b""
    for flat_index in range(tensor.numel):
        at, rest = tensor.offset, flat_index
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
            at += rest % size * stride
            rest //= size
        result += data[start + at * width : start + (at + 1) * width]
    return result


def assert_agrees(path: Path, loaded: Any, *, every_byte: bool = True) -> None:
    file, data = read_torch_file(path), path.read_bytes()
    ours, theirs = list(tensors(file.tree)), flat(loaded)
    assert len(ours) == len(theirs)
    storages: dict[int, StorageRef] = {}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype.name == str(other.dtype).removeprefix("torch.")
        assert mine.shape == tuple(other.shape)
        assert mine.strides == other.stride()
        assert mine.offset == other.storage_offset()
        assert mine.numel == other.numel()
        assert mine.is_dense == other.is_contiguous()
        if other.untyped_storage().nbytes():
            assert storages.setdefault(other.data_ptr() - mine.offset * mine.dtype.itemsize,
                                       mine.storage) is mine.storage  # fmt: skip
        expected = bytes(other.detach().contiguous().flatten().view(torch.uint8).numpy())
        if mine.is_dense:
            offset, length = file.extent(mine)
            assert data[offset : offset + length] == expected
        elif every_byte:
            assert gathered(data, file, mine) == expected


@pytest.mark.parametrize("label", CASES)
def test_reader_agrees_with_torch_on_every_tensor(label: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    torch.save(CASES[label](), path)
    assert_agrees(path, torch.load(path, weights_only=False))


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_reader_agrees_with_torch_on_files_of_older_torch(path: Path) -> None:
    # Written by the torch that the name tells; 1.6.0 was the first to write zip files.
    assert_agrees(path, torch.load(path, weights_only=True))
    assert len(OLD) == 2


class _Anything:
    """Stands in for the classes of Megatron, which is not installed here."""

    def __init__(self, *args: object) -> None:
        self.args = args


class _Pickle:
    """A pickle module that finds what exists and stands in for the rest."""

    @staticmethod
    def load(file: io.BytesIO, **_: object) -> object:
        return _Pickle.Unpickler(file).load()

    import pickle as _pickle

    class Unpickler(_pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return _Anything if module.startswith("megatron") else super().find_class(module, name)


@pytest.mark.skipif(not REAL, reason="no Megatron fixtures in fixtures/megatron")
def test_reader_agrees_with_torch_on_every_real_file() -> None:
    for path in REAL:
        loaded = torch.load(path, pickle_module=_Pickle, weights_only=False)
        assert_agrees(path, loaded)


def test_file_inside_another_is_read_at_its_place(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"w": x, "h": x[1:, 2:]}, inner)
    path = tmp_path / "outer.bin"
    path.write_bytes(b"q" * 77 + inner.getvalue() + b"r" * 5)
    file = read_torch_file(path, window=(77, len(inner.getvalue())))
    first, second = tensors(file.tree)
    offset, length = file.extent(first)
    assert path.read_bytes()[offset : offset + length] == x.numpy().tobytes()
    load_small_payloads(file, file.tree)
    assert second.storage.payload == x.numpy().tobytes()
    with pytest.raises(FormatError, match="outer.bin: must be a zip archive"):
        read_torch_file(path)
    with pytest.raises(FormatError, match="part must lie in .* bytes, got 9999999 at 77"):
        read_torch_file(path, window=(77, 9999999))


def test_missing_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone.pt: must be readable, got No such file"):
        read_torch_file(tmp_path / "gone.pt")


def test_strided_view_has_no_single_extent(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(x.t(), path)
    file = read_torch_file(path)
    with pytest.raises(FormatError, match="tensor must be dense to be one extent, got shape .7, 5"):
        file.extent(next(tensors(file.tree)))
    with pytest.raises(FormatError, match="storage must be of this file, got StorageRef"):
        file.payload(StorageRef(dtype("float32"), 35, key="0"))


def test_small_payloads_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "rng.pt"
    torch.save({"rng": torch.arange(5056).to(torch.uint8), "big": x}, path)
    file = read_torch_file(path)
    assert isinstance(file.tree, dict)
    load_small_payloads(file, file.tree["rng"])
    assert file.tree["rng"].storage.payload == bytes(i % 256 for i in range(5056))
    assert file.tree["big"].storage.payload is None
    with pytest.raises(FormatError, match="storage 1 must have at most 100 bytes, got 140"):
        load_small_payloads(file, file.tree["big"], limit_bytes=100)
    offset, _ = file.extent(file.tree["big"])
    data = bytearray(path.read_bytes())
    data[offset + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="rng.pt: data/1: CRC-32 must be 0x.*, got 0x"):
        load_small_payloads(file, file.tree)


def test_parameter_is_one_tensor_with_its_making_remembered(tmp_path: Path) -> None:
    path = tmp_path / "p.pt"
    parameter = torch.nn.Parameter(x)
    parameter.note = "n"  # type: ignore[attr-defined]
    torch.save([torch.nn.Parameter(x, requires_grad=False), parameter], path)
    plain, noted = tensors(read_torch_file(path).tree)
    for tensor, name in ((plain, "_rebuild_parameter"), (noted, "_rebuild_parameter_with_state")):
        assert tensor.parameter is not None
        assert is_global(tensor.parameter[0], "torch._utils", name)
    assert plain.parameter is not None
    assert noted.parameter is not None
    assert plain.parameter[1][0] is False
    assert noted.parameter[1][2] == {"note": "n"}


def test_other_tensor_kinds_stay_descriptions_with_their_storages(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    torch.save(torch.eye(3).to_sparse(), path)
    tree = read_torch_file(path).tree
    assert isinstance(tree, Inert)
    assert qualified_name(tree) == "torch._utils._rebuild_sparse_tensor"
    assert [tensor.shape for tensor in tensors(tree)] == [(2, 3), (3,)]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (2, 1, 5), (0, 0)])
@pytest.mark.parametrize("name", BY_NAME)
def test_new_tensors_are_dense_as_torch_has_them(name: str, shape: tuple[int, ...]) -> None:
    mine = new_tensor(dtype(name), shape)
    other = torch.empty(shape, dtype=getattr(torch, name))
    assert (mine.dtype.name, mine.shape, mine.strides) == (name, shape, other.stride())
    assert mine.is_dense
    assert mine.numel == math.prod(shape)
    assert mine.storage.length_bytes == other.untyped_storage().nbytes()


@pytest.mark.parametrize("size", range(4))
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 1), (1, 2), (0, 1), (4, 2)])
def test_dense_means_what_torch_calls_contiguous(size: int, strides: tuple[int, int]) -> None:
    other = torch.empty(99).as_strided((size, 2), strides)
    mine = TensorRef(StorageRef(dtype("float32"), 99), 0, (size, 2), strides)
    assert mine.is_dense == other.is_contiguous()
