"""``mmfsdp-cli inspect``: shows what a checkpoint holds, from its metadata alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfsdp_cli.options.modelling import reference_of
from mmfsdp_cli.options.shared import checkpoint_argument, flag, json_report, limit, option, shapes_from, trust
from mmfsdp_cli.printing.console import reporting_errors, say, say_lines, say_list, say_table, shown_name
from mmfsdp_cli.printing.help import Command
from mmfsdp_cli.printing.progress import byte_progress

if TYPE_CHECKING:
    from mmfsdp.checkpoint import Layout, TensorEntry

__all__ = ["inspect_command"]

_VIEW = "What to show"


@click.command("inspect", cls=Command)
@checkpoint_argument("path")
@flag("--tree", section=_VIEW, help="Sum up along the parts of the names.")
@option(
    "--depth",
    section=_VIEW,
    metavar="N",
    type=click.IntRange(min=0),
    default=3,
    help="Levels of --tree; 0 shows all.",
)
@option("--tensor", section=_VIEW, metavar="NAME", help="Show where the parts of one tensor are stored.")
@flag("--stats", section=_VIEW, help="With --tensor: read it, and show its minimum, mean, norm... Needs numpy.")
@trust
@shapes_from
@limit
@json_report
def inspect_command(
    path: Path | str,
    tree: bool,
    depth: int,
    tensor: str | None,
    stats: bool,
    trust: bool,
    reference: Path | str | None,
    model: str | None,
    model_arguments: tuple[str, ...],
    limit: int,
    as_json: bool,
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
            _print_tensor(find_tensor(layout, tensor), limit, as_json)
        elif tree:
            _print_tree(layout, depth, limit, as_json)
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


def _print_tensor(entry: TensorEntry, limit: int, as_json: bool) -> None:
    from mmfsdp.basics import human_bytes

    chunks = entry.chunks()
    if as_json:
        chunk_entries = [
            {
                "file": str(chunk.file),
                "offset": chunk.offset,
                "bytes": chunk.nbytes,
                "box_offsets": list(chunk.box_offsets),
                "box_sizes": list(chunk.box_sizes),
                "crc32": chunk.crc32,
            }
            for chunk in chunks
        ]
        content = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "chunks": chunk_entries}
        click.echo(json.dumps(content, indent=1))
        return
    say(f"{shown_name(entry.name)}: {entry.dtype}, {_shape(entry.shape)}, {human_bytes(entry.nbytes)}", bold=True)
    lines = [
        f"{list(chunk.box_offsets)} of size {list(chunk.box_sizes)}: {chunk.file} at byte {chunk.offset}, "
        f"{human_bytes(chunk.nbytes)}" + ("" if chunk.crc32 is None else f", CRC-32 {chunk.crc32:08x}")
        for chunk in chunks
    ]
    say_list("Chunks", lines, limit)


def _print_tree(layout: Layout, depth: int, limit: int, as_json: bool) -> None:
    from mmfsdp.basics import Column, human_bytes
    from mmfsdp.checkpoint import tensor_tree

    root = tensor_tree(layout)
    if as_json:
        click.echo(json.dumps(root.describe(), indent=1))
        return
    nodes = [*root.walk(depth or None)]
    rows = []
    for level, node in nodes[: limit or None]:
        what = f"{node.tensors} tensor{'s' * (node.tensors != 1)}"
        if node.entry is not None:
            what = f"{node.entry.dtype} {_shape(node.entry.shape)}"
        rows.append(("  " * level + shown_name(node.name), what, human_bytes(node.nbytes)))
    columns = (Column("name", wraps=True), Column("holds", wraps=True), Column("bytes", right=True))
    say_table(columns, rows, hidden=len(nodes) - len(rows))
    _print_totals(layout, limit)


def _print_tables(layout: Layout, limit: int) -> None:
    from mmfsdp.basics import Column, human_bytes

    entries = list(layout.tensors.values())
    rows = [
        (entry.name, entry.dtype, _shape(entry.shape), str(entry.num_chunks), human_bytes(entry.nbytes))
        for entry in entries[: limit or None]
    ]
    columns = (
        Column("tensor", wraps=True),
        Column("dtype", once=True, rank=1),
        Column("shape", wraps=True),
        Column("chunks", right=True, once=True, rank=2),
        Column("bytes", right=True),
    )
    say_table(columns, rows, hidden=len(entries) - len(rows))
    _print_totals(layout, limit)


def _print_totals(layout: Layout, limit: int) -> None:
    from mmfsdp.basics import human_bytes

    ranks = f", {layout.world_size} ranks" if layout.world_size > 1 else ""
    count = len(layout.tensors)
    what = f"{count} tensor{'s' * (count != 1)}, {human_bytes(layout.nbytes)}"
    say(f"\n{_lone_file(layout)}{layout.format}{ranks}: {what}", bold=True)
    content = [f"{shown_name(key) or '(at the top)'}: {_summary(found)}" for key, found in layout.content().items()]
    say_lines(content, limit, indent=2)
    for note in layout.notes:
        say(f"Note: {note}.")


def _lone_file(layout: Layout) -> str:
    """Return the name of the only file that a directory's checkpoint was read from, with a comma after it."""
    path = Path(str(layout.path))
    files = {chunk.file for entry in layout.tensors.values() for chunk in entry.chunks()} if path.is_dir() else set()
    lone = next(iter(files)) if len(files) == 1 else None
    return "" if lone is None or layout.world_size > 1 else f"{Path(str(lone)).name}, "


def _summary(found: Mapping[str, Any]) -> str:
    from mmfsdp.basics import human_bytes

    if "num_tensors" in found:
        return f"{found['num_tensors']} tensor{'s' * (found['num_tensors'] != 1)}, {human_bytes(found['bytes'])}"
    if "num_values" not in found:
        return repr(found["value"])
    names = found.get("names", ())
    more = ", ..." * (len(names) < found["num_values"])
    return f"{found['num_values']} value{'s' * (found['num_values'] != 1)}" + (
        f": {', '.join(names)}{more}" if names else ""
    )


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
