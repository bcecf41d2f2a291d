"""The public functions: what they promise beside the bytes of the checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpttools
from ckpttools import api, comparison
from ckpttools.api import ReadOptions, Resources, Target
from ckpttools.errors import MismatchError, StorageError, UnknownFormatError, UsageError
from ckpttools.formats import ParamGroup

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"
TP2 = FIXTURES / "gqa_tp2_pp1_dp2" / "torch"
TP1 = FIXTURES / "gqa_tp1_pp1_dp2" / "torch"
SMALL = Resources(budget_bytes=1 << 20, workers=2)


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of everything under ``root``, itself included."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in (root, *root.rglob("*"))
    }


def topology(path: Path) -> dict[str, int]:
    found = api.inspect(path)["topology"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a checkpoint in a directory of its own, TP2 PP1 DP2."""
    return Path(shutil.copytree(TP2, tmp_path / "run7"))


# --- the public names -----------------------------------------------------------------


def test_every_public_name_is_there_once() -> None:
    assert all(getattr(ckpttools, name) is not None for name in ckpttools.__all__)
    assert len(set(ckpttools.__all__)) == len(ckpttools.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ckpttools.nonsense  # noqa: B018  # the access is what is tested


def test_no_function_prints(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, whole = tmp_path / "made", tmp_path / "whole"
    api.reshard(source, made, target=Target(tp=1), resources=SMALL)
    api.gather(made, whole, resources=SMALL)
    api.verify(made, against=whole, resources=SMALL)
    api.diff(made, whole, resources=SMALL)
    api.digest(made, resources=SMALL)
    api.inspect(made)
    api.formats_table()
    assert capfd.readouterr() == ("", "")


def test_a_manifest_can_be_planned_and_nothing_is_written(source: Path) -> None:
    before = listing(source)
    plan = api.plan_reshard(api.read_manifest(source), Target(tp=1, dp=3))
    assert plan.op_count > 0
    assert plan.write_bytes >= api.read_manifest(source).state_bytes
    assert listing(source) == before


# --- formats --------------------------------------------------------------------------


def test_the_format_follows_from_names_alone(source: Path, tmp_path: Path) -> None:
    for file in source.rglob("*.pt"):
        file.write_bytes(b"")
    assert api.detect_format(source).name == "megatron"
    assert api.detect_format(source / "iter_0000003").name == "megatron"
    api.gather(TP1, tmp_path / "whole")
    assert api.detect_format(tmp_path / "whole").name == "safetensors"


def test_a_path_of_no_known_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="must be of exactly one known format, got none"):
        api.detect_format(tmp_path)


def test_a_path_of_two_formats_needs_the_name_of_one(source: Path, tmp_path: Path) -> None:
    shutil.copy(_gathered(tmp_path) / "state.json", source)
    with pytest.raises(UnknownFormatError, match="got megatron and safetensors") as caught:
        api.open_checkpoint(source)
    assert caught.value.hint == "name it with --format"
    assert api.open_checkpoint(source, format="megatron").format.name == "megatron"


def _gathered(tmp_path: Path) -> Path:
    whole = tmp_path / "whole"
    api.gather(TP1, whole)
    return whole


@pytest.mark.parametrize("name", ["zar", "Megatron", ""])
def test_an_unknown_format_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnknownFormatError, match="must be one of megatron, safetensors, zarr, zero1, zero2, "
    ):
        api.detect_format(TP1, name)
    with pytest.raises(UnknownFormatError, match="--to: must be one of"):
        api.reshard(TP1, tmp_path / "out", to=name or "none")
    assert not (tmp_path / "out").exists()


def test_a_path_that_does_not_exist_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="must exist, got no such path"):
        api.inspect(tmp_path / "nowhere")


# --- targets --------------------------------------------------------------------------

WORLDS = [
    (Target(world=8), (2, 1, 4)),
    (Target(tp=1, pp=2, world=8), (1, 2, 4)),
    (Target(tp=1, world=6), (1, 1, 6)),
    (Target(tp=4, pp=2, world=8, dp=1), (4, 2, 1)),
    (Target(dp=3), (2, 1, 3)),
    (Target(), (2, 1, 2)),
]


@pytest.mark.parametrize(("target", "sizes"), WORLDS, ids=str)
def test_sizes_not_named_stay_and_dp_follows_from_the_world(
    target: Target, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    report = api.reshard(TP2, tmp_path / "out", target=target, resources=SMALL)
    named = dict(zip(("tp", "pp", "dp"), sizes, strict=True))
    assert {k: v for k, v in report.dst_topology.items() if k != "cp"} == named
    assert {k: v for k, v in topology(tmp_path / "out").items() if k != "cp"} == named


REFUSED = [
    (Target(world=7), "--world: must be TP 2 x PP 1 x CP 1 x DP, got 7"),
    (Target(world=1), "--world: must be TP 2 x PP 1 x CP 1 x DP, got 1"),
    (Target(world=8, dp=2), "--world: must be TP 2 x PP 1 x CP 1 x DP, got 8"),
    (Target(tp=3), "--tp: must divide the 4 attention heads, got 3"),
    (Target(pp=3), "--pp 3 --vpp 1: pipeline: 2 layers must divide over 3 stages, got a rest"),
    (Target(pp=2, vpp=2), "--pp 2 --vpp 2: pipeline: layers of each stage must divide over 2 mod"),
    (Target(vpp=2), "--vpp: needs more than one pipeline stage, got 2"),
    (Target(pp=2, first_stage_layers=2), "--pp 2 --vpp 1: pipeline: 0 layers must divide over 1"),
    (Target(dp=0), "--dp: must be at least 1, got 0"),
]


@pytest.mark.parametrize(("target", "message"), REFUSED, ids=str)
def test_a_target_that_the_model_does_not_fit_is_refused(
    target: Target, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        api.reshard(TP2, tmp_path / "out", target=target)
    assert list(tmp_path.iterdir()) == []


def test_whole_tensors_take_no_topology(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whole tensors have no topology"):
        api.reshard(TP1, tmp_path / "out", to="safetensors", target=Target(tp=2))


# --- what a run leaves behind ---------------------------------------------------------


def test_a_dry_run_changes_nothing_and_tells_what_a_run_would_do(
    source: Path, tmp_path: Path
) -> None:
    before = listing(tmp_path)
    planned = api.reshard(source, tmp_path / "out", target=Target(tp=1), dry_run=True)
    assert listing(tmp_path) == before
    done = api.reshard(source, tmp_path / "out", target=Target(tp=1))
    assert listing(tmp_path) != before
    for name in ("tensors", "state_bytes", "ops", "read_bytes", "write_bytes", "files", "lost"):
        assert getattr(planned, name) == getattr(done, name), name
    assert (planned.dry_run, planned.proof, done.dry_run) == (True, (), False)
    assert done.proof


def test_a_run_reads_its_source_only_and_leaves_one_directory(source: Path, tmp_path: Path) -> None:
    before = listing(source)
    api.reshard(source, tmp_path / "out", target=Target(tp=1, pp=2))
    assert listing(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run7"]


def test_an_existing_destination_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    before = listing(tmp_path)
    with pytest.raises(StorageError, match="must not exist, got an existing path") as caught:
        api.reshard(source, tmp_path / "out")
    assert "--overwrite" in caught.value.hint
    assert listing(tmp_path) == before


def test_overwrite_puts_the_new_checkpoint_in_place_of_the_old(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    api.reshard(source, out, target=Target(tp=1, pp=2))
    (out / "only in the old one").touch()
    api.reshard(source, out, target=Target(tp=4), overwrite=True)
    assert topology(out)["tp"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run7"]
    assert not (out / "only in the old one").exists()
    assert api.diff(source, out).same


def test_overwrite_that_fails_leaves_the_old_checkpoint_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    api.reshard(source, out, target=Target(tp=1))
    before = listing(out)

    def fail(*_: object, **__: object) -> None:
        raise MismatchError("out: must be right, got an error")

    monkeypatch.setattr(api.conversion, "prove", fail)
    with pytest.raises(MismatchError, match="out: must be right"):
        api.reshard(source, out, target=Target(tp=4), overwrite=True)
    assert listing(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run7"]


@pytest.mark.parametrize(
    "place", ["run7", "run7/new", "run7/iter_0000003", "run7/../run7/new", "."]
)
def test_a_checkpoint_is_never_written_into_itself_or_around_itself(
    place: str, source: Path, tmp_path: Path
) -> None:
    before = listing(tmp_path)
    with pytest.raises(StorageError, match="must lie outside of the source and not around it"):
        api.reshard(source, tmp_path / place, target=Target(tp=1), overwrite=True)
    assert listing(tmp_path) == before


def test_one_iteration_is_not_written_beside_itself(source: Path, tmp_path: Path) -> None:
    """The save directory of an iteration belongs to it: what is there would be two runs' files."""
    before = listing(tmp_path)
    with pytest.raises(StorageError, match="destination must"):
        api.reshard(source / "iter_0000003", source, target=Target(tp=1), overwrite=True)
    assert listing(tmp_path) == before


def test_a_destination_without_a_parent_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="must be a directory, got none"):
        api.reshard(TP1, tmp_path / "no" / "out")


# --- verify and diff ------------------------------------------------------------------


def test_verify_requires_the_optimizer_only_where_asked(tmp_path: Path) -> None:
    weights = _weights_only(tmp_path)
    options = ReadOptions(accept_loss=frozenset({"optimizer"}))
    assert api.verify(weights, options=options).ok
    found = api.verify(weights, options=options, require=frozenset({"optimizer"}))
    assert found.differences == ("optimizer state: must be there, got none in it",)
    with pytest.raises(UsageError, match="--require: must be optimizer, got scaler"):
        api.verify(weights, require=frozenset({"scaler"}))


def test_weights_without_their_optimizer_are_refused_unless_accepted(tmp_path: Path) -> None:
    weights = _weights_only(tmp_path)
    with pytest.raises(ckpttools.CkptError, match="must be there, as the parameter groups") as e:
        api.open_checkpoint(weights)
    assert "--accept-loss optimizer" in e.value.hint
    accepted = api.open_checkpoint(
        weights, options=ReadOptions(accept_loss=frozenset({"optimizer"}))
    )
    assert accepted.manifest.slots() == ("weight",)


def _weights_only(tmp_path: Path) -> Path:
    path = Path(shutil.copytree(TP1, tmp_path / "weights"))
    for file in path.rglob("distrib_optim.pt"):
        file.unlink()
    return path


def test_diff_of_other_states_tells_every_tensor() -> None:
    found = api.diff(FIXTURES / "tied_tp1_pp1_dp2" / "torch", TP1)
    assert not found.same
    assert found.only_a
    assert found.only_b


def test_the_digest_depends_on_content_and_on_nothing_else(tmp_path: Path) -> None:
    api.gather(TP2, tmp_path / "whole")
    one, tensors = api.digest(TP2)
    assert len(tensors) == 60
    assert api.digest(TP1)[0] == one == api.digest(tmp_path / "whole")[0]
    assert api.digest(FIXTURES / "tied_tp1_pp1_dp2" / "torch")[0] != one


def test_progress_is_told_by_steps_with_their_size(source: Path, tmp_path: Path) -> None:
    steps: dict[str, list[int]] = {}

    def stage(name: str, total_bytes: int) -> api.conversion.Progress:
        steps[name] = [total_bytes, 0]

        def advance(done_bytes: int) -> None:
            steps[name][1] += done_bytes

        return advance

    one = Resources(workers=1)
    api.reshard(source, tmp_path / "out", target=Target(tp=1), resources=one, stage=stage)
    assert list(steps) == ["write", "compare"]
    for name, (total, done) in steps.items():  # rows of padding count on one side only
        assert total * 0.9 < done < total * 1.1, name


def test_a_dry_run_names_the_files_that_the_run_then_writes(tmp_path: Path) -> None:
    target = Target(tp=1, pp=2, dp=4)
    report = api.reshard(TP2, tmp_path / "out", target=target, dry_run=True)
    api.reshard(TP2, tmp_path / "out", target=target)
    written = {
        str(path.relative_to(tmp_path / "out")): path.stat().st_size
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert dict(report.paths) == written
    assert [line for line in report.lines(verbose=True) if line.startswith("file: ")]


def test_a_setting_of_a_group_that_one_side_lacks_is_a_remark_and_another_value_a_difference() -> (
    None
):
    def objects(**settings: object) -> dict[str, object]:
        return {"param_groups": (ParamGroup(settings, ("a", "b")),)}

    mine, theirs = objects(lr=0.1, wd_mult=1.0), objects(lr=0.1, initial_lr=0.1)
    assert comparison.settings_lost(mine, theirs) == ("wd_mult",)
    assert comparison.settings_lost(theirs, mine) == ("initial_lr",)
    assert list(comparison._compare_objects(mine, theirs)) == []
    found = list(comparison._compare_objects(mine, objects(lr=0.2)))
    assert [str(one) for one in found] == [
        "a: its parameter group has another lr",
        "b: its parameter group has another lr",
    ]


# --- facts that the files don't hold ----------------------------------------------------

APEX = FIXTURES.parent / "apex"
NAMES = ReadOptions(names_path=str(APEX / "names.json"))
V2 = APEX / "bf16_store_ws2" / "v2.pt"
WITH_MODEL = ReadOptions(
    names_path=str(APEX / "names.json"), model_path=str(APEX / "bf16_store_ws2" / "model.pt")
)


def test_a_file_that_no_reader_can_use_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    message = f"--names: must not be given for megatron, which has no use for it, got {APEX}"
    for call in (api.inspect, api.open_checkpoint, api.digest, api.verify):
        with pytest.raises(UsageError) as caught:
            call(TP1, options=NAMES)
        assert str(caught.value).startswith(message)
    with pytest.raises(UsageError, match="--names: must not be given for megatron"):
        api.reshard(TP1, tmp_path / "out", options=NAMES)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="for megatron and megatron"):
        api.diff(TP1, TP2, options=NAMES)


def test_of_two_checkpoints_each_is_told_what_it_can_use(tmp_path: Path) -> None:
    made = tmp_path / "zero2"
    api.reshard(V2, made, to="zero2", options=WITH_MODEL, resources=SMALL)
    assert api.diff(V2, made, options=WITH_MODEL).equal
    assert api.diff(made, V2, options=WITH_MODEL).equal
    assert api.verify(V2, against=made, options=WITH_MODEL).ok
    assert api.verify(made, against=V2, options=WITH_MODEL).ok
