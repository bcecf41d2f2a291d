"""``ckpttools gather``."""

from __future__ import annotations

from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import conversion_options, selection_options
from ckpttools.cli.output import print_report, progress


@click.command()
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["safetensors", "zarr"]),
    default="safetensors",
    show_default=True,
    help="The form to write; zarr needs ckpttools[zarr].",
)
@selection_options
@conversion_options
def gather(src: str, dst: str, to: str, *, as_json: bool, verbose: bool, **conversion: Any) -> None:
    """Write whole tensors by name: weights, optimizer state and the rest, no topology left.

    \b
    Example:
        ckpttools gather run7 run7-whole
        ckpttools gather run7 run7.zarr --to zarr
    """  # noqa: D301  # \b is click's mark for lines to keep
    with progress() as stage:
        report = api.gather(src, dst, to=to, stage=stage, **conversion)
    print_report(report, as_json=as_json, verbose=verbose)
