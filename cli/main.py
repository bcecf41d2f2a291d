"""The command group, and what errors become: one line on stderr and an exit code.

0 done and equal; 1 could not run; 2 wrong usage; 3 damage or a difference (verify, diff);
4 something asked for could not be checked (verify); 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from ckpttools.errors import CkptError

COMMANDS = ("inspect", "reshard", "gather", "strip", "verify", "diff", "digest", "formats")


class _Commands(click.Group):
    """Loads a command when it is used: ``--version`` waits for no numpy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of the module that has its name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"ckpttools.cli.{cmd_name}"), cmd_name)
        return command if isinstance(command, click.Command) else None


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="ckpttools", prog_name="ckpttools")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Take training checkpoints from any parallel layout to any other, and prove it.

    \b
    Example:
        ckpttools reshard run7 run7-tp1 --tp 1 --pp 2 --dp 4
    """  # noqa: D301  # \b is click's mark for lines to keep
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """Run the command line and exit."""
    try:
        code = cli.main(prog_name="ckpttools", standalone_mode=False)
    except CkptError as error:
        _fail(str(error), error.hint, 1)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "ckpttools"
        _fail(error.format_message(), f"see '{path} --help'", 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", "", 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", "", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, hint: str, code: int) -> None:
    """Say what went wrong in one line, what to do in another, and exit."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    sys.exit(code)
