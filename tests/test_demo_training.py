"""The training demonstration runs, and fails when something is wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo_training.py"


@pytest.fixture
def demo() -> ModuleType:
    """Return the demonstration as a module."""
    spec = importlib.util.spec_from_file_location("demo_training", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_ranks_save_one_goes_on_and_the_losses_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        (sys.executable, str(DEMO), "--before", "2", "--after", "1", "--first", "1", "--last", "2"),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read back: 256 tensors, 16.5 MB, equal the source bit for bit" in done.stdout
    assert "largest distance from one process with torch's AdamW: 0.000" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if "ckpttools" in path.name] == []


def test_the_demonstration_fails_where_losses_are_not_those_of_one_process(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = iter([[5.0, 4.0], [3.0, 2.5], [5.0, 4.0, 3.0, 2.0]])

    class Report:
        proof = ()

    class Comparison:
        equal, compared = True, 1

    monkeypatch.setattr(demo, "train", lambda *_: next(curves))
    monkeypatch.setattr(demo.api, "reshard", lambda *_, **__: Report)
    monkeypatch.setattr(demo.api, "diff", lambda *_: Comparison)
    monkeypatch.setattr(sys, "argv", ["demo_training.py"])
    assert demo.main() == 1
    assert "NOT as it must be: losses must lie within" in capsys.readouterr().err
