"""``mmfsdp-cli average``: writes the average of the weights of several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.shared import CHECKPOINT, option
from mmfsdp_cli.options.writing import write_checkpoint, writing_options
from mmfsdp_cli.printing.help import Command, argument

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["average_command"]

_AVERAGE = "Average"


def _numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    try:
        return None if value is None else tuple(float(number) for number in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0.5,0.3,0.2.") from error


@click.command("average", cls=Command)
@argument("sources", type=CHECKPOINT, nargs=-1, required=True, help="Two checkpoints or more, of any formats.")
@argument("target", type=CHECKPOINT, help="The path to write: .safetensors, .pth or .pt, or a directory.")
@option(
    "--weights",
    section=_AVERAGE,
    callback=_numbers,
    metavar="W,W,...",
    help="One number per checkpoint; equal ones by default.",
)
@option(
    "--ema", section=_AVERAGE, type=float, metavar="DECAY", help="Average snapshots exponentially, the first one first."
)
@writing_options
def average_command(
    sources: tuple[Path | str, ...],
    target: Path | str,
    weights: tuple[float, ...] | None,
    ema: float | None,
    **given: Any,
) -> None:
    """Write the average of the weights of several checkpoints, in constant memory. Needs numpy.

    Sums are computed in float64 and rounded once. Names and shapes must match; formats, shardings and dtypes need not.

    Exit codes: 0 done; 1 a checkpoint is damaged, incomplete or unsafe, or the target cannot be written; 2 a path or
    argument is wrong, or the checkpoints do not match.
    """

    def write(**settings: Any) -> ConversionReport:
        from mmfsdp.checkpoint import average_checkpoints

        return average_checkpoints(sources, target, weights=weights, ema=ema, **settings)

    write_checkpoint(write, given)
