"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ckpttools.api import ReadOptions, Resources

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


class Size(click.ParamType[int]):
    """A number of bytes such as 64MiB or 2GB."""

    name = "SIZE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Parse a size."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(value).strip())
        unit = match[2].upper() if match else None
        if match is None or unit not in _UNITS:
            self.fail(f"{value!r} is not a size such as 64MiB or 2GB", param, ctx)
        return int(float(match[1]) * _UNITS[unit])


def reading_options(command: Command) -> Command:
    """Add what a user may have to tell a reader."""
    for option in (
        click.option(
            "--layout", metavar="NAME", help="The layout variant, where files fit several."
        ),
        click.option(
            "--rules",
            "rules_path",
            metavar="FILE",
            help="Sharding rules (TOML) of the model family.",
        ),
        click.option(
            "--vocab-size", type=click.IntRange(min=1), help="The true number of vocabulary rows."
        ),
        click.option("--format", "format_", metavar="FORMAT", help="The source's format."),
    ):
        command = option(command)
    return command


def resource_options(command: Command) -> Command:
    """Add the memory budget and the number of workers."""
    for option in (
        click.option(
            "--workers", type=click.IntRange(min=1), help="Threads that copy (default: up to 4)."
        ),
        click.option(
            "--memory", type=Size(), default="1GiB", show_default=True, help="Budget for buffers."
        ),
    ):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def resources_of(memory: int, workers: int | None) -> Resources:
    """Return the resources that the options name."""
    if workers is None:
        return Resources(budget_bytes=memory)
    return Resources(budget_bytes=memory, workers=workers)


def read_options_of(
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    accept_loss: tuple[str, ...] = (),
) -> ReadOptions:
    """Return the facts that the options tell a reader."""
    return ReadOptions(
        layout=layout,
        rules_path=rules_path,
        vocab_size=vocab_size,
        accept_loss=frozenset(accept_loss),
    )
