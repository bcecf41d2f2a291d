"""The command line: exit codes, messages, and what goes to which stream."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ckpttools import api
from ckpttools.cli import main as main_module
from ckpttools.cli import output
from ckpttools.cli.main import COMMANDS, cli, main

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "megatron"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command line in a directory with the checkpoint ``run7``."""
    shutil.copytree(FIXTURES / "gqa_tp2_pp1_dp2" / "torch", tmp_path / "run7")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckpttools", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


def flip(path: Path, place: int = -3000) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# --- exit codes and messages ----------------------------------------------------------

TARGET = ("--tp", "1", "--pp", "2", "--dp", "4")

COULD_NOT_RUN = [
    (("inspect", "nowhere"), "nowhere: must exist, got no such path", ""),
    (("inspect", "empty"), "empty: must be of exactly one known format, got none", "known are"),
    (
        ("inspect", "run7", "--format", "zar"),
        "must be one of megatron, safetensors, zarr, zero1, zero2, ",
        "",
    ),
    (("inspect", "run7", "--format", "zarr"), "zarr.json: ", ""),
    (("verify", "nowhere"), "nowhere: must exist", ""),
    (("verify", "empty"), "empty: must be of exactly one known format", "known are"),
    (("verify", "run7", "--against", "nowhere"), "nowhere: must exist", ""),
    (("diff", "run7", "nowhere"), "nowhere: must exist", ""),
    (("digest", "nowhere"), "nowhere: must exist", ""),
    (("gather", "nowhere", "out"), "nowhere: must exist", ""),
    (("reshard", "nowhere", "out"), "nowhere: must exist", ""),
    (("reshard", "run7", "out", "--to", "zar"), "--to: must be one of megatron, safetensors", ""),
    (("reshard", "run7", "out", "--to", "zarr", "--tp", "1"), "whole tensors have no topology", ""),
    (("reshard", "run7", "empty"), "the destination must not exist", "or give --overwrite"),
    (("reshard", "run7", "no/out"), "no: must be a directory, got none", ""),
    (("reshard", "run7", "run7/out"), "must lie outside of the source", ""),
    (("reshard", "run7", "out", "--tp", "3"), "--tp: must divide the 4 attention heads, got 3", ""),
    (("reshard", "run7", "out", "--pp", "3"), "--pp 3 --vpp 1: pipeline: 2 layers must divide", ""),
    (("reshard", "run7", "out", "--vpp", "2"), "--vpp: needs more than one pipeline stage", ""),
    (
        ("reshard", "run7", "out", "--pp", "2", "--first-stage-layers", "2"),
        "--pp 2 --vpp 1: pipeline: 0 layers must divide over 1 stages",
        "",
    ),
    (("reshard", "run7", "out", "--world", "7"), "--world: must be TP 2 x PP 1", ""),
    (("reshard", "run7", "out", "--memory", "1kB"), "memory: must be at least", ""),
    (("reshard", "run7", "out", "--rules", "nowhere"), "nowhere: ", ""),
    (("reshard", "run7", "out", "--layout", "x"), "layout: must be one of core-0.13", ""),
    (("reshard", "run7", "out", "--vocab-size", "999"), "must be padded to 1024", "--vocab-size"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), COULD_NOT_RUN, ids=str)
def test_what_cannot_run_says_why_in_one_line_and_exits_1(
    arguments: tuple[str, ...], message: str, hint: str, run: Run, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert [line.startswith("hint: ") and hint in line for line in lines[1:]] == [True] * bool(hint)
    assert sorted(tmp_path.rglob("*")) == before


WRONG_USAGE = [
    ((), None),
    (("nonsense",), "No such command 'nonsense'"),
    (("--nonsense",), "No such option"),
    (("inspect",), "Missing argument 'SRC'"),
    (("reshard", "run7"), "Missing argument 'DST'"),
    (("reshard", "run7", "out", "more"), "unexpected extra argument"),
    (("reshard", "run7", "out", "--tp", "0"), "0 is not in the range x>=1"),
    (("reshard", "run7", "out", "--dp", "two"), "'two' is not a valid integer"),
    (("reshard", "run7", "out", "--bucket-size", "0"), "a number of elements or 'none', got '0'"),
    (("reshard", "run7", "out", "--bucket-size", "big"), "elements or 'none', got 'big'"),
    (("reshard", "run7", "out", "--memory", "much"), "'much' is not a size such as 64MiB"),
    (("reshard", "run7", "out", "--workers", "0"), "0 is not in the range"),
    (("reshard", "run7", "out", "--accept-loss", "all"), "'all' is not one of 'bias_correction',"),
    (("reshard", "run7", "out", "--vpp", "0"), "0 is not in the range x>=1"),
    (("reshard", "run7", "out", "--first-stage-layers", "0"), "0 is not in the range x>=1"),
    (("reshard", "run7", "out", "--last-stage-layers", "all"), "'all' is not a valid integer"),
    (("gather", "run7", "out", "--to", "megatron"), "'megatron' is not one of 'safetensors', 'za"),
    (("gather", "run7", "out", "--tp", "1"), "No such option"),
    (("verify", "run7", "--require", "scaler"), "'scaler' is not 'optimizer'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_USAGE, ids=str)
def test_wrong_usage_exits_2_and_points_to_the_help(
    arguments: tuple[str, ...], message: str | None, run: Run
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    if message is None:
        assert err.startswith("Usage: ckpttools")
        return
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    command = f" {arguments[0]}" if arguments[0] in COMMANDS else ""
    assert second == f"hint: see 'ckpttools{command} --help'"


def test_what_succeeds_exits_0_through_the_whole_main_job(run: Run) -> None:
    for arguments, says in (
        (("inspect", "run7"), "topology   TP2 PP1 DP2"),
        (("reshard", "run7", "out", *TARGET), "megatron TP2 PP1 DP2 -> megatron TP1 PP2 DP4"),
        (("verify", "out", "--against", "run7"), "\nok\n"),
        (("diff", "run7", "out"), "60 tensors compared, 306.9 kB: equal"),
        (("gather", "out", "whole"), "megatron TP1 PP2 DP4 -> safetensors\n"),
        (("verify", "whole", "--against", "run7", "--require", "optimizer"), "\nok\n"),
        (("gather", "out", "store", "--to", "zarr"), "megatron TP1 PP2 DP4 -> zarr\n"),
        (("verify", "store", "--against", "whole", "--require", "optimizer"), "\nok\n"),
        (("digest", "out"), "output_layer.weight"),
        (("formats",), "megatron"),
    ):
        code, out, err = run(*arguments)
        assert code == 0, err
        assert says in out
        assert "error" not in err


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "gone"])
def test_verify_exits_3_on_damage_and_names_the_file(file: str, how: str, run: Run) -> None:
    assert run("reshard", "run7", "out", *TARGET)[0] == 0
    place = Path("out/iter_0000003/mp_rank_00_001", file)
    if how == "flipped":
        flip(place, place.stat().st_size // 2)
    elif how == "gone":
        place.unlink()
    else:
        place.write_bytes(place.read_bytes()[:40000] if how == "cut" else b"")
    code, out, err = run("verify", "out")
    assert code == 3, out + err
    first = out.splitlines()[0]
    assert first.startswith("damaged: ")
    assert str(place) in first
    assert out.splitlines()[-1] == "NOT OK"


def test_a_difference_exits_3_and_names_the_tensor(run: Run) -> None:
    run("reshard", "run7", "out", *TARGET)
    place = Path("out/iter_0000003/mp_rank_00_001/distrib_optim.pt")
    flip(place, place.stat().st_size // 2)
    for arguments in (("verify", "out", "--against", "run7"), ("diff", "run7", "out")):
        code, out, _ = run(*arguments)
        assert code == 3
        assert re.search(
            r"^differs: decoder\.layers\.\S+ \(exp_avg\): 1 of \d+ ", out, re.MULTILINE
        )
    assert out.endswith("NOT equal\n")


def test_what_could_not_be_checked_exits_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = api.Verification(("something",), (), (), ("weights against masters: none",), ())
    monkeypatch.setattr(api, "verify", lambda *_, **__: found)
    code, out, _ = run("verify", "run7")
    assert code == 4
    assert out.splitlines() == [
        "could not check: weights against masters: none",
        "checked: something",
        "nothing wrong was found, but not all could be checked",
    ]


def test_an_interrupt_exits_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "reshard", interrupted)
    code, out, err = run("reshard", "run7", "out")
    assert (code, out, err.strip()) == (130, "", "error: interrupted")


def test_an_error_of_the_system_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "run7/secret")

    monkeypatch.setattr(api, "inspect", refused)
    assert run("inspect", "run7") == (1, "", "error: run7/secret: Permission denied\n")


# --- streams --------------------------------------------------------------------------

JSON_COMMANDS = [
    ("inspect", "run7"),
    ("reshard", "run7", "out", *TARGET),
    ("reshard", "run7", "out", "--dry-run"),
    ("gather", "run7", "out"),
    ("gather", "run7", "out", "--to", "zarr"),
    ("strip", "run7", "out"),
    ("verify", "run7"),
    ("verify", "run7", "--against", "run7"),
    ("diff", "run7", "run7"),
    ("digest", "run7"),
    ("formats",),
]
PROGRESS = re.compile(r"(write|compare|digest): ([\d.]+ \w+|done in [\d.]+ s)")


@pytest.mark.parametrize("arguments", JSON_COMMANDS, ids=" ".join)
def test_json_is_one_document_on_stdout_and_progress_is_on_stderr(
    arguments: tuple[str, ...], run: Run
) -> None:
    code, out, err = run(*arguments, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)
    assert all(PROGRESS.fullmatch(line) for line in err.splitlines())
    code, text, again = run(*arguments[:2], *(("again",) if arguments[2:3] == ("out",) else ()))
    assert text != out
    assert "{" not in again


def test_every_json_command_is_in_the_matrix() -> None:
    with_json = {name for name in COMMANDS if "--json" in options_of(name)}
    assert with_json == {arguments[0] for arguments in JSON_COMMANDS} == set(COMMANDS)


def test_the_json_of_a_difference_names_it(run: Run) -> None:
    run("reshard", "run7", "out", "--tp", "1")
    flip(Path("out/iter_0000003/mp_rank_00/distrib_optim.pt"), 100_000)
    code, out, _ = run("diff", "run7", "out", "--json")
    document = json.loads(out)
    assert (code, document["equal"], len(document["differences"])) == (3, False, 1)
    code, out, _ = run("verify", "out", "--json")
    document = json.loads(out)
    assert (code, document["ok"], len(document["damage"])) == (3, False, 1)


def test_a_long_step_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    with output.progress() as stage:
        advance = stage("write", 3_000_000)
        assert advance is not None
        advance(1_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:2] == ["write: 3.0 MB", "write: 1.0 MB of 3.0 MB"]
    assert err.splitlines()[2].startswith("write: done in ")


def test_on_a_terminal_progress_is_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress() as stage:
        advance = stage("write", 1000)
        assert advance is not None
        advance(1000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "write" in err
    assert "1.0/1.0 kB" in err


# --- help -----------------------------------------------------------------------------


def options_of(name: str) -> set[str]:
    """Return the options of a command."""
    return {o for parameter in command(name).params for o in parameter.opts if o.startswith("-")}


def command(name: str) -> click.Command:
    with click.Context(cli) as ctx:
        found = cli.get_command(ctx, name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"])
    assert done.exit_code == 0
    assert re.search(rf"\n  Example:\n +ckpttools {name}\b", done.output)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help.endswith("."), parameter.help


def test_the_help_lists_the_commands_in_the_order_of_the_work() -> None:
    listed = re.findall(r"^  (\w+)  +\S", CliRunner().invoke(cli, ["-h"]).output, re.MULTILINE)
    assert tuple(listed) == COMMANDS


# --- as a process ---------------------------------------------------------------------

CKPTTOOLS = "from ckpttools.cli.main import main; main()"


def process(
    program: str, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-c", program, *arguments),
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_version_and_the_help_of_the_group_wait_for_no_numpy() -> None:
    program = "import sys, atexit; atexit.register(lambda: print('numpy' in sys.modules)); "
    done = process(program + CKPTTOOLS, "--version")
    assert done.stdout.splitlines() == ["ckpttools, version 0.1.0", "False"]
    assert done.returncode == 0


def test_a_process_exits_with_the_code_and_prints_no_traceback(tmp_path: Path) -> None:
    done = process(CKPTTOOLS, "inspect", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path / 'nowhere'}: must exist, got no such path\n"
    assert process(CKPTTOOLS, "inspect").returncode == 2


def test_ctrl_c_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    """A signal comes when the files are written and not yet proven."""
    source = str(FIXTURES / "gqa_tp2_pp1_dp2" / "torch")
    program = (
        "import os, signal\n"
        "from ckpttools import conversion\n"
        "conversion.prove = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n" + CKPTTOOLS
    )
    done = process(program, "reshard", source, "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "error: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_the_module_holds_the_names_of_its_commands() -> None:
    modules = {p.stem for p in Path(main_module.__file__).parent.glob("*.py")}
    assert modules - {"__init__", "main", "options", "output"} == set(COMMANDS)


def test_command_files_are_short_and_call_the_api_once() -> None:
    for name in COMMANDS:
        text = (Path(main_module.__file__).parent / f"{name}.py").read_text()
        calls = re.findall(r"\bapi\.([a-z_]+)\(", text)
        assert text.count("\n") <= 100, name
        assert len(calls) == 1, (name, calls)
