"""Arguments and options that several commands have, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["CheckpointPath", "JsonReport", "ModelArguments", "ModelName", "Reference", "Trust"]

CheckpointPath = Annotated[
    Path, typer.Argument(help="A .pth/.pt or .safetensors file, an index, or a directory: rank{i}.pth, DCP, shards.")
]
"""The checkpoint that a command reads."""

JsonReport = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")]
"""Output for machines."""

Trust = Annotated[
    bool, typer.Option("--trust", help="Keep unknown pickled objects as placeholders instead of refusing them.")
]
"""Reading pickles with unknown names; nothing is imported even then."""

Reference = Annotated[
    Path | None,
    typer.Option(help="A whole checkpoint of the same model, for rank files of MMEngine that lack shapes."),
]
"""Where shapes come from that the checkpoint does not say."""

ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FACTORY|CONFIG",
        help="In place of --reference: the model, as package.module:factory or an MMEngine config. Needs torch.",
    ),
]
"""The model itself, where shapes come from it."""

ModelArguments = Annotated[
    list[str] | None,
    typer.Option("--model-arg", metavar="KEY=VALUE", help="A keyword argument of the factory; may be repeated."),
]
"""How the model's factory is called."""
