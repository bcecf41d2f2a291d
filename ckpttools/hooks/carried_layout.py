"""Does what an earlier checkpoint told of a model's cuts still tell of the run that went on?

A run of torch's own optimizers knows nothing of tensor and pipeline ranks. If it began with a
checkpoint that does, the layout goes on with it, so that it can go back to where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.errors import LayoutError
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.manifest import WEIGHT, TensorSpec


def fitting_layout(
    tensors: Sequence[TensorSpec], carry: Mapping[str, object] | None
) -> ShardedLayout | None:
    """Return the layout of the checkpoint that a run began with, if it still tells of the run.

    It says how other topologies cut each weight; so it must have every weight, with its dtype.
    """
    known = (carry or {}).get("sharded_layout")
    if not isinstance(known, ShardedLayout):
        return None
    weights = {spec.name: spec for spec in tensors if spec.slot == WEIGHT}
    params = []
    for param in known.params:
        spec = weights.get(param.canonical)
        if spec is None or param.dtype != spec.dtype.name:
            return None
        unpadded = param.vocab_rows is not None and spec.shape[:1] == (param.vocab_rows,)
        if param.shape != spec.shape and not (unpadded and param.shape[1:] == spec.shape[1:]):
            return None
        params.append(replace(param, shape=spec.shape))
    if len({param.canonical for param in params}) < len(weights):
        return None
    try:
        return replace(known, params=tuple(params))
    except LayoutError:  # its tensor ranks can't cut a vocabulary without padding
        return None
