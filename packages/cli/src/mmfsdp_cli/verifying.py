"""``mmfsdp-cli verify``: whether a checkpoint is whole and undamaged."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mmfsdp_cli.console import byte_progress, human_bytes, reporting_errors, say
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import CheckpointPath, JsonReport, ModelArguments, ModelName, Reference, Trust

__all__ = ["verify_command"]


def verify_command(
    path: CheckpointPath,
    as_json: JsonReport = False,
    jobs: Annotated[int, typer.Option(min=1, help="Files, or parts of one, to read at the same time.")] = 1,
    trust: Trust = False,
    reference: Reference = None,
    model: ModelName = None,
    model_arguments: ModelArguments = None,
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
            typer.echo(json.dumps(report.describe(), indent=1))
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
            raise typer.Exit(1)
