"""``mmfsdp-cli diff``: how two checkpoints differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmfsdp_cli.console import count_progress, reporting_errors, say
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import CheckpointPath, JsonReport, ModelArguments, ModelName, Reference, Trust

if TYPE_CHECKING:
    from mmfsdp.checkpoint import DiffReport

__all__ = ["diff_command"]


def diff_command(
    a: CheckpointPath,
    b: Annotated[Path, typer.Argument(help="Another, of any format.")],
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance.")] = 0.0,
    keep: Annotated[
        str | None, typer.Option(metavar="model|all|KEY", help="What to compare; as much as both have, by default.")
    ] = None,
    ignore_dtypes: Annotated[
        bool, typer.Option("--ignore-dtypes", help="Compare values of different dtypes as numbers.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Lines per kind of difference; 0 shows all.")] = 20,
    trust: Trust = False,
    reference: Reference = None,
    model: ModelName = None,
    model_arguments: ModelArguments = None,
    as_json: JsonReport = False,
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
            typer.echo(json.dumps(report.describe(), indent=1))
        else:
            _print(report, limit)
        if not report.same:
            raise typer.Exit(1)


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
