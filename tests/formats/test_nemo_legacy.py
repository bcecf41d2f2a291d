"""NeMo's legacy form: files of all ranks join to one state, and are written rank by rank again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle_megatron as oracle
import pytest
import torch
from nemo_builder import (
    EMBEDDING,
    LEGACY,
    NAME,
    OUTPUT,
    State,
    content,
    decays,
    differences,
    flat,
    half_away,
    legacy,
    model,
    truth,
)

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import EvidenceError, FormatError, UsageError
from ckpttools.formats import registry
from ckpttools.manifest import MASTER, WEIGHT, Manifest

GRIDS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]


def read(path: Path, **options: Any) -> Manifest:
    return api.read_manifest(path, options=ReadOptions(**options))


def files(root: Path) -> list[str]:
    return sorted(str(f.relative_to(root)) for f in root.rglob("*.ckpt"))


def trees(root: Path) -> dict[str, Any]:
    """Return what torch loads of every file."""
    return {name: torch.load(root / name, weights_only=False) for name in files(root)}


# --- reading --------------------------------------------------------------------------


def test_the_originals_file_holds_what_the_live_run_held_in_every_slot() -> None:
    manifest = read(LEGACY)
    assert differences(content(manifest), truth()) == []
    assert manifest.objects["step"] == 4


@pytest.mark.parametrize(("tp", "pp", "vpp"), GRIDS)
@pytest.mark.parametrize("tied", [False, True])
def test_files_of_any_ranks_join_to_the_whole_state(
    tp: int, pp: int, vpp: int, tied: bool, tmp_path: Path
) -> None:
    state = model(4, tied=tied)
    root = legacy(tmp_path / "run", state, tp=tp, pp=pp, vpp=vpp)
    opened = api.open_checkpoint(root)
    assert opened.format.name == "nemo-legacy"
    assert differences(content(opened.manifest), state) == []
    assert api.verify(root).damage == ()
    sizes = {"tp": tp, "pp": pp, "dp": 1} | ({"vpp": vpp} if vpp > 1 else {})
    assert opened.manifest.objects["topology"] == sizes


@pytest.mark.parametrize("rule", ["one-dimensional", "norm-modules", "biases", "all"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_the_numbers_themselves_tell_the_rule_of_groups(
    rule: str, tp: int, pp: int, tmp_path: Path
) -> None:
    state = model(2)
    root = legacy(tmp_path / "run", state, tp=tp, pp=pp, rule=rule)
    opened = api.open_checkpoint(root)
    assert rule in opened.layouts
    assert differences(content(opened.manifest), state) == []
    found = {n: g.settings["weight_decay"] for g in groups(opened.manifest) for n in g.members}
    wanted = {n: 0.1 if decays(n, s[MASTER], rule) else 0.0 for n, s in state.items()}
    assert found == wanted


def groups(manifest: Manifest) -> Any:
    return manifest.objects["param_groups"]


@pytest.mark.parametrize("prefix", ["model.", "model.module.", "module.", ""])
def test_names_are_the_models_own_whatever_wraps_it(prefix: str, tmp_path: Path) -> None:
    state = model(2)
    root = legacy(tmp_path / "run", state, prefix=prefix)
    assert set(content(read(root))) == set(state)
    api.reshard(root, tmp_path / "out", to="nemo-legacy")
    assert flat(trees(tmp_path / "out")) == flat(trees(root))


def test_a_file_of_one_rank_stands_for_all(tmp_path: Path) -> None:
    state = model(2)
    root = legacy(tmp_path / "run", state, tp=2)
    other = root / "mp_rank_00" / "other-last.ckpt"
    other.write_bytes(b"")
    with pytest.raises(FormatError, match="must hold one checkpoint, got megatron_gpt.*, other-la"):
        api.open_checkpoint(root)
    opened = api.open_checkpoint(root / "mp_rank_01" / NAME)
    assert differences(content(opened.manifest), state) == []


def test_a_step_and_a_rate_that_are_tensors_are_numbers(tmp_path: Path) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p
        optimizer = tree["optimizer_states"][0]
        optimizer["state"]["step"] = torch.tensor([9], dtype=torch.int32)
        for group in optimizer["param_groups"]:
            group["lr"] = torch.tensor(0.01, dtype=torch.float32)

    manifest = read(legacy(tmp_path / "run", model(2), edit=edit))
    assert manifest.objects["step"] == 9
    assert groups(manifest)[0].settings["lr"] == pytest.approx(0.01)


def test_the_configuration_tells_sizes_and_adam_w_mode(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 3,
        "make_vocab_size_divisible_by": 4,
        "optim": {"adam_w_mode": False},
    }
    manifest = read(legacy(tmp_path / "run", model(2), config=config), vocab_size=41)
    layout = manifest.objects["sharded_layout"]
    assert (layout.facts.heads, layout.facts.vocab_divisor) == (3, 4)
    assert manifest.objects["adam_w_mode"] is False
    assert next(s for s in manifest.tensors if s.name == EMBEDDING).padding_rows == 3
    with pytest.raises(UsageError, match="--tp: must divide the 3 attention heads, got 2"):
        api.plan_reshard(manifest, Target(tp=2), to="nemo-legacy")


# --- names that the user gives ---------------------------------------------------------


def numbered(state: State) -> list[list[str]]:
    """Return the names of each group in the order of numbers."""
    return [
        [n for n, s in state.items() if decays(n, s[MASTER], "one-dimensional") == wanted]
        for wanted in (True, False)
    ]


@pytest.mark.parametrize("form", ["list", "table", "groups", "prefixed"])
def test_names_in_a_file_of_the_users_say_what_numbers_are(form: str, tmp_path: Path) -> None:
    state = model(2)
    parted = numbered(state)
    flat_list = [name for group in parted for name in group]
    document: object = {
        "list": flat_list,
        "table": {str(i): name for i, name in enumerate(flat_list)},
        "groups": parted,
        "prefixed": [f"model.{name}" for name in flat_list],
    }[form]
    place = tmp_path / "names.json"
    place.write_text(json.dumps(document))
    for tp, pp in ((1, 1), (2, 1)):
        root = legacy(tmp_path / f"run{tp}{pp}", state, tp=tp, pp=pp)
        assert differences(content(read(root, names_path=str(place))), state) == []


def test_names_by_group_serve_all_stages(tmp_path: Path) -> None:
    state = model(4)
    place = tmp_path / "names.json"
    place.write_text(json.dumps(numbered(state)))
    root = legacy(tmp_path / "run", state, tp=2, pp=2)
    assert differences(content(read(root, names_path=str(place))), state) == []


def test_wrong_names_of_one_shape_are_told_by_the_weights(tmp_path: Path) -> None:
    state = model(2)
    names = [name for group in numbered(state) for name in group]
    a, b = (names.index(f"decoder.layers.{i}.mlp.linear_fc2.weight") for i in (0, 1))
    names[a], names[b] = names[b], names[a]
    place = tmp_path / "names.json"
    place.write_text(json.dumps(names))
    with pytest.raises(EvidenceError, match="layout names: decoder.layers.0.mlp.linear_fc2.weight"):
        read(legacy(tmp_path / "run", state), names_path=str(place))


@pytest.mark.parametrize(
    ("document", "kind", "message"),
    [
        (["a"], FormatError, "must name each of the 15 numbered parameters"),
        (3, UsageError, "must be a list of names, a table of them by number or a list of lists"),
        ([3], UsageError, "must be a list of names, a table of them by number or a list of lists"),
        ({"x": "a"}, UsageError, "must be a list of names, a table of them"),
    ],
)
def test_names_that_are_none_are_refused(
    document: object, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    place = tmp_path / "names.json"
    place.write_text(json.dumps(document))
    with pytest.raises(kind, match=message):
        read(legacy(tmp_path / "run", model(2)), names_path=str(place))


def test_numbers_that_no_rule_fits_are_refused_with_the_reason(tmp_path: Path) -> None:
    def edit(t: int, p: int, tree: dict[str, Any]) -> None:
        del t, p
        numbers = tree["optimizer_states"][0]["param_groups"][0]["params"]
        numbers[0], numbers[1] = numbers[1], numbers[0]

    root = legacy(tmp_path / "run", model(2), edit=edit)
    with pytest.raises(EvidenceError, match=r"parameter 1 must be embedding.*\(44, 12\), got \(36"):
        read(root)


# --- writing --------------------------------------------------------------------------


def test_the_same_state_is_written_as_the_original_wrote_it(tmp_path: Path) -> None:
    api.reshard(LEGACY, tmp_path / "out", to="nemo-legacy")
    assert flat(trees(tmp_path / "out")) == flat(trees(LEGACY))


@pytest.mark.parametrize(("tp", "pp", "vpp"), GRIDS)
@pytest.mark.parametrize("tied", [False, True])
def test_each_ranks_file_is_the_one_that_nemo_would_write(
    tp: int, pp: int, vpp: int, tied: bool, tmp_path: Path
) -> None:
    state = model(4, tied=tied)
    source = legacy(tmp_path / "source", state, tp=2)
    expected = legacy(tmp_path / "expected", state, tp=tp, pp=pp, vpp=vpp)
    target = Target(tp=tp, pp=pp, vpp=vpp if vpp > 1 else None)
    api.reshard(source, tmp_path / "out", to="nemo-legacy", target=target)
    mine, theirs = trees(tmp_path / "out"), trees(expected)
    assert set(mine) == set(theirs)
    for name, tree in theirs.items():
        for found in (mine[name], tree):  # the number of model chunks need not be stated
            found["hyper_parameters"]["cfg"].pop("virtual_pipeline_model_parallel_size", None)
        assert {k: flat(v) for k, v in mine[name].items()} == {k: flat(v) for k, v in tree.items()}


def test_through_the_distributed_form_and_back_nothing_changes(tmp_path: Path) -> None:
    state = model(4)
    root = legacy(tmp_path / "run", state, tp=2, pp=2, vpp=2, extra=True)
    api.reshard(root, tmp_path / "nemo", to="nemo")
    assert differences(content(read(tmp_path / "nemo")), state) == []
    target = Target(tp=2, pp=2, vpp=2)
    api.reshard(tmp_path / "nemo", tmp_path / "back", to="nemo-legacy", target=target)
    mine = {Path(k).parent: v for k, v in trees(tmp_path / "back").items()}
    theirs = {Path(k).parent: v for k, v in trees(root).items()}
    for rank, tree in theirs.items():
        mine[rank]["hyper_parameters"]["cfg"].pop("virtual_pipeline_model_parallel_size")
        assert flat(mine[rank]["optimizer_states"]) == flat(tree["optimizer_states"])
        assert flat(mine[rank]["hyper_parameters"]) == flat(tree["hyper_parameters"])
        for key in ("model0", "model1"):
            assert set(mine[rank][key]) == set(tree[key])
            for name in tree[key]:
                assert flat(mine[rank][key][name]) == flat(tree[key][name])


def test_a_megatron_run_becomes_a_nemo_one_rank_by_rank(tmp_path: Path) -> None:
    case = oracle.case("tied_tp1_pp2_dp2")
    out = tmp_path / "out"
    report = api.reshard(case.directory, out, to="nemo-legacy", target=Target(tp=2))
    assert files(out) == [
        f"tp_rank_{t:02d}_pp_rank_{p:03d}/megatron_gpt.ckpt" for t in (0, 1) for p in (0, 1)
    ]
    found, tensors = content(read(out)), case.truth_tensors()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        slot = {"model": WEIGHT, "param": MASTER}.get(kind, kind)
        wanted = half_away(tensors[f"param/{name}"]) if slot == WEIGHT else tensor
        mine = found[name][slot][: len(wanted)]
        assert (
            mine.contiguous()
            .view(torch.uint8)
            .equal(wanted[: len(mine)].contiguous().view(torch.uint8))
        ), key
    assert any("opt_param_scheduler" in line for line in report.lost)
    last = torch.load(out / "tp_rank_01_pp_rank_001/megatron_gpt.ckpt", weights_only=True)
    assert last["state_dict"][f"model.{OUTPUT}"].shape[0] == 64
    assert last["hyper_parameters"]["cfg"]["share_embeddings_and_output_weights"] is True


def test_a_run_that_went_on_elsewhere_is_written_with_its_newer_step(tmp_path: Path) -> None:
    api.reshard(LEGACY, tmp_path / "own", to="zero1")
    manifest = read(tmp_path / "own")
    newer = replace(manifest, objects={**manifest.objects, "step": 11, "iteration": 12})
    draft = registry()["nemo-legacy"].lay_out(newer, Target(), "")
    assert any("lr_schedulers is of step 4, the rest of step 12" in n for n in draft.notes)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target(pp=3), "--pp 3 --vpp 1: pipeline: 4 layers must divide over 3 stages"),
        (Target(vpp=2), "--vpp: needs more than one pipeline stage, got 2"),
        (Target(tp=5), "--tp 5: embedding.word_embeddings.weight"),
        (Target(pp=2, first_stage_layers=1), "NeMo's stages have the same number of layers"),
        (Target(bucket_size="none"), "files have no buckets"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(
    target: Target, message: str, tmp_path: Path
) -> None:
    manifest = read(legacy(tmp_path / "run", model(4)))
    with pytest.raises(UsageError, match=message):
        api.plan_reshard(manifest, target, to="nemo-legacy")
