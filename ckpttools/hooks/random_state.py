"""Where do this process's random generators stand? Python's, numpy's and torch's, as plain data.

Reading a state draws no number, and setting one checks all of it before the first generator is
touched.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpttools.errors import FormatError, MismatchError


def random_state() -> dict[str, object]:
    """Return the state of the generators of Python, numpy, torch and the current CUDA device."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  # it is the one that training scripts draw from
    state: dict[str, object] = {
        "python": (version, _words(words), gauss),
        "numpy": (str(name), _words(keys), int(position), int(has_gauss), float(cached)),
        "torch": bytes(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stubs lack it
        state["cuda"] = bytes(torch.cuda.get_rng_state().numpy())
    return state


def set_random_state(state: object, where: str) -> tuple[str, ...]:
    """Set the generators; return a remark on each that has no state, or no place here.

    Raises:
        FormatError: it is not what :func:`random_state` returned; nothing was set.
    """
    try:
        python, numpy_state, torch_state, cuda = _parse(state)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: must be a state of random generators, got {error!r}") from None
    try:  # on generators of no importance
        torch.Generator().set_state(torch_state)
        np.random.RandomState().set_state(numpy_state)
        random.Random().setstate(python)  # noqa: S311  # nothing is drawn
    except (IndexError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise MismatchError(
            f"{where}: this torch, numpy or Python must know it, got {error}"
        ) from None
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)  # noqa: NPY002  # as above
    random.setstate(python)
    if not torch.cuda.is_available():
        return () if cuda is None else ("rng: the checkpoint's CUDA generator has no place here",)
    if cuda is None:
        return ("rng: the checkpoint has no CUDA generator, so this run's goes on",)
    torch.cuda.set_rng_state(cuda)
    return ()


def _parse(state: object) -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    if not isinstance(state, Mapping):
        raise TypeError("no table")
    version, words, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    cuda = state.get("cuda")
    return (
        (version, tuple(_unpack(words)), gauss),
        (name, np.array(_unpack(keys), np.uint32), position, has_gauss, cached),
        _bytes(state["torch"]),
        None if cuda is None else _bytes(cuda),
    )


def _words(numbers: Any) -> bytes:
    """Return 32-bit numbers as little-endian bytes."""
    packed = array("I", [int(number) for number in numbers])
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(data: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(data, "<u4")]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
