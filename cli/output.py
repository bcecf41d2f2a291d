"""What goes where: results to stdout, progress and messages to stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.filesize import decimal

from ckpttools.api import Report

Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress | None]

SECONDS_BETWEEN_LINES = 10.0
"""How often a long step says how far it is where no bar can be drawn."""


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(document, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout."""
    for line in lines:
        click.echo(line)


def print_report(report: Report, *, as_json: bool, verbose: bool) -> None:
    """Print the outcome of a conversion."""
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(report.lines(verbose=verbose))


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Align rows in columns; those with an index in ``right`` stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(size_bytes: int) -> str:
    """Write a number of bytes for people."""
    return decimal(size_bytes)


@contextmanager
def progress() -> Iterator[Stage]:
    """Show the progress of long steps on stderr: bars on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        steps = _Lines()
        yield steps.begin
        steps.end()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:

        def stage(name: str, total_bytes: int) -> Progress:
            task = bars.add_task(name, total=total_bytes)
            return lambda done_bytes: bars.advance(task, done_bytes)

        yield stage


class _Lines:
    """Progress as lines: when a step begins, now and then, and when it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name = ""
        self._started = 0.0

    def begin(self, name: str, total_bytes: int) -> Progress:
        """End the step before and begin one; return what to tell of bytes done, by any thread."""
        self.end()
        self._name, self._started = name, time.monotonic()
        click.echo(f"{name}: {size(total_bytes)}", err=True)
        done, said = 0, self._started

        def advance(done_bytes: int) -> None:
            nonlocal done, said
            with self._lock:
                done += done_bytes
                now = time.monotonic()
                if now - said >= SECONDS_BETWEEN_LINES:
                    said = now
                    click.echo(f"{name}: {size(done)} of {size(total_bytes)}", err=True)

        return advance

    def end(self) -> None:
        """Say that the step is done, if one has begun."""
        if self._name:
            seconds = time.monotonic() - self._started
            click.echo(f"{self._name}: done in {seconds:.2f} s", err=True)
            self._name = ""
