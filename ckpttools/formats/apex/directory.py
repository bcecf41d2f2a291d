"""Which files are the optimizer's, and which are the model's? By their content.

Apex gives no file a name: users call ``torch.save`` themselves. A path may be one file, or a
directory with one ``v2`` file, one gathered ``v1`` file, or a ``v1`` file of each rank; the
model's weights may lie beside them as ``model.pt`` or ``model.safetensors``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpttools.errors import FormatError, StorageError
from ckpttools.formats.apex.saved import Kind, kind_of
from ckpttools.formats.apex.sidecar import FORMAT, SIDECAR
from ckpttools.storage.torchzip import TorchFile, read_torch_file

OPTIMIZER_FILE = "optimizer.pt"
MODEL_FILES = ("model.pt", "model.safetensors")

_HEAD_BYTES = 1 << 16
# How the pickle begins, which stands first in the file; what lies between texts are opcodes.
_MARK = re.compile(
    rb"\x80[\x02-\x05].{0,32}?(?:(?:X\x0f\0\0\0|\x8c\x0f)gathered_states|"
    rb"(?:X\x05\0\0\0|\x8c\x05)state.{0,12}?(?:X\x07\0\0\0|\x8c\x07|X\x04\0\0\0|\x8c\x04)(?:buckets|step))",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a checkpoint: those of the optimizer, all of one kind, in natural order."""

    root: Path
    kind: Kind
    files: tuple[TorchFile, ...]
    model: Path | None
    sidecar: Path | None
    others: tuple[str, ...] = ()


def looks_like_apex(path: Path) -> bool:
    """Say whether a file, or one in a directory, begins as Apex's state dicts do."""
    if path.is_dir():
        return _has_sidecar(path) or any(_is_marked(file) for file in _torch_files(path))
    return path.is_file() and _is_marked(path)


def find_files(path: Path) -> Found:
    """Find the files of a checkpoint.

    Raises:
        FormatError: there are none, or files that don't belong together.
        StorageError: the path can't be read.
    """
    if not path.is_dir():
        torch_file = read_torch_file(path)
        kind = kind_of(torch_file.tree)
        if kind is None:
            raise FormatError(
                f"{path}: must be a state dict of Apex's DistributedFusedAdam, got another file"
            )
        return Found(path.parent, kind, (torch_file,), None, None)
    model = next((path / name for name in MODEL_FILES if (path / name).is_file()), None)
    found: list[tuple[Kind, TorchFile]] = []
    others: list[str] = []
    for file in _torch_files(path):
        opened = None if file == model else _opened(file)
        kind = None if opened is None else kind_of(opened.tree)
        if opened is not None and kind is not None:
            found.append((kind, opened))
        elif file != model:
            others.append(file.name)
    kinds = dict.fromkeys(kind for kind, _ in found)
    files = tuple(torch_file for _, torch_file in found)
    if not found:
        raise FormatError(f"{path}: must hold a state dict of DistributedFusedAdam, got none")
    if len(kinds) > 1 or (len(files) > 1 and "v1" not in kinds):
        listed = ", ".join(f"{torch_file.path.name} ({kind})" for kind, torch_file in found[:4])
        raise FormatError(
            f"{path}: must hold one v2 file, one gathered file, or v1 files of all ranks, got "
            f"{listed}",
            hint="name one of the files, with its weights as --model",
        )
    sidecar = path / SIDECAR if (path / SIDECAR).is_file() else None
    return Found(path, next(iter(kinds)), files, model, sidecar, tuple(others))


def _opened(file: Path) -> TorchFile | None:
    """Read a torch file; None where it is none that can be read and doesn't begin as Apex's."""
    try:
        return read_torch_file(file)
    except FormatError:
        if _is_marked(file):
            raise
        return None


def _has_sidecar(path: Path) -> bool:
    """Say whether a directory has the file that we write; damaged elsewhere it still is one."""
    return FORMAT.encode() in _head(path / SIDECAR) if (path / SIDECAR).is_file() else False


def _torch_files(path: Path) -> Iterator[Path]:
    """Yield the files of a directory that are zip archives, in natural order."""
    for file in sorted(path.iterdir(), key=lambda place: _natural(place.name)):
        if not file.name.startswith(".") and file.is_file() and _head(file, 2) == b"PK":
            yield file


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort ``rank2`` before ``rank10``."""
    parts = re.split(r"([0-9]+)", name)  # every second one is a number
    return [(int(p), "") if i % 2 else (-1, p) for i, p in enumerate(parts)]


def _is_marked(file: Path) -> bool:
    return _MARK.search(_head(file)) is not None


def _head(file: Path, count: int = _HEAD_BYTES) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError as error:
        raise StorageError(f"{file}: can't read it: {error.strerror or error}") from error
