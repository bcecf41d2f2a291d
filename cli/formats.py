"""``ckpttools formats``."""

from __future__ import annotations

import click

from ckpttools import api
from ckpttools.cli.options import json_option
from ckpttools.cli.output import print_json, print_lines


@click.command()
@json_option
def formats(*, as_json: bool) -> None:
    """List the formats that can be read and written.

    \b
    Example:
        ckpttools formats
    """  # noqa: D301  # \b is click's mark for lines to keep
    table = api.formats_table()
    if as_json:
        print_json(table)
    else:
        print_lines(f"{name:<12} {text}" for name, text in table.items())
