"""``mmfsdp-cli formats``: lists the formats that can be read and written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.options.shared import json_report
from mmfsdp_cli.printing.console import reporting_errors, say_table
from mmfsdp_cli.printing.help import Command

if TYPE_CHECKING:
    from mmfsdp.checkpoint import FormatInfo

__all__ = ["formats_command"]

_WIDEST = 80


@click.command("formats", cls=Command)
@json_report
def formats_command(as_json: bool) -> None:
    """List the formats. Every format that can be read converts to every format that can be written.

    Exit codes: 0 done; 2 an argument is wrong.
    """
    with reporting_errors():
        from mmfsdp.basics import Column
        from mmfsdp.checkpoint import known_formats

        formats = known_formats()
        if as_json:
            click.echo(json.dumps([info.describe() for info in formats], indent=1))
            return
        columns = (Column("format"), Column("reads"), Column("writes"), Column("what it is", wraps=True))
        rows = [(info.name, _yes(info.reads), _yes(info.writes), _about(info)) for info in formats]
        say_table(columns, rows, widest=_WIDEST)


def _about(info: FormatInfo) -> str:
    names = [*info.suffixes, *info.aliases]
    return info.description + (f" ({', '.join(names)})" if names else "")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
