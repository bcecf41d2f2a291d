"""Does a layout variant give the numbers that a rank's files show for one buffer?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.errors import CkptError, FormatError, LayoutError
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.ranks import RankFiles
from ckpttools.formats.megatron.saved_buffers import SavedBuffer
from ckpttools.layout.megatron import (
    BufferLayout,
    BufferParam,
    Cuts,
    buffer_layout,
    cuts_from_starts,
    layouts_by_size,
)
from ckpttools.storage.torchzip import TensorRef


@dataclass(frozen=True, slots=True)
class BufferFit:
    """One buffer of one rank under one variant, and what the files show of it.

    ``params`` and ``tensors`` are its weights in module order; ``saved`` is None where there is
    no optimizer state.
    """

    files: RankFiles
    run: Run
    variant: str
    chunk: int
    params: Sequence[BufferParam]
    tensors: Sequence[TensorRef]
    saved: SavedBuffer | None

    def find(self) -> tuple[Cuts, BufferLayout, str]:
        """Return the bucket cuts, the layout, and where the cuts were found.

        Cuts come from the weights' places in their storage where those show, else from the
        arguments (buckets exist in the first chunk of the first stage only), else there are none.
        A cut whose padding the alignment of the next parameter hides shows in the saved lengths
        alone, as do those of files that keep buckets apart; there the one bucket size that gives
        all numbers is taken.

        Raises:
            FormatError: the variant gives other numbers than the files show, or several sizes fit.
            LayoutError: it has no layout for these parameters.
        """
        starts = self._live_starts()
        error: CkptError | None = None
        hidden = False
        for source, cuts in self._options(starts):
            try:
                layout = buffer_layout(
                    self.params,
                    dp=self.run.buffer_ranks,
                    cuts=cuts,
                    variant=self.variant,
                    busbw=self.run.busbw,
                )
                self._check_starts(layout, starts)
                hidden = hidden or starts is not None
                self._check_saved(layout)
            except (LayoutError, FormatError) as failure:
                error = error or failure
                continue
            return cuts, layout, source
        listed = self.saved is not None and self.saved.version == "v1"
        if (hidden or listed) and self._has_buckets:
            fits = self._sizes_that_fit(starts)
            if len(fits) > 1:
                raise FormatError(
                    f"{self.files.where_optimizer}: its buckets must follow from the files, got "
                    f"bucket sizes {_text(tuple(c.size or 0 for c, _ in fits))} that all fit"
                )
            for cuts, layout in fits:
                return cuts, layout, "saved lengths"
        raise error or FormatError(f"{self.files.where}: must fit layout {self.variant}")

    @property
    def _has_buckets(self) -> bool:
        """Whether Megatron can have cut this buffer by size."""
        return self.files.pp == 0 and self.chunk == 0 and not self.run.chained

    def _sizes_that_fit(self, starts: Sequence[int] | None) -> list[tuple[Cuts, BufferLayout]]:
        """Return the bucket sizes that give all the numbers, one for each layout in the file."""
        found: dict[tuple[int, ...], tuple[Cuts, BufferLayout]] = {}
        for cuts, layout in layouts_by_size(
            self.params, dp=self.run.buffer_ranks, variant=self.variant, busbw=self.run.busbw
        ):
            try:
                self._check_starts(layout, starts)
                self._check_saved(layout)
            except FormatError:
                continue
            found.setdefault(layout.file_starts, (cuts, layout))
        return list(found.values())

    def _options(self, starts: Sequence[int] | None) -> list[tuple[str, Cuts]]:
        """Return the cuts to try, best founded first."""
        implied = Cuts(self.run.bucket_size if self._has_buckets else None)
        options: list[tuple[str, Cuts]] = [("args", implied)]
        if implied.size is not None:
            options.append(("none", Cuts()))
        if starts is not None:
            seen = cuts_from_starts(
                self.params,
                starts,
                dp=self.run.buffer_ranks,
                variant=self.variant,
                busbw=self.run.busbw,
            )
            options.insert(0, ("storage offsets", seen))
        return options

    def _live_starts(self) -> list[int] | None:
        """Return the weights' places in the storage that they all share; None if they don't."""
        if len({id(tensor.storage) for tensor in self.tensors}) != 1 or len(self.tensors) < 2:
            return None
        return [tensor.offset for tensor in self.tensors]

    def _check_starts(self, layout: BufferLayout, starts: Sequence[int] | None) -> None:
        """Hold the live offsets and the buffer's length against the weights' storage."""
        if starts is None:
            return
        for param, formula, start in zip(layout.params, layout.starts, starts, strict=True):
            if formula != start:
                raise FormatError(
                    f"{self.files.where}: {param.name} must start at element {formula} of its "
                    f"storage by the buffer formula, got {start}"
                )
        if self.tensors[0].storage.numel != layout.numel:
            raise FormatError(
                f"{self.files.where}: the weights' storage must have {layout.numel} elements by "
                f"the buffer formula, got {self.tensors[0].storage.numel}"
            )

    def _check_saved(self, layout: BufferLayout) -> None:
        """Hold the length of what was saved against the formula."""
        if self.saved is None:
            return
        expected: tuple[int, ...]
        if self.saved.version == "v2":
            expected = (layout.numel_unpadded,)
        elif self.saved.version == "v0":
            expected = (layout.numel,)
        else:
            sizes = zip(layout.bucket_starts, layout.bucket_stops, strict=True)
            expected = tuple(stop - start for start, stop in sizes)
        if self.saved.bucket_numels != expected:
            what = "numel_unpadded" if self.saved.version == "v2" else "bucket sizes"
            raise FormatError(
                f"{self.files.where_optimizer}: {what} must be {_text(expected)} by the buffer "
                f"formula, got {_text(self.saved.bucket_numels)}"
            )


def _text(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
