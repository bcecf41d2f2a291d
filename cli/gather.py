"""``ckpttools gather``."""

from __future__ import annotations

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
@click.argument("dst", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["safetensors"]),
    default="safetensors",
    show_default=True,
    help="The form to write.",
)
@click.option("--accept-loss", multiple=True, metavar="NAME", help="What may be lost.")
@reading_options
@resource_options
@click.option("--dry-run", is_flag=True, help="Plan only; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST, atomically.")
@click.option("--no-cross-check", is_flag=True, help="Don't hold weights against their masters.")
@json_option
def gather(
    src: str,
    dst: str,
    to: str,
    accept_loss: tuple[str, ...],
    format_: str | None,
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    memory: int,
    workers: int | None,
    *,
    dry_run: bool,
    overwrite: bool,
    no_cross_check: bool,
    as_json: bool,
) -> None:
    r"""Write whole tensors by name: weights, optimizer state and the rest, no topology left.

    \b
    Example:
        ckpttools gather run7 run7-whole
    """
    with progress() as stage:
        report = api.gather(
            src,
            dst,
            to=to,
            format=format_,
            options=read_options_of(layout, rules_path, vocab_size, accept_loss),
            resources=resources_of(memory, workers),
            cross_check=not no_cross_check,
            dry_run=dry_run,
            overwrite=overwrite,
            stage=stage,
        )
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(report.lines())
