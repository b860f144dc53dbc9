"""``mmfsdp-cli convert``: any checkpoint into one safetensors or ``.pth`` file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from mmfsdp_cli.console import byte_progress, human_bytes, reporting_errors

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[
        Path,
        typer.Argument(help="A .pth/.pt or .safetensors file, an index, or a directory: rank{i}.pth, DCP, shards."),
    ],
    target: Annotated[Path, typer.Argument(help="The file to write: .safetensors, .pth or .pt.")],
    keep: Annotated[
        str, typer.Option(metavar="model|all|KEY", help="The weights, everything, or one top-level key.")
    ] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing target.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare stored checksums with the data.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Keep unknown pickled objects as placeholders instead of refusing them.")
    ] = False,
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="safetensors or pth, where the suffix does not say.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="A whole checkpoint of the same model, for rank files of MMEngine that lack shapes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")] = False,
) -> None:
    """Write a checkpoint as one file, in constant memory. The target appears complete or not at all."""
    with reporting_errors():
        from mmfsdp.checkpoint import convert

        with byte_progress(quiet=as_json) as progress:
            report = convert(
                source,
                target,
                keep=keep,
                overwrite=force,
                trust=trust,
                verify=not no_verify,
                progress=progress,
                to=to,
                reference=reference,
            )
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(report), indent=1))
            return
        rate = human_bytes(int(report.bytes / report.seconds)) if report.seconds else "?"
        typer.echo(
            f"Wrote {target} ({report.format}): {report.tensors} tensors, {human_bytes(report.bytes)} in "
            f"{report.seconds:.1f} s ({rate}/s)."
        )
        if report.dropped:
            typer.echo(f"Not written: {_listed(report.dropped)}.")


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(paths[:20]) + (f" and {len(paths) - 20} more" if len(paths) > 20 else "")
