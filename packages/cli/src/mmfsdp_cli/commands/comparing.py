"""``mmfsdp-cli compare``: finds the first tensor in which two recorded runs differ."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.exceptions import Exit

from mmfsdp_cli.options.shared import PATH, flag, json_report, limit, option, several
from mmfsdp_cli.printing.console import reporting_errors, say, say_list
from mmfsdp_cli.printing.help import Command, argument
from mmfsdp_cli.printing.reporting import free_target

__all__ = ["compare_command"]

_EQUAL = "What counts as equal"


@click.command("compare", cls=Command)
@argument("a", type=PATH, help="The reference: the folder that its mmfsdp.recording() wrote.")
@argument("b", type=PATH, help="The folder of the other run, of any number of ranks.")
@several(
    "--perturbed",
    section=_EQUAL,
    type=PATH,
    metavar="FOLDER",
    help="A run of the reference with perturbed inputs, the yardstick; give three.",
)
@option(
    "--rtol",
    section=_EQUAL,
    type=click.FloatRange(min=0),
    metavar="X",
    help="The share of its norm by which a tensor may differ; by default from --perturbed, else from the dtype.",
)
@option("--html", section="Output", type=PATH, metavar="FILE", help="Write a page that shows the differences.")
@flag("--force", "overwrite", section="Output", help="Replace an existing page.")
@limit
@json_report
def compare_command(
    a: Path,
    b: Path,
    perturbed: tuple[Path, ...],
    rtol: float | None,
    html: Path | None,
    overwrite: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Find the first tensor in which two recorded training runs differ, by name.

    Exit codes: 0 nothing differs by more than it may; 1 something does; 2 a path or argument is wrong.
    """
    if html is not None:
        free_target(html, overwrite=overwrite)
    with reporting_errors():
        from mmfsdp.parity import compare

        found = compare(a, b, perturbed=perturbed, rtol=rtol)
        if html is not None:
            from mmfsdp.checkpoint import write_page
            from mmfsdp.parity import comparison_page

            write_page(comparison_page(found), html, overwrite=overwrite)
        if as_json:
            click.echo(json.dumps(found.describe(), indent=1))
        else:
            if len(found.differences) > 1:
                say_list("Differences", [str(difference) for difference in found.differences], limit)
            say(str(found), colour="green" if found.same else "red")
        if not found.same:
            raise Exit(1)
