"""``ckpttools inspect``."""

from __future__ import annotations

from math import prod
from typing import Any

import click

from ckpttools import api
from ckpttools.cli.options import json_option, reading_options
from ckpttools.cli.output import print_json, print_lines, size, table


@click.command()
@click.argument("src", type=click.Path())
@reading_options
@json_option
@click.option("-v", "--verbose", is_flag=True, help="List every tensor.")
def inspect(src: str, *, as_json: bool, verbose: bool, **how: Any) -> None:
    """Describe a checkpoint from its structure; no tensor is read and none of its code runs.

    \b
    Example:
        ckpttools inspect run7 --json
    """  # noqa: D301  # \b is click's mark for lines to keep
    document = api.inspect(src, **how)
    if as_json:
        print_json(document)
    else:
        print_lines(_lines(document, verbose=verbose))


def _lines(document: dict[str, Any], *, verbose: bool) -> list[str]:
    """Return the description as text: the run, the slots and, if asked for, every tensor."""
    sizes: dict[str, int] = document["topology"] or {}
    topology = " ".join(f"{name.upper()}{n}" for name, n in sizes.items())
    step = "" if document["step"] is None else f", optimizer step {document['step']:g}"
    files, iteration = document["files"], document["iteration"]
    facts = [
        ("format", document["format"]),
        ("topology", f"{topology} ({prod(sizes.values())} ranks)" if sizes else "none"),
        ("layout", " or ".join(document["layouts"])),
        ("buckets", document["buckets"] or "none"),
        ("iteration", f"{'none' if iteration is None else iteration}{step}"),
        ("files", f"{len(files)}, {size(sum(f['size_bytes'] for f in files))}"),
    ]
    return [
        *table(facts),
        "",
        *table(_slots(document), right=(2, 3)),
        *(["", *table(_tensors(document), right=(4,))] if verbose else []),
        *(f"note: {note}" for note in document["notes"]),
    ]


def _slots(document: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row for each slot, and one for all."""
    rows = [("slot", "dtype", "tensors", "size")]
    slots = document["slots"]
    for slot, numbers in slots.items():
        dtypes = sorted({t["dtype"] for t in document["tensors"] if t["slot"] == slot})
        rows.append((slot, ", ".join(dtypes), str(numbers["tensors"]), size(numbers["bytes"])))
    count, total = (sum(n[key] for n in slots.values()) for key in ("tensors", "bytes"))
    return [*rows, ("all", "", str(count), size(total))]


def _tensors(document: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each tensor."""
    rows = [("tensor", "slot", "dtype", "shape", "chunks")]
    for t in document["tensors"]:
        shape = " x ".join(map(str, t["shape"])) or "scalar"
        padding = f" + {t['padding_rows']} rows of padding" if t["padding_rows"] else ""
        rows.append((t["name"], t["slot"], t["dtype"], shape + padding, str(t["chunks"])))
    return rows
