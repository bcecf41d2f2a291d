"""Which element lies in which cell of which buffer of a Megatron run? By brute force.

Nothing here imports ckpttools. No layout formula is solved: buffers grow cell by cell, a parameter
is cut by lists of row and column numbers, and sizes are rounded up by counting. A cell holds the
*tag* of an element, unique over the whole model, or GAP.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
STRIDE = 1 << 15  # tags between two parameters
GAP = -1  # a cell that no parameter owns

Cells = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense GPT. ``norm_dtype`` is that of the norms where it isn't the rest's.

    ``learned`` is the number of learned positions, 0 without; ``fused_norms`` gives the names
    that Transformer Engine's layers have.
    """

    layers: int = 4
    hidden: int = 12
    heads: int = 4
    groups: int = 2
    head_dim: int = 3
    ffn: int = 20
    gated: bool = True
    biases: bool = False
    norm_biases: bool = False
    tied: bool = False
    qk_norms: bool = False
    learned: int = 0
    vocab: int = 13
    divisor: int = 4
    dtype: str = "bf16"
    norm_dtype: str | None = None
    fused_norms: bool = False

    def padded(self, tp: int) -> int:
        """Rows of the vocabulary tensors: counted up until they divide."""
        return next(n for n in itertools.count(self.vocab) if n % (self.divisor * tp) == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that saves: topology, what its Megatron does, and what its arguments say.

    ``stages`` are the layers of each stage's chunks; ``told_chunks`` is which option says how many
    chunks there are: "layers" (of one), "stages" or neither. ``rule`` is the Megatron release whose
    buffers these are, ``version`` that of ``distrib_optim.pt``. ``told_bucket`` is the bucket
    size in the arguments (0 says that gradients overlap, without a size), ``filled`` the rows of
    vocabulary tensors that hold something, by default all. ``junk`` is what lies in gaps.
    """

    model: Model
    stages: tuple[tuple[int, ...], ...]
    tp: int = 1
    dp: int = 1
    cp: int = 1
    instances: int = 1
    bucket: int | None = None
    told_bucket: int | None = None
    busbw: bool = False
    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    pipeline: Any = None
    told_chunks: str = ""
    chained: bool = False
    groups: str = "plain"
    writer: str = "0.16"
    rule: str = "0.13"
    version: str = "v2"
    one_storage: bool = True
    filled: int | None = None
    junk: float = 0.0
    step: float = 3.0

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def vpp(self) -> int:
        return len(self.stages[0])

    @property
    def sharers(self) -> int:
        """Ranks that share one buffer."""
        return self.dp * self.cp // self.instances

    @property
    def by_key(self) -> bool:
        return self.writer == "0.16"


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the whole model. ``cut`` is none, rows, halves (of rows) or columns."""

    number: int
    name: str
    shape: tuple[int, ...]
    cut: str
    dtype: str
    filled: int | None = None  # leading rows that hold something; None for all

    def tags(self) -> Cells:
        """Every element's tag; 0, whose values are zero, in rows that hold nothing."""
        numel = int(np.prod(self.shape))
        assert numel < STRIDE - 1
        tags = (self.number * STRIDE + 1 + np.arange(numel)).reshape(self.shape)
        if self.filled is not None:
            tags[self.filled :] = 0
        return tags

    def local(self, rank: int, tp: int) -> Cells:
        """The tags that one tensor rank holds."""
        tags = self.tags()
        if self.cut == "none":
            return tags
        if self.cut == "columns":
            return tags[:, [c for c in range(self.shape[1]) if c * tp // self.shape[1] == rank]]
        half = self.shape[0] // 2 if self.cut == "halves" else self.shape[0]
        return tags[[r for r in range(self.shape[0]) if r % half * tp // half == rank]]


# --- the model --------------------------------------------------------------------------


def layer_params(m: Model) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and cuts of one layer in module order; shape () is an extra state."""
    h, d = m.hidden, m.head_dim
    norms = ("weight", "bias") if m.norm_biases else ("weight",)

    def linear(name: str, rows: int, columns: int, cut: str) -> Iterator[Any]:
        yield f"{name}.weight", (rows, columns), cut
        if m.biases:
            yield f"{name}.bias", (rows,), "none" if cut == "columns" else cut
        yield f"{name}._extra_state", (), ""

    def norm(separate: str, fused: str) -> Iterator[Any]:
        for part in norms:
            name = f"{fused}.layer_norm_{part}" if m.fused_norms else f"{separate}.{part}"
            yield name, (h,), "none"

    attention = norm("input_layernorm", "self_attention.linear_qkv")
    if not m.fused_norms:
        yield from attention
    yield from linear("self_attention.linear_proj", h, m.heads * d, "columns")
    if m.fused_norms:
        yield from attention
    rows = (m.heads + 2 * m.groups) * d
    yield from linear("self_attention.linear_qkv", rows, h, "rows")
    for name in ("q_layernorm", "k_layernorm") if m.qk_norms else ():
        yield from ((f"self_attention.{name}.{part}", (d,), "none") for part in norms)
    yield from norm("pre_mlp_layernorm", "mlp.linear_fc1")
    yield from linear("mlp.linear_fc1", m.ffn * (1 + m.gated), h, "halves" if m.gated else "rows")
    yield from linear("mlp.linear_fc2", h, m.ffn, "columns")


def whole_model(run: Run) -> Iterator[tuple[str, tuple[int, ...], str]]:
    m = run.model
    vocabulary = (m.padded(run.tp), m.hidden)
    yield EMBEDDING, vocabulary, "rows"
    if m.learned:
        yield "embedding.position_embeddings.weight", (m.learned, m.hidden), "none"
    for layer in range(m.layers):
        for name, shape, cut in layer_params(m):
            yield f"decoder.layers.{layer}.{name}", shape, cut
    for part in ("weight", "bias") if m.norm_biases else ("weight",):
        yield f"decoder.final_layernorm.{part}", (m.hidden,), "none"
    yield OUTPUT, vocabulary, "rows"
    yield "output_layer._extra_state", (), ""


def is_norm(name: str) -> bool:
    return "layernorm" in name or "layer_norm" in name


def params(run: Run) -> dict[str, Param | None]:
    """Every entry of the whole model in module order; None is an extra state.

    Tags don't depend on the run: numbers count the entries, a tied output has its embedding's.
    """
    m = run.model
    filled = m.padded(run.tp) if run.filled is None else run.filled
    found: dict[str, Param | None] = {}
    for number, (name, shape, cut) in enumerate(whole_model(run)):
        if not shape:
            found[name] = None
            continue
        if name == OUTPUT and m.tied:
            if run.pp == 1:
                continue
            number = 0  # noqa: PLW2901  # the embedding's
        dtype = (m.norm_dtype or m.dtype) if is_norm(name) else m.dtype
        rows = filled if name in (EMBEDDING, OUTPUT) else None
        found[name] = Param(number, name, shape, cut, dtype, rows)
    return found


def chunk_of(run: Run, name: str) -> tuple[int, int]:
    """The stage and chunk of an entry: layers are dealt chunk by chunk, stage by stage."""
    if name.startswith("embedding."):
        return 0, 0
    if not name.startswith("decoder.layers."):
        return run.pp - 1, run.vpp - 1
    owners = [
        (p, v) for v in range(run.vpp) for p in range(run.pp) for _ in range(run.stages[p][v])
    ]
    return owners[int(name.split(".")[2])]


def local_entries(run: Run, p: int, v: int) -> dict[str, Param | None]:
    """A chunk's entries by the names in its file."""
    mine = {n: param for n, param in params(run).items() if chunk_of(run, n) == (p, v)}
    layers = sorted({int(n.split(".")[2]) for n in mine if n.startswith("decoder.layers.")})
    renamed: dict[str, Param | None] = {}
    for name, param in mine.items():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(layers.index(int(parts[2])))
        renamed[".".join(parts)] = param
    return renamed


# --- buffers ----------------------------------------------------------------------------


@dataclass(slots=True)
class Bucket:
    """Cells from ``start`` of the live buffer on; the first ``content`` of them are saved."""

    start: int
    cells: list[int]
    content: int = 0


def shared_embedding(run: Run, param: Param) -> bool:
    own_bucket = run.model.tied and run.pp > 1 and param.name in (EMBEDDING, OUTPUT)
    return own_bucket and run.rule != "0.5"


def buffer(run: Run, tp: int, p: int, v: int, dtype: str) -> tuple[list[Bucket], dict[str, int]]:
    """Lay out one buffer; also return each parameter's live start by its name in the file."""
    aligned = run.rule in ("0.13", "0.12")
    unit = next(
        n
        for n in itertools.count(run.sharers, run.sharers)
        if (run.rule in ("0.6", "0.5") or n % 128 == 0) and (not run.busbw or n % 65536 == 0)
    )
    limit = run.bucket if (p, v) == (0, 0) and not run.chained else None
    buckets, starts = [Bucket(0, [])], {}

    def fill(multiple: int) -> None:
        while (buckets[-1].start + len(buckets[-1].cells)) % multiple:
            buckets[-1].cells.append(GAP)

    def close() -> None:
        buckets[-1].content = len(buckets[-1].cells)
        fill(unit)
        buckets.append(Bucket(buckets[-1].start + len(buckets[-1].cells), []))

    entries = local_entries(run, p, v).items()
    mine = [(name, x) for name, x in entries if x is not None and x.dtype == dtype]
    for name, param in reversed(mine):
        shared = shared_embedding(run, param)
        if aligned:
            fill(64)
        if shared and buckets[-1].cells:
            if run.rule == "0.12" and len(buckets[-1].cells) % run.sharers:
                fill(unit)
            close()
            odd = run.rule == "0.12" and len(buckets[-2].cells) != buckets[-2].content
            assert not odd, "Megatron refuses a parameter that lies in two buckets"
        starts[name] = buckets[-1].start + len(buckets[-1].cells)
        buckets[-1].cells += param.local(tp, run.tp).reshape(-1).tolist()
        if shared or (limit is not None and len(buckets[-1].cells) >= limit):
            close()
    if buckets[-1].cells:
        close()
    return buckets[:-1], starts


def dtypes_of(run: Run, p: int, v: int) -> list[str]:
    return list(dict.fromkeys(x.dtype for x in local_entries(run, p, v).values() if x))


def owners(run: Run) -> list[range]:
    """Which chunks each chained optimizer has."""
    if run.chained and run.vpp > 1:
        return [range(1), range(1, run.vpp)]
    return [range(run.vpp)]
