"""``mmfsdp-cli diff``: shows how two checkpoints differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from mmfsdp_cli.options.modelling import reference_of
from mmfsdp_cli.options.shared import (
    CHECKPOINT,
    PATH,
    checkpoint_argument,
    flag,
    jobs,
    json_report,
    keep,
    limit,
    option,
    shapes_from,
    trust,
)
from mmfsdp_cli.printing.console import reporting_errors, say, say_list
from mmfsdp_cli.printing.help import Command, argument
from mmfsdp_cli.printing.progress import count_progress
from mmfsdp_cli.printing.reporting import free_target

if TYPE_CHECKING:
    from mmfsdp.checkpoint import DiffReport

__all__ = ["diff_command"]

_LONG, _AROUND = 200, 40  # characters
_EQUAL = "What counts as equal"


@click.command("diff", cls=Command)
@checkpoint_argument("a")
@argument("b", type=CHECKPOINT, help="Another checkpoint, of any format.")
@keep("as much as both have")
@option(
    "--rtol",
    section=_EQUAL,
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="X",
    help="Relative tolerance. Needs numpy.",
)
@option(
    "--atol",
    section=_EQUAL,
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="X",
    help="Absolute tolerance. Needs numpy.",
)
@flag("--ignore-dtypes", section=_EQUAL, help="Compare tensors of different dtypes as numbers. Needs numpy.")
@flag(
    "--dequantize",
    section=_EQUAL,
    help="Compare 8-bit codes with scales as the numbers that they stand for. Needs numpy.",
)
@option("--strip-prefix", section="Names", metavar="TEXT", help="Remove this prefix from names that have it.")
@trust
@shapes_from
@jobs
@option(
    "--html",
    section="Output",
    type=PATH,
    metavar="FILE",
    help="Write a page that shows what changed, per module. Needs numpy.",
)
@flag("--force", "overwrite", section="Output", help="Replace an existing target.")
@limit
@json_report
def diff_command(
    a: Path | str,
    b: Path | str,
    keep: str | None,
    rtol: float,
    atol: float,
    ignore_dtypes: bool,
    dequantize: bool,
    strip_prefix: str | None,
    trust: bool,
    reference: Path | str | None,
    model: str | None,
    model_arguments: tuple[str, ...],
    jobs: int | None,
    html: Path | None,
    overwrite: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Compare two checkpoints across formats and shardings: names, shapes, dtypes and values.

    By default it compares as much as both have; --keep names a part. Without numpy it does not count how many elements
    differ, and by how much.

    Exit codes: 0 the same; 1 different, or one of them is damaged; 2 a path or argument is wrong.
    """
    if html is not None:
        free_target(html, overwrite=overwrite)
    with reporting_errors():
        from mmfsdp.checkpoint import diff

        with count_progress(quiet=as_json, unit="elements") as progress:
            report = diff(
                a,
                b,
                rtol=rtol,
                atol=atol,
                keep=keep,
                strip_prefix=strip_prefix,
                ignore_dtypes=ignore_dtypes,
                dequantize=dequantize,
                trust=trust,
                progress=progress,
                reference=reference_of(reference, model, model_arguments),
                jobs=jobs,
                histogram=html is not None,
            )
        if html is not None:
            from mmfsdp.checkpoint import diff_page, write_page

            write_page(diff_page(report), html, overwrite=overwrite)
        if as_json:
            click.echo(json.dumps(report.describe(), indent=1))
        else:
            _print(report, limit)
        if not report.same:
            raise Exit(1)


def _print(report: DiffReport, limit: int) -> None:
    say_list(f"Only in {report.a}", report.only_in_a, limit)
    say_list(f"Only in {report.b}", report.only_in_b, limit)
    if report.prefix:
        say(f"  Most names match without {report.prefix!r}: add --strip-prefix {report.prefix}")
    say_list("Shapes", [f"{item.name}: {item.a} and {item.b}" for item in report.shapes], limit)
    say_list("Dtypes", [f"{item.name}: {item.a} and {item.b}" for item in report.dtypes], limit)
    if report.quantized:
        say("  One holds weights as 8-bit codes with scales: to compare them as numbers, add --dequantize.")
    elif report.dtypes:
        say("  To compare these as numbers, add --ignore-dtypes.")
    values = [
        f"{item.name}: "
        + ("differs" if item.differing is None else f"{item.differing} of {item.elements} elements differ")
        + ("" if item.max_abs is None else f", by up to {item.max_abs:.3g}")
        + ("" if item.max_rel is None else f" ({item.max_rel:.3g} of the value)")
        for item in report.values
    ]
    say_list("Values", values, limit)
    say_list("Not tensors", [f"{item.name}: {_both(item.a, item.b)}" for item in report.other], limit)
    beside = report.only_in_a or report.only_in_b or report.other
    if report.scope == "all" and report.compared and beside and not (report.shapes or report.dtypes or report.values):
        say("  What both have is the same: to compare the weights alone, add --keep model.")
    if report.left_out:
        say(f"Not compared: {', '.join(report.left_out)}.")
    said = f"the same: {report.compared} tensor{'s' * (report.compared != 1)} compared"
    if not report.same:
        others = f" and {len(report.other)} other value{'s' * (len(report.other) != 1)}" if report.other else ""
        tensors = f"{report.num_differing} of {report.num_tensors} tensors"
        said = f"different: {tensors}{others} differ"
    say(f"{said} ({report.scope}) in {report.seconds:.1f} s.", colour="green" if report.same else "red")


def _both(a: object, b: object) -> str:
    """Return two values as text; of long ones, such as whole configs, only the part around the first difference."""
    one, other = repr(a), repr(b)
    if max(len(one), len(other)) <= _LONG:
        return f"{one} and {other}"
    differs = next((index for index, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
    begin = max(0, differs - _AROUND)
    parts = [
        text[begin : differs + _AROUND] + ("..." if len(text) > differs + _AROUND else "") for text in (one, other)
    ]
    before = "..." if begin else ""
    return f"{before}{parts[0]} and {before}{parts[1]} (--json has both, of {len(one)} and {len(other)} characters)"
