"""What does this rank write in a save? Files, and for each key the live tensor that fills it.

A plan is made by every rank alike, before anything is written; after that each rank knows its own
bytes, and rank 0 what has to be added when the sums of all are known. How the bytes get to disk
(at once, or from a copy behind the training) is nothing that a plan knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

from ckpttools.errors import LayoutError
from ckpttools.formats.native.files import Entry, RankFile, rank_files
from ckpttools.formats.native.manifest_file import MANIFEST_FILE, StatedFile, manifest_document
from ckpttools.formats.native.objects import carried_documents
from ckpttools.formats.native.places import aliased_digests, chunks_of, tensors_of
from ckpttools.hooks.file_content import Contents, Held, joined_digests
from ckpttools.hooks.run_state import known_layout, run_objects
from ckpttools.hooks.together import rank_of
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.layout.slots import WEIGHT
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.optimizer.describe import dtype_name

Late = Callable[[Mapping[str, int]], bytes]
"""Gets the CRC-32 of each item before, by key; returns an item's bytes."""

Finish = Callable[[Sequence[StatedFile]], Mapping[str, bytes]]
"""Gets what vouches for the files of all ranks; returns small files by path, written last."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """The bytes of one key: the elements of ``tensor`` in row-major order, from byte ``offset``.

    ``tensor`` is the live one, dense; it is read when the plan is carried out. Where bytes depend
    on the sums of items before, ``late`` gives them, and ``tensor`` has their number alone.
    """

    key: str
    offset: int
    tensor: Tensor
    late: Late | None = None

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One file: ``header`` at byte 0, then the items in the order of the file, without a gap.

    Raises:
        LayoutError: they leave a gap, overlap, or don't end with the file.
    """

    path: str
    header: bytes
    size_bytes: int
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        end = len(self.header)
        for item in self.items:
            if item.offset != end:
                raise LayoutError(
                    f"{self.path}: {item.key}: must begin at byte {end}, got {item.offset}"
                )
            end += item.length
        if end != self.size_bytes:
            raise LayoutError(f"{self.path}: must end at byte {self.size_bytes}, got {end}")


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What this rank writes; the same call on every rank gives matching plans.

    ``finish`` is called on rank 0 once all ranks' files are durable; ``contents`` gives the chunks
    that this rank's files hold, with those that are stored in parts.
    """

    files: tuple[FilePlan, ...]
    finish: Finish
    contents: Contents

    @property
    def size_bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(file.size_bytes for file in self.files)


# An optimizer is laid out once, when it is built, so its ranks need to tell each other only once.
# What is kept here was told to all of them in a call that ended well on each.
_DESCRIBED: WeakKeyDictionary[ShardedOptimizer, ShardedLayout] = WeakKeyDictionary()


def plan_native(
    optimizer: ShardedOptimizer,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> SavePlan:
    """Plan the native sharded form of a run with one of our optimizers.

    A collective call of all ranks. ``scheduler`` and ``carry`` are those of ``save_sharded``;
    ``extra`` are further objects of the checkpoint, equal on every rank. Parameter gathers that
    are under way are finished first.

    Raises:
        OptimizerError: ranks don't have the same parameters or steps.
    """
    optimizer.finish_param_sync()
    described = _DESCRIBED.get(optimizer) or optimizer.describe()
    layout = known_layout(described, carry)
    objects = run_objects(optimizer, iteration=iteration, scheduler=scheduler, carry=carry)
    objects.update(extra or {})
    mine = rank_files(layout, rank_of(optimizer))
    files = tuple(_file(file, layout, optimizer) for file in mine)
    _DESCRIBED[optimizer] = described

    def contents() -> Sequence[Held]:
        specs = tensors_of(layout, with_aliases=False)
        chunks = chunks_of(layout, mine, specs, with_aliases=False)
        return [(specs[chunk.tensor], chunk) for chunk in chunks]

    def finish(stated: Sequence[StatedFile]) -> Mapping[str, bytes]:
        carried = carried_documents(objects)
        taken = joined_digests(stated, tensors_of(layout, with_aliases=False))
        digests = None if taken is None else aliased_digests(layout, taken)
        return {MANIFEST_FILE: manifest_document(layout, stated, objects, carried, digests)}

    return SavePlan(files, finish, contents)


def _file(file: RankFile, layout: ShardedLayout, optimizer: ShardedOptimizer) -> FilePlan:
    items = tuple(
        Item(entry.key, entry.offset, local_tensor(entry, layout, optimizer))
        for entry in file.entries
    )
    return FilePlan(file.path, file.header, file.size_bytes, items)


def local_tensor(entry: Entry, layout: ShardedLayout, optimizer: ShardedOptimizer) -> Tensor:
    """Return the live tensor whose elements a key holds, 1-D."""
    if entry.frozen is not None:
        name = layout.params[entry.frozen].name
        managed = next(one for one in optimizer.managed if one.name == name)
        return managed.param.data.reshape(-1)
    piece = entry.piece
    for buffer in optimizer.buffers:
        if piece is not None and (buffer.chunk, dtype_name(buffer.param_dtype)) == (
            piece.vpp,
            piece.dtype,
        ):
            shard = optimizer.shard_of(buffer.buckets[piece.bucket])
            if entry.slot == WEIGHT:
                return shard.bucket.local_params
            return shard.slots()[entry.slot]
    raise KeyError(entry.key)
