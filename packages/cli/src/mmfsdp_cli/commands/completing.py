"""``mmfsdp-cli completion``: prints the script with which a shell completes commands, options and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mmfsdp_cli.printing.help import Command, argument

__all__ = ["completion_command"]

_PROGRAM = "mmfsdp-cli"


@click.command("completion", cls=Command)
@argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="bash, zsh or fish.")
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options and values.

    For bash, put this into ~/.bashrc: eval "$(mmfsdp-cli completion bash)"

    Exit codes: 0 done; 2 there is no such shell.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"This version of click has no completion for {shell}.")
    variable = f"_{_PROGRAM}_COMPLETE".replace("-", "_").upper()  # what click looks for when the program is run
    click.echo(kind(context.find_root().command, {}, _PROGRAM, variable).source())
