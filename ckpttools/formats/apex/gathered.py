"""Where in a gathered ``v1`` file is the torch file of each rank?

Each is a uint8 tensor, so a zip inside a zip, read where it lies. In July and August of 2022 they
were ``bytes``: those can be read in place where the pickle holds them raw, as protocols from 3 on
do; protocol 2 spells them as text, byte by byte.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ckpttools.errors import FormatError, UnsupportedError
from ckpttools.formats.apex.saved import GATHERED, check_format
from ckpttools.storage.inert import Inert, qualified_name
from ckpttools.storage.torchzip import TensorRef, TorchFile, read_torch_file

_CALLS = ("_codecs.encode", "__builtin__.bytearray", "builtins.bytearray")
_HINT = (
    "load it with torch, make each of the gathered_states a uint8 tensor with torch.frombuffer, "
    "and save it again"
)


def rank_windows(torch_file: TorchFile) -> list[tuple[int, int]]:
    """Return the ``(offset, length)`` in bytes of each rank's torch file.

    Raises:
        FormatError: an entry of the list is no flat run of bytes.
        UnsupportedError: the pickle spells the bytes as text.
    """
    where, tree = str(torch_file.path), torch_file.tree
    states = tree.get(GATHERED) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(states, list) or not states:
        raise FormatError(f"{where}: {GATHERED} must be a list, got {states!r:.60}")
    check_format(tree, "v1-gathered", where)
    pickle: bytes | None = None
    windows = []
    for rank, state in enumerate(states):
        at = f"{where}: {GATHERED}[{rank}]"
        if isinstance(state, TensorRef):
            if state.dtype.name != "uint8" or len(state.shape) != 1:
                raise FormatError(
                    f"{at}: must be a flat tensor of uint8, got {state.dtype} of shape "
                    f"{list(state.shape)}"
                )
            windows.append(torch_file.extent(state))
            continue
        raw = _raw(state)
        if raw is None:
            raise FormatError(f"{at}: must be the bytes of a torch file, got {state!r:.60}")
        pickle = _pickle_of(torch_file) if pickle is None else pickle
        windows.append(_place_in(torch_file, pickle, raw, at))
    _check_apart(windows, where)
    return windows


def read_windows(torch_file: TorchFile) -> list[TorchFile]:
    """Return the torch file of each rank, with offsets in the outer file.

    Raises:
        FormatError: one of them is damaged.
    """
    return [read_torch_file(torch_file.path, window=w) for w in rank_windows(torch_file)]


def _check_apart(windows: list[tuple[int, int]], where: str) -> None:
    """Check that no two ranks share bytes, which a short list may name any number of times."""
    for before, after in pairwise(sorted(windows)):
        if after[0] < sum(before):
            raise FormatError(
                f"{where}: {GATHERED} must be a torch file of its own for each rank, got two that "
                f"share bytes from {after[0]} on"
            )


def _raw(state: object) -> bytes | None:
    """Return bytes that stand in a pickle as themselves; nothing for a call with a text.

    Protocols below 5 make a bytearray of bytes; 2 makes bytes of a text.
    """
    if isinstance(state, (bytes, bytearray)):
        return bytes(state)
    name = qualified_name(state)
    if not isinstance(state, Inert) or name not in _CALLS:
        return None
    inner = state.args[0] if state.args else None
    return _raw(inner) if name in _CALLS[1:] and inner is not None else b""


def _pickle_of(torch_file: TorchFile) -> bytes:
    record = torch_file.records["data.pkl"]
    with Path(torch_file.path).open("rb") as opened:
        opened.seek(record.offset)
        return opened.read(record.length)


def _place_in(torch_file: TorchFile, pickle: bytes, state: bytes, where: str) -> tuple[int, int]:
    """Find equal bytes in the pickle: wherever they stand, they are the state."""
    at = pickle.find(state)
    if at < 0 or not state:
        raise UnsupportedError(
            f"{where}: bytes must stand raw in the pickle, got them spelled as text", hint=_HINT
        )
    return torch_file.records["data.pkl"].offset + at, len(state)
