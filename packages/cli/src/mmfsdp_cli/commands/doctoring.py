"""``mmfsdp-cli doctor``: checks an MMEngine config before it trains sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from mmfsdp_cli.options.modelling import running_user_code
from mmfsdp_cli.options.plans import mesh_of, print_plan
from mmfsdp_cli.options.shared import PATH, flag, json_report, limit, ranks
from mmfsdp_cli.printing.console import reporting_errors, say, say_text
from mmfsdp_cli.printing.help import Command, argument

if TYPE_CHECKING:
    from mmfsdp.frontends import Diagnosis, Finding, Level

__all__ = ["doctor_command"]

_TITLES: dict[Level, tuple[str, str]] = {
    "error": ("Does not run as it is", "red"),
    "warning": ("Probably not what you want", "magenta"),
    "changed": ("Works, and differs from stock MMEngine", "cyan"),
    "ok": ("As before", "green"),
}


@click.command("doctor", cls=Command)
@argument("config", type=PATH, help="An MMEngine config. Its imports are run.")
@ranks("Model", "Number of ranks to plan for; by default as device_mesh says, else 8")
@flag("--no-plan", section="What to show", help="Do not show the plan.")
@flag("--all", "every_unit", section="What to show", help="Show each unit; by default equal layers share a row.")
@limit
@json_report
def doctor_command(config: Path, ranks: str | None, no_plan: bool, every_unit: bool, limit: int, as_json: bool) -> None:
    """Check an MMEngine config: how it trains sharded, what differs from MMEngine, what to change. Needs torch.

    The model's weights take no memory; no device is used, and no process is started.

    Exit codes: 0 nothing is wrong; 1 the config does not run as it is; 2 it cannot be read.
    """
    with reporting_errors():
        from mmfsdp.frontends import read_config

        mesh = None if ranks is None else mesh_of(ranks)
        if isinstance(mesh, dict):
            raise click.BadParameter("an MMEngine config takes N or RxS, not named axes.", param_hint="--ranks")
        with running_user_code():
            diagnosis = read_config(config).diagnose(mesh)
        if as_json:
            click.echo(json.dumps(diagnosis.describe(), indent=1))
        else:
            _print(diagnosis, with_plan=not no_plan, every_unit=every_unit, limit=limit)
        if not diagnosis.ok:
            raise Exit(1)


def _print(diagnosis: Diagnosis, *, with_plan: bool, every_unit: bool, limit: int) -> None:
    from mmfsdp.frontends import LEVELS

    if with_plan and diagnosis.plan is not None:
        if diagnosis.suggested:
            say("The config shards nothing. With the advice below:\n")
        print_plan(diagnosis.plan, every_unit=every_unit, limit=limit)
        say("")
        if diagnosis.memory is not None:
            say(f"{diagnosis.memory.table()}\n")
    groups = {level: [item for item in diagnosis.findings if item.level == level] for level in LEVELS}
    for level, findings in groups.items():
        if findings:
            title, colour = _TITLES[level]
            say(f"{title} ({len(findings)})", colour=colour, bold=True)
            for finding in findings[: limit or None]:
                _print_finding(finding, colour)
            if limit and len(findings) > limit:
                say(f"  ... and {len(findings) - limit} more (--limit 0 shows all)")
            say("")
    counts = ", ".join(_counted(level, len(groups[level])) for level in LEVELS if groups[level])
    say(f"{diagnosis.path}: {counts or 'no findings'}.")


def _counted(level: Level, count: int) -> str:
    return f"{count} {level}{'s' if count > 1 and level in ('error', 'warning') else ''}"


def _print_finding(finding: Finding, colour: str) -> None:
    say(finding.path, colour=colour, indent=2)
    for label, text in (("here", finding.here), ("stock", finding.stock)):
        if text:
            say(f"{label}: {text}", indent=4)
    for index, line in enumerate(finding.advice.splitlines()):
        say_text(f"    {'write: ' if not index else '       '}{line}")
