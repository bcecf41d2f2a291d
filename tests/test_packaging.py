"""The top-level folders ``optimizer`` and ``cli`` are packages of ckpttools and nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = ("optimizer", "cli")
SOURCES = ("ckpttools", "tests", "examples", "benchmarks")


def python_files(*folders: str) -> list[Path]:
    """List the Python files below the folders, through the two symlinks."""
    return [
        Path(folder, name)
        for top in folders
        for folder, _, names in os.walk(ROOT / top, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]


def package_folders() -> set[str]:
    """Name the packages that an import finds: each folder with an ``__init__.py``."""
    return {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in python_files("ckpttools")
        if path.name == "__init__.py"
    }


def bare_imports(source: str) -> list[str]:
    """Name the modules of a mapped folder that ``source`` imports under a global name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(node.module or "")
    return [name for name in found if name.split(".")[0] in MAPPED]


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_folder_is_reached_through_a_relative_symlink(name: str) -> None:
    link = ROOT / "ckpttools" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert SETTINGS["tool"]["setuptools"]["package-dir"][f"ckpttools.{name}"] == name


def test_every_package_is_listed_once_and_no_other() -> None:
    listed = SETTINGS["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == package_folders()


def test_every_module_lies_in_a_package() -> None:
    folders = {path.parent for path in python_files("ckpttools")}
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_dependencies_and_pins_have_their_reason_on_their_line() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = SETTINGS["project"]
    extras = project["optional-dependencies"].values()
    for requirement in {*project["dependencies"], *(r for extra in extras for r in extra)}:
        lines = [line for line in text.splitlines() if f'"{requirement}"' in line]
        assert lines
        assert all(re.search(r"#\s*\S+", line) for line in lines), requirement


def names_of(requirements: Iterable[str]) -> set[str]:
    """Return the canonical names of the distributions that are required here."""
    parsed = map(Requirement, requirements)
    return {canonicalize_name(r.name) for r in parsed if not r.marker or r.marker.evaluate()}


def requirements_of(distribution: str) -> set[str]:
    """Return what an installed distribution requires; nothing of one that isn't there."""
    try:
        return names_of(importlib.metadata.requires(distribution) or [])
    except importlib.metadata.PackageNotFoundError:
        return set()


def test_all_that_the_extras_install_is_pinned_and_what_it_needs_in_turn() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", pin) for pin in pins), pins
    pinned = {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    assert len(pinned) == len(pins)
    project = SETTINGS["project"]
    open_ones = names_of(project["dependencies"]).union(
        *(names_of(extra) for extra in project["optional-dependencies"].values())
    )
    assert "zarr" in open_ones
    seen: set[str] = set()
    while open_ones:
        name = open_ones.pop()
        seen.add(name)
        open_ones |= requirements_of(name) - seen
    assert {"donfig", "numcodecs", "pyyaml"} <= seen
    # torch's wheel for CUDA pins the libraries that it brings itself.
    cuda = ("nvidia", "cuda", "triton")
    assert {name for name in seen - pinned if not name.startswith(cuda)} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import optimizer",
        "import cli.main as m",
        "from optimizer import zero1",
        "from cli.main import f",
    ],
)
def test_the_scan_finds_a_bare_import(source: str) -> None:
    assert len(bare_imports(source)) == 1


@pytest.mark.parametrize(
    "source",
    ["import ckpttools.cli.main", "from ckpttools.optimizer import zero1", "import clickx"],
)
def test_the_scan_passes_an_absolute_import(source: str) -> None:
    assert bare_imports(source) == []


def test_no_source_imports_a_mapped_folder_by_its_bare_name() -> None:
    files = python_files(*SOURCES)
    assert len(files) > len(python_files("ckpttools"))
    assert {str(f): bare_imports(f.read_text()) for f in files if bare_imports(f.read_text())} == {}


@pytest.mark.slow
def test_the_wheel_has_one_top_level_name_and_every_module(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns(
        ".git", ".venv*", "build", "fixtures", "*.egg-info", "__pycache__"
    )
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=skipped)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    command = (sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path), str(source))
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
        archive.extractall(tmp_path / "installed")
    modules = {str(path.relative_to(ROOT)) for path in python_files("ckpttools")}
    rules = {str(path.relative_to(ROOT)) for path in (ROOT / "ckpttools" / "rules").glob("*.toml")}
    assert {name.split("/")[0] for name in names} == {"ckpttools"}
    assert set(names) == modules | rules | {"ckpttools/py.typed"}

    empty = tmp_path / "empty"
    empty.mkdir()
    check = (
        "import importlib.util, ckpttools.optimizer; "
        "assert importlib.util.find_spec('optimizer') is None; "
        "assert importlib.util.find_spec('cli') is None; "
        "print(ckpttools.optimizer.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    found = subprocess.run(
        (sys.executable, "-c", check),
        cwd=empty,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    assert found == str(tmp_path / "installed/ckpttools/optimizer/__init__.py")
