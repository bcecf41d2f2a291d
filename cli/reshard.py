"""``ckpttools reshard``."""

from __future__ import annotations

from typing import Any, Literal

import click

from ckpttools import api
from ckpttools.cli.options import conversion_options, selection_options
from ckpttools.cli.output import print_report, progress

_Size = click.IntRange(min=1)


class _BucketSize(click.ParamType[int | Literal["none"]]):
    """A number of elements, or ``none``."""

    name = "bucket size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["none"]:
        """Parse ``--bucket-size``."""
        text = str(value)
        if text == "none":
            return "none"
        if not text.isdecimal() or int(text) < 1:
            self.fail(f"must be a number of elements or 'none', got {text!r}", param, ctx)
        return int(text)


@click.command()
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--to", metavar="FORMAT", help="The format to write (default: the source's).")
@click.option("--tp", type=_Size, help="Tensor-parallel size.")
@click.option("--pp", type=_Size, help="Pipeline-parallel size.")
@click.option("--vpp", type=_Size, help="Model chunks of a stage, for interleaved stages.")
@click.option("--first-stage-layers", type=_Size, metavar="N", help="Layers of the first stage.")
@click.option("--last-stage-layers", type=_Size, metavar="N", help="Layers of the last stage.")
@click.option("--dp", type=_Size, help="Data-parallel size.")
@click.option("--world", type=_Size, help="Number of ranks; gives the data-parallel size.")
@click.option(
    "--bucket-size",
    type=_BucketSize(),
    metavar="N",
    help="Elements in a bucket, or 'none' for one.",
)
@click.option(
    "--masters",
    type=click.Choice(["stored", "remainders"]),
    help="How the run to come keeps masters of bfloat16 weights.",
)
@selection_options
@conversion_options
def reshard(
    src: str,
    dst: str,
    to: str | None,
    tp: int | None,
    pp: int | None,
    vpp: int | None,
    first_stage_layers: int | None,
    last_stage_layers: int | None,
    dp: int | None,
    world: int | None,
    bucket_size: int | Literal["none"] | None,
    masters: Literal["stored", "remainders"] | None,
    *,
    as_json: bool,
    verbose: bool,
    **conversion: Any,
) -> None:
    """Write a checkpoint for another topology, prove it equal, and publish it in one step.

    A size that is not named stays as in the source; where the number of stages changes, each has
    one model chunk unless --vpp says otherwise.

    \b
    Example:
        ckpttools reshard run7 run7-tp1 --tp 1 --pp 2 --dp 4
    """  # noqa: D301  # \b is click's mark for lines to keep
    target = api.Target(
        tp=tp,
        pp=pp,
        vpp=vpp,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        dp=dp,
        world=world,
        bucket_size=bucket_size,
        masters=masters,
    )
    with progress() as stage:
        report = api.reshard(src, dst, target=target, to=to, stage=stage, **conversion)
    print_report(report, as_json=as_json, verbose=verbose)
