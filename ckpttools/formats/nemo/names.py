"""Which name does a NeMo key stand for, and which key does a name have?

NeMo's model lies in ``model`` (and ``module`` under its 16-bit wrapper), so keys begin with that;
canonical names don't. The distributed form stacks layers: ``decoder.layers.<rest>`` is all layers'
``<rest>`` on a leading axis. It also calls norms that are modules of their own as if they were
fused into the linear layer behind them. Source: ``sharded_state_dict`` of NeMo 1.23's
megatron_gpt_model.py and of megatron/core/models/gpt/gpt_layer_specs.py of core 0.8.
"""

from __future__ import annotations

import re

_WRAPPERS = re.compile(r"(?:(?:model|module)\.)+")
_LAYER = re.compile(r"((?:[^.]+\.)*?layers)\.([0-9]{1,9})\.(.+)", re.DOTALL)
_STACK = re.compile(r"((?:[^.]+\.)*?layers)\.(?![0-9]+\.)(.+)", re.DOTALL)
_SLOT = re.compile(r"optimizer\.state\.([A-Za-z0-9_]+)\.(.+)", re.DOTALL)
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}

DEFAULT_PREFIX = "model."
"""What NeMo's models put before every name."""


def split_prefix(key: str) -> tuple[str, str]:
    """Return the wrapper prefix of a key and the name behind it.

    >>> split_prefix("model.module.decoder.layers.0.mlp.linear_fc2.weight")
    ('model.module.', 'decoder.layers.0.mlp.linear_fc2.weight')
    """
    match = _WRAPPERS.match(key)
    prefix = match[0] if match and match.end() < len(key) else ""
    return prefix, key[len(prefix) :]


def split_slot(key: str) -> tuple[str | None, str]:
    """Return the optimizer slot of a key of the distributed form, and the model's key.

    >>> split_slot("optimizer.state.exp_avg.model.output_layer.weight")
    ('exp_avg', 'model.output_layer.weight')
    >>> split_slot("model.output_layer.weight")
    (None, 'model.output_layer.weight')
    """
    match = _SLOT.fullmatch(key)
    return (match[1], match[2]) if match else (None, key)


def split_layer(name: str) -> tuple[str, int, str] | None:
    """Return stack, layer number and rest of a layer's name; None where it is in no layer.

    >>> split_layer("decoder.layers.7.mlp.linear_fc2.weight")
    ('decoder.layers', 7, 'mlp.linear_fc2.weight')
    """
    match = _LAYER.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def split_stack(name: str) -> tuple[str, str] | None:
    """Return stack and rest of the name of all layers' tensor; None where it is something else.

    >>> split_stack("decoder.layers.mlp.linear_fc2.weight")
    ('decoder.layers', 'mlp.linear_fc2.weight')
    >>> split_stack("decoder.layers.7.mlp.linear_fc2.weight") is None
    True
    """
    match = _STACK.fullmatch(name)
    return (match[1], match[2]) if match else None


def fused_name(name: str) -> str:
    """Return the name that the distributed form has for a parameter.

    >>> fused_name("decoder.layers.3.input_layernorm.bias")
    'decoder.layers.3.self_attention.linear_qkv.layer_norm_bias'
    """
    found = split_layer(name)
    if found is None:
        return name
    stack, layer, rest = found
    for own, fused in _FUSED.items():
        if rest.startswith(own):
            return f"{stack}.{layer}.{fused}{rest.removeprefix(own)}"
    return name
