"""``mmfsdp-cli delta`` and ``apply-delta``: write what changed between two checkpoints, and apply it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.shared import CHECKPOINT, checkpoint_argument
from mmfsdp_cli.options.writing import write_checkpoint, writing_options
from mmfsdp_cli.printing.help import Command, argument

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["apply_delta_command", "delta_command"]

_TARGET = "The path to write: .safetensors, .pth or .pt, or a directory."


@click.command("delta", cls=Command)
@checkpoint_argument("a")
@argument("b", type=CHECKPOINT, help="The second checkpoint, of any format.")
@argument("target", type=CHECKPOINT, help=_TARGET)
@writing_options
def delta_command(a: Path | str, b: Path | str, target: Path | str, **given: Any) -> None:
    """Write what changed from one checkpoint to another; apply-delta restores the second, bit for bit. Needs numpy.

    Exit codes: 0 done; 1 a checkpoint is damaged, incomplete or unsafe, or the target cannot be written; 2 a path or
    argument is wrong.
    """

    def write(**settings: Any) -> ConversionReport:
        from mmfsdp.checkpoint import checkpoint_delta

        return checkpoint_delta(a, b, target, **settings)

    write_checkpoint(write, given)


@click.command("apply-delta", cls=Command)
@checkpoint_argument("base")
@argument("delta", type=CHECKPOINT, help="What mmfsdp-cli delta wrote.")
@argument("target", type=CHECKPOINT, help=_TARGET)
@writing_options
def apply_delta_command(base: Path | str, delta: Path | str, target: Path | str, **given: Any) -> None:
    """Write the second checkpoint from the first and their delta, bit for bit. Needs numpy.

    Exit codes: 0 done; 1 a checkpoint is damaged, incomplete or unsafe, or the target cannot be written; 2 a path or
    argument is wrong, or the delta was made from another checkpoint.
    """

    def write(**settings: Any) -> ConversionReport:
        from mmfsdp.checkpoint import apply_delta

        return apply_delta(base, delta, target, **settings)

    write_checkpoint(write, given)
