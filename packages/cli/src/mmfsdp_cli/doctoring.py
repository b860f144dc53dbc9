"""``mmfsdp-cli doctor``: what there is to know about an MMEngine config before it trains sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from mmfsdp_cli.console import reporting_errors
from mmfsdp_cli.modelling import running_user_code
from mmfsdp_cli.options import PATH, flag
from mmfsdp_cli.planning import mesh_of

if TYPE_CHECKING:
    from mmfsdp.frontends import Diagnosis, Finding, Level

__all__ = ["doctor_command"]

_TITLES: dict[Level, tuple[str, str]] = {
    "error": ("Does not run as it is", "red"),
    "warning": ("Probably not what you want", "yellow"),
    "changed": ("Works, and differs from stock MMEngine", "cyan"),
    "ok": ("As before", "green"),
}


@click.command("doctor")
@click.argument("config", type=PATH, help="An MMEngine config. Its imports are run.")
@click.option("--ranks", metavar="N|RxS", help="For how many ranks to plan; by default what device_mesh says, else 8.")
@flag("--no-plan", help="Do not show the plan.")
@flag("--json", "as_json", help="Print findings and plan as JSON.")
def doctor_command(config: Path, ranks: str | None, no_plan: bool, as_json: bool) -> None:
    """Say how an MMEngine config will train sharded, what differs from stock MMEngine, and what to change.

    The model's weights take no memory; no device is used, and no process is started.

    Exit codes: 0 nothing is wrong; 1 the config does not run as it is; 2 it cannot be read.
    """
    with reporting_errors():
        from mmfsdp.frontends import read_config

        mesh = None if ranks is None else mesh_of(ranks)
        with running_user_code():
            diagnosis = read_config(config).diagnose(mesh)
        if as_json:
            click.echo(json.dumps(diagnosis.describe(), indent=1))
        else:
            _print(diagnosis, with_plan=not no_plan)
        if not diagnosis.ok:
            raise Exit(1)


def _print(diagnosis: Diagnosis, *, with_plan: bool) -> None:
    from mmfsdp.frontends import LEVELS

    if with_plan and diagnosis.plan is not None:
        if diagnosis.suggested:
            click.echo("The config shards nothing. With what is advised below:\n")
        click.echo(f"{diagnosis.plan.table()}\n")
        if diagnosis.memory is not None:
            click.echo(f"{diagnosis.memory.table()}\n")
    groups = {level: [item for item in diagnosis.findings if item.level == level] for level in LEVELS}
    for level, findings in groups.items():
        if findings:
            title, colour = _TITLES[level]
            click.secho(f"{title} ({len(findings)})", fg=colour, bold=True)
            for finding in findings:
                _print_finding(finding, colour)
            click.echo()
    counts = ", ".join(f"{len(groups[level])} {level}" for level in LEVELS if groups[level])
    click.echo(f"{diagnosis.path}: {counts or 'nothing to say'}.")


def _print_finding(finding: Finding, colour: str) -> None:
    click.secho(f"  {finding.path}", fg=colour)
    for label, text in (("here", finding.here), ("stock", finding.stock)):
        if text:
            click.echo(_wrapped(f"{label}: {text}", 4))
    for index, line in enumerate(finding.advice.splitlines()):
        click.echo(f"    {'write: ' if not index else '       '}{line}")


def _wrapped(text: str, indent: int) -> str:
    import shutil
    import textwrap

    width = max(min(shutil.get_terminal_size().columns, 120), 40)
    prefix = " " * indent
    return textwrap.fill(
        text, width, initial_indent=prefix, subsequent_indent=prefix + "       ", break_long_words=False
    )
