"""How do I test code that works on layouts, and that a run which stops goes on as if it hadn't?

With the strategies that ckpttools tests itself with (they need hypothesis): small shapes, boxes
in a box and tilings of a box. 0-d, empty and one-element values are drawn like any other.

And with :func:`assert_resume_exact`, which trains, saves, resumes and compares bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from hypothesis import strategies as st

from ckpttools.layout.box import Box

__all__ = ["ResumableRun", "assert_resume_exact", "boxes", "boxes_in", "shapes", "tilings"]


class ResumableRun(Protocol):
    """A training run, at its start or wherever it was taken to."""

    def train(self, start: int, stop: int) -> object:
        """Take the steps ``start`` to ``stop`` (not included)."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return tensors, arrays or bytes by name: all that must be equal in the end."""
        ...

    def save(self, directory: Path, step: int) -> object:
        """Save, durably on return."""
        ...

    def restore(self, directory: Path) -> object:
        """Take over what was saved."""
        ...


def assert_resume_exact(
    make_run: Callable[[], ResumableRun | None],
    directory: str | Path,
    *,
    save_at: int,
    stop_at: int,
    make_resumed: Callable[[], ResumableRun | None] | None = None,
    barrier: Callable[[], object] = lambda: None,
) -> None:
    """Check that a run which is saved and resumed ends bit for bit where one ends that never stops.

    Three runs are made: one goes through and saves at ``save_at`` on its way; one is restored and
    goes on to ``stop_at``; one starts cold at ``save_at``, and must end elsewhere, or the check
    would show nothing. With several ranks every rank calls this. ``make_resumed`` makes the
    second and third run where they are on another topology; where a rank takes no part in a run
    its function returns None there. ``barrier`` is called between save and restore. Ranks that
    take part in both runs compare.

    Raises:
        AssertionError: a value differs; the message names it.
    """
    place = Path(directory)
    expected: dict[str, bytes] | None = None
    through = make_run()
    if through is not None:
        through.train(0, save_at)
        through.save(place, save_at)
        through.train(save_at, stop_at)
        expected = _bits(through.state())
    barrier()
    make_second = make_resumed or make_run
    resumed, cold = make_second(), make_second()
    if resumed is None or cold is None:
        return
    resumed.restore(place)
    resumed.train(save_at, stop_at)
    cold.train(save_at, stop_at)
    if expected is None:
        return
    if _bits(cold.state()) == expected:
        raise AssertionError(
            f"{place}: a cold start must end elsewhere, got the same state: the check shows nothing"
        )
    found = _bits(resumed.state())
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise AssertionError(
                f"{place}: {name}: must be equal bit for bit after a resume at step {save_at}, got "
                f"a difference at step {stop_at}"
            )


def _bits(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of every value, with its dtype and shape."""
    return {name: _bits_of(value) for name, value in state.items()}


def _bits_of(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    kind = f"{value.dtype} {tuple(value.shape)} ".encode()
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return kind + bytes(flat.view(torch.uint8).numpy())
    return kind + np.ascontiguousarray(value).tobytes()


def shapes(*, max_ndim: int = 4, max_length: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the shape of a small tensor; 0-d and empty ones are among them."""
    return st.lists(st.integers(0, max_length), max_size=max_ndim).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, *, max_ndim: int = 4, max_length: int = 5) -> Box:
    """Draw a small box that may lie anywhere, as the buffer of a piece of a tensor does."""
    lengths = draw(shapes(max_ndim=max_ndim, max_length=max_length))
    return Box(tuple(draw(st.integers(0, 7)) for _ in lengths), lengths)


@st.composite
def boxes_in(draw: st.DrawFn, within: Box) -> Box:
    """Draw a box that ``within`` covers; it may be empty, or all of it."""
    offsets, lengths = [], []
    for start, stop in zip(within.offsets, within.stops, strict=True):
        low, high = sorted((draw(st.integers(start, stop)), draw(st.integers(start, stop))))
        offsets.append(low)
        lengths.append(high - low)
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def tilings(draw: st.DrawFn, whole: Box, *, max_cuts: int = 6) -> tuple[Box, ...]:
    """Draw boxes, in any order and some of them empty, that hold each element of a box once."""
    tiles = [whole]
    for _ in range(draw(st.integers(0, max_cuts)) if whole.ndim else 0):
        tile = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, whole.ndim - 1))
        tiles.extend(tile.split(dim, draw(st.integers(0, tile.lengths[dim]))))
    return tuple(draw(st.permutations(tiles)))
