"""``ckpttools strip``."""

from __future__ import annotations

from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import conversion_options
from ckpttools.cli.output import print_report, progress


@click.command()
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--to", metavar="FORMAT", help="The format to write (default: the source's).")
@click.option(
    "--slot",
    "slots",
    metavar="NAME",
    multiple=True,
    help="Leave out this slot of the optimizer's state alone; may be repeated.",
)
@conversion_options
def strip(
    src: str,
    dst: str,
    to: str | None,
    slots: tuple[str, ...],
    *,
    as_json: bool,
    verbose: bool,
    **conversion: Any,
) -> None:
    """Write a checkpoint without its optimizer state, or without the slots that are named.

    \b
    Example:
        ckpttools strip run7 run7-weights
    """  # noqa: D301  # \b is click's mark for lines to keep
    with progress() as stage:
        report = api.strip(src, dst, slots=slots, to=to, stage=stage, **conversion)
    print_report(report, as_json=as_json, verbose=verbose)
