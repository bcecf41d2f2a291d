"""``ckpttools verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import (
    cross_check_option,
    json_option,
    reading_options,
    resource_options,
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
@cross_check_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    src: str,
    against: str | None,
    require: tuple[str, ...],
    *,
    as_json: bool,
    **how: Any,
) -> None:
    """Check a checkpoint for damage, and that its content equals another's.

    Exits 0 if all is well, 3 on damage or a difference, 4 if something could not be checked.

    \b
    Example:
        ckpttools verify run7-tp1 --against run7
    """  # noqa: D301  # \b is click's mark for lines to keep
    with progress() as stage:
        result = api.verify(src, against=against, require=frozenset(require), stage=stage, **how)
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
    verdict = "ok" if result.ok else "NOT OK"
    if result.ok and result.unchecked:
        verdict = "nothing wrong was found, but not all could be checked"
    return [
        *(f"damaged: {line}" for line in result.damage),
        *(f"differs: {line}" for line in result.differences),
        *(f"could not check: {line}" for line in result.unchecked),
        *(f"checked: {line}" for line in result.checked),
        *(f"note: {line}" for line in result.notes),
        verdict,
    ]
