"""Prints for people: lines, tables and lists that fit the terminal, and one line for an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click
from click.exceptions import Exit

if TYPE_CHECKING:
    from mmfsdp.basics import Column

__all__ = [
    "is_quiet",
    "may_colour",
    "reporting_errors",
    "say",
    "say_lines",
    "say_list",
    "say_table",
    "say_text",
    "say_usage_error",
    "shown_name",
    "terminal_width",
]

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 130
_NAME = 200  # characters
_NEGATED = {"verify": "--no-checksums", "fsync": "--no-fsync"}


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn errors of the library and of the operating system into a line on stderr and an exit code.

    Messages of the library speak of the options of the command that runs.
    """
    from mmfsdp.basics import arguments_written_as
    from mmfsdp.errors import (
        CheckpointNotFoundError,
        ConfigError,
        FormatError,
        MissingTorchError,
        MmfsdpError,
        PlanError,
        RehearsalError,
    )

    usage = (ConfigError, PlanError, RehearsalError, CheckpointNotFoundError, FormatError, MissingTorchError)
    options = _option_names()
    try:
        with arguments_written_as(options):
            yield
    except MmfsdpError as error:
        message, context = error.message, {key: str(value) for key, value in error.context.items()}
        # The message names the option or the file already. The model of a config is not that of --model.
        if context.get("config") in {*options} - {"model"} or context.get("file", "\0") in message:
            context = {key: value for key, value in context.items() if key not in ("config", "file")}
        message += f" ({', '.join(f'{key}: {value}' for key, value in context.items())})" if context else ""
        _complain(error, message, _USAGE if isinstance(error, usage) or _target_exists(error) else _FAILED)
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(0) from None
    except OSError as error:
        text = f"{error.strerror or error} (file: {error.filename})" if error.filename else str(error)
        _complain(error, text, _FAILED)
    except KeyboardInterrupt as error:
        _complain(error, _interrupted(), _INTERRUPTED)
    except Exception as error:  # a defect: its traceback follows
        if not isinstance(error, click.ClickException | Exit):
            _say_json(error, str(error), _FAILED)
        raise


def say_usage_error(error: click.UsageError) -> None:
    """Print what is wrong with the arguments of a command, how it is called, and where that is explained."""
    message = " ".join(error.format_message().split())  # click lists choices in lines of their own
    _say_json(error, message, error.exit_code)
    colour = may_colour()  # asked for here, as the command's context has ended
    say(f"error: {message}", colour="red" if colour else None, err=True)
    if error.ctx is not None:
        say(error.ctx.get_usage(), err=True)
        say(f"Help: {error.ctx.command_path} --help", err=True)


def say(text: str, *, colour: str | None = None, bold: bool = False, err: bool = False, indent: int = 0) -> None:
    """Print lines, wrapped between words where the terminal is narrower.

    Control characters in them are shown as escapes, so that a name cannot move the cursor or change colours.

    Args:
        text: The lines.
        colour: Colour on a terminal.
        bold: Print bold on a terminal.
        err: Print to stderr.
        indent: Spaces before each line, and two more before those that continue one.
    """
    if is_quiet() and not err:
        return
    width = terminal_width(sys.stderr if err else sys.stdout)
    for line in text.split("\n"):
        line = " " * indent + _visible(line)
        if width is not None and len(line) > width:
            import textwrap  # only on a narrow terminal

            rest = " " * (len(line) - len(line.lstrip()) + 2)
            options = {"break_long_words": False, "break_on_hyphens": False}
            line = textwrap.fill(line, width, subsequent_indent=rest, **options)  # type: ignore[arg-type]
        styled = line and (colour or bold)
        click.echo(click.style(line, fg=colour, bold=bold or None) if styled else line, err=err)


def say_text(text: str) -> None:
    """Print text as it is, to copy."""
    if not is_quiet():
        click.echo(text)


def say_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, hidden: int = 0, widest: int | None = None
) -> None:
    """Print a table that fits the terminal, its titles in bold.

    Args:
        columns: The columns.
        rows: The rows.
        hidden: How many rows more there are, which ``--limit`` leaves out.
        widest: Characters that a line may have where there is no terminal.
    """
    if is_quiet():
        return
    from mmfsdp.basics import format_table

    lines = format_table(columns, [[shown_name(cell) for cell in row] for row in rows], terminal_width() or widest)
    for place, line in enumerate(lines):
        click.echo(click.style(line, bold=place == 0 or None, dim=place == 1 or None) if place < 2 else line)
    _say_hidden(hidden)


def say_lines(lines: Sequence[str], limit: int, *, err: bool = False, indent: int = 0) -> None:
    """Print lines, and how many more ``limit`` leaves out; 0 shows all."""
    for line in lines[: limit or None]:
        say(line, err=err, indent=indent)
    _say_hidden(len(lines) - limit if limit else 0, indent=indent, err=err)


def say_list(title: str, lines: Sequence[str], limit: int, *, colour: str | None = None, err: bool = False) -> None:
    """Print a title with the number of lines, and the first of them; nothing if there are none.

    Args:
        title: The title.
        lines: The lines.
        limit: How many to show; 0 shows all.
        colour: Colour of the title on a terminal.
        err: Print to stderr.
    """
    if lines:
        say(f"{title} ({len(lines)}):", colour=colour, bold=True, err=err)
        say_lines(lines, limit, err=err, indent=2)


def _say_hidden(count: int, *, indent: int = 0, err: bool = False) -> None:
    if count > 0:
        say(f"... and {count} more (--limit 0 shows all)", err=err, indent=indent)


def shown_name(name: str) -> str:
    """Return a tensor's name for a table: in one line, its middle left out if it is very long."""
    name = _visible(name)
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}...{name[-_NAME // 2 :]}"


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return how many characters a line may have on a terminal; None for pipes and files, which have no width."""
    stream = sys.stdout if stream is None else stream
    if stream is None or not stream.isatty():
        return None
    import shutil  # only on a terminal

    return max(shutil.get_terminal_size().columns, 20)


def is_quiet() -> bool:
    """Tell whether the command that runs prints only warnings and errors."""
    return _has("quiet")


def _has(option: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(f"mmfsdp_cli.{option}", False)


def may_colour() -> bool:
    """Tell whether the environment allows colours on terminals; see https://no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _option_names() -> dict[str, str]:
    """Return the options of the command that runs, by the settings that they stand for."""
    context = click.get_current_context(silent=True)
    params = [] if context is None else context.command.params
    names = {param.name or "": max(param.opts, key=len) for param in params if isinstance(param, click.Option)}
    return names | {name: option for name, option in _NEGATED.items() if option in names.values()}


def _target_exists(error: Exception) -> bool:
    from mmfsdp.checkpoint import TargetExistsError

    return isinstance(error, TargetExistsError)


def _complain(error: BaseException, message: str, code: int) -> None:
    _say_json(error, message, code)
    if _has("verbose"):
        import traceback  # only if asked for

        click.echo(traceback.format_exc(), err=True, nl=False)
    say(f"error: {message}", colour="red", err=True)
    raise Exit(code)


def _say_json(error: BaseException, message: str, code: int) -> None:
    """Print an error for programs, where ``--json`` was given; its text for people still goes to stderr."""
    context = getattr(error, "ctx", None) or click.get_current_context(silent=True)
    # Where parsing failed, nobody knows yet which options there are.
    given = context is not None and context.params.get("as_json")
    if given if given is not None else "--json" in sys.argv[1:]:
        where = {key: str(value) for key, value in getattr(error, "context", {}).items()}
        content = {"type": type(error).__name__, "message": message, "context": where, "exit_code": code}
        click.echo(json.dumps({"error": content}, indent=1))


def _interrupted() -> str:
    """Return what is said after Ctrl-C."""
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("resume"):
        return "Interrupted. What was written is kept: run the same command again, with --continue, to go on from it."
    return "Interrupted; nothing was written."
