"""``ckpttools digest``."""

from __future__ import annotations

from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import json_option, reading_options, resource_options
from ckpttools.cli.output import print_json, print_lines, progress


@click.command()
@click.argument("src", type=click.Path())
@reading_options
@resource_options
@json_option
def digest(src: str, *, as_json: bool, **how: Any) -> None:
    """Print a digest of the content that no layout or format changes, for it and each tensor.

    A line for each tensor: name, slot, dtype, shape, CRC-32C; then the SHA-256 over these lines.

    \b
    Example:
        ckpttools digest run7
    """  # noqa: D301  # \b is click's mark for lines to keep
    with progress() as stage:
        whole, tensors = api.digest(src, stage=stage, **how)
    lines = sorted(tensor.line() for tensor in tensors)
    if as_json:
        print_json({"sha256": whole, "tensors": lines})
    else:
        print_lines([*lines, whole])
