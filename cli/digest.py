"""``ckpttools digest``."""

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
@reading_options
@resource_options
@json_option
def digest(
    src: str,
    format_: str | None,
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    memory: int,
    workers: int | None,
    *,
    as_json: bool,
) -> None:
    r"""Print a digest of the content that no layout or format changes, for it and each tensor.

    \b
    Example:
        ckpttools digest run7
    """
    with progress() as stage:
        whole, tensors = api.digest(
            src,
            format=format_,
            options=read_options_of(layout, rules_path, vocab_size),
            resources=resources_of(memory, workers),
            stage=stage,
        )
    if as_json:
        lines = [tensor.line() for tensor in tensors]
        print_json({"sha256": whole, "tensors": sorted(lines)})
    else:
        print_lines([*sorted(tensor.line() for tensor in tensors), whole])
