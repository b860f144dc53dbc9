"""``mmfsdp-cli inspect``: what a checkpoint holds, from its metadata alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmfsdp_cli.console import byte_progress, human_bytes, reporting_errors, say, shown_name
from mmfsdp_cli.modelling import reference_of
from mmfsdp_cli.options import checkpoint_argument, flag, shapes_from, trust

if TYPE_CHECKING:
    from mmfsdp.checkpoint import Layout, TensorEntry

__all__ = ["inspect_command"]


@click.command("inspect")
@checkpoint_argument("path")
@flag("--json", "as_json", help="Print JSON, with every tensor.")
@click.option("--limit", type=click.IntRange(min=0), default=40, help="Rows of the table; 0 shows all.")
@flag("--tree", help="Sum up along the parts of the names.")
@click.option("--depth", type=click.IntRange(min=0), default=3, help="Levels of the tree; 0 shows all.")
@click.option("--tensor", metavar="NAME", help="Show where the parts of one tensor lie.")
@flag("--stats", help="With --tensor: read it, and show its minimum, mean, norm...")
@trust
@shapes_from
def inspect_command(
    path: Path,
    as_json: bool,
    limit: int,
    tree: bool,
    depth: int,
    tensor: str | None,
    stats: bool,
    trust: bool,
    reference: Path | None,
    model: str | None,
    model_arguments: tuple[str, ...],
) -> None:
    """Show the tensors of a checkpoint and what else it holds. Without --stats no tensor data is read.

    Exit codes: 0 done; 1 the checkpoint is damaged, incomplete or unsafe; 2 a path or argument is wrong.
    """
    if stats and tensor is None:
        raise click.BadParameter("needs --tensor NAME", param_hint="--stats")
    with reporting_errors():
        from mmfsdp.checkpoint import find_tensor, open_layout

        layout = open_layout(path, trust=trust, reference=reference_of(reference, model, model_arguments))
        if stats and tensor is not None:
            _print_statistics(layout, tensor, as_json)
        elif tensor is not None:
            _print_tensor(find_tensor(layout, tensor), as_json)
        elif tree:
            _print_tree(layout, depth, as_json)
        elif as_json:
            click.echo(json.dumps(layout.describe(), indent=1))
        else:
            _print_tables(layout, limit)


def _print_statistics(layout: Layout, name: str, as_json: bool) -> None:
    from mmfsdp.checkpoint import tensor_statistics

    with byte_progress(quiet=as_json) as progress:
        found = tensor_statistics(layout, name, progress=progress).describe()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for key, value in found.items():
        shown = _shape(value) if key == "shape" else f"{value:.9g}" if isinstance(value, float) else value
        say(f"{key:9}{shown}")


def _print_tensor(entry: TensorEntry, as_json: bool) -> None:
    chunks = [
        {
            "file": str(chunk.file),
            "offset": chunk.offset,
            "bytes": chunk.nbytes,
            "box_offsets": list(chunk.box_offsets),
            "box_sizes": list(chunk.box_sizes),
            "crc32": chunk.crc32,
        }
        for chunk in entry.chunks()
    ]
    if as_json:
        content = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunks}
        click.echo(json.dumps(content, indent=1))
        return
    say(f"{shown_name(entry.name)}: {entry.dtype}, {_shape(entry.shape)}, {human_bytes(entry.nbytes)}")
    for chunk in entry.chunks():
        say(
            f"  {list(chunk.box_offsets)} of size {list(chunk.box_sizes)}: {chunk.file} at byte {chunk.offset}, "
            f"{chunk.nbytes} bytes" + ("" if chunk.crc32 is None else f", CRC-32 {chunk.crc32:08x}")
        )


def _print_tree(layout: Layout, depth: int, as_json: bool) -> None:
    from mmfsdp.checkpoint import tensor_tree

    root = tensor_tree(layout)
    if as_json:
        click.echo(json.dumps(root.describe(), indent=1))
        return
    rows = []
    for level, node in root.walk(depth or None):
        what = f"{node.tensors} tensors" if node.entry is None else f"{node.entry.dtype} {_shape(node.entry.shape)}"
        rows.append(("  " * level + shown_name(node.name), what, human_bytes(node.nbytes)))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for name, what, size in rows:
        say(f"{name:{widths[0]}}  {what:{widths[1]}}  {size:>{widths[2]}}")
    _print_totals(layout)


def _print_tables(layout: Layout, limit: int) -> None:
    entries = list(layout.tensors.values())
    shown = entries[: limit or None]
    rows = [("tensor", "dtype", "shape", "chunks", "bytes")]
    for entry in shown:
        chunks = str(entry.num_chunks)
        rows.append((shown_name(entry.name), entry.dtype, _shape(entry.shape), chunks, human_bytes(entry.nbytes)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for name, dtype, shape, chunks, size in rows:
        line = (
            f"{name:{widths[0]}}  {dtype:{widths[1]}}  {shape:{widths[2]}}  {chunks:>{widths[3]}}  {size:>{widths[4]}}"
        )
        say(line)
    if len(shown) < len(entries):
        say(f"... and {len(entries) - len(shown)} more (--limit 0 shows all)")
    _print_totals(layout, limit)


def _print_totals(layout: Layout, limit: int = 0) -> None:
    ranks = f", {layout.world_size} ranks" if layout.world_size > 1 else ""
    say(f"\n{layout.format}{ranks}: {len(layout.tensors)} tensors, {human_bytes(layout.nbytes)}")
    content = list(layout.content().items())
    for key, summary in content[: limit or None]:
        say(f"  {shown_name(key) or '(at the top)'}: {summary}")
    if limit and len(content) > limit:
        say(f"  ... and {len(content) - limit} more (--limit 0 shows all)")


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
