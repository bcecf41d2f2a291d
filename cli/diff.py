"""``ckpttools diff``."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckpttools import api
from ckpttools.cli.options import (
    json_option,
    read_options_of,
    reading_options,
    resource_options,
    resources_of,
)
from ckpttools.cli.output import print_json, print_lines, progress


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@reading_options
@resource_options
@json_option
@click.pass_context
def diff(
    ctx: click.Context,
    a: str,
    b: str,
    format_: str | None,
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    memory: int,
    workers: int | None,
    *,
    as_json: bool,
) -> None:
    r"""List what differs between the content of two checkpoints, whatever their layouts.

    The options tell of both. Exits 0 if all is equal, 3 if something differs.

    \b
    Example:
        ckpttools diff run7 run7-tp1
    """
    with progress() as stage:
        result = api.diff(
            a,
            b,
            format=format_,
            options=read_options_of(layout, rules_path, vocab_size),
            resources=resources_of(memory, workers),
            stage=stage,
        )
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
    lines += [f"padding differs: {name} ({slot})" for name, slot in result.padding]
    return [*lines, f"{result.compared} tensors compared, {result.compared_bytes} bytes"]
