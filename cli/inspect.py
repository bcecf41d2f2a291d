"""``ckpttools inspect``."""

from __future__ import annotations

from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import json_option, read_options_of, reading_options
from ckpttools.cli.output import print_json, print_lines


@click.command()
@click.argument("src", type=click.Path())
@reading_options
@json_option
@click.option("-v", "--verbose", is_flag=True, help="List every tensor.")
def inspect(
    src: str,
    format_: str | None,
    layout: str | None,
    rules_path: str | None,
    vocab_size: int | None,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    r"""Describe a checkpoint from its structure; no tensor is read and none of its code runs.

    \b
    Example:
        ckpttools inspect checkpoints/run7 --json
    """
    options = read_options_of(layout, rules_path, vocab_size)
    document = api.inspect(src, format=format_, options=options)
    if as_json:
        print_json(document)
    else:
        print_lines(_lines(document, verbose=verbose))


def _lines(document: dict[str, Any], *, verbose: bool) -> list[str]:
    """Return the description as text."""
    topology = " ".join(f"{k.upper()}{v}" for k, v in (document["topology"] or {}).items())
    size = sum(file["size_bytes"] for file in document["files"])
    lines = [
        f"format:    {document['format']}",
        f"topology:  {topology or 'none (whole tensors)'}",
        f"layout:    {', '.join(document['layouts'])}; buckets {document['buckets'] or 'none'}",
        f"iteration: {document['iteration']}, optimizer step: {document['step']}",
        f"files:     {len(document['files'])}, {size} bytes",
    ]
    for slot, numbers in document["slots"].items():
        lines.append(f"{slot + ':':<11}{numbers['tensors']} tensors, {numbers['bytes']} bytes")
    if verbose:
        for tensor in document["tensors"]:
            padding = f" +{tensor['padding_rows']} padding rows" if tensor["padding_rows"] else ""
            lines.append(
                f"  {tensor['name']} {tensor['slot']} {tensor['dtype']} {tensor['shape']}{padding} "
                f"in {tensor['chunks']} chunks"
            )
    return [*lines, *(f"note: {note}" for note in document["notes"])]
