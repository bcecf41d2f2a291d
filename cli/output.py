"""What goes where: results to stdout, progress and messages to stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[int], None]
Stage = Callable[[str, int], Progress | None]


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(document, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout."""
    for line in lines:
        click.echo(line)


@contextmanager
def progress() -> Iterator[Stage]:
    """Show the progress of long steps on stderr: bars on a terminal, else a line a step."""
    if not sys.stderr.isatty():
        yield _plain_stage
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


def _plain_stage(name: str, total_bytes: int) -> Progress:
    """Print when a step begins, and when it is all done."""
    started, left = time.monotonic(), [total_bytes]
    click.echo(f"{name}: {total_bytes} bytes", err=True)

    def advance(done_bytes: int) -> None:
        left[0] -= done_bytes
        if left[0] <= 0 and done_bytes:
            click.echo(f"{name}: done in {time.monotonic() - started:.2f} s", err=True)
            left[0] = sys.maxsize

    return advance
