"""``mmfsdp-cli formats``: what can be read and written."""

from __future__ import annotations

import json

import click

from mmfsdp_cli.console import reporting_errors
from mmfsdp_cli.options import flag

__all__ = ["formats_command"]


@click.command("formats")
@flag("--json", "as_json", help="Print the list as JSON.")
def formats_command(as_json: bool) -> None:
    """List the formats. Whatever can be read can be converted to whatever can be written."""
    with reporting_errors():
        from mmfsdp.checkpoint import known_formats

        formats = known_formats()
        if as_json:
            click.echo(json.dumps([info.describe() for info in formats], indent=1))
            return
        rows = [("format", "reads", "writes", "what it is")]
        for info in formats:
            asked = ", ".join([*info.suffixes, f"--to {info.name}", *info.aliases])
            what = f"{info.description} ({asked})" if info.writes else info.description
            rows.append((info.name, "yes" if info.reads else "no", "yes" if info.writes else "no", what))
        width = max(len(row[0]) for row in rows)
        for name, reads, writes, what in rows:
            click.echo(f"{name:{width}}  {reads:5}  {writes:6}  {what}")
