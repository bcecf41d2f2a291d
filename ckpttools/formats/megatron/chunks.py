"""Which bytes of which rank file hold which elements? Chunks, for reading and for writing.

The order of maps: file bytes → element of the saved buffer → element of the rank's tensor →
boxes of the rank's tensor, one per sub-block → boxes of the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttools.dtypes import DType
from ckpttools.errors import FormatError
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.carry import EXTRA_STATE, is_empty
from ckpttools.formats.megatron.directory import IterationDirectory
from ckpttools.formats.megatron.document import CarriedState
from ckpttools.formats.megatron.neutral import sharded_layout
from ckpttools.formats.megatron.ranks import RankFiles
from ckpttools.formats.megatron.saved_buffers import SavedBuffer
from ckpttools.formats.megatron.state import (
    ChunkId,
    MegatronState,
    ParamInfo,
    RankId,
    optimizer_chunks,
)
from ckpttools.layout.blocks import shard_boxes
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.megatron import BufferLayout, BufferParam
from ckpttools.manifest import MASTER, WEIGHT, Chunk, Extent, File, Manifest, Part, TensorSpec

PER_RANK = ("rng_state", "rerun_state_machine")
"""Entries of a rank file that belong to the rank, not to the model."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's tensor of one slot lies: file, byte of its first element, strides."""

    file: int
    offset: int
    dtype: DType
    strides: tuple[int, ...]


class ManifestBuilder:
    """Collects tensors and chunks; every slot of a parameter is a tensor of its own."""

    def __init__(self) -> None:
        self.files: list[File] = []
        self.tensors: list[TensorSpec] = []
        self.chunks: list[Chunk] = []
        self._index: dict[tuple[str, str], int] = {}
        self._replicas: dict[tuple[int, Box], int] = {}

    def add_file(self, path: str, size_bytes: int) -> int:
        """Add a file and return its index."""
        self.files.append(File(path, size_bytes))
        return len(self.files) - 1

    def add(self, info: ParamInfo, slot: str, place: Place, *, tp: int, tp_size: int) -> None:
        """Add the chunks of tensor rank ``tp`` for one slot of a parameter.

        A region that another rank has added is a replica: the rules say so, since only a rule
        without a split and a tied copy give the same region twice.
        """
        tensor = self._tensor(info, slot, place.dtype)
        for local, whole in rank_boxes(info, tp, tp_size):
            strides = place.strides
            shift = sum(o * s for o, s in zip(local.offsets, strides, strict=True))
            dense = _is_dense(local.lengths, strides)
            numel_span = (
                local.numel
                if dense
                else sum((n - 1) * s for n, s in zip(local.lengths, strides, strict=True)) + 1
            )
            itemsize = place.dtype.itemsize
            extent = Extent(
                place.file,
                place.offset + shift * itemsize,
                numel_span * itemsize if local.numel else 0,
            )
            replica = self._replicas.get((tensor, whole), -1) + 1
            self._replicas[tensor, whole] = replica
            self.chunks.append(
                Chunk(
                    tensor=tensor,
                    region=whole,
                    parts=(Part(extent, place.dtype, None if dense else strides),),
                    replica_id=replica,
                )
            )

    def _tensor(self, info: ParamInfo, slot: str, kind: DType) -> int:
        """Return the index of a tensor, adding it at its first mention."""
        key = info.canonical, slot
        rows = info.shape[0] if info.vocab_rows is None else info.vocab_rows
        shape = (rows, *info.shape[1:]) if info.shape else ()
        padding = info.shape[0] - rows if info.shape else 0
        spec = TensorSpec(*key, kind, shape, padding)
        if key not in self._index:
            self._index[key] = len(self.tensors)
            self.tensors.append(spec)
        known = self.tensors[self._index[key]]
        if known != spec:
            raise FormatError(
                f"{info.name} ({slot}): a tied copy must be {known.dtype} {known.stored_shape}, "
                f"got {spec.dtype} {spec.stored_shape}"
            )
        return self._index[key]


def rank_boxes(info: ParamInfo, tp: int, tp_size: int) -> tuple[tuple[Box, Box], ...]:
    """Return (box of the rank's tensor, box of the whole tensor) for each sub-block."""
    if info.rule.split is None:
        whole = Box.whole(info.shape)
        return ((whole, whole),)
    split = info.rule.split
    return shard_boxes(info.shape, split.dim, split.blocks, tp_size, tp)


def build_manifest(
    iteration: IterationDirectory, ranks: Mapping[RankId, RankFiles], state: MegatronState
) -> Manifest:
    """Build the Manifest of files that exist."""
    builder = ManifestBuilder()
    for (t, p), files in sorted(ranks.items(), key=lambda item: (item[0][1], item[0][0])):
        for info, slot, place in _saved_places(files, state, builder, t, p):
            builder.add(info, slot, place, tp=t, tp_size=state.run.tp)
    return Manifest(
        format="megatron",
        root=str(iteration.root),
        files=tuple(builder.files),
        tensors=tuple(builder.tensors),
        chunks=tuple(builder.chunks),
        objects=describe(state, builder.tensors),
    )


def _saved_places(
    files: RankFiles, state: MegatronState, builder: ManifestBuilder, t: int, p: int
) -> Iterator[tuple[ParamInfo, str, Place]]:
    """Yield where each parameter's weight and slots lie in the files of a rank."""
    model = builder.add_file(files.model_path, files.model_file.path.stat().st_size)
    for v in range(state.pipeline.vpp):
        for info, tensor in zip(state.chunks[p, v], files.params(v).values(), strict=True):
            start, _ = files.model_file.payload(tensor.storage)
            offset = start + tensor.offset * tensor.dtype.itemsize
            yield info, WEIGHT, Place(model, offset, tensor.dtype, tensor.strides)
    if files.optimizer_file is None:
        return
    optimizer = builder.add_file(files.optimizer_path, files.optimizer_file.path.stat().st_size)
    for (v, kind), buffer in saved_buffers(files, state.run, state.chunks).items():
        _, layout = state.buffers[t, p, v, kind]
        infos = {info.name: info for info in state.chunks[p, v]}
        for key, pieces in buffer.tensors.items():
            starts = [files.optimizer_file.extent(piece)[0] for piece in pieces]
            for number, param in enumerate(layout.params):
                piece, element = saved_element(layout, number, buffer.version)
                itemsize = pieces[piece].dtype.itemsize
                info = infos[param.name]
                strides = row_major_strides(local_shape_of(info, state.run.tp))
                offset = starts[piece] + element * itemsize
                slot = MASTER if key == "param" else key
                yield info, slot, Place(optimizer, offset, pieces[piece].dtype, strides)


def saved_buffers(
    files: RankFiles, run: Run, chunks: Mapping[ChunkId, tuple[ParamInfo, ...]]
) -> dict[tuple[int, str], SavedBuffer]:
    """Return the saved buffers of a rank by model chunk and parameter dtype.

    A file numbers buffers chunk by chunk, in each chunk by dtype in first-seen order, within each
    chained optimizer.

    Raises:
        FormatError: the file's buffers are not those that the weights make.
    """
    found: dict[tuple[int, str], SavedBuffer] = {}
    owners = optimizer_chunks(run)
    if len(files.optimizers) != len(owners):
        raise FormatError(
            f"{files.where_optimizer}: must have {len(owners)} optimizers, as the arguments say, "
            f"got {len(files.optimizers)}"
        )
    for optimizer, owned in zip(files.optimizers, owners, strict=True):
        kinds = [(v, k) for v in owned for k in dict.fromkeys(i.dtype for i in chunks[files.pp, v])]
        saved = [buffer.param_dtype for buffer in optimizer.buffers]
        expected = [kind for _, kind in kinds]
        if len(saved) != len(expected) or any(
            s not in (None, e) for s, e in zip(saved, expected, strict=True)
        ):
            raise FormatError(
                f"{files.where_optimizer}: buffers must be of {expected} in this order, as the "
                f"weights are, got {saved}"
            )
        found |= dict(zip(kinds, optimizer.buffers, strict=True))
    return found


def saved_element(layout: BufferLayout, number: int, version: str) -> tuple[int, int]:
    """Return in which stored piece of a buffer a parameter lies, and at which element of it."""
    if version == "v2":
        return 0, layout.file_starts[number]
    start = layout.starts[number]
    if version == "v0":
        return 0, start
    bucket = bisect_right(layout.bucket_starts, start) - 1
    return bucket, start - layout.bucket_starts[bucket]


def local_shape_of(info: ParamInfo, tp_size: int) -> tuple[int, ...]:
    """Return the shape of a parameter on one tensor rank."""
    split = info.rule.split
    if split is None:
        return info.shape
    return tuple(n // tp_size if d == split.dim else n for d, n in enumerate(info.shape))


def buffer_param(info: ParamInfo, run: Run) -> BufferParam:
    """Return a parameter as the buffer formula sees it on one rank of ``run``.

    An embedding is shared where input and output are tied and lie on different stages.
    """
    return BufferParam(
        name=info.name,
        numel=prod(local_shape_of(info, run.tp)),
        shared_embedding=run.tied and run.pp > 1 and info.rule.vocabulary,
    )


def _is_dense(lengths: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Say whether a box of these strides is one run."""
    expected = 1
    for n, s in zip(reversed(lengths), reversed(strides), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def describe(state: MegatronState, tensors: Sequence[TensorSpec]) -> dict[str, object]:
    """Return the objects of a Manifest: what every format understands, and ``megatron``."""
    groups = state.groups
    objects: dict[str, object] = {
        "topology": _topology(state),
        "layout": state.layouts,
        "layers": str(state.pipeline),
        "buckets": f"from {state.cuts_from}",
    }
    tree = state.trees[0, 0]
    for key in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far"):
        if key in tree:
            objects[key] = tree[key]
    if groups is not None:
        params = [info.group_param for info in state.params if not info.rule.tied_to]
        objects["step"] = groups.step
        objects["param_groups"] = groups.by_name(params)
    objects["args"] = state.args[0, 0]
    per_rank = [key for key in PER_RANK if key in tree]
    if not all(map(is_empty, state.extra_states.values())):
        per_rank.append(EXTRA_STATE)
    objects["per_rank"] = tuple(per_rank)
    outer = tree.get("optimizer")
    inner = outer[0] if isinstance(outer, list) and outer else outer
    if isinstance(inner, Mapping) and "grad_scaler" in inner:
        objects["grad_scaler"] = inner["grad_scaler"]
    known = {*objects, *PER_RANK, "checkpoint_version", "model", "optimizer"}
    objects["unconverted"] = tuple(key for key in tree if key not in known)
    objects["megatron"] = state
    objects["sharded_layout"] = sharded_layout(state, tensors)
    objects["carried"] = {"megatron": CarriedState(state)}
    return objects


def _topology(state: MegatronState) -> dict[str, int]:
    """Return the sizes of the parallel dimensions."""
    run = state.run
    sizes = {"tp": run.tp, "pp": run.pp, "dp": run.dp, "cp": run.cp}
    return sizes | ({"vpp": run.vpp} if run.vpp > 1 else {})
