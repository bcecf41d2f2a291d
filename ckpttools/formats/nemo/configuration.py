"""What does a NeMo file's own configuration say of the model, and what must a new file's say?

Under ``hyper_parameters`` lies the configuration of the run, a dict or an OmegaConf container. A
file of one of several ranks can't be understood without it: sizes, and whether embeddings are
tied. So a writer keeps it true, and adds what isn't there only where a reader needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from ckpttools.formats.nemo.settings import setting
from ckpttools.layout.sharded import ShardedLayout
from ckpttools.storage.inert import Inert

KEY = "hyper_parameters"
MODE = "adam_w_mode"
TIED = "share_embeddings_and_output_weights"
VOCABULARY = "vocab_size"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}


def new_configuration(layout: ShardedLayout) -> dict[str, object]:
    """Return ``hyper_parameters`` for a source that never was NeMo's: what is known of it."""
    optim: dict[str, object] = {"name": "distributed_fused_adam"}
    facts = {
        "make_vocab_size_divisible_by": layout.facts.vocab_divisor,
        "num_attention_heads": layout.facts.heads,
    }
    known = {name: value for name, value in facts.items() if value is not None}
    return {"cfg": {**known, TIED: _is_tied(layout), "optim": optim}}


def with_mode(tree: Mapping[str, object], adam_w_mode: bool | None) -> dict[str, object]:
    """Return Lightning's dict whose configuration says how weight decay is done, where it is known.

    A pickled configuration says it only where it has a place for it.
    """
    stated = setting(tree, KEY, "cfg", "optim", MODE)
    if adam_w_mode is None or stated is adam_w_mode:
        return dict(tree)
    config = deepcopy(tree.get(KEY, {"cfg": {}}))
    node: object = config
    for name in ("cfg", "optim"):
        if isinstance(node, dict):
            node = node.setdefault(name, {})
        elif isinstance(node, Inert) and isinstance(node.state, dict):
            content = node.state.get("_content")
            node = content.get(name) if isinstance(content, dict) else None
    if isinstance(node, dict):
        node[MODE] = adam_w_mode
    elif isinstance(node, Inert) and isinstance(node.state, dict):
        content = node.state.get("_content")
        value = content.get(MODE) if isinstance(content, dict) else None
        if isinstance(value, Inert) and isinstance(value.state, dict):
            value.state["_val"] = adam_w_mode
    return {**tree, KEY: config}


def with_sizes(tree: Mapping[str, object], layout: ShardedLayout) -> dict[str, object]:
    """Return Lightning's dict with the configuration of another topology.

    What isn't stated is added where there are several ranks; one rank needs nothing.
    """
    topology = layout.topology
    facts: dict[str, object] = {SIZES["tp"]: topology.tp, SIZES["pp"]: topology.pp}
    vpp = topology.vpp if topology.vpp > 1 else None
    several = topology.tp * topology.pp > 1
    config = deepcopy(tree.get(KEY)) if KEY in tree else {"cfg": {}} if several else None
    inner = config.get("cfg") if isinstance(config, dict) else None
    if isinstance(inner, dict):
        if several or SIZES["vpp"] in inner:
            facts[SIZES["vpp"]] = vpp
        if topology.pp > 1:
            facts[TIED] = _is_tied(layout)
        inner.update({k: v for k, v in facts.items() if several or k in inner})
    elif isinstance(inner, Inert) and isinstance(inner.state, dict):
        content = inner.state.get("_content")
        for name, value in {**facts, SIZES["vpp"]: vpp}.items():
            node = content.get(name) if isinstance(content, dict) else None
            if isinstance(node, Inert) and isinstance(node.state, dict):
                node.state["_val"] = value
    return {**tree, KEY: config} if config is not None else dict(tree)


def with_vocabulary(tree: Mapping[str, object], layout: ShardedLayout) -> dict[str, object]:
    """Return Lightning's dict with the true number of vocabulary rows, where that is known.

    NeMo asks its tokenizer and states it nowhere; without it rows of padding look like others.
    """
    rows = next((p.vocab_rows for p in layout.params if p.vocab_rows is not None), None)
    config = deepcopy(tree.get(KEY, {"cfg": {}}))
    inner = config.get("cfg") if isinstance(config, dict) else None
    if rows is None or not isinstance(inner, dict):
        return dict(tree)
    inner[VOCABULARY] = rows
    return {**tree, KEY: config}


def _is_tied(layout: ShardedLayout) -> bool:
    return any(param.tied_to for param in layout.params)
