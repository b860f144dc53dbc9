"""``mmfsdp-cli verify``: whether a checkpoint is whole and undamaged."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.exceptions import Exit

from mmfsdp_cli.console import byte_progress, human_bytes, reporting_errors, say
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import checkpoint_argument, json_report, shapes_from, trust

__all__ = ["verify_command"]


@click.command("verify")
@checkpoint_argument("path")
@json_report
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Files, or parts of one, to read at the same time.")
@trust
@shapes_from
def verify_command(
    path: Path,
    as_json: bool,
    jobs: int,
    trust: bool,
    reference: Path | None,
    model: str | None,
    model_arguments: tuple[str, ...],
) -> None:
    """Check structure, coverage of every tensor, file sizes, checksums and manifest.

    Exit codes: 0 nothing is wrong as far as it could be checked; 1 damaged, incomplete or unsafe; 2 no checkpoint.
    """
    with reporting_errors():
        from mmfsdp.checkpoint import verify

        with byte_progress(quiet=as_json) as progress:
            report = verify(
                path,
                trust=trust,
                jobs=jobs,
                progress=progress,
                reference=reference_of(reference, model, model_arguments),
            )
        if as_json:
            click.echo(json.dumps(report.describe(), indent=1))
        else:
            for problem in report.problems:
                say(f"error: {problem.message}", colour="red", err=True)
            for what in report.unchecked:
                say(f"Not checked: {what}.")
            verdict = "ok" if report.ok else f"{len(report.problems)} problem{'s' * (len(report.problems) != 1)}"
            say(
                f"{path}: {verdict} ({report.format or 'unknown format'}, {report.tensors} tensors, "
                f"{human_bytes(report.bytes)} compared with checksums"
                f"{', manifest' if report.manifest else ''}) in {report.seconds:.1f} s."
            )
        if not report.ok:
            raise Exit(1)
