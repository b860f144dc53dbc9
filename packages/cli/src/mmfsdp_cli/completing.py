"""``mmfsdp-cli completion``: commands and options completed by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion_command"]

_PROGRAM = "mmfsdp-cli"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="The shell to write for.")
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands and options.

    For bash, put it into ~/.bashrc with: eval "$(mmfsdp-cli completion bash)"
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"This version of click has no completion for {shell}.")
    variable = f"_{_PROGRAM}_COMPLETE".replace("-", "_").upper()  # what click looks for when the program is run
    click.echo(kind(context.find_root().command, {}, _PROGRAM, variable).source())
