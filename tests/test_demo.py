"""The demonstration runs with the runtime dependencies alone, and fails when something is wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ckpttools import api

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo.py"
TEST_DEPENDENCIES = ("torch", "safetensors", "hypothesis", "pytest")

WITHOUT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({TEST_DEPENDENCIES!r}))
runpy.run_path({str(DEMO)!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """Return the demonstration as a module."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demonstration_succeeds_and_cleans_up(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT),
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 tensors, 306.9 kB, equal the source bit for bit" in done.stdout
    assert "mp_rank_00_001/distrib_optim.pt: 24 pieces, 136320 bytes: as Mega" in done.stdout
    for slot in ("weight", "fp32_param", "exp_avg", "exp_avg_sq"):
        assert f"\n{slot:<10}  21920 of 21920 values" in done.stdout
    assert "linear_fc2.weight (exp_avg_sq): 1 of 1536 elements differ" in done.stdout
    assert "(exit code 3)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_demonstration_fails_where_megatrons_own_files_differ(
    demo: ModuleType, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(demo.MEGATRONS_OWN / "torch", tmp_path / "made"))
    demo.compare_with_megatron(made)
    demo.flip_a_bit(made)
    with pytest.raises(demo.DemoError, match=r"\(exp_avg_sq\) must have the bytes that Megatron"):
        demo.compare_with_megatron(made)
    with pytest.raises(demo.DemoError, match="pieces must be those of Megatron"):
        demo.compare_with_megatron(demo.SOURCE / "torch")


def test_the_demonstration_fails_where_a_value_is_not_that_of_the_live_run(
    demo: ModuleType, tmp_path: Path
) -> None:
    api.gather(demo.SOURCE / "torch", tmp_path / "whole")
    demo.compare_with_live_run(tmp_path / "whole")
    file = tmp_path / "whole" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(demo.DemoError, match="must be what the live run held"):
        demo.compare_with_live_run(tmp_path / "whole")


def test_the_demonstration_exits_1_and_says_what_is_wrong(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places: list[Path] = []

    def wrong(work: Path) -> None:
        places.append(work.resolve())
        raise demo.DemoError("a tensor differs")

    monkeypatch.setattr(demo, "demonstrate", wrong)
    assert demo.main() == 1
    assert capsys.readouterr().err == "\nNOT as it must be: a tensor differs\n"
    assert not places[0].exists()
