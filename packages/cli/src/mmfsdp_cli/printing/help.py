"""Help of commands: arguments and options in sections, and summaries that are not cut off."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from mmfsdp_cli.printing.console import may_colour

__all__ = ["Command", "Context", "Option", "argument", "summary"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Option(click.Option):
    """An option that says under which heading of the help it belongs."""

    def __init__(self, *args: Any, section: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.section = section


class _Argument(click.Argument):
    """An argument with a help text, which old versions of click do not have."""

    def __init__(self, *args: Any, help: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = help


class _Formatter(click.HelpFormatter):
    """Writes headings in bold; what prints them removes that where there is no terminal."""

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{click.style(heading, bold=True)}:\n")


class Context(click.Context):
    """A context that prints no colours where the environment forbids them."""

    formatter_class = _Formatter

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not may_colour():
            self.color = False


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[f"mmfsdp_cli.{param.name}"] = value


class Command(click.Command):
    """A command whose help shows arguments first, then options under their headings. All take ``-q`` and ``-v``."""

    context_class = Context

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for short, name, help in (
            ("-q", "--quiet", "Print only warnings and errors, and what --json asks for."),
            ("-v", "--verbose", "Print where in the code an error was raised."),
        ):
            self.params.append(
                Option(
                    [short, name],
                    section="Output",
                    is_flag=True,
                    expose_value=False,
                    is_eager=True,
                    callback=_remember,
                    help=help,
                )
            )

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                sections.setdefault("Arguments", []).append(((param.name or "").upper(), getattr(param, "help", "")))
            elif record := param.get_help_record(ctx):
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=28)


def argument(name: str, *, help: str, type: Any = None, **settings: Any) -> Decorator:
    """Take a positional argument with a help text."""
    return click.argument(name, cls=_Argument, type=type, help=help, **settings)


def summary(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
