"""Whatever a script calls its model and its optimizer, each key is known for what it is.

torch writes the checkpoints; what the model and the optimizer hold is the truth.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ckpttools import api
from ckpttools.api import ReadOptions, Target
from ckpttools.errors import FormatError, UnsupportedError, UsageError
from ckpttools.formats import CarriedDocument, ParamGroup
from ckpttools.formats.dcp.contents import key_of, path_of
from ckpttools.formats.dcp.keys import Naming, sort_keys
from ckpttools.formats.dcp.state import PLAIN_STEP, DcpState, state_of
from ckpttools.manifest import Manifest


class Blocks(nn.Module):
    """A model with names that look like torch's own keys."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(5, 3)
        self.state = nn.Linear(3, 2, bias=False)
        self.head = nn.ModuleDict({"state": nn.Linear(2, 2)})

    def forward(self, x: Any) -> Any:
        return self.head["state"](self.state(self.model(x)))


NAMES = ["model.weight", "model.bias", "state.weight", "head.state.weight", "head.state.bias"]


def run(*, groups: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer after two steps."""
    torch.manual_seed(7)
    model = Blocks()
    params: Any = list(model.parameters())
    if groups:
        params = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(params, lr=0.25)
    for _ in range(2):
        model(torch.ones(5)).sum().backward()
        optimizer.step()
    return model, optimizer


def save(root: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch tells that there is one process
        dcp.save(state, checkpoint_id=str(root))
    return root


def states(*, flat: bool = False, groups: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(*run(groups=groups), options=options)
    return dict(weights), dict(state)


def nested(weights: Any, state: Any) -> dict[str, Any]:
    return {"model": weights, "optimizer": state}


STYLES: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str, str]] = {
    "recipe": (nested, "model.", "optimizer."),
    "one dict": (lambda w, s: {"app": {"model": w, "optim": s}}, "app.model.", "app.optim."),
    "other words": (lambda w, s: {"net": w, "opt": s, "epoch": 3}, "net.", "opt."),
    "model at the top": (lambda w, s: {**w, "optimizer": s, "rng": {"a": 1}}, "", "optimizer."),
    "wrapped": (
        lambda w, s: {"model": {f"module.{k}": v for k, v in w.items()}, "optim": s},
        "model.module.",
        "optim.",
    ),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_names_slots_and_groups_are_found_in_every_style(
    style: str, flat: bool, tmp_path: Path
) -> None:
    build, model, optimizer = STYLES[style]
    weights, state = states(flat=flat, groups=True)
    manifest = api.read_manifest(save(tmp_path / "src", build(weights, state)))
    assert [spec.name for spec in manifest.tensors if spec.slot == "weight"] == NAMES
    assert manifest.slots() == ("weight", "exp_avg", "exp_avg_sq")
    assert manifest.objects["step"] == 2
    groups = manifest.objects["param_groups"]
    assert isinstance(groups, tuple)
    assert [group.members for group in groups] == [tuple(NAMES[:2]), tuple(NAMES[2:])]
    assert [group.settings["lr"] for group in groups] == [0.5, 0.25]
    assert naming_of(manifest) == Naming(model, optimizer, flat)
    out = tmp_path / "out"
    assert api.reshard(tmp_path / "src", out, target=Target(world=2)).lost == ()
    assert keys_in(out) == keys_in(tmp_path / "src")


def naming_of(manifest: Manifest) -> Naming:
    carried = manifest.objects["carried"]
    assert isinstance(carried, dict)
    state = carried["dcp"]
    assert isinstance(state, DcpState)
    return state.naming


def keys_in(root: Path) -> tuple[set[str], dict[str, Any]]:
    metadata = dcp.FileSystemReader(root).read_metadata()
    return set(metadata.state_dict_metadata), dict(metadata.planner_data)


def test_a_model_alone_is_known_by_its_dict_or_lies_at_the_top(tmp_path: Path) -> None:
    weights, _ = states()
    for name, build in {"a": {"model": weights}, "b": weights, "c": {"sd": weights}}.items():
        manifest = api.read_manifest(save(tmp_path / name, build))
        assert [spec.name for spec in manifest.tensors] == NAMES, name
        assert "step" not in manifest.objects


def test_an_optimizer_without_state_has_its_groups(tmp_path: Path) -> None:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weights, state = get_state_dict(model, optimizer)
    manifest = api.read_manifest(save(tmp_path / "src", nested(weights, state)))
    (group,) = manifest.objects["param_groups"]
    assert isinstance(group, ParamGroup)
    assert group.members == tuple(NAMES)
    assert group.settings["lr"] == 0.5


def test_numbers_in_place_of_names_need_the_names(tmp_path: Path) -> None:
    model, optimizer = run()
    root = save(tmp_path / "src", nested(model.state_dict(), optimizer.state_dict()))
    with pytest.raises(UsageError, match="parameters must have names, got numbers alone"):
        api.read_manifest(root)
    names = tmp_path / "names.json"
    names.write_text(json.dumps(NAMES))
    manifest = api.read_manifest(root, options=ReadOptions(names_path=str(names)))
    weights, state = states()
    named = api.read_manifest(save(tmp_path / "named", nested(weights, state)))
    assert manifest.objects["param_groups"] == named.objects["param_groups"]
    assert api.digest(root, options=ReadOptions(names_path=str(names))) == api.digest(
        tmp_path / "named"
    )
    names.write_text(json.dumps(["nobody", *NAMES[1:]]))
    with pytest.raises(UsageError, match="must have names of weights, got 'nobody'"):
        api.read_manifest(root, options=ReadOptions(names_path=str(names)))
    names.write_text(json.dumps(NAMES[:4]))
    with pytest.raises(UsageError, match="must name parameter 4, got 4 names"):
        api.read_manifest(root, options=ReadOptions(names_path=str(names)))


def test_two_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    weights, state = states()
    root = save(tmp_path / "src", {"model": weights, "first": state, "second": state})
    with pytest.raises(UnsupportedError, match="one optimizer, got those under 'first.' and 'sec"):
        api.read_manifest(root)


def test_state_of_what_is_no_weight_is_refused(tmp_path: Path) -> None:
    weights, state = states()
    weights.pop("model.weight")
    root = save(tmp_path / "src", nested(weights, state))
    with pytest.raises(FormatError, match=r"optimizer\.state\.model\.weight.*: must be state of"):
        api.read_manifest(root)


def test_steps_keep_the_kind_of_number_that_the_optimizer_counts_with(tmp_path: Path) -> None:
    weights, state = states()
    kinds = {PLAIN_STEP: 2, "float64": torch.tensor(2.0, dtype=torch.float64)}
    for kind, step in kinds.items():
        for entry in state["state"].values():
            entry["step"] = step
        save(tmp_path / kind, nested(weights, state))
        assert naming_of(api.read_manifest(tmp_path / kind)).step == kind
        api.reshard(tmp_path / kind, tmp_path / f"{kind}-out")
        key = "optimizer.state.model.bias.step"
        read = [
            dcp.FileSystemReader(tmp_path / end).read_metadata().state_dict_metadata[key]
            for end in (kind, f"{kind}-out")
        ]
        assert type(read[0]) is type(read[1])
        assert getattr(read[0], "properties", None) == getattr(read[1], "properties", None)


def test_a_step_that_its_dtype_can_not_hold_is_refused(tmp_path: Path) -> None:
    weights, state = states()
    for entry in state["state"].values():
        entry["step"] = 2**24 + 1
    root = save(tmp_path / "src", nested(weights, state))
    api.reshard(root, tmp_path / "there", to="sharded")
    document = json.loads((tmp_path / "there" / "manifest.json").read_text())
    assert document["objects"]["step"] == 2**24 + 1
    manifest = api.read_manifest(tmp_path / "there")
    foreign = Manifest(
        manifest.format,
        manifest.root,
        manifest.files,
        manifest.tensors,
        manifest.chunks,
        {k: v for k, v in manifest.objects.items() if k != "carried"},
    )
    with pytest.raises(UsageError, match="step: must be exact in float32, got 16777217"):
        api.plan_reshard(foreign, Target(), to="dcp")


def test_settings_and_values_of_other_optimizers_are_carried(tmp_path: Path) -> None:
    weights, state = states()
    state["state"]["model.bias"]["seen"] = 5
    state["state"]["model.bias"]["factors"] = torch.arange(3.0)
    state["param_groups"][0]["schedule"] = {"kind": "cosine", "ends": [1, 2]}
    save(tmp_path / "src", nested(weights, state))
    for root in (tmp_path / "src", tmp_path / "out"):
        manifest = api.read_manifest(root) if root.exists() else None
        if manifest is None:
            api.reshard(tmp_path / "src", root, target=Target(world=3))
            manifest = api.read_manifest(root)
        assert manifest.objects["state_values"] == {"model.bias": {"seen": 5}}
        assert ("model.bias", "factors") in manifest.index()
        (group,) = manifest.objects["param_groups"]
        assert isinstance(group, ParamGroup)
        settings = {k: v for k, v in group.settings.items() if k.startswith("schedule")}
        assert settings == {"schedule.kind": "cosine", "schedule.ends": [1, 2]}


NAMES_DOCUMENT = {
    "model": "net.",
    "optimizer": "opt.",
    "flat": True,
    "step_dtype": "float64",
    "step": 3,
    "others": {"epoch": [["epoch"], 4]},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_dtype": "bfloat16"}, "must have names and others"),
        ({"flat": 1}, "must have names and others"),
        ({"others": []}, "must have names and others"),
        ({"others": {"a": [[1.5], 4]}}, "a: must be a path and a value"),
        ({"others": {"a": [["a"], {"nonsense": 1}]}}, "carried dcp: a"),
    ],
)
def test_names_that_another_format_carried_must_be_what_was_given_to_it(
    change: dict[str, Any], message: str
) -> None:
    sound = state_of({"carried": {"dcp": CarriedDocument(NAMES_DOCUMENT)}})
    assert sound.naming == Naming("net.", "opt.", True, "float64")
    assert sound.to_document() == NAMES_DOCUMENT
    with pytest.raises(FormatError, match=message):
        state_of({"carried": {"dcp": CarriedDocument({**NAMES_DOCUMENT, **change})}})


PARTS = st.lists(st.sampled_from(["a", "b", "state", "model", "weight"]), min_size=1, max_size=4)


@given(
    st.sets(PARTS.map(".".join), min_size=1, max_size=6),
    st.sampled_from(["", "model.", "app.net.", "model.module."]),
    st.sampled_from(["optimizer.", "app.opt."]),
    st.booleans(),
)
def test_keys_that_are_written_read_as_the_names_they_were_made_of(
    names: set[str], model: str, optimizer: str, flat: bool
) -> None:
    naming = Naming(model, optimizer, flat)
    slots = [(name, slot) for name in sorted(names) for slot in ("weight", "exp_avg", "sum")]
    keys = {key: key_of(naming, *key) for key in slots}
    paths = {key_of(naming, *key): path_of(naming, *key) for key in slots}
    if len(paths) < len(keys):
        return  # two tensors of one key: refused when they are written
    group = f"{optimizer}param_groups.{min(names) if flat else 0}.lr"
    split = tuple(optimizer.split(".")[:-1])
    rest = group.removeprefix(optimizer)
    paths[group] = (*split, rest) if flat else (*split, "param_groups", 0, "lr")
    found = sort_keys(list(keys.values()), [group], paths, where="here")
    assert found.naming.optimizer == optimizer
    assert found.weights == {name: keys[name, "weight"] for name in names}
    assert found.state == {k: v for k, v in keys.items() if k[1] != "weight"}


def test_pickles_of_strange_metadata_are_refused_in_one_line(tmp_path: Path) -> None:
    weights, state = states()
    root = save(tmp_path / "src", nested(weights, state))
    metadata = pickle.loads((root / ".metadata").read_bytes())  # torch's own
    listed = metadata.state_dict_metadata
    listed["optimizer.param_groups.x.lr"] = listed.pop("optimizer.param_groups.0.lr")
    for index in list(metadata.storage_data):
        if index.fqn == "optimizer.param_groups.0.lr":
            info = metadata.storage_data.pop(index)
            named = type(index)("optimizer.param_groups.x.lr")
            metadata.storage_data[named] = info
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match=r"param_groups\.x\.lr: must be a setting of a weight"):
        api.read_manifest(root)
