"""What is the layout of whole tensors? That of the source, taken to a single rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttools.errors import LayoutError
from ckpttools.layout.sharded import ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import Manifest, TensorSpec


def layout_of(source: Manifest) -> ShardedLayout | None:
    """Return the source's layout on one rank; None where it has none.

    Vocabularies are padded as for one tensor rank. Tied copies, which later stages hold, are in
    no model chunk.
    """
    known = source.objects.get("sharded_layout")
    if not isinstance(known, ShardedLayout):
        return None
    params = tuple(_padded(param, known) for param in known.params)
    mine = tuple(i for i, param in enumerate(params) if not param.tied_to)
    stages_stay = (known.topology.pp, known.topology.vpp) == (1, 1)
    try:
        return replace(
            known,
            topology=Topology(),
            params=params,
            chunks={(0, 0): mine},
            cuts={},
            fills=known.fills if stages_stay else {},
        )
    except LayoutError:
        return None  # a layout that only several ranks can have


def padded(spec: TensorSpec, params: Mapping[str, ShardedParam]) -> TensorSpec:
    """Return a tensor with the padding rows of one tensor rank; as it is where nobody knows."""
    param = params.get(spec.name)
    if param is None or not param.vocabulary or param.vocab_rows != spec.shape[0]:
        return spec
    return replace(spec, padding_rows=param.shape[0] - param.vocab_rows)


def _padded(param: ShardedParam, layout: ShardedLayout) -> ShardedParam:
    if param.vocab_rows is None or layout.facts.vocab_divisor is None:
        return param
    rows = layout.facts.padded_rows(param.vocab_rows, 1)
    return replace(param, shape=(rows, *param.shape[1:]))
