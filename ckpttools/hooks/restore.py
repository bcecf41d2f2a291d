"""How does a checkpoint of any format and layout come into a live optimizer? By name and place.

1. Every rank opens the checkpoint; data-parallel rank zero also holds its formula against the
   evidence in its files.
2. Everything that this run needs must be there, in the same dtype and shape: checked for every
   tensor before the first byte is read.
3. A rank reads the byte ranges of its own shard, weights included, and the ranks gather the
   weights: what is read is 1/DP of the model part, whatever cut the files.
4. Nothing is taken over before every rank has read (`ckpttools.hooks.landing`), so an error on
   any rank leaves all of them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpttools import api
from ckpttools.errors import MismatchError, system_errors
from ckpttools.formats import ReadOptions
from ckpttools.hooks.landing import Landing
from ckpttools.hooks.reading import MOST_READ, SCRATCH_BYTES
from ckpttools.hooks.regions import tiles_of
from ckpttools.hooks.saved_settings import SavedSettings
from ckpttools.hooks.together import together
from ckpttools.layout.megatron import VARIANTS
from ckpttools.layout.sharded import ShardedParam
from ckpttools.layout.slots import REMAINDER_SLOT, SCALE_SUFFIX
from ckpttools.manifest import MASTER, WEIGHT, Manifest
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.optimizer.describe import dtype_name, sharded_param
from ckpttools.plan import Pieces, pieces
from ckpttools.storage.local import FilePool
from ckpttools.tiles import read_tile


@dataclass(frozen=True, slots=True)
class Restored:
    """What was taken from a checkpoint, and what in it was not.

    ``objects`` are the checkpoint's own objects (iteration, scheduler, arguments, the state that
    a foreign format needs to be written again): hand them to ``save_sharded``. :attr:`step` and
    :attr:`extra` are what a script asks of them.
    """

    path: str
    format: str
    tensors: int
    read_bytes: int
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    objects: Mapping[str, object] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step at which it was saved; None where the checkpoint doesn't tell."""
        step = self.objects.get("iteration")
        return step if type(step) is int else None

    @property
    def extra(self) -> Mapping[str, Any] | None:
        """What the script gave to ``save(extra=)``; None where it gave nothing."""
        extra = self.objects.get("extra")
        return extra if isinstance(extra, Mapping) else None


@system_errors()
def load_sharded(
    path: str | Path,
    optimizer: ShardedOptimizer,
    *,
    format: str | None = None,  # noqa: A002  # the name of the CLI's option
    options: ReadOptions | None = None,
    weights_only: bool = False,
    strict: bool = True,
    cross_check: bool = True,
) -> Restored:
    """Load a checkpoint of any format that is read here, whatever topology wrote it.

    A collective call of all ranks. Weights, masters, moments, step counts and the settings of
    parameter groups are taken; parameters are whole on every rank afterwards. ``weights_only``
    takes weights and makes the masters anew of them. ``strict`` refuses a checkpoint that holds
    parameters this run hasn't.

    Raises:
        CkptError: a tensor is missing, or its shape or dtype is another, or the files are damaged;
            raised on every rank, and nothing was changed.
    """
    optimizer.finish_param_sync()
    opened: list[api.Opened] = []
    loaders: list[_Loader] = []
    first = optimizer.dp.rank == 0

    def open_first() -> tuple[str, list[str]]:
        if first:
            opened.append(
                api.open_checkpoint(path, format=format, options=options, cross_check=cross_check)
            )
        names = [one.sharding.tied_to or one.name for one in optimizer.managed]
        return opened[0].layouts[0] if opened else "", names

    told = together(optimizer, open_first).values()
    everywhere = frozenset(name for _, names in told for name in names)

    def prepare() -> bool:
        if not first:  # the layout that the evidence allows was found by the first rank
            variant = _variant(layout for layout, _ in told)
            known = replace(options or ReadOptions(), layout=variant)
            opened.append(
                api.open_checkpoint(path, format=format, options=known, cross_check=False)
            )
        loader = _Loader(opened[0].manifest, optimizer, weights_only=weights_only)
        loader.check(everywhere if strict else None)
        loaders.append(loader)
        loader.read()
        return True

    try:
        together(optimizer, prepare)
    except BaseException:
        for loader in loaders:
            loader.undo()
        raise
    loader = loaders[0]
    loader.install()
    optimizer.start_param_sync()
    optimizer.finish_param_sync()
    if weights_only:
        optimizer.reload_model_params()
    return Restored(
        path=str(path),
        format=opened[0].format.name,
        tensors=len(loader.wanted),
        read_bytes=loader.read_bytes,
        unused=loader.unused(),
        notes=(*opened[0].notes, *loader.notes()),
        objects=opened[0].manifest.objects,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Want:
    """Elements ``start`` to ``stop`` of a flattened local tensor of one slot, and who takes them.

    They are read as ``dtype``; ``take`` gets them 1-D, on the host. ``memory`` is where ``take``
    puts them as they are; None where it does more.
    """

    param: ShardedParam
    slot: str
    start: int
    stop: int
    dtype: torch.dtype
    take: Callable[[Tensor], object]
    memory: Tensor | None = None


class _Loader:
    """Reads this rank's part of a checkpoint."""

    def __init__(
        self, manifest: Manifest, optimizer: ShardedOptimizer, *, weights_only: bool
    ) -> None:
        self.manifest = manifest
        self.optimizer = optimizer
        self.weights_only = weights_only
        self.read_bytes = 0
        self._index = manifest.index()
        self._landing = Landing()
        self._read_to: list[Tensor] = []
        self._params = {
            managed.name: sharded_param(managed, optimizer.tp.size, optimizer.trains)
            for managed in optimizer.managed
        }
        self._kept = {
            dtype_name(buffer.param_dtype): optimizer.shard_of(bucket).logical_slots()
            for buffer in optimizer.buffers
            for bucket in buffer.buckets
        }
        canonical = {name: param.canonical for name, param in self._params.items()}
        self.settings = SavedSettings(manifest, optimizer, canonical)
        self.wanted = list(self._wants())

    def check(self, known: Collection[str] | None) -> None:
        """Check that everything is there as this run needs it, and groups and steps fit.

        ``known`` are the parameters of all stages, beside which there must be none; None: there
        may be others.
        """
        for param in self._params.values():
            self._check(param, WEIGHT, param.dtype)
            if param.trainable and not self.weights_only:
                for slot in self._kept.get(param.dtype, ()):
                    self._check(param, slot, "float32")
        names = dict.fromkeys(spec.name for spec in self.manifest.tensors)
        if known is not None and (extra := [name for name in names if name not in known]):
            raise MismatchError(
                f"{self.manifest.root}: {extra[0]}: must be a parameter of this run, got none "
                f"({len(extra)} such tensors)",
                hint="give strict=False to leave them",
            )
        if not self.weights_only:
            self.settings.check()

    def read(self) -> None:
        """Read every wanted range into memory that can be given up."""
        chunks = self.manifest.by_tensor()
        columns: dict[int, Pieces] = {}
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        with FilePool(self.manifest.root, [f.path for f in self.manifest.files]) as pool:
            for want in self.wanted:
                i = self._index[want.param.canonical, want.slot]
                if i not in columns:
                    primaries = [c for c in chunks[i] if c.replica_id == 0]
                    columns[i] = pieces(primaries, ndim=len(self.manifest.tensors[i].shape))
                flat = self._landing.place(want.stop - want.start, want.dtype, want.memory)
                self._read_to.append(flat)
                self._read(pool, columns[i], want, flat, scratch)
            self.read_bytes = pool.read_bytes

    def undo(self) -> None:
        """Leave the run as it was before :meth:`read`."""
        self._landing.undo()

    def install(self) -> None:
        """Take everything over."""
        with torch.no_grad():
            for want, flat in zip(self.wanted, self._read_to, strict=True):
                if flat is not want.memory:
                    want.take(flat)
        self._read_to.clear()
        if self.weights_only:
            return
        self.optimizer.steps.update(self.settings.steps())
        for live, settings in self.settings.groups():
            live.update(settings)
        scaler = self.manifest.objects.get("grad_scaler")
        if self.optimizer.scaler is not None and isinstance(scaler, Mapping) and scaler:
            self.optimizer.scaler.load_state_dict(scaler)

    def unused(self) -> tuple[str, ...]:
        """Return what of this rank's model part no rank takes, by tensor."""
        taken = {
            (param.canonical, slot)
            for param in self._params.values()
            for slot in (WEIGHT, *(self._state_slots(param)))
        }
        names = {param.canonical for param in self._params.values()}
        return tuple(
            str(spec)
            for spec in self.manifest.tensors
            if spec.key not in taken and spec.name in names
        )

    def _state_slots(self, param: ShardedParam) -> tuple[str, ...]:
        """Return the slots of state that are taken; the master of an fp32 weight is the weight."""
        if self.weights_only or not param.trainable:
            return ()
        master = (MASTER,) if param.dtype == "float32" else ()
        return (*master, *self._kept.get(param.dtype, ()))

    def notes(self) -> tuple[str, ...]:
        """Return a remark on each thing that is not taken, or not told by the checkpoint."""
        rows = [line for param in self._params.values() if (line := self._padding_note(param))]
        if self.weights_only:
            return tuple(rows)
        rows += self._form_notes()
        groups = self.settings.groups()
        if not groups:
            rows.append(
                "parameter groups: the checkpoint names no members, so this run's settings stay"
            )
        if odd := self.settings.without_a_place():
            rows.append(f"parameter groups: this run's have no place for {', '.join(odd)}")
        scaler = self.manifest.objects.get("grad_scaler")
        if scaler and self.optimizer.scaler is None:
            rows.append("grad_scaler: this run has no loss scale, so the checkpoint's is not taken")
        if self.optimizer.scaler is not None and not isinstance(scaler, Mapping):
            rows.append("grad_scaler: the checkpoint has none, so this run's loss scale stays")
        return tuple(rows)

    def _form_notes(self) -> Iterator[str]:
        """Say where this run keeps state in a form that isn't the checkpoint's."""
        slots = {slot for shard in self.optimizer.shards for slot in shard.slots()}
        if REMAINDER_SLOT in slots:
            yield "weights are their masters rounded half away from zero, as remainders need them"
        if any(slot.endswith(SCALE_SUFFIX) for slot in slots):
            yield "this run keeps state in 16 bits with scales: what was loaded is rounded to them"

    def _padding_note(self, param: ShardedParam) -> str:
        """Say where rows of vocabulary padding have no place here, or none in the checkpoint."""
        spec = self.manifest.tensors[self._index[param.canonical, WEIGHT]]
        mine, theirs = param.shape[:1], spec.stored_shape[:1]
        if mine == theirs:
            return ""
        return (
            f"{param.canonical}: {theirs[0]} rows with padding in the checkpoint and {mine[0]} "
            f"here: rows of padding that only one side has are left out, or stay zero"
        )

    def _wants(self) -> Iterator[_Want]:
        """List the weights and state that this rank is to hold."""
        optimizer = self.optimizer
        params = self._params
        for managed in optimizer.managed:
            if managed.name not in optimizer.trains:
                flat = managed.param.data.view(-1)
                size = flat.numel()
                yield _Want(params[managed.name], WEIGHT, 0, size, flat.dtype, flat.copy_)
        for piece in optimizer.pieces:
            param, part = params[piece.name], piece.range.param
            weight = piece.slot.param.data.view(-1)[part.start : part.end]
            yield _Want(param, WEIGHT, part.start, part.end, weight.dtype, weight.copy_)
            for slot in () if self.weights_only else piece.logical_slots():
                take = partial(piece.put, slot)
                memory = piece.memory(slot)
                yield _Want(param, slot, part.start, part.end, torch.float32, take, memory)

    def _check(self, mine: ShardedParam, slot: str, kind: str) -> None:
        """Check that a slot is there with the shape and dtype that this run has."""
        key = mine.canonical, slot
        where = f"{self.manifest.root}: {mine.canonical} ({slot})"
        if key not in self._index:
            raise MismatchError(
                f"{where}: must be in the checkpoint, got none",
                hint="give weights_only=True to start with fresh optimizer state",
            )
        spec = self.manifest.tensors[self._index[key]]
        if mine.vocab_rows is not None:
            fits = spec.shape == (mine.vocab_rows, *mine.shape[1:])
        else:
            fits = mine.shape in (spec.shape, spec.stored_shape)
        if not fits:
            raise MismatchError(
                f"{where}: shape must be {mine.shape} as in this run, got {spec.shape}"
                + (f" and {spec.padding_rows} rows of padding" if spec.padding_rows else ""),
                hint="give the true vocabulary as vocab_rows of its Sharding"
                if spec.padding_rows
                else "",
            )
        if spec.dtype.name != kind:
            raise MismatchError(f"{where}: dtype must be {kind} as in this run, got {spec.dtype}")

    def _read(
        self, pool: FilePool, columns: Pieces, want: _Want, flat: Tensor, scratch: memoryview
    ) -> None:
        """Fill ``flat`` with the elements of one range."""
        optimizer = self.optimizer
        for tile, out in tiles_of(
            flat,
            want.param,
            tp=optimizer.tp.rank,
            tp_size=optimizer.tp.size,
            start=want.start,
            stop=want.stop,
            tile_bytes=SCRATCH_BYTES,
        ):
            read_tile(pool, columns, tile, out, scratch, MOST_READ)


def _variant(layouts: Iterable[str]) -> str | None:
    """Return the layout variant that was found; other formats have none to choose."""
    return next((name for name in layouts if name in VARIANTS), None)
