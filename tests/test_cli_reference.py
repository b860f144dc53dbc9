"""docs/reference/cli.md is what its script writes from the commands."""

from __future__ import annotations

import click
from tests.doc_pages import ROOT
from tools.cli_reference import JSON, PAGE, VARIABLES, page

from mmfsdp_cli.main import app


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python tools/cli_reference.py"


def test_it_has_every_command_option_and_report() -> None:
    text, context = PAGE.read_text(encoding="utf-8"), click.Context(app)
    for name in app.list_commands(context):
        assert "\nExit codes: 0 " in text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        command = app.get_command(context, name)
        assert command is not None
        assert (name in {key.split()[0] for key in JSON}) == any(param.name == "as_json" for param in command.params)
        options = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
        assert [option for option in options if f"`{option}" not in text] == []


def test_the_variables_exist() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("packages/c*/src/**/*.py"))
    assert [name for name in VARIABLES if f'"{name}"' not in sources] == []
