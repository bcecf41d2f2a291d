"""What the documentation says is so: it names everything, its examples run, its links lead on.

A page is run from top to bottom in a directory of its own that holds a copy of ``fixtures``. In
a ``console`` block each line that starts with ``$ `` is run, and the lines below it must be what
it prints: stdout, and of stderr the errors and hints. In a ``python`` block lines with ``>>>``
are a doctest. ``...`` stands for any text; times, free space and what depends on the number of
cores are not compared.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click
import pytest

import ckpttools
from ckpttools import hooks, optimizer, testing
from ckpttools.cli.main import COMMANDS, cli, main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN = [
    page for page in PAGES if re.search(r"^```(console|python)$", page.read_text(), re.MULTILINE)
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COMPARED = [
    (re.compile(r"\d+\.\d+ s\b"), "N s"),
    (re.compile(r"[\d.]+ [kMGTP]?B free"), "N free"),
    (re.compile(r"\d+ workers? with [\d.]+ MB"), "N workers"),
    (re.compile(r"memory: about [\d.]+ MB"), "memory: about N"),
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- running a page -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a ``console`` block and what should come of it."""

    line: int
    command: str
    expected: str


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield language, line and text of each block, from top to bottom."""
    for match in BLOCK.finditer(text):
        yield match[1], text.count("\n", 0, match.start()) + 2, match[2]


def steps(line: int, block: str) -> Iterator[Step]:
    """Yield the commands of a ``console`` block."""
    for match in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        yield Step(line + block.count("\n", 0, match.start()), match[1], match[2])


class Shell:
    """Runs commands as a terminal would; ``ckpttools`` in this process, the rest in bash."""

    def __init__(self) -> None:
        self.code = 0

    def run(self, command: str) -> str:
        """Return what a command prints: stdout, and the errors and hints of stderr."""
        if command == "echo $?":
            return f"{self.code}\n"
        words = shlex.split(command)
        if words[0] == "ckpttools" and not {"|", ">"} & set(words):
            return self._ckpttools(words)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ("/bin/bash", "-c", command),
            env={**os.environ, "PATH": path},
            check=False,
            capture_output=True,
            text=True,
        )
        self.code = done.returncode
        return done.stdout + (_shown(done.stderr) if "ckpttools" in words else done.stderr)

    def _ckpttools(self, words: list[str]) -> str:
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setattr(sys, "argv", words)
            try:
                main()
            except SystemExit as stop:
                self.code = int(str(stop.code))
        return out.getvalue() + _shown(err.getvalue())


def _shown(err: str) -> str:
    """Return the errors and hints of a stderr."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(("error: ", "hint: ")))


def normal(text: str) -> str:
    """Return the text without what may differ from run to run, and with relative paths."""
    text = text.replace(f"{Path.cwd()}/", "")
    for pattern, instead in NOT_COMPARED:
        text = pattern.sub(instead, text)
    return text


def as_expected(expected: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(normal(expected), normal(got), doctest.ELLIPSIS)


class Page:
    """Runs a page's blocks from top to bottom, all ``python`` blocks in one namespace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names: dict[str, object] = {}
        self.shell = Shell()
        self.runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        self.wrong: list[str] = []

    def run(self, text: str) -> str:
        """Return a description of each difference between the page and what it does."""
        for language, line, block in blocks(text):
            if language == "console":
                self._console(line, block)
            elif language == "python":
                self._python(line, block)
        return "\n".join(self.wrong)

    def _console(self, line: int, block: str) -> None:
        for step in steps(line, block):
            got = self.shell.run(step.command)
            if not as_expected(step.expected, got):
                self.wrong.append(f"line {step.line}: $ {step.command}\n{got}")

    def _python(self, line: int, block: str) -> None:
        if ">>>" not in block:
            exec(compile(block, self.name, "exec"), self.names)  # noqa: S102  # made to be run
            return
        said = io.StringIO()
        parser = doctest.DocTestParser()
        test = parser.get_doctest(block, self.names, self.name, self.name, line - 1)
        self.runner.run(test, out=said.write, clear_globs=False)
        self.names = test.globs
        if said.getvalue():
            self.wrong.append(said.getvalue())


@pytest.mark.parametrize("page", RUN, ids=page_id)
def test_the_examples_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in ("megatron", "apex", "nemo"):
        shutil.copytree(ROOT / "fixtures" / tool, tmp_path / "fixtures" / tool)
    monkeypatch.chdir(tmp_path)
    assert Page(page.name).run(page.read_text()) == ""


def test_the_runner_sees_a_wrong_output_a_wrong_code_and_a_wrong_value() -> None:
    page = "```console\n$ echo one\ntwo\n$ false\n$ echo $?\n0\n$ echo three\nthree\n```\n"
    wrong = Page("page").run(page).splitlines()
    assert [line for line in wrong if line.startswith("line ")] == [
        "line 2: $ echo one",
        "line 5: $ echo $?",
    ]
    sum_of_two = "```python\n>>> 1 + 1\n3\n```\n"
    assert "Expected:\n    3\nGot:\n    2" in Page("page").run(sum_of_two)
    assert Page("page").run("```python\nx = 2\n```\n\n```python\n>>> x\n2\n```\n") == ""


def test_the_blocks_of_a_page_run_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make = '```python\n>>> import pathlib; _ = pathlib.Path("made").write_text("x")\n```\n'
    look = "```console\n$ ls made\nmade\n```\n"
    assert Page("page").run(make + look) == ""
    (tmp_path / "made").unlink()
    assert "ls: " in Page("page").run(look + make)


def test_the_runner_compares_all_but_times_and_what_the_machine_decides() -> None:
    assert as_expected("done in 0.10 s\n", "done in 31.00 s\n")
    assert as_expected("a ... z\n", "a b c z\n")
    assert not as_expected("15 tensors\n", "16 tensors\n")
    assert not as_expected("", "16 tensors\n")


# --- completeness ---------------------------------------------------------------------


def section(page: str, heading: str) -> str:
    """Return the text below a heading of the second level."""
    match = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {heading!r}"
    return match[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_each_of_its_options_has_help_and_stands_in_the_docs(name: str) -> None:
    page = (DOCS / "cli.md").read_text()
    text = section(page, f"ckpttools {name}")
    shared = section(page, "Options that several commands share")
    with click.Context(cli) as ctx:
        command = cli.get_command(ctx, name)
    assert command is not None
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            for option in parameter.opts:
                assert re.search(rf"`{option}[ `]", text + shared), f"{name} {option}"
    assert f"$ ckpttools {name}" in text
    documented = set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))
    assert documented <= {o for p in command.params for o in p.opts}


def test_every_public_name_stands_in_the_docs_and_no_other_does() -> None:
    page = (DOCS / "api.md").read_text()
    headings = re.findall(r"^### `([a-zA-Z_]+)", page, re.MULTILINE)
    assert sorted(headings) == sorted([*ckpttools.__all__, *testing.__all__])


_FORMAT_NAMES = re.compile(r"^Format names?: (.*?)\.\s", re.MULTILINE | re.DOTALL)


def test_every_format_has_a_page() -> None:
    pages = {page: page.read_text() for page in (DOCS / "formats").glob("*.md")}
    named = {
        name: [
            page
            for page, text in pages.items()
            if any(f"`{name}`" in named for named in re.findall(_FORMAT_NAMES, text))
        ]
        for name in ckpttools.format_names()
    }
    assert all(len(found) == 1 for found in named.values()), named
    assert {page for found in named.values() for page in found} == set(pages)


@pytest.mark.parametrize("package", [optimizer, hooks], ids=lambda package: str(package.__name__))
def test_every_public_name_of_the_training_side_stands_in_its_page(package: ModuleType) -> None:
    listed = section((DOCS / "optimizer.md").read_text(), "Names")
    assert [name for name in package.__all__ if f"`{name}`" not in listed] == []


def test_the_changelog_and_the_package_have_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ckpttools.__version__ == project["version"]
    assert f"\n## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def messages() -> str:
    """Return the package's source with literals joined and each value in a message as …."""
    folders = ("ckpttools/**", "optimizer", "cli")  # a glob doesn't follow the symbolic links
    paths = sorted(path for folder in folders for path in ROOT.glob(f"{folder}/*.py"))
    text = "\n".join(path.read_text() for path in paths)
    return re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", text))


def test_every_refusal_that_the_how_to_explains_is_one_of_the_package() -> None:
    table = section((DOCS / "how-to.md").read_text(), "What to do on each refusal")
    explained = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(explained) > 15
    source = messages()
    assert [text for text in explained if text not in source] == []


# --- links ----------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target
        assert DOCS not in page.parents or DOCS in place.parents, f"{target} leaves the site"


def test_every_page_of_the_site_is_in_its_navigation_and_the_other_way_round() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
