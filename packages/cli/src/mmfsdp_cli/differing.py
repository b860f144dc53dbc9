"""``mmfsdp-cli diff``: how two checkpoints differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from mmfsdp_cli.console import count_progress, reporting_errors, say
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import PATH, checkpoint_argument, flag, json_report, shapes_from, trust

if TYPE_CHECKING:
    from mmfsdp.checkpoint import DiffReport

__all__ = ["diff_command"]


@click.command("diff")
@checkpoint_argument("a")
@click.argument("b", type=PATH, help="Another, of any format.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@click.option("--keep", metavar="model|all|KEY", help="What to compare; as much as both have, by default.")
@flag("--ignore-dtypes", help="Compare values of different dtypes as numbers.")
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Lines per kind of difference; 0 shows all.")
@trust
@shapes_from
@json_report
def diff_command(
    a: Path,
    b: Path,
    rtol: float,
    atol: float,
    keep: str | None,
    ignore_dtypes: bool,
    limit: int,
    trust: bool,
    reference: Path | None,
    model: str | None,
    model_arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare two checkpoints across formats and shardings: names, shapes, dtypes and values.

    Exit codes: 0 the same; 1 different, or one of them is damaged; 2 a path or argument is wrong.
    """
    with reporting_errors():
        from mmfsdp.checkpoint import diff

        with count_progress(quiet=as_json) as progress:
            report = diff(
                a,
                b,
                rtol=rtol,
                atol=atol,
                keep=keep,
                ignore_dtypes=ignore_dtypes,
                trust=trust,
                progress=progress,
                reference=reference_of(reference, model, model_arguments),
            )
        if as_json:
            click.echo(json.dumps(report.describe(), indent=1))
        else:
            _print(report, limit)
        if not report.same:
            raise Exit(1)


def _print(report: DiffReport, limit: int) -> None:
    kinds = {
        f"Only in {report.a}": [*report.only_in_a],
        f"Only in {report.b}": [*report.only_in_b],
        "Shapes": [f"{item.name}: {item.a} and {item.b}" for item in report.shapes],
        "Dtypes": [f"{item.name}: {item.a} and {item.b}" for item in report.dtypes],
        "Values": [
            f"{item.name}: "
            + ("differs" if item.differing is None else f"{item.differing} of {item.elements} elements differ")
            + ("" if item.max_abs is None else f", by up to {item.max_abs:.3g}")
            + ("" if item.max_rel is None else f" ({item.max_rel:.3g} of the value)")
            for item in report.values
        ],
        "Not tensors": [f"{item.name}: {item.a!r} and {item.b!r}" for item in report.other],
    }
    for title, lines in kinds.items():
        if lines:
            say(f"{title} ({len(lines)}):")
            for line in lines[: limit or None]:
                say(f"  {line}")
            if limit and len(lines) > limit:
                say(f"  ... and {len(lines) - limit} more (--limit 0 shows all)")
    if report.left_out:
        say(f"Not compared: {', '.join(report.left_out)}.")
    verdict = "the same" if report.same else "different"
    say(f"{verdict}: {report.compared} tensors compared ({report.scope}) in {report.seconds:.1f} s.")
