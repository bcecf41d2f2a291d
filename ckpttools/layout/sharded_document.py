"""How does a :class:`ShardedLayout` travel as JSON? To plain data and back, every field checked.

``from_document(to_document(layout)) == layout``. A document with a missing or further key is
refused: what isn't understood can't be placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ckpttools.errors import LayoutError
from ckpttools.layout import pipeline
from ckpttools.layout.blocks import Blocks
from ckpttools.layout.fixed_buckets import FixedBuckets
from ckpttools.layout.megatron import Cuts
from ckpttools.layout.rules import Split
from ckpttools.layout.sharded import (
    KINDS,
    FillKey,
    Kind,
    ModelFacts,
    ShardedLayout,
    ShardedParam,
    Topology,
)

K = TypeVar("K")
T = TypeVar("T")


def to_document(layout: ShardedLayout) -> dict[str, object]:
    """Return a layout as plain data: dicts with text keys, lists, texts, numbers, None."""
    topology, facts = layout.topology, layout.facts
    return {
        "kind": layout.kind,
        "topology": {name: getattr(topology, name) for name in _TOPOLOGY},
        "params": [_param_document(param) for param in layout.params],
        "chunks": [
            {"pp": p, "vpp": v, "params": list(indices)}
            for (p, v), indices in sorted(layout.chunks.items())
        ],
        "slots": {dtype: dict(slots) for dtype, slots in layout.slots.items()},
        "variant": layout.variant,
        "busbw": layout.busbw,
        "cuts": [
            {"tp": t, "pp": p, "vpp": v, "dtype": dtype, "size": c.size, "after": sorted(c.after)}
            for (t, p, v, dtype), c in sorted(layout.cuts.items())
        ],
        "grad_dtypes": dict(layout.grad_dtypes),
        "facts": {
            "vocab_divisor": facts.vocab_divisor,
            "heads": facts.heads,
            "pipeline": {name: getattr(facts.pipeline, name) for name in _PIPELINE},
        },
        **(_fill_document(layout) if layout.kind == "zero2" else {}),
    }


def _fill_document(layout: ShardedLayout) -> dict[str, object]:
    """Return what only a zero2 layout has."""
    return {
        "fixed": {
            dtype: {name: getattr(rule, name) for name in _FIXED}
            for dtype, rule in layout.fixed.items()
        },
        "fills": [
            {"pp": p, "vpp": v, "dtype": dtype, "groups": [list(group) for group in groups]}
            for (p, v, dtype), groups in sorted(layout.fills.items())
        ],
    }


def from_document(document: object, *, where: str) -> ShardedLayout:
    """Return the layout that a document describes; ``where`` names it in errors.

    Raises:
        LayoutError: it is no layout, or one that contradicts itself.
    """
    fused = isinstance(document, Mapping) and document.get("kind") == "zero2"
    top = _Table(document, where, [*_LAYOUT, "fixed", "fills"] if fused else _LAYOUT)
    topology = top.table("topology", _TOPOLOGY)
    facts = top.table("facts", _FACTS)
    split = facts.table("pipeline", _PIPELINE)
    return ShardedLayout(
        kind=_kind(top.text("kind"), where),
        topology=Topology(**{name: topology.natural(name) for name in _TOPOLOGY}),
        params=tuple(_param(item, at) for at, item in top.items("params")),
        chunks=_unique(
            ((c.natural("pp"), c.natural("vpp")), c.naturals("params"))
            for c in (_Table(item, at, _CHUNK) for at, item in top.items("chunks"))
        ),
        slots={
            dtype: _texts(slots, f"{where}: slots: {dtype}")
            for dtype, slots in top.mapping("slots").items()
        },
        variant=top.text("variant"),
        busbw=top.flag("busbw"),
        cuts=_unique(
            (
                (c.natural("tp"), c.natural("pp"), c.natural("vpp"), c.text("dtype")),
                Cuts(c.optional_natural("size"), frozenset(c.texts("after"))),
            )
            for c in (_Table(item, at, _CUTS) for at, item in top.items("cuts"))
        ),
        grad_dtypes=_texts(top.mapping("grad_dtypes"), f"{where}: grad_dtypes"),
        facts=ModelFacts(
            vocab_divisor=facts.optional_natural("vocab_divisor"),
            heads=facts.optional_natural("heads"),
            pipeline=pipeline.Split(
                first=split.optional_natural("first"),
                last=split.optional_natural("last"),
                embedding=split.flag("embedding"),
                loss=split.flag("loss"),
            ),
        ),
        fixed=_fixed(top) if fused else {},
        fills=_fills(top) if fused else {},
    )


def _fixed(top: _Table) -> dict[str, FixedBuckets]:
    """Return the size of buckets for each dtype."""
    rules = top.mapping("fixed")
    tables = {
        dtype: _Table(rule, f"{top.where}: fixed: {dtype}", _FIXED) for dtype, rule in rules.items()
    }
    return {
        dtype: FixedBuckets(**{name: table.natural(name) for name in _FIXED})
        for dtype, table in tables.items()
    }


def _fills(top: _Table) -> dict[FillKey, tuple[tuple[int, ...], ...]]:
    """Return the order in which buckets are filled, for each buffer that has one of its own."""
    tables = [_Table(item, at, _FILL) for at, item in top.items("fills")]
    return _unique(
        (
            (fill.natural("pp"), fill.natural("vpp"), fill.text("dtype")),
            tuple(
                _Table({"group": group}, at, ["group"]).naturals("group")
                for at, group in fill.items("groups")
            ),
        )
        for fill in tables
    )


_LIMIT = 1 << 62
_LAYOUT = [
    "kind",
    "topology",
    "params",
    "chunks",
    "slots",
    "variant",
    "busbw",
    "cuts",
    "grad_dtypes",
    "facts",
]
_TOPOLOGY = ("tp", "pp", "vpp", "dp")
_FACTS = ("vocab_divisor", "heads", "pipeline")
_PIPELINE = ("first", "last", "embedding", "loss")
_CHUNK = ("pp", "vpp", "params")
_FIXED = ("cap_numel", "alignment")
_FILL = ("pp", "vpp", "dtype", "groups")
_CUTS = ("tp", "pp", "vpp", "dtype", "size", "after")
_PARAM = [
    "name",
    "shape",
    "dtype",
    "dim",
    "blocks",
    "vocabulary",
    "vocab_rows",
    "stage",
    "layer",
    "tied_to",
    "trainable",
]


def _param_document(param: ShardedParam) -> dict[str, object]:
    split = param.split
    return {
        "name": param.name,
        "shape": list(param.shape),
        "dtype": param.dtype,
        "dim": None if split is None else split.dim,
        "blocks": None if split is None else list(split.blocks.weights),
        "vocabulary": param.vocabulary,
        "vocab_rows": param.vocab_rows,
        "stage": param.stage,
        "layer": param.layer,
        "tied_to": param.tied_to,
        "trainable": param.trainable,
    }


def _param(item: object, where: str) -> ShardedParam:
    entry = _Table(item, where, _PARAM)
    dim = entry.optional_natural("dim")
    if (dim is None) != (entry.values["blocks"] is None):
        raise LayoutError(f"{where}: dim and blocks must be there together, got one of them")
    return ShardedParam(
        name=entry.text("name"),
        shape=entry.naturals("shape"),
        dtype=entry.text("dtype"),
        split=None if dim is None else Split(dim, Blocks(entry.naturals("blocks"))),
        vocabulary=entry.flag("vocabulary"),
        vocab_rows=entry.optional_natural("vocab_rows"),
        stage=None if entry.values["stage"] is None else entry.text("stage"),
        layer=entry.optional_natural("layer"),
        tied_to=entry.text("tied_to"),
        trainable=entry.flag("trainable"),
    )


def _kind(text: str, where: str) -> Kind:
    for kind in KINDS:
        if text == kind:
            return kind
    raise LayoutError(f"{where}: kind must be one of {', '.join(KINDS)}, got {text!r:.40}")


def _unique(pairs: Iterable[tuple[K, T]]) -> dict[K, T]:
    """Return pairs as a dict.

    Raises:
        LayoutError: a key is there twice.
    """
    found: dict[K, T] = {}
    for key, value in pairs:
        if key in found:
            raise LayoutError(f"layout: entries must be there once, got {key} twice")
        found[key] = value
    return found


def _texts(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise LayoutError(f"{where} must map texts to texts, got {value!r:.60}")
    return {str(key): text for key, text in value.items()}


class _Table:
    """Typed access to an object with exactly these keys, with errors that name its place."""

    def __init__(self, value: object, where: str, keys: Sequence[str]) -> None:
        if not isinstance(value, dict) or set(value) != set(keys):
            got = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise LayoutError(f"{where}: must have {', '.join(keys)}, got {got:.200}")
        self.values: Mapping[str, object] = value
        self.where = where

    def refuse(self, key: str, rule: str) -> LayoutError:
        return LayoutError(f"{self.where}: {key} must be {rule}, got {self.values[key]!r:.60}")

    def text(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str):
            raise self.refuse(key, "text")
        return value

    def flag(self, key: str) -> bool:
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def natural(self, key: str) -> int:
        value = self.values[key]
        if type(value) is not int or not 0 <= value < _LIMIT:
            raise self.refuse(key, "a natural number")
        return value

    def optional_natural(self, key: str) -> int | None:
        return None if self.values[key] is None else self.natural(key)

    def naturals(self, key: str) -> tuple[int, ...]:
        value = self.values[key]
        if not isinstance(value, list) or not all(
            type(n) is int and 0 <= n < _LIMIT for n in value
        ):
            raise self.refuse(key, "natural numbers")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values[key]
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.refuse(key, "texts")
        return tuple(value)

    def items(self, key: str) -> list[tuple[str, object]]:
        value = self.values[key]
        if not isinstance(value, list):
            raise self.refuse(key, "a list")
        return [(f"{self.where}: {key}[{i}]", item) for i, item in enumerate(value)]

    def mapping(self, key: str) -> dict[str, object]:
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return value

    def table(self, key: str, keys: Sequence[str]) -> _Table:
        return _Table(self.values[key], f"{self.where}: {key}", keys)
