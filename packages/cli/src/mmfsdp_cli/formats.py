"""``mmfsdp-cli formats``: lists the formats that can be read and written."""

from __future__ import annotations

import json

import click

from mmfsdp_cli.console import reporting_errors, say_table
from mmfsdp_cli.help import Command
from mmfsdp_cli.options import json_report

__all__ = ["formats_command"]


@click.command("formats", cls=Command)
@json_report
def formats_command(as_json: bool) -> None:
    """List the formats. Every format that can be read converts to every format that can be written."""
    with reporting_errors():
        from mmfsdp.basics import Column
        from mmfsdp.checkpoint import known_formats

        formats = known_formats()
        if as_json:
            click.echo(json.dumps([info.describe() for info in formats], indent=1))
            return
        columns = (
            Column("format"),
            Column("reads", once=True),
            Column("writes"),
            Column("also called", wraps=True),
            Column("what it is", wraps=True),
        )
        rows = [
            (
                info.name,
                _yes(info.reads),
                _yes(info.writes),
                ", ".join([*info.suffixes, *info.aliases]) or "-",
                info.description,
            )
            for info in formats
        ]
        say_table(columns, rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
