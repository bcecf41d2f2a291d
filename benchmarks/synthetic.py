"""What would a run have saved, had it been as large as we like? A checkpoint to measure with.

A fixture that Megatron wrote is the template: its arguments (with the sizes replaced), parameter
groups, scheduler and module metadata are put around tensors of other sizes, in files of the real
``torch`` format. The model is Llama-shaped; per parameter there are a bf16 weight, an fp32
master and two fp32 moments, 14 bytes. Every value is random and every weight is its master,
rounded, so all proofs of a real checkpoint hold.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from ckpttools import api, codecs
from ckpttools.conversion import check_room
from ckpttools.dtypes import dtype
from ckpttools.executor import WriteLog
from ckpttools.formats import Draft, Target, Written, registry
from ckpttools.layout.box import Box, row_major_strides
from ckpttools.layout.megatron import BufferLayout, BufferParam, Cuts, buffer_layout, round_up
from ckpttools.manifest import MASTER, WEIGHT, Manifest, TensorSpec
from ckpttools.plan import pieces
from ckpttools.storage.crc import crc32
from ckpttools.storage.journal import Piece
from ckpttools.storage.local import FilePool, create_file
from ckpttools.storage.torchzip import StorageRef, TensorRef, load_small_payloads, read_torch_file
from ckpttools.storage.torchzip_writer import lay_out_torch_file
from ckpttools.tiles import Tile, cut_tiles, write_tile

TEMPLATE = Path(__file__).parent.parent / "fixtures/megatron/gqa_tp1_pp1_dp1/torch"
BYTES_PER_PARAMETER = 14
VOCAB_DIVISOR = 128
HEADS, QUERY_GROUPS = 32, 4
TILE_BYTES = 4 << 20
TRACKER = "latest_checkpointed_iteration.txt"

Value = TypeVar("Value")

_CARRIED = ("rng_state", "optimizer", "opt_param_scheduler")  # may hold small tensors
_LAYER = re.compile(r"(?<=decoder\.layers\.)([0-9]+)(?=\.|$)")
# Random bits, but for some of the exponent: four binades about 0.01, 1e-4 (both signs), 1e-9.
_KEPT = {MASTER: 0x81FFFFFF, "exp_avg": 0x81FFFFFF, "exp_avg_sq": 0x01FFFFFF}
_FIXED = {MASTER: 0x3C000000, "exp_avg": 0x38000000, "exp_avg_sq": 0x30000000}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-shaped model: ``hidden`` and ``ffn`` widths, ``layers``, ``vocab`` rows."""

    hidden: int
    ffn: int
    layers: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, the gated feed-forward block, two norms."""
        head = self.hidden // HEADS
        qkv = (HEADS + 2 * QUERY_GROUPS) * head
        return self.hidden * (qkv + self.hidden + 3 * self.ffn + 2)

    @property
    def state_bytes(self) -> int:
        """Weights, masters and moments, padding excluded."""
        embeddings = (2 * self.vocab + 1) * self.hidden
        return BYTES_PER_PARAMETER * (embeddings + self.layers * self.layer_parameters)

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, ffn {self.ffn}, {HEADS} heads, {QUERY_GROUPS} query groups, "
            f"{self.layers} layers, vocabulary {self.vocab}"
        )


def shape_of_size(size_bytes: int) -> ModelShape:
    """Return the model of about ``size_bytes`` of state, with an even number of layers.

    It is 2048 wide with a vocabulary of 32,000, as TinyLlama is; for small sizes the width is
    halved until two layers fit, and the vocabulary until it takes at most half.
    """
    model = ModelShape(hidden=2048, ffn=5632, layers=2, vocab=32_000)
    while model.hidden > HEADS and replace(model, vocab=0).state_bytes > size_bytes * 2 // 3:
        model = replace(model, hidden=model.hidden // 2, ffn=model.ffn // 2)
    while model.vocab % 2 == 0 and replace(model, layers=0).state_bytes > size_bytes // 2:
        model = replace(model, vocab=model.vocab // 2)
    rest = size_bytes - replace(model, layers=0).state_bytes
    pairs = round(rest / (2 * BYTES_PER_PARAMETER * model.layer_parameters))
    return replace(model, layers=2 * max(1, pairs))


def write_checkpoint(root: Path, model: ModelShape, *, tp: int, pp: int, dp: int) -> None:
    """Write a checkpoint of ``model`` under ``root``; the same values whatever the topology."""
    target = Target(tp=tp, pp=pp, dp=dp)
    with _skeleton(model) as source:
        draft = registry()["megatron"].lay_out(source, target, str(root))
    root.mkdir(parents=True, exist_ok=True)
    check_room(draft, root)
    for file in draft.manifest.files:
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        create_file(root / file.path, file.size_bytes)
    with FilePool(str(root), [f.path for f in draft.manifest.files], writable=True) as pool:
        for patch in draft.patches:
            pool.write_at(patch.file, patch.offset, patch.data)
        crcs = _write_payload(draft, pool)
        for patch in draft.finish(Written(crcs, {})).patches:
            pool.write_at(patch.file, patch.offset, patch.data)


def _write_payload(draft: Draft, pool: FilePool) -> list[int]:
    """Write every tensor, and return the CRC-32 of each sealed extent."""
    log = WriteLog()

    def wrote(file: int, offset: int, data: memoryview) -> None:
        log.add([Piece(file, offset, len(data), crc32(data))])

    manifest, scratch = draft.manifest, np.empty(TILE_BYTES, np.uint8).data
    index, chunks = manifest.index(), manifest.by_tensor()
    for name, slot in index:
        if slot == WEIGHT:
            continue  # comes with its master
        spec = manifest.tensors[index[name, slot]]
        seed = zlib.crc32(f"{name} {slot}".encode())
        sides = [pieces(chunks[index[name, slot]], ndim=len(spec.shape))]
        if slot == MASTER:
            sides.append(pieces(chunks[index[name, WEIGHT]], ndim=len(spec.shape)))
        for start, box in _tiles(spec):
            bits = _values(slot, (seed, start), box)
            tiles: tuple[Tile, ...] = (bits, codecs.round_float32(bits, dtype("bfloat16")))
            for side, tile in zip(sides, tiles, strict=False):
                write_tile(pool, side, box, tile, scratch, wrote)
    return log.crc32(draft.seals)


def _tiles(spec: TensorSpec) -> Iterator[tuple[int, Box]]:
    return enumerate(cut_tiles(Box.whole(spec.stored_shape), 4, TILE_BYTES))


def _values(slot: str, seed: tuple[int, int], box: Box) -> Tile:
    """Return random fp32 values, as bits, in the shape of ``box``."""
    random = np.random.Generator(np.random.SFC64(seed))
    bits = random.integers(0, 1 << 32, box.lengths, dtype=np.uint32)
    bits &= np.uint32(_KEPT[slot])
    bits |= np.uint32(_FIXED[slot])
    return bits


@contextmanager
def _skeleton(model: ModelShape) -> Iterator[Manifest]:
    """Lend the Manifest of a checkpoint on one rank that takes no room: its payload is holes."""
    template = api.open_checkpoint(TEMPLATE).manifest
    with TemporaryDirectory() as name:
        for file in template.files:
            path, old = Path(name, file.path), read_torch_file(TEMPLATE / file.path)
            load_small_payloads(old, {k: v for k, v in old.tree.items() if k in _CARRIED})
            grown = _model_tree if path.stem == "model_optim_rng" else _optimizer_tree
            draft = lay_out_torch_file(path.stem, grown(old.tree, model))
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as new:
                new.truncate(draft.size)
                for offset, data in draft.pieces:
                    new.seek(offset)
                    new.write(data)
        shutil.copy(TEMPLATE / TRACKER, name)
        yield api.open_checkpoint(name, cross_check=False).manifest


def _layout(names: Iterable[str], model: ModelShape) -> BufferLayout:
    """Lay out the buffer of the parameters among ``names``."""
    params = [BufferParam(n, prod(_shape_of(n, model))) for n in names if n.endswith(".weight")]
    return buffer_layout(params, dp=1, cuts=Cuts())


def _model_tree(tree: dict[str, Any], model: ModelShape) -> dict[str, Any]:
    """Return the top-level dict of ``model_optim_rng.pt`` for ``model``."""
    settings = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": HEADS,
        "num_query_groups": QUERY_GROUPS,
        "kv_channels": model.hidden // HEADS,
        "vocab_size": model.vocab,
        "padded_vocab_size": round_up(model.vocab, VOCAB_DIVISOR),
        "make_vocab_size_divisible_by": VOCAB_DIVISOR,
    }
    args = replace(tree["args"], state={**tree["args"].state, **settings})
    entries = OrderedDict(_by_layer(tree["model"], model.layers))
    layout = _layout(entries, model)
    storage = StorageRef(dtype("bfloat16"), layout.numel)
    for param, start in zip(layout.params, layout.starts, strict=True):
        shape = _shape_of(param.name, model)
        entries[param.name] = TensorRef(storage, start, shape, row_major_strides(shape))
    metadata = vars(tree["model"])["_metadata"]
    vars(entries)["_metadata"] = OrderedDict(_by_layer(metadata, model.layers))
    return {**tree, "args": args, "model": entries}


def _optimizer_tree(tree: dict[Any, Any], model: ModelShape) -> dict[Any, Any]:
    """Return the top-level dict of ``distrib_optim.pt`` for ``model``."""
    names = api.open_checkpoint(TEMPLATE).manifest.index()
    weights = _by_layer({name: None for name, slot in names if slot == WEIGHT}, model.layers)
    numel = _layout(weights, model).numel_unpadded
    ((key, buffer),) = tree[0].items()
    flats = {
        slot: TensorRef(StorageRef(dtype("float32"), numel), 0, (numel,), (1,))
        for slot in buffer
        if slot != "numel_unpadded"
    }
    return {**tree, 0: {key: {**flats, "numel_unpadded": numel}}}


def _by_layer(named: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """Repeat what is named after layer 0 for every layer, in the order of the layers."""
    order = {name: i for i, name in enumerate(named) if _layer(name) in (None, 0)}
    first = next(i for name, i in order.items() if _layer(name) == 0)
    places: list[tuple[tuple[int, int, int], str, Value]] = []
    for name, i in order.items():
        for layer in range(layers) if _layer(name) == 0 else (0,):
            zone = 1 if _layer(name) == 0 else (0 if i < first else 2)
            places.append(((zone, layer, i), _LAYER.sub(str(layer), name), named[name]))
    return {name: value for _, name, value in sorted(places, key=lambda place: place[0])}


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _shape_of(name: str, model: ModelShape) -> tuple[int, ...]:
    """Return the shape of a parameter of ``model``."""
    rows, head = round_up(model.vocab, VOCAB_DIVISOR), model.hidden // HEADS
    shapes = {
        "linear_qkv": ((HEADS + 2 * QUERY_GROUPS) * head, model.hidden),
        "linear_proj": (model.hidden, model.hidden),
        "linear_fc1": (2 * model.ffn, model.hidden),
        "linear_fc2": (model.hidden, model.ffn),
        "word_embeddings": (rows, model.hidden),
        "output_layer": (rows, model.hidden),
    }
    return shapes.get(name.removesuffix(".weight").rpartition(".")[2], (model.hidden,))
