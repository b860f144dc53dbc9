"""Entry point of ``mmfsdp-cli``: imports the command that is run."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

import click

from mmfsdp_cli import __version__
from mmfsdp_cli.console import say_usage_error
from mmfsdp_cli.help import Context, summary

__all__ = ["app", "main"]

_MODULES = {
    "inspect": "inspecting",
    "convert": "converting",
    "average": "averaging",
    "merge-lora": "merging",
    "delta": "deltas",
    "apply-delta": "deltas",
    "verify": "verifying",
    "diff": "differing",
    "formats": "formats",
    "recipes": "recipes",
    "plan": "planning",
    "doctor": "doctoring",
    "completion": "completing",
}


class _Commands(click.Group):
    """Imports a command when it is run, and all of them only for the help."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"mmfsdp_cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _MODULES and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib  # only when something is wrong

            near = difflib.get_close_matches(name, _MODULES, n=1, cutoff=0.5)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(command)) for name, command in commands if command is not None])


@click.group(
    name="mmfsdp-cli",
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or two checkpoints differ; 2 a path "
    "or argument is wrong.",
)
@click.version_option(__version__, message="mmfsdp-cli %(version)s", help="Print the version and exit.")
@click.pass_context
def app(ctx: click.Context) -> None:
    """Inspect, convert, verify and compare checkpoints, without torch; plan how a model is sharded, without ranks."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> None:
    """Run the command line."""
    # SIGTERM must not leave half an output: raise, as an interrupt does, so that the conversion cleans up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Our own threads share the work. Those of numpy's BLAS take CPU time from them: as soon as numpy is imported, and
    # in products, where they wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Metadata is many objects and no garbage: searching them for cycles takes as long as reading them.
    gc.disable()
    try:
        sys.exit(app(prog_name="mmfsdp-cli", standalone_mode=False))
    except click.UsageError as error:
        say_usage_error(error)
        sys.exit(error.exit_code)
    except click.Abort:  # an interrupt before the command began
        sys.exit(130)
    finally:
        gc.freeze()  # do not search them as the process ends either
