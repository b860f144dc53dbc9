"""``mmfsdp-cli recipes``: lists the recipes that are shipped, or prints one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mmfsdp_cli.options.shared import json_report
from mmfsdp_cli.printing.console import reporting_errors, say_table
from mmfsdp_cli.printing.help import Command, argument

__all__ = ["recipes_command"]


@click.command("recipes", cls=Command)
@argument("name", required=False, help="The recipe to print; lists all of them by default.")
@json_report
def recipes_command(name: str | None, as_json: bool) -> None:
    """List the recipes that --recipe of convert takes by name, or print one to copy and change.

    Exit codes: 0 done; 2 there is no such recipe, or an argument is wrong.
    """
    with reporting_errors():
        from mmfsdp.basics import Column
        from mmfsdp.checkpoint import known_recipes
        from mmfsdp.errors import ConfigError, closest

        recipes = known_recipes()
        if name is not None:
            found = [info for info in recipes if info.name == name]
            if not found:
                hint = closest(name, [info.name for info in recipes])
                raise ConfigError(f"There is no recipe {name!r}.{hint} `mmfsdp-cli recipes` lists them.")
            text = Path(found[0].path).read_text(encoding="utf-8")
            if as_json:
                import tomllib

                click.echo(json.dumps({**found[0].describe(), "recipe": tomllib.loads(text)}, indent=1))
            else:
                click.echo(text, nl=False)
            return
        if as_json:
            click.echo(json.dumps([info.describe() for info in recipes], indent=1))
            return
        columns = (Column("recipe"), Column("needs", wraps=True), Column("what it does", wraps=True))
        say_table(columns, [(info.name, ", ".join(info.values) or "-", info.about) for info in recipes])
