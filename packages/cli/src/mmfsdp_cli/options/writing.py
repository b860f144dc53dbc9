"""Options of every command that writes a checkpoint, the settings that they stand for, and the lines that it prints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.modelling import reference_of
from mmfsdp_cli.options.shared import (
    completing,
    flag,
    jobs,
    json_report,
    limit,
    option,
    ranks,
    several,
    shapes_from,
    trust,
)
from mmfsdp_cli.printing.console import reporting_errors, say, say_list, say_text
from mmfsdp_cli.printing.progress import byte_progress

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["write_checkpoint", "writing_options"]

Function = Callable[..., Any]

_TAKE, _NAMES, _WRITE, _CARE = "What to take", "Names", "What to write", "How carefully, how fast"


def _dtypes() -> Iterable[str]:
    return ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64")


def _recipes() -> Iterable[str]:
    from mmfsdp.checkpoint import known_recipes

    return [info.name for info in known_recipes()]


def _formats(*, written: bool) -> Iterable[str]:
    from mmfsdp.checkpoint import known_formats

    return [info.name for info in known_formats() if (info.writes if written else info.reads)]


_OPTIONS = (
    several(
        "--include", section=_TAKE, metavar="PATTERN", help="Take only tensors with such names: a glob or re:REGEX."
    ),
    several("--exclude", section=_TAKE, metavar="PATTERN", help="Leave out tensors and values with such names."),
    option("--strip-prefix", section=_NAMES, metavar="TEXT", help="Remove this prefix from names, before --rename."),
    several("--rename", section=_NAMES, metavar="REGEX=REPL", help="Rewrite names as Python's re.sub does; in order."),
    option(
        "--recipe",
        section=_NAMES,
        metavar="NAME|FILE",
        shell_complete=completing(_recipes),
        help="Then rewrite names and shapes for another library's model; see mmfsdp-cli recipes.",
    ),
    flag("--inverse", section=_NAMES, help="Undo the recipe instead."),
    several(
        "--recipe-value",
        "recipe_values",
        section=_NAMES,
        metavar="NAME=N",
        help="A number that the recipe needs, if no config.json beside the source has it.",
    ),
    option(
        "--to",
        section=_WRITE,
        metavar="FORMAT",
        shell_complete=completing(lambda: _formats(written=True)),
        help="Format to write, if the target's suffix does not say it; see mmfsdp-cli formats.",
    ),
    option(
        "--like",
        section=_WRITE,
        metavar="FOLDER",
        help="For hf and gguf: a folder of the same model, for its config and tokenizer files.",
    ),
    several(
        "--dtype",
        section=_WRITE,
        metavar="[PATTERN=]DTYPE",
        shell_complete=completing(_dtypes),
        help="Cast floating point tensors, all or by name, to float32, bfloat16, float16... Needs numpy.",
    ),
    option(
        "--quantize",
        section=_WRITE,
        metavar="KIND",
        shell_complete=completing(lambda: ("fp8", "fp8_channel", "fp8_tensor", "q8_0", "none")),
        help="Write 8 bits per weight: fp8, fp8_channel or fp8_tensor as transformers and vLLM load them, q8_0 in a "
        ".gguf file. none restores the weights. Needs numpy.",
    ),
    option("--max-shard-size", section=_WRITE, metavar="SIZE", help="Write safetensors files of up to, say, 5GB each."),
    ranks(_WRITE, "For dcp and local: number of ranks"),
    option(
        "--from",
        "source_format",
        section="Reading",
        metavar="FORMAT",
        shell_complete=completing(lambda: _formats(written=False)),
        help="Format of the source, if it is not recognised.",
    ),
    trust,
    shapes_from,
    flag("--no-checksums", section=_CARE, help="Do not compare the source with its stored checksums."),
    flag("--verify-output", section=_CARE, help="Read the output again and compare it with the source."),
    flag("--no-fsync", section=_CARE, help="Do not wait until the output is on disk."),
    jobs,
    flag(
        "--continue",
        "resume",
        section="Output",
        help="Keep what is written if interrupted, and go on from it next time.",
    ),
    flag("--force", "overwrite", section="Output", help="Replace an existing target."),
    flag("--dry-run", section="Output", help="Check everything and show what would be written; write nothing."),
    limit,
    json_report,
)


def writing_options(command: Function) -> Function:
    """Take the options of every command that writes a checkpoint; `write_checkpoint` carries them out."""
    for decorator in reversed(_OPTIONS):
        command = decorator(command)
    return command


def write_checkpoint(write: Callable[..., ConversionReport], given: dict[str, Any]) -> None:
    """Write a checkpoint and print the report.

    Args:
        write: Called with the settings that the options stand for, ``reference``, ``dry_run`` and ``progress``.
        given: The options of `writing_options`, and others that are fields of ``Conversion``.
    """
    rest = dict(given)
    reference = [rest.pop(name) for name in ("reference", "model", "model_arguments")]
    dry_run, shown, as_json = (rest.pop(name) for name in ("dry_run", "limit", "as_json"))
    settings = _settings(rest)
    with reporting_errors():
        with byte_progress(quiet=as_json) as progress:
            report = write(reference=reference_of(*reference), dry_run=dry_run, progress=progress, **settings)
        if as_json:
            click.echo(json.dumps(report.describe(), indent=1))
        else:
            _print(report, shown)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``Conversion`` that options set."""
    settings = {name: value for name, value in given.items() if value not in (None, (), False)}
    for negated, name in (("no_checksums", "verify"), ("no_fsync", "fsync")):
        if settings.pop(negated, False):
            settings[name] = False
    if "rename" in settings:
        settings["rename"] = [_pair(text, "--rename", "REGEX=REPL") for text in settings["rename"]]
    if "recipe_values" in settings:
        pairs = [_pair(text, "--recipe-value", "NAME=N") for text in settings["recipe_values"]]
        settings["recipe_values"] = {name: _number(number, "--recipe-value") for name, number in pairs}
    match settings.get("dtype"):
        case (dtype,) if "=" not in dtype:
            settings["dtype"] = dtype
        case dtypes if dtypes:
            settings["dtype"] = dict(_pair(text, "--dtype", "PATTERN=DTYPE") for text in dtypes)
    return settings


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    # Split at the last sign: a regular expression may hold others, as in (?=...); a replacement or dtype hardly does.
    left, sign, right = text.rpartition("=")
    if not sign or not left:
        raise click.BadParameter(f"{text!r} is not of the form {form}.", param_hint=option)
    return left, right


def _number(text: str, option: str) -> int:
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is not a whole number.", param_hint=option)
    return int(text)


def _print(report: ConversionReport, limit: int) -> None:
    from mmfsdp.basics import human_bytes, name_list

    what = f"{report.tensors} tensor{'s' * (report.tensors != 1)}, {human_bytes(report.bytes)}"
    if report.dry_run:
        say(f"Would write {report.path} ({report.format}): {what}.", bold=True)
        say_list("Files", [f"{name}: {human_bytes(size)}" for name, size in report.files.items() if name], limit)
        say(f"To read: {human_bytes(report.bytes_read)}. Free on the disk: {human_bytes(report.free_bytes)}.")
        say_list("New names", [f"{old} -> {new}" for old, new in report.renamed.items()], limit)
        say_list("New dtypes", [f"{name}: {dtype}" for name, dtype in report.casts.items()], limit)
    else:
        rate = human_bytes(int(report.bytes / report.seconds)) if report.seconds else "?"
        checked = ", verified" if report.verified else ""
        say(
            f"Wrote {report.path} ({report.format}): {what} in {report.seconds:.1f} s ({rate}/s){checked}.",
            colour="green",
        )
        if report.casts:
            say(f"Cast: {len(report.casts)} tensor{'s' * (len(report.casts) != 1)}.")
    lost = [
        f"{count} elements of {name}, to "
        + ("448, the largest number" if report.casts.get(name) == "float8_e4m3fn" else "infinity")
        for name, count in report.overflowed.items()
    ]
    say_list("warning: too large for the new dtype", lost, limit, colour="magenta", err=True)
    for note in report.notes:
        say(f"Note: {note}.")
    if report.dropped:
        count = limit or len(report.dropped)
        hint = " (--limit 0 shows all)" if len(report.dropped) > count else ""
        say(f"Not written: {name_list(report.dropped, count, quoted=False)}{hint}.")
    if report.dry_run:
        say("Settings, for --config:", bold=True)
        say_text(json.dumps(report.conversion.to_dict(defaults=False), indent=2))
