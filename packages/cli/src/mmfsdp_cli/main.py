"""Entry point of ``mmfsdp-cli``: its commands, and how errors become exit codes."""

from __future__ import annotations

import gc
import signal
import sys

import click

from mmfsdp_cli import __version__
from mmfsdp_cli.completing import completion_command
from mmfsdp_cli.converting import convert_command
from mmfsdp_cli.differing import diff_command
from mmfsdp_cli.doctoring import doctor_command
from mmfsdp_cli.formats import formats_command
from mmfsdp_cli.inspecting import inspect_command
from mmfsdp_cli.planning import plan_command
from mmfsdp_cli.verifying import verify_command

__all__ = ["app", "main"]


@click.group(
    name="mmfsdp-cli",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or two checkpoints differ; 2 a path "
    "or argument is wrong.",
)
@click.version_option(__version__, message="mmfsdp-cli %(version)s", help="Print the version and exit.")
def app() -> None:
    """Inspect, convert, verify and compare checkpoints, without torch; look at plans and configs, without ranks."""


for command in (
    inspect_command,
    convert_command,
    verify_command,
    diff_command,
    formats_command,
    plan_command,
    doctor_command,
    completion_command,
):
    app.add_command(command)


def main() -> None:
    """Run the command line."""
    # As an interrupt does, SIGTERM must not leave half an output: what ends the process is raised where it is at work.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Metadata is many objects and no garbage: looking for cycles among them takes as long as reading them.
    gc.disable()
    app()
