"""``mmfsdp-cli convert``: writes a checkpoint, or a part of it, in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.shared import CHECKPOINT, checkpoint_argument, config_file, flag, keep, several
from mmfsdp_cli.options.writing import write_checkpoint, writing_options
from mmfsdp_cli.printing.help import Command, argument

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["convert_command"]

_TAKE = "What to take"


@click.command("convert", cls=Command)
@checkpoint_argument("source")
@argument("target", type=CHECKPOINT, help="The path to write: .safetensors, .pth or .pt, or a directory.")
@config_file("Settings as YAML, JSON or TOML, as --dry-run prints them; options win over them.")
@keep("everything for dcp and local, else the weights")
@several("--drop", section=_TAKE, metavar="KEY", help="Take everything but this top-level key, such as optimizer.")
@flag("--use-ema", section=_TAKE, help="Take the averaged weights as the model's.")
@flag("--publish", section=_TAKE, help="Weights and meta only, with a hash in the file name as OpenMMLab does.")
@writing_options
def convert_command(source: Path | str, target: Path | str, config: Path | None, **given: Any) -> None:
    """Write a checkpoint in another format, in constant memory. The target appears complete or not at all.

    Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or cannot be written; 2 a path or argument
    is wrong.
    """

    def write(**settings: Any) -> ConversionReport:
        from mmfsdp.checkpoint import Conversion, convert

        return convert(source, target, None if config is None else Conversion.from_file(config), **settings)

    write_checkpoint(write, given)
