"""Starting is cheap: neither the library nor the command line loads torch or zarr."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "zarr", "fsspec"}

IMPORT = "import ckpttools"
VERSION = """
import sys
from ckpttools.cli.main import main
sys.argv = ["ckpttools", "--version"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
REPORT = """
import json, sys
print()
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def loaded_after(program: str) -> tuple[set[str], str]:
    """Return the top-level modules that a fresh interpreter holds then, and what it printed."""
    command = (sys.executable, "-c", program + "\n" + REPORT)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    printed, modules = done.stdout.rstrip().rsplit("\n", 1)
    return set(json.loads(modules)), printed


def test_the_probe_sees_a_heavy_import() -> None:
    modules, _ = loaded_after("import fsspec")
    assert modules & HEAVY == {"fsspec"}


@pytest.mark.parametrize("program", [IMPORT, VERSION], ids=["import", "--version"])
def test_starting_loads_no_heavy_module(program: str) -> None:
    modules, _ = loaded_after(program)
    assert "ckpttools" in modules
    assert modules & HEAVY == set()


def test_the_library_alone_loads_no_command_line() -> None:
    modules, _ = loaded_after(IMPORT)
    assert modules & {"click", "rich"} == set()


def test_the_command_line_prints_its_version() -> None:
    _, printed = loaded_after(VERSION)
    assert "0.1.0" in printed
