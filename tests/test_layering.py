"""A module imports only what its row of the layering table allows.

The table is that of docs/architecture.md. A module that no row names is an error, so a new one
is placed on purpose; a row whose module is not there yet is none.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOT_PACKAGE = "ckpttools"

# Each row may import the rows named: itself only where it is named in its own set.
BASE = {"errors", "dtypes"}
GEOMETRY = BASE | {"layout"}
HUB = GEOMETRY | {"manifest", "selection", "derived"}
INPUT = HUB | {"storage"}
ACTION = {
    "tiles",
    "executor",
    "codecs",
    "comparison",
    "digests",
    "evidence",
    "findings",
    "conversion",
    "job",
    "report",
    "verification",
    "description",
}
LIBRARY = INPUT | {"version", "formats", "plan"} | ACTION | {"api"}
ROWS: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "dtypes": {"errors"},
    "layout": GEOMETRY,
    "manifest": GEOMETRY,
    "selection": GEOMETRY | {"manifest"},
    "derived": GEOMETRY | {"manifest"},
    "storage": BASE | {"storage"},
    "plan": HUB,
    "formats": INPUT | {"formats"},
    **{name: INPUT | {"version", "formats", "plan"} | ACTION for name in ACTION},
    "api": LIBRARY - {"api"},
    "": LIBRARY,  # ckpttools/__init__.py
    "optimizer": HUB | {"optimizer"},
    "hooks": LIBRARY | {"hooks", "optimizer"},
    "testing": LIBRARY,
    "cli": {"api", "errors", "cli"},
    "__main__": {"cli"},
}
# The Protocol that each format imports, and the registry, whose late imports name them all.
REGISTRY = "ckpttools.formats"

# Other distributions, and the rows that may import them.
OUTSIDE: dict[str, set[str]] = {
    "numpy": set(ROWS) - {"errors", "cli", "__main__"},
    "google_crc32c": {"storage", "formats", "api"} | ACTION,
    "isal": {"storage"},
    "click": {"cli"},
    "rich": {"cli"},
    "torch": {"optimizer", "hooks"},
    "yaml": {"optimizer"},
    "apex": {"optimizer"},
    "transformer_engine": {"optimizer"},
    "lightning": {"hooks"},
    "transformers": {"hooks"},
    "accelerate": {"hooks"},
    "hypothesis": {"testing"},
    "pytest": {"testing"},
    "zarr": {"storage", "formats"},
    "fsspec": {"storage"},
}
ONLY_INSIDE_FUNCTIONS = {
    *{"zarr", "fsspec", "yaml", "apex", "transformer_engine"},
    *{"lightning", "transformers", "accelerate"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full name."""

    module: str
    line: int
    inside_function: bool
    relative: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One source file and what it imports."""

    name: str
    is_package: bool
    imports: tuple[Import, ...]

    @property
    def row(self) -> str:
        """The row of the table: the component below ckpttools, or "" for the root itself."""
        return row_of(self.name)


def row_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(source: str, known: frozenset[str] = frozenset()) -> tuple[Import, ...]:
    """List the imports of a source text; ``from a import b`` is ``a.b`` where that is a module."""

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, inside, relative=False)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    name = full if full in known else base
                    yield Import(name, child.lineno, inside, relative=bool(child.level))
            here = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, here)

    return tuple(walk(ast.parse(source), inside=False))


def read_modules(root: Path) -> list[Module]:
    """Read every module below ckpttools, through the two symlinks."""
    files = {}
    for folder, _, names in os.walk(root / ROOT_PACKAGE, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(root).with_suffix("").parts
                files[".".join(parts).removesuffix(".__init__")] = path
    known = frozenset(files)
    return [
        Module(name, path.name == "__init__.py", imports_of(path.read_text(), known))
        for name, path in sorted(files.items())
    ]


def violations(module: Module) -> list[str]:
    """Describe each import that the tables don't allow."""
    if module.row not in ROWS:
        return [f"{module.name}: no row of the layering table names it"]
    found = []
    for imported in module.imports:
        broken = rule_broken(module, imported)
        if broken:
            found.append(f"{module.name}:{imported.line}: imports {imported.module}: {broken}")
    return found


def rule_broken(module: Module, imported: Import) -> str | None:
    top = imported.module.split(".")[0]
    if imported.relative:
        return "imports must be absolute"
    if top == ROOT_PACKAGE:
        return own_rule_broken(module, imported.module)
    if top in sys.stdlib_module_names:
        return None
    if module.row not in OUTSIDE.get(top, set()):
        return f"row {module.row or ROOT_PACKAGE!r} must not"
    if top in ONLY_INSIDE_FUNCTIONS and not imported.inside_function:
        return "only inside a function"
    return None


def own_rule_broken(module: Module, imported: str) -> str | None:
    row = row_of(imported)
    if row not in ROWS[module.row]:
        return f"row {module.row or ROOT_PACKAGE!r} must not"
    if module.row != "formats" or row != "formats" or REGISTRY in (module.name, imported):
        return None
    if format_of(imported) != format_of(module.name):
        return "a format must not import another"
    return None


def format_of(module: str) -> str:
    return module.split(".")[2]


def cycle(modules: list[Module]) -> list[str]:
    """Return the modules of one import cycle, or nothing; the registry's late ones are none."""
    graph = {
        m.name: {i.module for i in m.imports if not (i.inside_function and m.name == REGISTRY)}
        for m in modules
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            found = visit(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in graph:
        found = visit(name, [])
        if found:
            return found
    return []


def planted(name: str, source: str) -> Module:
    known = frozenset({"ckpttools.api", "ckpttools.formats.hf", "ckpttools.layout.box"})
    return Module(name, is_package=False, imports=imports_of(source, known))


MODULES = read_modules(ROOT)


def test_modules_are_found_through_the_symlinks() -> None:
    names = {module.name for module in MODULES}
    assert {"ckpttools.errors", "ckpttools.layout.box", "ckpttools.optimizer"} <= names


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_a_module_imports_only_what_its_row_allows(module: Module) -> None:
    assert violations(module) == []


def test_no_import_goes_in_a_circle() -> None:
    assert cycle(MODULES) == []


@pytest.mark.parametrize(
    ("name", "source", "rule"),
    [
        ("ckpttools.novel", "import os", "no row of the layering table"),
        ("ckpttools.layout.box", "from ckpttools.manifest import Manifest", "must not"),
        ("ckpttools.layout.box", "import torch", "must not"),
        ("ckpttools.plan", "from ckpttools.storage import local", "must not"),
        ("ckpttools.plan", "import zarr", "must not"),
        ("ckpttools.executor", "import isal", "must not"),
        ("ckpttools.selection", "from ckpttools.plan import Plan", "must not"),
        ("ckpttools.derived", "from ckpttools.codecs import decode", "must not"),
        ("ckpttools.derived", "from ckpttools.storage.local import FilePool", "must not"),
        ("ckpttools.manifest", "from ckpttools.selection import Selection", "must not"),
        ("ckpttools.storage.journal", "from ckpttools.manifest import Manifest", "must not"),
        ("ckpttools.layout.pipeline", "from ckpttools.manifest import Manifest", "must not"),
        ("ckpttools.formats.consolidated.zarr_write", "import zarr", "only inside a function"),
        ("ckpttools.storage.local", "from ckpttools.layout.box import Box", "must not"),
        ("ckpttools.storage.remote", "import fsspec", "only inside a function"),
        ("ckpttools.formats.dcp", "from ckpttools.formats.hf import read", "another"),
        ("ckpttools.formats.dcp", "from ckpttools.formats import hf", "another"),
        ("ckpttools.formats.megatron.reader", "import ckpttools.formats.hf", "another"),
        ("ckpttools.formats.dcp", "from ckpttools.plan import Plan", "must not"),
        ("ckpttools.formats.dcp", "def f():\n    import torch", "must not"),
        ("ckpttools.evidence", "from ckpttools import api", "must not"),
        ("ckpttools.api", "import click", "must not"),
        ("ckpttools.optimizer.zero1", "from ckpttools.storage import local", "must not"),
        ("ckpttools.cli.main", "from ckpttools.plan import Plan", "must not"),
        ("ckpttools.cli.main", "import ckpttools", "must not"),
        ("ckpttools.cli.main", "import numpy", "must not"),
        ("ckpttools.cli.main", "from . import options", "absolute"),
        ("ckpttools.hooks.lightning", "import lightning", "only inside a function"),
        ("ckpttools.optimizer.zero1", "def f():\n    import transformers", "must not"),
    ],
)
def test_a_planted_import_is_refused(name: str, source: str, rule: str) -> None:
    (found,) = violations(planted(name, source))
    assert rule in found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ckpttools.dtypes", "import numpy as np\nfrom ckpttools.errors import FormatError"),
        ("ckpttools.formats.megatron.reader", "from ckpttools.formats.megatron import names"),
        ("ckpttools.formats.dcp", "from ckpttools.formats import Format"),
        ("ckpttools.formats", "from ckpttools.formats import hf"),
        ("ckpttools.storage.remote", "def f():\n    import fsspec"),
        ("ckpttools.storage.crc", "from isal.isal_zlib import crc32"),
        ("ckpttools.formats.consolidated.zarr_write", "def f():\n    import zarr"),
        ("ckpttools.selection", "from ckpttools.manifest import Manifest"),
        ("ckpttools.formats.dcp", "from ckpttools.derived import widened"),
        ("ckpttools.conversion", "from ckpttools.selection import Selection"),
        ("ckpttools.executor", "from ckpttools.codecs import Codec"),
        ("ckpttools.optimizer.zero1", "import torch\nfrom ckpttools.layout.box import Box"),
        ("ckpttools.cli.main", "import click\nfrom ckpttools import api"),
    ],
)
def test_an_allowed_import_passes(name: str, source: str) -> None:
    assert violations(planted(name, source)) == []


def test_a_planted_circle_is_found() -> None:
    a = planted("ckpttools.codecs", "import ckpttools.digest")
    b = planted("ckpttools.digest", "import ckpttools.codecs")
    assert cycle([a]) == []
    assert cycle([a, b]) == ["ckpttools.codecs", "ckpttools.digest", "ckpttools.codecs"]
