"""A rule must say how each parameter is cut, and a file of rules must say it without a doubt."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import oracle_megatron as oracle
import pytest

from ckpttools import api
from ckpttools.errors import LayoutError, RuleError
from ckpttools.layout.blocks import shard_boxes
from ckpttools.layout.rules import Rules, builtin_rules, parse_rules, read_rules

BUILTIN = builtin_rules("megatron-gpt")
PLAIN = {"gated": False, "tied": False, "output_gate": False}
RULES_FILE = Path(api.__file__).parent / "rules" / "megatron_gpt.toml"


def parse(*rules: str) -> Rules:
    return parse_rules(
        'family = "f"\n' + "".join(f"[[rule]]\n{r}\n" for r in rules), where="r.toml"
    )


def facts_of(case: oracle.Case) -> dict[str, bool]:
    return {
        "gated": case.model["gated_linear_unit"],
        "tied": case.model["tie_embeddings"],
        "output_gate": False,
    }


# --- the built-in rules against what Megatron had ----------------------------------------------


@pytest.mark.parametrize("case", oracle.cases(), ids=str)
def test_every_parameter_of_every_fixture_has_one_rule_that_cuts_it_as_megatron_did(
    case: oracle.Case,
) -> None:
    shards = [shard for rank in case.layout() for shard in rank["shards"]]
    assert shards
    for shard in shards:
        rule = BUILTIN.find(shard["canon"], facts_of(case))
        dim = None if rule.split is None or case.tp == 1 else rule.split.dim
        assert dim == shard["tp_split_dim"], shard["canon"]
    for rank in case.layout():
        for param in (p for buffer in rank["buffers"] for p in buffer["params"]):
            assert BUILTIN.find(param["canon"], facts_of(case))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "gated"), [("linear_fc1", True), ("linear_fc1", False), ("linear_qkv", False)]
)
def test_fused_tensors_are_cut_as_the_trainer_cuts_them(name: str, gated: bool, tp: int) -> None:
    module = "mlp" if name == "linear_fc1" else "self_attention"
    rule = BUILTIN.find(f"decoder.layers.3.{module}.{name}.weight", {**PLAIN, "gated": gated})
    assert rule.split is not None
    whole = np.arange(24 * 5).reshape(24, 5)  # every element tells its place
    for rank in range(tp):
        if gated:  # a rank holds [gate; up], its part of either
            gate, up = np.split(whole, 2)
            expected = np.concatenate([np.split(gate, tp)[rank], np.split(up, tp)[rank]])
        else:  # query groups stand one after the other: plain rows
            expected = np.split(whole, tp)[rank]
        local = np.full(expected.shape, -1)
        for here, there in shard_boxes(whole.shape, rule.split.dim, rule.split.blocks, tp, rank):
            local[here.slices] = whole[there.slices]
        assert (local == expected).all()


def test_rules_with_facts_choose_by_them() -> None:
    name = "output_layer.weight"
    assert BUILTIN.find(name, PLAIN).tied_to == ""
    tied = BUILTIN.find(name, {**PLAIN, "tied": True})
    assert tied.tied_to == "embedding.word_embeddings.weight"
    assert tied.vocabulary


def test_the_decoupled_and_the_decayed_kinds_are_told() -> None:
    kinds = {
        name: BUILTIN.find(name, PLAIN).kind
        for name in (
            "embedding.word_embeddings.weight",
            "embedding.position_embeddings.weight",
            "output_layer.weight",
            "decoder.layers.0.self_attention.q_layernorm.weight",
            "decoder.layers.0.input_layernorm.weight",
        )
    }
    assert list(kinds.values()) == ["embedding", "", "embedding", "qk_layernorm", ""]


# --- what a parameter may not do ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.x.mlp.linear_fc2.weight",
        "decoder.layers.0.mlp.linear_fc2.weight.extra",
        "decoder.layers.0.mlp.experts.linear_fc1.weight",
        "xdecoder.final_layernorm.weight",
        "decoderXfinal_layernorm.weight",
        "decoder.final_layernorm.weight\n",
        "decoder.layers.0.self_attention.linear_qkv.weight",  # with an output gate
    ],
)
def test_a_parameter_without_a_rule_is_refused_by_name(name: str) -> None:
    message = (
        f"{name}: must match exactly one rule of the built-in rules megatron_gpt.toml, got none"
    )
    with pytest.raises(RuleError, match=re.escape(message)) as caught:
        BUILTIN.find(name, {**PLAIN, "output_gate": True})
    assert "--rules FILE" in caught.value.hint


def test_a_parameter_with_two_rules_is_refused_by_both_names() -> None:
    rules = parse('name = "a.{b,c}"\nstage = "first"', 'name = "a.b"\nstage = "first"')
    assert rules.find("a.c", {}).name == "a.{b,c}"
    with pytest.raises(
        RuleError,
        match=re.escape("a.b: must match exactly one rule of r.toml, got a.{b,c} and a.b"),
    ):
        rules.find("a.b", {})


def test_a_rule_on_a_fact_that_the_run_does_not_tell_is_refused() -> None:
    rules = parse('name = "a"\nstage = "first"\nwhen = { moon = true }')
    message = "rule a: depends on the fact 'moon', got a run that only tells gated, tied"
    with pytest.raises(RuleError, match=re.escape(message)):
        rules.find("a", {"gated": True, "tied": True})
    with pytest.raises(RuleError, match=re.escape("only tells nothing")):
        rules.find("a", {})


# --- what a file may not say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            'name = "a"\nstage = "first"\ndim = 0',
            "r.toml: rule 1: a: a rule that cuts a dimension must declare its sub-blocks, got none",
        ),
        (
            'name = "a"\nstage = "first"\nblocks = [1]',
            "r.toml: rule 1: a: dim must be a dimension number, got None",
        ),
        (
            'name = "a"\nstage = "first"\ndim = true\nblocks = [1]',
            "a: dim must be a dimension number, got True",
        ),
        (
            'name = "a"\nstage = "first"\ndim = -1\nblocks = [1]',
            "a: dim must be a dimension number, got -1",
        ),
        *(
            (
                f'name = "a"\nstage = "first"\ndim = 0\nblocks = {blocks}',
                f"a: blocks must be a list of positive numbers, got {shown}",
            )
            for blocks, shown in [
                ("[]", "[]"),
                ("[0]", "[0]"),
                ("[true]", "[True]"),
                ("[1.0]", "[1.0]"),
                ("1", "1"),
            ]
        ),
        (
            'name = "a"\nstage = "first"\nspan = 1',
            "keys must be blocks, dim, kind, name, stage, tied_to, vocabulary, when, got span",
        ),
        (
            'name = "a"\nstage = "first"\ndim = 1\nblocks = [1]\nvocabulary = true',
            "r.toml: rule 1: a: a vocabulary tensor must be cut in dim 0, got",
        ),
        (
            'name = "a"\nstage = "first"\nvocabulary = true',
            "r.toml: rule 1: a: a vocabulary tensor must be cut in dim 0, got",
        ),
        (
            'name = "a"\nstage = "first"\nvocabulary = 1',
            "r.toml: rule 1: a: vocabulary must be true or false, got 1",
        ),
        (
            'name = "a"\nstage = "first"\nkind = 1',
            "r.toml: rule 1: a: tied_to and kind must be text, got None and 1",
        ),
        (
            'name = "a"\nstage = "first"\ntied_to = "b"',
            "r.toml: a: tied_to must be a parameter of another rule, got 'b'",
        ),
        (
            'name = "a"\nstage = "first"\nwhen = { tied = 1 }',
            "r.toml: rule 1: a: when must map facts to true or false, got {'tied': 1}",
        ),
        (
            'name = "a"\nstage = "middle"',
            "and 'layer' exactly where the name has {layer}, got 'middle'",
        ),
        ('name = "a"\nstage = "layer"', "the name has {layer}, got 'layer'"),
        ('name = "a.{layer}"\nstage = "first"', "the name has {layer}, got 'first'"),
        ('name = "a"', "the name has {layer}, got None"),
        *(
            (
                f'name = "{name}"\nstage = "first"',
                f"at most one {{layer}} and {{a,b}} for alternatives, got '{name}'",
            )
            for name in ["", "a.{b", "a}.b", "a.{}", "a.{b,}", "{a,{b}}", "{layer}.{layer}"]
        ),
        ("stage = 'first'", "for alternatives, got None"),
    ],
)
def test_a_rule_that_is_not_one_is_refused(rule: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        parse(rule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family = ", "r.toml: a rules file must be TOML, got "),
        ("", "r.toml: a rules file must have a family and a list of [[rule]], got keys none"),
        ('family = "f"', "got keys family"),
        ('family = "f"\nrule = 1', "got keys family, rule"),
        ('family = 1\n[[rule]]\nname = "a"\nstage = "first"', "got keys family, rule"),
        ('family = "f"\nrules = []\n[[rule]]\nname = "a"', "got keys family, rule, rules"),
        ('family = "f"\nrule = [1]', "r.toml: rule 1: must be a table, got 1"),
    ],
)
def test_a_file_that_holds_no_rules_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        parse_rules(text, where="r.toml")


def test_a_rules_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(
            LayoutError, match=re.escape(f"{path}: a rules file must be readable text, got ")
        ):
            read_rules(path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b'family = "\xe9"')
    with pytest.raises(LayoutError, match="must be readable text"):
        read_rules(path)


# --- a file instead of the built-in rules ------------------------------------------------------


def test_a_copy_of_the_built_in_file_gives_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(RULES_FILE.read_text())
    mine = read_rules(path)
    assert mine.rules == BUILTIN.rules
    assert mine.where == str(path)


def test_a_rules_file_replaces_the_built_in_one(tmp_path: Path) -> None:
    case = oracle.case("gqa_tp1_pp1_dp1")
    text = RULES_FILE.read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('name = "decoder.final_layernorm.{weight,bias}"', 'name = "x"'))
    assert api.open_checkpoint(case.directory).manifest.tensors
    with pytest.raises(
        RuleError,
        match=re.escape(f"decoder.final_layernorm.weight: must match exactly one rule of {path}"),
    ):
        api.open_checkpoint(case.directory, options=api.ReadOptions(rules_path=str(path)))
