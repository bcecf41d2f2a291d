"""``ckpttools diff``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import json_option, reading_options, resource_options
from ckpttools.cli.output import print_json, print_lines, progress, size


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@reading_options
@resource_options
@json_option
@click.pass_context
def diff(ctx: click.Context, /, a: str, b: str, *, as_json: bool, **how: Any) -> None:
    """List what differs between the content of two checkpoints, whatever their layouts.

    The options tell of both. Exits 0 if all is equal, 3 if something differs.

    \b
    Example:
        ckpttools diff run7 run7-tp1
    """  # noqa: D301  # \b is click's mark for lines to keep
    with progress() as stage:
        result = api.diff(a, b, stage=stage, **how)
    if as_json:
        print_json({"equal": result.same, **asdict(result)})
    else:
        print_lines(_lines(result, a, b))
    if not result.same:
        ctx.exit(3)


def _lines(result: api.Comparison, a: str, b: str) -> list[str]:
    """Return the differences as text."""
    lines = [f"differs: {difference}" for difference in result.differences]
    lines += [f"only in {a}: {name} ({slot})" for name, slot in result.only_a]
    lines += [f"only in {b}: {name} ({slot})" for name, slot in result.only_b]
    lines += [f"note: padding differs: {name} ({slot})" for name, slot in result.padding]
    verdict = "equal" if result.same else "NOT equal"
    compared = f"{result.compared} tensors compared, {size(result.compared_bytes)}"
    return [*lines, f"{compared}: {verdict}"]
