"""Which bytes are which elements? Chunks of whole tensors, and of the fragments of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttools.dtypes import DType, dtype
from ckpttools.errors import FormatError, UsageError
from ckpttools.formats.apex.buckets import MOMENTS, PARAMS, REMAINDERS
from ckpttools.formats.apex.model import (
    Model,
    StoredTensor,
    channels_last_strides,
    stored_tensor,
)
from ckpttools.formats.apex.ranks import Piece, Ranks
from ckpttools.formats.apex.whole import Whole
from ckpttools.layout.box import Box
from ckpttools.layout.flat import FlatRange
from ckpttools.manifest import (
    IDENTITY,
    MASTER,
    REMAINDER,
    WEIGHT,
    Chunk,
    Part,
    Region,
    TensorSpec,
)
from ckpttools.storage.torchzip import TensorRef

_SLOTS = {
    PARAMS: MASTER,
    "exp_avg_shard": "exp_avg",
    "exp_avg_sq_shard": "exp_avg_sq",
}


class Builder:
    """The tensors and chunks so far. The model's weights come first, in its order.

    ``names`` are those of the optimizer's parameters: a weight that is one of them under another
    name is left out.
    """

    def __init__(
        self, model: Model | None, names: Sequence[str], padding: Mapping[str, int]
    ) -> None:
        self.model = model
        self._padding = padding
        self._tensors: list[TensorSpec] = []
        self._chunks: list[Chunk] = []
        self._index: dict[tuple[str, str], int] = {}
        for name, weight in (model.distinct(names) if model else {}).items():
            self.add_stored(name, WEIGHT, weight)

    def content(self) -> tuple[tuple[TensorSpec, ...], tuple[Chunk, ...]]:
        """Return all tensors and chunks."""
        return tuple(self._tensors), tuple(self._chunks)

    def weight(self, name: str, where: str) -> StoredTensor | None:
        """Return the weight of a parameter; None where there is no model.

        Raises:
            FormatError: the model has no such weight.
        """
        if self.model is None:
            return None
        found = self.model.weights.get(name)
        if found is None:
            raise FormatError(
                f"{self.model.path}: must have the weight {name} of {where}, got none"
            )
        return found

    def add_stored(self, name: str, slot: str, tensor: StoredTensor) -> None:
        """Add a tensor that is stored whole."""
        self.add(name, slot, tensor.dtype, tensor.shape)
        self.add_chunk(name, slot, Box.whole(tensor.shape), (tensor.part(),))

    def add(self, name: str, slot: str, kind: DType, shape: tuple[int, ...]) -> None:
        """Add a tensor without its chunks; ``shape`` is with padding rows."""
        rows = self._padding.get(name, 0)
        if rows and (not shape or rows > shape[0]):
            raise FormatError(
                f"{name}: must have its {rows} rows of padding, got shape {list(shape)}"
            )
        true = (shape[0] - rows, *shape[1:]) if rows else shape
        self._index[name, slot] = len(self._tensors)
        self._tensors.append(TensorSpec(name, slot, kind, true, rows))

    def add_chunk(
        self,
        name: str,
        slot: str,
        region: Region,
        parts: tuple[Part, ...],
        codec: str = IDENTITY,
        copy: int = 0,
    ) -> None:
        """Add a stored piece of a tensor."""
        self._chunks.append(Chunk(self._index[name, slot], region, parts, codec, copy))


def add_whole(builder: Builder, whole: Whole, names: Sequence[str]) -> None:
    """Add the tensors of a ``v2`` file.

    Raises:
        FormatError: a weight of the model has another shape.
    """
    for index, name in enumerate(names):
        weight = builder.weight(name, whole.saved.where)
        if weight is not None and not whole.fits(index, weight):
            raise FormatError(
                f"{whole.saved.where}: parameter {index} must have the shape {list(weight.shape)} "
                f"of the weight {name}, got {list(whole.params[index][MASTER].shape)}",
                hint="are these the names of the run that saved it?",
            )
        for slot, tensor in whole.params[index].items():
            builder.add_stored(name, slot, tensor)


def add_ranks(builder: Builder, ranks: Ranks, names: Sequence[str]) -> None:
    """Add the tensors of the ``v1`` states of all ranks.

    Raises:
        UsageError: the model's weights are not given.
        FormatError: they don't fit, or don't tell what the states lack.
    """
    for index, name in enumerate(names):
        weight = builder.weight(name, ranks.saved.where)
        if weight is None or builder.model is None:
            raise UsageError(
                f"{ranks.saved.where}: parameter {index}, {name}: its shape must be known, got a "
                f"v1 state, which has lengths alone",
                hint="give the model's weights with --model FILE",
            )
        if weight.numel != ranks.numel(index):
            raise FormatError(
                f"{ranks.saved.where}: parameter {index} must have the {weight.numel} elements of "
                f"the weight {name}, got {ranks.numel(index)}",
                hint="are these the names of the run that saved it?",
            )
        permuted = _is_permuted(builder.model, name, weight)
        _add_fragments(builder, ranks, index, name, weight, permuted=permuted)


def _is_permuted(model: Model, name: str, weight: StoredTensor) -> bool:
    """Say whether the flat order of a parameter is N, H, W, C.

    Raises:
        UsageError: the model's file can't tell.
        FormatError: its strides are of neither order.
    """
    if not weight.is_dense and not weight.is_channels_last:
        raise FormatError(
            f"{model.path}: {name}: must be contiguous or channels-last, got strides "
            f"{list(weight.strides)} for shape {list(weight.shape)}"
        )
    # A single channel, or a single place: then both orders are one, and it doesn't matter.
    if len(weight.shape) == 4 and not model.shows_strides and not weight.is_channels_last:
        raise UsageError(
            f"{model.path}: {name}: whether it was channels-last must show in its strides, got "
            f"a file without strides",
            hint="give a torch file of the model's state dict as --model",
        )
    return not weight.is_dense


def _add_fragments(
    builder: Builder, ranks: Ranks, index: int, name: str, weight: StoredTensor, *, permuted: bool
) -> None:
    """Add the slots of one parameter, and where each piece of them is."""
    field = _master_field(ranks, index)
    own = ranks.fragments[index]
    shards = ranks.states[0].buckets[own[0].bucket].shards if own else {}
    if field is None:
        builder.add_stored(name, MASTER, weight)
    else:
        kind = dtype("float32") if field == REMAINDERS else shards[field].dtype
        builder.add(name, MASTER, kind, weight.shape)
    for moment in MOMENTS:
        kind = shards[moment].dtype if own else weight.dtype
        builder.add(name, _SLOTS[moment], kind, weight.shape)
    for piece in ranks.pieces(index):
        for region, low in _regions(weight.shape, piece, permuted=permuted):
            for name_of_shard, shard in piece.shards.items():
                part = _shard_part(piece, shard, region, low, weight.shape)
                if name_of_shard == REMAINDERS:
                    parts: tuple[Part, ...] = (weight.part(region), part)
                    builder.add_chunk(name, MASTER, region, parts, REMAINDER, piece.copy)
                else:
                    slot = _SLOTS[name_of_shard]
                    builder.add_chunk(name, slot, region, (part,), copy=piece.copy)


def _master_field(ranks: Ranks, index: int) -> str | None:
    """Return where the master of a parameter is; None where it is the weight itself.

    Raises:
        FormatError: its fragments differ in that.
    """
    buckets = ranks.states[0].buckets
    found = {
        tuple(field for field in (PARAMS, REMAINDERS) if field in buckets[f.bucket].shards)
        for f in ranks.fragments[index]
    }
    fields = found.pop() if found else ()
    if found or len(fields) > 1:
        raise FormatError(
            f"{ranks.saved.where}: parameter {index} must be kept as {PARAMS} or as {REMAINDERS} "
            f"throughout, got fragments that differ"
        )
    return fields[0] if fields else None


def _regions(
    shape: tuple[int, ...], piece: Piece, *, permuted: bool
) -> Iterator[tuple[Region, int]]:
    """Yield the regions of a piece, each with the index in the shard of its first element."""
    start, stop = piece.param_range
    low = piece.shard_range[0]
    if not permuted:
        yield FlatRange(start, stop, Box.whole(shape)), low
        return
    n, c, h, w = shape
    for box in FlatRange(start, stop, Box.whole((n, h, w, c))).boxes():
        offsets, lengths = ((d[0], d[3], d[1], d[2]) for d in (box.offsets, box.lengths))
        yield Box(offsets, lengths), low
        low += box.numel


def _shard_part(
    piece: Piece, shard: TensorRef, region: Region, low: int, shape: tuple[int, ...]
) -> Part:
    """Return the bytes of a region, whose first element has the index ``low`` in the shard."""
    flat = stored_tensor(piece.state.torch_file, shard, piece.state.file)
    offset = flat.offset + low * flat.dtype.itemsize
    if isinstance(region, Box):
        strides = channels_last_strides(shape)
        return StoredTensor(flat.file, offset, flat.dtype, region.lengths, strides).part()
    return StoredTensor(flat.file, offset, flat.dtype, (region.numel,), (1,)).part()
