"""``ckpttools reshard``."""

from __future__ import annotations

from typing import Literal

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

_Size = click.IntRange(min=1)


@click.command()
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--to", metavar="FORMAT", help="The format to write (default: the source's).")
@click.option("--tp", type=_Size, help="Tensor-parallel size.")
@click.option("--pp", type=_Size, help="Pipeline-parallel size.")
@click.option("--dp", type=_Size, help="Data-parallel size.")
@click.option("--world", type=_Size, help="Number of ranks; gives the data-parallel size.")
@click.option("--bucket-size", metavar="N", help="Elements in a bucket, or 'none' for one bucket.")
@click.option("--accept-loss", multiple=True, metavar="NAME", help="What may be lost.")
@reading_options
@resource_options
@click.option("--dry-run", is_flag=True, help="Plan only; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST, atomically.")
@click.option("--no-cross-check", is_flag=True, help="Don't hold weights against their masters.")
@json_option
def reshard(
    src: str,
    dst: str,
    to: str | None,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    world: int | None,
    bucket_size: str | None,
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
    r"""Write a checkpoint for another topology, prove it equal, and publish it in one step.

    A size that is not named stays as in the source.

    \b
    Example:
        ckpttools reshard run7 run7-tp1 --tp 1 --pp 2 --dp 4
    """
    target = api.Target(tp=tp, pp=pp, dp=dp, world=world, bucket_size=_bucket_size(bucket_size))
    with progress() as stage:
        report = api.reshard(
            src,
            dst,
            target=target,
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


def _bucket_size(text: str | None) -> int | Literal["none"] | None:
    """Parse ``--bucket-size``."""
    if text is None or text == "none":
        return None if text is None else "none"
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(
            f"must be a number of elements or 'none', got {text!r}", param_hint="--bucket-size"
        )
    return int(text)
