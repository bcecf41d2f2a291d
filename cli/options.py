"""Options that several commands share.

Each decorator adds options to a command and hands them over as the api's own arguments, so that a
command passes them on without looking at them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from ckpttools.api import ACCEPTABLE_LOSSES, ReadOptions, Resources, Selection

Command = Callable[..., Any]

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
    """Add what a user may have to tell a reader; hand over ``format`` and ``options``."""

    @wraps(command)
    def call(*args: object, **given: Any) -> object:
        options = ReadOptions(
            layout=given.pop("layout"),
            rules_path=given.pop("rules_path"),
            vocab_size=given.pop("vocab_size"),
            accept_loss=frozenset(given.pop("accept_loss")),
            names_path=given.pop("names_path"),
            model_path=given.pop("model_path"),
            adam_w_mode=given.pop("adam_w_mode"),
        )
        return command(*args, format=given.pop("format_"), options=options, **given)

    return _with(
        call,
        click.option("--format", "format_", metavar="FORMAT", help="The source's format."),
        click.option("--vocab-size", type=click.IntRange(min=1), help="True vocabulary rows."),
        click.option("--rules", "rules_path", metavar="FILE", help="Sharding rules (TOML)."),
        click.option("--layout", metavar="NAME", help="The layout variant, where several fit."),
        click.option(
            "--accept-loss",
            type=click.Choice(sorted(ACCEPTABLE_LOSSES)),
            multiple=True,
            help="Go on without what the source lacks or no target can hold.",
        ),
        click.option(
            "--names",
            "names_path",
            metavar="FILE",
            help="Names of the parameters (JSON), where a file only numbers them.",
        ),
        click.option(
            "--model",
            "model_path",
            metavar="FILE",
            help="The model's weights, where the optimizer's file lacks them.",
        ),
        click.option(
            "--adam-w-mode/--l2-mode",
            "adam_w_mode",
            default=None,
            help="How weight decay was done, where no file tells.",
        ),
    )


def resource_options(command: Command) -> Command:
    """Add the memory budget and the number of workers; hand over ``resources``."""

    @wraps(command)
    def call(*args: object, memory: int, workers: int | None, **given: Any) -> object:
        number = {} if workers is None else {"workers": workers}
        return command(*args, resources=Resources(budget_bytes=memory, **number), **given)

    return _with(
        call,
        click.option(
            "--memory", type=Size(), default="1GiB", show_default=True, help="Budget for buffers."
        ),
        click.option(
            "--workers", type=click.IntRange(min=1), help="Threads that copy (default: up to 4)."
        ),
    )


def cross_check_option(command: Command) -> Command:
    """Add ``--no-cross-check``; hand over ``cross_check``."""

    @wraps(command)
    def call(*args: object, no_cross_check: bool, **given: Any) -> object:
        return command(*args, cross_check=not no_cross_check, **given)

    return _with(
        call,
        click.option(
            "--no-cross-check", is_flag=True, help="Don't hold weights against their masters."
        ),
    )


def conversion_options(command: Command) -> Command:
    """Add all that reading, copying and publishing a checkpoint take, and how to report it."""
    return reading_options(
        resource_options(
            cross_check_option(
                _with(
                    command,
                    click.option("--dry-run", is_flag=True, help="Plan only; write nothing."),
                    click.option("--overwrite", is_flag=True, help="Replace DST, atomically."),
                    click.option("--resume", is_flag=True, help="Go on with unfinished work."),
                    json_option,
                    click.option(
                        "-v", "--verbose", is_flag=True, help="Tell more of what was carried."
                    ),
                )
            )
        )
    )


def selection_options(command: Command) -> Command:
    """Add patterns of tensors; hand over ``selection``."""

    @wraps(command)
    def call(
        *args: object, include: tuple[str, ...], exclude: tuple[str, ...], **given: Any
    ) -> object:
        return command(*args, selection=Selection(include, exclude), **given)

    return _with(
        call,
        click.option(
            "--include",
            metavar="PATTERN",
            multiple=True,
            help="Take only tensors of this name, slot or name:slot; may be repeated.",
        ),
        click.option(
            "--exclude", metavar="PATTERN", multiple=True, help="Leave such tensors out; the same."
        ),
    )


def json_option(command: Command) -> Command:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options so that the help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command
