"""Entry point of ``mmfsdp-cli``: imports the command that is run."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

import click

from mmfsdp_cli import __version__
from mmfsdp_cli.printing.console import say_usage_error
from mmfsdp_cli.printing.help import Context

__all__ = ["app", "main"]

# The module and the summary of each command: the list of commands imports none of them.
_COMMANDS = {
    "inspect": ("inspecting", "Show the tensors of a checkpoint and what else it holds."),
    "convert": ("converting", "Write a checkpoint in another format, in constant memory."),
    "average": ("averaging", "Write the average of the weights of several checkpoints, in constant memory."),
    "merge-lora": ("merging", "Merge a LoRA adapter into its base, in constant memory."),
    "delta": (
        "deltas",
        "Write what changed from one checkpoint to another; apply-delta restores the second, bit for bit.",
    ),
    "apply-delta": ("deltas", "Write the second checkpoint from the first and their delta, bit for bit."),
    "verify": (
        "verifying",
        "Check structure, coverage of every tensor, file sizes, checksums and manifest of a checkpoint.",
    ),
    "diff": ("differing", "Compare two checkpoints across formats and shardings: names, shapes, dtypes and values."),
    "compare": ("comparing", "Find the first tensor in which two recorded training runs differ, by name."),
    "formats": ("formats", "List the formats."),
    "recipes": (
        "recipes",
        "List the recipes that --recipe of convert takes by name, or print one to copy and change.",
    ),
    "plan": ("planning", "Show how a model would be sharded, for any number of ranks."),
    "rehearse": (
        "rehearsing",
        "Show the memory of a step, activations included, and its time, for any number of ranks.",
    ),
    "fit": ("fitting", "Print the fastest settings that fit into a device's memory."),
    "measure": ("measuring", "Run a few real steps on the CPUs at hand, and print predicted beside measured."),
    "prove": ("proving", "Prove that a model computes on several ranks what it computes in one process."),
    "doctor": (
        "doctoring",
        "Check an MMEngine config: how it trains sharded, what differs from MMEngine, what to change.",
    ),
    "completion": ("completing", "Print the script with which a shell completes commands, options and values."),
}


class _Commands(click.Group):
    """Imports a command when it is run."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"mmfsdp_cli.commands.{_COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib  # only when something is wrong

            near = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.5)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(
    name="mmfsdp-cli",
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or two checkpoints differ; 2 a path "
    "or argument is wrong.\n\nplan, rehearse, fit, measure, prove and doctor need torch; average, merge-lora, delta "
    "and apply-delta need numpy.",
)
@click.version_option(
    __version__, "-V", "--version", message="mmfsdp-cli %(version)s", help="Print the version and exit."
)
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
    # Our own threads share the work. The BLAS threads of numpy take CPU time from them as soon as numpy is imported,
    # and in products, where they wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Metadata has many objects and no garbage: searching them for cycles takes as long as reading them.
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
