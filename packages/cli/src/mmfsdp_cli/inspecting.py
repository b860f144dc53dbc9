"""``mmfsdp-cli inspect``: what a checkpoint holds, from its metadata alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmfsdp_cli.console import human_bytes, reporting_errors

if TYPE_CHECKING:
    from mmfsdp.checkpoint import Layout

__all__ = ["inspect_command"]


def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(help="A .pth/.pt or .safetensors file, an index, or a directory: rank{i}.pth, DCP, shards."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every tensor.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0 shows all.")] = 40,
    trust: Annotated[
        bool, typer.Option("--trust", help="Keep unknown pickled objects as placeholders instead of refusing them.")
    ] = False,
    reference: Annotated[
        Path | None,
        typer.Option(help="A whole checkpoint of the same model, for rank files of MMEngine that lack shapes."),
    ] = None,
) -> None:
    """Show the tensors of a checkpoint and what else it holds. No tensor data is read."""
    with reporting_errors():
        from mmfsdp.checkpoint import open_layout

        layout = open_layout(path, trust=trust, reference=reference)
        if as_json:
            typer.echo(json.dumps(layout.describe(), indent=1))
        else:
            _print_tables(layout, limit)


def _print_tables(layout: Layout, limit: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Names are what one looks for: without a terminal nothing may be cut to fit a width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    table.add_column("chunks", justify="right")
    table.add_column("bytes", justify="right")
    entries = list(layout.tensors.values())
    shown = entries[: limit or None]
    for entry in shown:
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        table.add_row(escape(entry.name), entry.dtype, shape, str(len(entry.chunks)), human_bytes(entry.nbytes))
    console.print(table)
    if len(shown) < len(entries):
        console.print(f"... and {len(entries) - len(shown)} more (--limit 0 shows all)")
    ranks = f", {layout.world_size} ranks" if layout.world_size > 1 else ""
    console.print(f"\n{layout.format}{ranks}: {len(entries)} tensors, {human_bytes(layout.nbytes)}", soft_wrap=True)
    for key, summary in layout.content().items():
        console.print(f"  {escape(key)}: {escape(summary)}", soft_wrap=True)
