"""``mmfsdp-cli merge-lora``: writes a checkpoint with a LoRA adapter merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.shared import CHECKPOINT, PATH, checkpoint_argument, option
from mmfsdp_cli.options.writing import write_checkpoint, writing_options
from mmfsdp_cli.printing.help import Command, argument

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["merge_lora_command"]


@click.command("merge-lora", cls=Command)
@checkpoint_argument("base")
@argument("adapter", type=PATH, help="The folder of the adapter, as peft or diffusers saves it.")
@argument("target", type=CHECKPOINT, help="The path to write: .safetensors, .pth or .pt, or a directory.")
@option(
    "--prefix",
    section="Adapter",
    default="",
    metavar="TEXT",
    help="What stands before the adapter's module names in the base.",
)
@option(
    "--component",
    section="Adapter",
    metavar="NAME",
    help="What the base is in diffusers' pipeline, such as unet, if the adapter is for several.",
)
@writing_options
def merge_lora_command(
    base: Path | str, adapter: Path, target: Path | str, prefix: str, component: str | None, **given: Any
) -> None:
    """Merge a LoRA adapter into its base, in constant memory. Needs numpy.

    Weights are computed in float64 and rounded once. The base may be sharded and of any format. DoRA and other variants
    are named and rejected.

    Exit codes: 0 done; 1 a checkpoint is damaged, incomplete or unsafe, or the target cannot be written; 2 a path or
    argument is wrong, or the adapter is for another base.
    """

    def write(**settings: Any) -> ConversionReport:
        from mmfsdp.checkpoint import merge_lora

        return merge_lora(base, adapter, target, prefix=prefix, component=component, **settings)

    write_checkpoint(write, given)
