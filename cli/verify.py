"""``ckpttools verify``."""

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
@click.argument("src", type=click.Path())
@click.option("--against", type=click.Path(), help="Compare the content with this checkpoint.")
@click.option(
    "--require",
    type=click.Choice(["optimizer"]),
    multiple=True,
    help="Its absence is a difference.",
)
@reading_options
@resource_options
@click.option("--no-cross-check", is_flag=True, help="Don't hold weights against their masters.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    src: str,
    against: str | None,
    require: tuple[str, ...],
    format_: str | None,
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    memory: int,
    workers: int | None,
    *,
    no_cross_check: bool,
    as_json: bool,
) -> None:
    r"""Check a checkpoint for damage, and that its content equals another's.

    Exits 0 if all is well, 3 on damage or a difference, 4 if something could not be checked.

    \b
    Example:
        ckpttools verify run7-tp1 --against run7
    """
    with progress() as stage:
        result = api.verify(
            src,
            against=against,
            require=frozenset(require),
            format=format_,
            options=read_options_of(layout, rules_path, vocab_size),
            resources=resources_of(memory, workers),
            cross_check=not no_cross_check,
            stage=stage,
        )
    if as_json:
        print_json({"ok": result.ok, **asdict(result)})
    else:
        print_lines(_lines(result))
    if not result.ok:
        ctx.exit(3)
    if result.unchecked:
        ctx.exit(4)


def _lines(result: api.Verification) -> list[str]:
    """Return the result as text."""
    verdict = "ok" if result.ok and not result.unchecked else "NOT OK"
    return [
        *(f"damaged: {line}" for line in result.damage),
        *(f"differs: {line}" for line in result.differences),
        *(f"could not check: {line}" for line in result.unchecked),
        *(f"checked: {line}" for line in result.checked),
        *(f"note: {line}" for line in result.notes),
        verdict,
    ]
