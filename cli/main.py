"""The command group, and what errors become: one line on stderr and an exit code.

0 done and equal; 1 could not run; 2 wrong usage; 3 damage or a difference (verify, diff);
4 something asked for could not be checked (verify); 130 interrupted.
"""

from __future__ import annotations

import sys

import click

from ckpttools.cli.diff import diff
from ckpttools.cli.digest import digest
from ckpttools.cli.formats import formats
from ckpttools.cli.gather import gather
from ckpttools.cli.inspect import inspect
from ckpttools.cli.reshard import reshard
from ckpttools.cli.verify import verify
from ckpttools.errors import CkptError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ckpttools", prog_name="ckpttools")
def cli() -> None:
    """Take training checkpoints from any parallel layout to any other, and prove it."""


for _command in (inspect, reshard, gather, verify, diff, digest, formats):
    cli.add_command(_command)


def main() -> None:
    """Run the command line and exit."""
    try:
        code = cli.main(standalone_mode=False)
    except CkptError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing was published", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
