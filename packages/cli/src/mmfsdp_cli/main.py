"""Entry point of ``mmfsdp-cli``: its commands, and how errors become exit codes."""

from __future__ import annotations

import gc
import signal
import sys
from typing import Annotated

import typer

from mmfsdp_cli import __version__
from mmfsdp_cli.converting import convert_command
from mmfsdp_cli.differing import diff_command
from mmfsdp_cli.doctoring import doctor_command
from mmfsdp_cli.formats import formats_command
from mmfsdp_cli.inspecting import inspect_command
from mmfsdp_cli.planning import plan_command
from mmfsdp_cli.verifying import verify_command

__all__ = ["app", "main"]

# Plain help: rich would double the time that `--help` takes.
app = typer.Typer(
    name="mmfsdp-cli",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Inspect, convert, verify and compare checkpoints, without torch; look at plans and configs, without ranks.",
    epilog="Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or two checkpoints differ; 2 a path "
    "or argument is wrong.",
)
app.command("inspect")(inspect_command)
app.command("convert")(convert_command)
app.command("verify")(verify_command)
app.command("diff")(diff_command)
app.command("formats")(formats_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mmfsdp-cli {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    # As an interrupt does, SIGTERM must not leave half an output: what ends the process is raised where it is at work.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Metadata is many objects and no garbage: looking for cycles among them takes as long as reading them.
    gc.disable()
    app()
