"""``mmfsdp-cli verify``: checks whether a checkpoint is complete and undamaged."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.exceptions import Exit

from mmfsdp_cli.options.modelling import reference_of
from mmfsdp_cli.options.shared import checkpoint_argument, json_report, limit, option, shapes_from, trust
from mmfsdp_cli.printing.console import reporting_errors, say, say_list
from mmfsdp_cli.printing.help import Command
from mmfsdp_cli.printing.progress import byte_progress

__all__ = ["verify_command"]


@click.command("verify", cls=Command)
@checkpoint_argument("path")
@trust
@shapes_from
@option(
    "--jobs",
    section="How carefully, how fast",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    help="Threads that read files, or parts of one.",
)
@limit
@json_report
def verify_command(
    path: Path | str,
    trust: bool,
    reference: Path | str | None,
    model: str | None,
    model_arguments: tuple[str, ...],
    jobs: int,
    limit: int,
    as_json: bool,
) -> None:
    """Check structure, coverage of every tensor, file sizes, checksums and manifest of a checkpoint.

    Exit codes: 0 nothing is wrong as far as it could be checked; 1 damaged, incomplete or unsafe; 2 no checkpoint, or
    one with a dtype that this version does not know.
    """
    with reporting_errors():
        from mmfsdp.basics import human_bytes
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
            for problem in report.problems[: limit or None]:
                say(f"error: {problem.message}", colour="red", err=True)
            if limit and len(report.problems) > limit:
                say(f"... and {len(report.problems) - limit} more (--limit 0 shows all)", err=True)
            say_list("Not checked", [*report.unchecked], limit, colour="magenta")
            verdict = "ok" if report.ok else f"{len(report.problems)} problem{'s' * (len(report.problems) != 1)}"
            tensors = f"{report.tensors} tensor{'s' * (report.tensors != 1)}"
            say(
                f"{report.path}: {verdict} ({report.format or 'unknown format'}, {tensors}, "
                f"{human_bytes(report.bytes)} compared with checksums"
                f"{', manifest' if report.manifest else ''}) in {report.seconds:.1f} s.",
                colour="green" if report.ok else "red",
            )
        if not report.ok:
            raise Exit(1)
