"""What of a Megatron checkpoint does the native sharded form need? Its layout, without Megatron.

Both forms share the flat buffers and the rules by which parameters are cut, so nothing but names
changes. A tied output layer is listed also where a single stage needs none.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.errors import LayoutError
from ckpttools.formats.megatron.arguments import Run
from ckpttools.formats.megatron.names import layer_of
from ckpttools.formats.megatron.state import MegatronState, ParamInfo, tied_output
from ckpttools.layout.megatron import Cuts
from ckpttools.layout.sharded import ModelFacts, ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import WEIGHT, TensorSpec
from ckpttools.storage.inert import InertType

NEWEST = "core-0.13"


def sharded_layout(state: MegatronState, tensors: Iterable[TensorSpec]) -> ShardedLayout | None:
    """Return the layout of a checkpoint; None where it has none that is free of Megatron.

    ``tensors`` tell the slots. Where several variants agree on the files the newest is taken:
    the native form names its own.
    """
    try:
        params = [_param(info, state.run) for info in _whole_model(state)]
        index = {param.name: i for i, param in enumerate(params)}
        return ShardedLayout(
            kind="zero1",
            topology=Topology(
                tp=state.run.tp, pp=state.run.pp, vpp=state.run.vpp, dp=state.run.buffer_ranks
            ),
            params=tuple(params),
            chunks={
                key: tuple(index[info.name] for info in chunk)
                for key, chunk in state.chunks.items()
            },
            slots=_slots(params, tensors),
            variant=NEWEST if NEWEST in state.layouts else state.layouts[0],
            busbw=state.run.busbw,
            cuts={key: cuts for key, (cuts, _) in state.buffers.items() if cuts != Cuts()},
            grad_dtypes=_grad_dtypes(state),
            facts=ModelFacts(
                vocab_divisor=state.run.vocab_divisor,
                heads=state.run.num_attention_heads,
                pipeline=state.run.split,
            ),
        )
    except LayoutError:
        return None  # rules of the user's own may say what only Megatron's layout can


def _whole_model(state: MegatronState) -> list[ParamInfo]:
    """Return all parameters in module order, a tied output layer among them."""
    infos = list(state.params)
    if state.run.tied and not any(info.rule.tied_to for info in infos):
        infos.append(tied_output(state, state.run, {info.name: info for info in infos}))
    return infos


def _param(info: ParamInfo, run: Run) -> ShardedParam:
    layered = info.rule.stage == "layer"
    return ShardedParam(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype,
        split=info.rule.split,
        vocabulary=info.rule.vocabulary,
        vocab_rows=info.vocab_rows if info.rule.vocabulary else None,
        stage=info.rule.stage,
        layer=layer_of(info.name) if layered else None,
        tied_to=info.rule.tied_to if run.tied else "",
    )


def _slots(
    params: Iterable[ShardedParam], tensors: Iterable[TensorSpec]
) -> dict[str, dict[str, str]]:
    """Return the slots of each dtype's parameters; a float32 master is no slot of its own."""
    dtypes = {param.canonical: param.dtype for param in params}
    slots: dict[str, dict[str, str]] = {dtype: {WEIGHT: dtype} for dtype in dtypes.values()}
    for spec in tensors:
        dtype = dtypes[spec.name]
        if dtype != "float32" or spec.slot != "fp32_param":
            slots[dtype][spec.slot] = spec.dtype.name
    return slots


def _grad_dtypes(state: MegatronState) -> dict[str, str]:
    """Return the gradients' dtype of each parameter dtype, which a buffer's key names."""
    return {
        kind: key[1].inert_name
        for kind, key in state.buffer_keys.items()
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], InertType)
    }
