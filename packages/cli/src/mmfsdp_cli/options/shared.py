"""Arguments and options that several commands share, with their completions for the shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from mmfsdp_cli.printing.help import Option, argument

__all__ = [
    "CHECKPOINT",
    "PATH",
    "checkpoint_argument",
    "completing",
    "config_file",
    "flag",
    "jobs",
    "json_report",
    "keep",
    "limit",
    "model_arguments",
    "option",
    "ranks",
    "several",
    "shapes_from",
    "trust",
]

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MODEL = "Model"
_READING = "Reading"
_OUTPUT = "Output"


class _LocalPath(click.Path):
    """A path on this machine, which may be missing: the command that reads it explains what is wrong with it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (scheme := _REMOTE.match(value)):
            self.fail(f"{scheme[0]} is only read, and not here: give a path on this machine.", param, ctx)
        if value == "":  # as of a variable that is not set; pathlib takes it for the current directory
            self.fail("The path is empty. For the current directory, write '.'.", param, ctx)
        return super().convert(value, param, ctx)


class _AnyPath(_LocalPath):
    """A path on this machine, or a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and _REMOTE.match(value):
            return value
        return super().convert(value, param, ctx)


PATH = _LocalPath()
"""Type of paths on this machine."""
CHECKPOINT = _AnyPath()
"""Type of checkpoints that are read: paths and URLs."""


def option(*names: str, section: str, **settings: Any) -> Decorator:
    """Take an option, under a heading of the help."""
    return click.option(*names, cls=Option, section=section, **settings)


def checkpoint_argument(name: str) -> Decorator:
    """Take the checkpoint that a command reads."""
    return argument(
        name,
        type=CHECKPOINT,
        help="A .pth, .pt or .safetensors file, an index of several, or a directory: rank files, DCP; or a URL.",
    )


def flag(*names: str, help: str, section: str) -> Decorator:
    """Take an option without a value."""
    return option(*names, section=section, is_flag=True, help=help)


def several(*names: str, metavar: str, help: str, section: str, **settings: Any) -> Decorator:
    """Take an option that may be given several times; the command gets a tuple."""
    return option(*names, section=section, metavar=metavar, multiple=True, help=help, **settings)


def completing(values: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes an option's value; after ``PATTERN=`` it completes what follows."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        before, sign, typed = incomplete.rpartition("=")
        return [f"{before}{sign}{value}" for value in values() if value.startswith(typed)]

    return complete


json_report = flag("--json", "as_json", section=_OUTPUT, help="Print JSON, errors included, and no progress.")
jobs = option(
    "--jobs",
    section="How carefully, how fast",
    metavar="N",
    type=click.IntRange(min=1),
    help="Threads; by default one per processor, four at most.",
)
limit = option(
    "--limit",
    section=_OUTPUT,
    type=click.IntRange(min=0),
    default=40,
    metavar="N",
    help="Lines of each list and table; 0 shows all.",
)
trust = flag(
    "--trust", section=_READING, help="Keep unknown pickled objects as placeholders instead of rejecting the file."
)
model_arguments = several(
    "--model-arg",
    "model_arguments",
    section=_MODEL,
    metavar="KEY=VALUE",
    help="A keyword argument of the model's factory; may be repeated.",
)


def config_file(help: str) -> Decorator:
    """Take a file of settings."""
    return option("--config", section="Settings", type=PATH, metavar="FILE", help=help)


def keep(default: str) -> Decorator:
    """Take the part of a checkpoint to read; ``default`` says which it is otherwise."""
    return option(
        "--keep",
        section="What to take",
        metavar="model|all|KEY",
        shell_complete=completing(lambda: ("model", "all")),
        help=f"The weights, everything, or one top-level key; by default {default}.",
    )


def ranks(section: str, help: str, *, replicas: bool = True, axes: bool = False) -> Decorator:
    """Take a number of ranks, also as replicas and shards unless the command arranges them, and as named axes."""
    metavar, form = ("N|RxS", "; 2x4 is two replicas of four shards.") if replicas else ("N", ".")
    if axes:
        metavar, form = "N|RxS|AXES", "; 2x4 is two replicas of four shards: replicate=2,shard=4."
    return option("--ranks", section=section, metavar=metavar, help=f"{help}{form}")


def shapes_from(command: Function) -> Function:
    """Take the options that give the shapes that a checkpoint lacks."""
    for decorator in (
        several(
            "--model-arg", "model_arguments", section=_READING, metavar="KEY=VALUE", help="An argument of --model."
        ),
        option(
            "--model",
            section=_READING,
            metavar="MODULE:FACTORY|CONFIG",
            help="Instead of --reference: the model, as package.module:factory or an MMEngine config. Needs torch.",
        ),
        option(
            "--reference",
            section=_READING,
            type=CHECKPOINT,
            metavar="PATH",
            help="A complete checkpoint of the same model, for MMEngine's rank files without shapes.",
        ),
    ):
        command = decorator(command)
    return command
