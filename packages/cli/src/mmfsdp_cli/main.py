"""Entry point of ``mmfsdp-cli``: its commands, and how errors become exit codes."""

from __future__ import annotations

import gc
import importlib
import signal
import sys

import click
from click.exceptions import NoSuchCommand

from mmfsdp_cli import __version__

__all__ = ["app", "main"]

_MODULES = {
    "inspect": "inspecting",
    "convert": "converting",
    "verify": "verifying",
    "diff": "differing",
    "formats": "formats",
    "plan": "planning",
    "doctor": "doctoring",
    "completion": "completing",
}


class _Commands(click.Group):
    """Imports a command when it is run, and all of them only for the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"mmfsdp_cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            raise NoSuchCommand(error.command_name, possibilities=_MODULES, ctx=ctx) from None


@click.group(
    name="mmfsdp-cli",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or two checkpoints differ; 2 a path "
    "or argument is wrong.",
)
@click.version_option(__version__, message="mmfsdp-cli %(version)s", help="Print the version and exit.")
def app() -> None:
    """Inspect, convert, verify and compare checkpoints, without torch; look at plans and configs, without ranks."""


def main() -> None:
    """Run the command line."""
    # As an interrupt does, SIGTERM must not leave half an output: what ends the process is raised where it is at work.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Metadata is many objects and no garbage: looking for cycles among them takes as long as reading them.
    gc.disable()
    try:
        app()
    finally:
        gc.freeze()  # nor are they looked through as the process ends
