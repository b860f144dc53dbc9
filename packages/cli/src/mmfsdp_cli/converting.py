"""``mmfsdp-cli convert``: any checkpoint into another format, in part or whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.console import byte_progress, human_bytes, reporting_errors, say
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import PATH, checkpoint_argument, flag, json_report, several, shapes_from, trust

if TYPE_CHECKING:
    from mmfsdp.checkpoint import ConversionReport

__all__ = ["convert_command"]


@click.command("convert")
@checkpoint_argument("source")
@click.argument("target", type=PATH, help="What to write: .safetensors, .pth or .pt, or a directory.")
@click.option(
    "--only",
    "--keep",
    "keep",
    metavar="model|all|KEY",
    help="The weights, everything, or one top-level key. By default everything for dcp and local, else model.",
)
@several("--drop", metavar="KEY", help="Everything but this top-level key, such as optimizer.")
@several("--include", metavar="PATTERN", help="Take only tensors with such names: a glob or re:REGEX.")
@several("--exclude", metavar="PATTERN", help="Leave out such names.")
@several("--rename", metavar="REGEX=REPL", help="Rewrite names, as Python's re.sub; in order.")
@click.option("--strip-prefix", metavar="TEXT", help="Take this off the beginning of names, before renaming.")
@several("--dtype", metavar="[PATTERN=]DTYPE", help="Cast floating point tensors, all or by name.")
@flag("--use-ema", help="Take the averaged weights as the model's.")
@flag("--publish", help="Weights and meta only, with a hash in the file name as OpenMMLab does.")
@click.option("--max-shard-size", metavar="SIZE", help="Write a directory of safetensors files up to, say, 5GB each.")
@click.option("--from", "source_format", metavar="FORMAT", help="What the source is, if not what it looks like.")
@click.option(
    "--to", metavar="FORMAT", help="safetensors, pth, safetensors_index, dcp or local, where the suffix does not say."
)
@click.option("--ranks", metavar="N|RxS", help="dcp, local: among how many ranks; 2x4 is two replicas of four shards.")
@flag("--force", help="Replace an existing target.")
@flag("--verify-output", help="Read the output again and compare it with the source.")
@flag("--no-verify", help="Do not compare the source's stored checksums with its data.")
@flag("--no-fsync", help="Do not wait until the output is on disk.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Threads that copy; one per processor by default, four at most."
)
@flag("--dry-run", help="Check everything and say what would be written; write nothing.")
@trust
@shapes_from
@json_report
def convert_command(
    source: Path,
    target: Path,
    keep: str | None,
    drop: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    rename: tuple[str, ...],
    strip_prefix: str | None,
    dtype: tuple[str, ...],
    use_ema: bool,
    publish: bool,
    max_shard_size: str | None,
    source_format: str | None,
    to: str | None,
    ranks: str | None,
    force: bool,
    verify_output: bool,
    no_verify: bool,
    no_fsync: bool,
    jobs: int | None,
    dry_run: bool,
    trust: bool,
    reference: Path | None,
    model: str | None,
    model_arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a checkpoint in another format, in constant memory. The target appears complete or not at all.

    Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe, or cannot be written; 2 a path or argument
    is wrong.
    """
    rewrites = [_pair(text, "--rename", "REGEX=REPL") for text in rename]
    if len(dtype) == 1 and "=" not in dtype[0]:
        dtypes: str | dict[str, str] | None = dtype[0]
    else:
        dtypes = dict(_pair(text, "--dtype", "PATTERN=DTYPE") for text in dtype) or None
    with reporting_errors():
        from mmfsdp.checkpoint import convert

        with byte_progress(quiet=as_json) as progress:
            report = convert(
                source,
                target,
                keep=keep,
                drop=drop,
                include=include,
                exclude=exclude,
                rename=rewrites,
                strip_prefix=strip_prefix,
                dtype=dtypes,
                use_ema=use_ema,
                publish=publish,
                max_shard_size=max_shard_size,
                overwrite=force,
                trust=trust,
                verify=not no_verify,
                verify_output=verify_output,
                fsync=not no_fsync,
                jobs=jobs,
                dry_run=dry_run,
                progress=progress,
                source_format=source_format,
                to=to,
                ranks=ranks,
                reference=reference_of(reference, model, model_arguments),
            )
        if as_json:
            click.echo(json.dumps(report.describe(), indent=1))
        else:
            _print(report)


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    # The last sign counts: a regular expression may hold one, as in (?=...), a replacement or dtype hardly does.
    left, sign, right = text.rpartition("=")
    if not sign or not left:
        raise click.BadParameter(f"{text!r} is not of the form {form}.", param_hint=option)
    return left, right


def _print(report: ConversionReport) -> None:
    what = f"{report.tensors} tensors, {human_bytes(report.bytes)}"
    if report.dry_run:
        say(f"Would write {report.path} ({report.format}): {what}.")
        for name, size in report.files.items():
            if name:
                say(f"  {name}: {human_bytes(size)}")
        say(f"To read: {human_bytes(report.bytes_read)}. Free on the disk: {human_bytes(report.free_bytes)}.")
    else:
        rate = human_bytes(int(report.bytes / report.seconds)) if report.seconds else "?"
        checked = ", verified" if report.verified else ""
        say(f"Wrote {report.path} ({report.format}): {what} in {report.seconds:.1f} s ({rate}/s){checked}.")
    if report.casts:
        say(f"Cast: {len(report.casts)} tensors.")
    for name, count in report.overflowed.items():
        lost = "448, the largest number" if report.casts.get(name) == "float8_e4m3fn" else "infinite"
        say(f"warning: {count} elements of {name} became {lost}.", colour="yellow", err=True)
    for note in report.notes:
        say(f"Note: {note}.")
    if report.dropped:
        say(f"Not written: {_listed(report.dropped)}.")


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(paths[:20]) + (f" and {len(paths) - 20} more" if len(paths) > 20 else "")
