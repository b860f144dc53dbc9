"""Arguments and options that several commands have, said once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["PATH", "checkpoint_argument", "flag", "json_report", "model_arguments", "several", "shapes_from", "trust"]

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

PATH = click.Path(path_type=Path)
"""A path, which may be missing: what reads it says what is wrong with it."""


def checkpoint_argument(name: str) -> Decorator:
    """Take the checkpoint that a command reads."""
    return click.argument(
        name, type=PATH, help="A .pth/.pt or .safetensors file, an index, or a directory: rank{i}.pth, DCP, shards."
    )


def flag(*names: str, help: str) -> Decorator:
    """Take an option without a value."""
    return click.option(*names, is_flag=True, help=help)


def several(*names: str, metavar: str, help: str) -> Decorator:
    """Take an option that may be given many times; the command gets a tuple."""
    return click.option(*names, metavar=metavar, multiple=True, help=help)


json_report = flag("--json", "as_json", help="Print the report as JSON, and no progress.")
trust = flag("--trust", help="Keep unknown pickled objects as placeholders instead of refusing them.")
model_arguments = several(
    "--model-arg", "model_arguments", metavar="KEY=VALUE", help="A keyword argument of the factory; may be repeated."
)


def shapes_from(command: Command) -> Command:
    """Take the options that say where shapes come from that the checkpoint lacks."""
    for option in (
        model_arguments,
        click.option(
            "--model",
            metavar="MODULE:FACTORY|CONFIG",
            help="In place of --reference: the model, as package.module:factory or an MMEngine config. Needs torch.",
        ),
        click.option(
            "--reference",
            type=PATH,
            help="A whole checkpoint of the same model, for rank files of MMEngine that lack shapes.",
        ),
    ):
        command = option(command)
    return command
