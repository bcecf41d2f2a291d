"""What is the model in a NeMo file? Parameters in module order, their cuts and stages.

The rules of Megatron's GPT family say how a parameter is cut. What they depend on is read from the
shapes and names: a gated ``linear_fc1`` has twice the rows that ``linear_fc2`` has columns; where
all stages are one, a model without output layer ties it to its embedding. Elsewhere the
configuration in the file must tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import FormatError, LayoutError, RuleError
from ckpttools.formats import ReadOptions
from ckpttools.formats.nemo.configuration import TIED, VOCABULARY
from ckpttools.formats.nemo.names import split_layer
from ckpttools.formats.nemo.settings import setting, whole_number
from ckpttools.layout.rules import Rules, builtin_rules, read_rules
from ckpttools.layout.sharded import ModelFacts, ShardedLayout, ShardedParam, Topology
from ckpttools.manifest import MASTER, WEIGHT

OUTPUT = "output_layer.weight"
_FC1, _FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
_STAGES = ("first", "layer", "last")

ChunkKey = tuple[int, int]
"""Pipeline stage and model chunk in it."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as one rank's file has it: global name, the rank's shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def build_layout(
    chunks: Mapping[ChunkKey, Sequence[Weight]],
    *,
    tp: int,
    pp: int,
    vpp: int,
    config: object,
    options: ReadOptions,
    slots: Mapping[str, str],
) -> ShardedLayout:
    """Return the layout of a model whose ``chunks`` every one of ``tp`` ranks has alike.

    ``slots`` are the optimizer's, with their dtypes.

    Raises:
        RuleError: a parameter matches no rule, or a rule depends on what nobody tells.
        LayoutError: the model can't be cut so.
    """
    rules = read_rules(options.rules_path) if options.rules_path else builtin_rules("megatron-gpt")
    weights = [weight for chunk in chunks.values() for weight in chunk]
    facts = _facts(weights, config, pp)
    vocab_size = options.vocab_size or whole_number(config, VOCABULARY)
    params: list[ShardedParam] = []
    for weight in weights:
        try:
            params.append(_param(weight, rules, facts, tp, vocab_size))
        except RuleError:
            raise
        except LayoutError as error:
            raise FormatError(f"{weight.name}: {error}") from error
    index = {param.name: i for i, param in enumerate(params)}
    if len(index) != len(params):
        raise FormatError("model: every parameter must be in one stage, got one in two")
    if facts.get("tied") and OUTPUT not in index:
        params += _tied_output(params, rules, facts)
    kinds = dict.fromkeys(param.dtype for param in params)
    return ShardedLayout(
        kind="zero1",
        topology=Topology(tp=tp, pp=pp, vpp=vpp),
        params=tuple(params),
        chunks={key: tuple(index[w.name] for w in chunk) for key, chunk in chunks.items()},
        slots={kind: slots_of(kind, slots) for kind in kinds},
        facts=ModelFacts(
            vocab_divisor=whole_number(config, "make_vocab_size_divisible_by"),
            heads=whole_number(config, "num_attention_heads"),
        ),
    )


def slots_of(kind: str, slots: Mapping[str, str]) -> dict[str, str]:
    """Return the slots of parameters of a dtype; a float32 master is the weight, no slot."""
    mine = {slot: d for slot, d in slots.items() if slot != MASTER or kind != "float32"}
    return {WEIGHT: kind, **mine}


def in_module_order(weights: Sequence[Weight], options: ReadOptions) -> list[Weight]:
    """Sort weights by stage and layer where rules tell the stage; else leave them as they are."""
    rules = read_rules(options.rules_path) if options.rules_path else builtin_rules("megatron-gpt")
    places: dict[str, tuple[int, int]] = {}
    for weight in weights:
        found = [rule for rule in rules.rules if rule.matches(weight.name)]
        if not found:
            return list(weights)
        layer = split_layer(weight.name)
        places[weight.name] = _STAGES.index(found[0].stage), layer[1] if layer else 0
    return sorted(weights, key=lambda weight: places[weight.name])


def _facts(weights: Sequence[Weight], config: object, pp: int) -> dict[str, bool]:
    """Return the facts that rules depend on, those that are known."""
    facts = {"output_gate": False}
    names = {weight.name for weight in weights}
    rows = [w.shape[0] for w in weights if w.name.endswith(_FC1) and len(w.shape) == 2]
    columns = [w.shape[1] for w in weights if w.name.endswith(_FC2) and len(w.shape) == 2]
    if rows and columns and rows[0] in (columns[0], 2 * columns[0]):
        facts["gated"] = rows[0] == 2 * columns[0]
    shared = setting(config, TIED)
    if isinstance(shared, bool):
        facts["tied"] = shared
    elif pp == 1 or OUTPUT not in names:
        facts["tied"] = pp == 1 and OUTPUT not in names
    if facts.get("tied") and pp == 1 and OUTPUT in names:
        facts["tied"] = False  # a tied model of one stage has no output layer of its own
    return facts


def _param(
    weight: Weight, rules: Rules, facts: Mapping[str, bool], tp: int, vocab_size: int | None
) -> ShardedParam:
    """Return a parameter with its shape over all tensor ranks."""
    rule = rules.find(weight.name, facts)
    shape = weight.shape
    if rule.split is not None:
        dim = rule.split.dim
        if dim >= len(shape):
            raise LayoutError(f"rule {rule.name} cuts dimension {dim}, got shape {shape}")
        shape = tuple(n * tp if d == dim else n for d, n in enumerate(shape))
    layer = split_layer(weight.name)
    return ShardedParam(
        name=weight.name,
        shape=shape,
        dtype=weight.dtype,
        split=rule.split,
        vocab_rows=vocab_size if rule.vocabulary else None,
        stage=rule.stage,
        layer=layer[1] if layer and rule.stage == "layer" else None,
        tied_to=rule.tied_to,
        vocabulary=rule.vocabulary,
    )


def _tied_output(
    params: Sequence[ShardedParam], rules: Rules, facts: Mapping[str, bool]
) -> list[ShardedParam]:
    """Return the output layer that a tied model has where there are several stages."""
    try:
        rule = rules.find(OUTPUT, facts)
    except RuleError:
        return []  # rules without one: then stages can't change
    original = next((param for param in params if param.name == rule.tied_to), None)
    if original is None:
        return []
    return [replace(original, name=OUTPUT, stage=rule.stage, tied_to=original.name)]
