"""A rehearsal as text: the peak by kind, the modules that hold most of it, and what is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.basics.text import human_bytes, human_range
from mmfsdp.rehearsal.fakes.compiling import EAGER_INSTEAD
from mmfsdp.rehearsal.savings import savings_text

if TYPE_CHECKING:
    from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["table_of"]


def table_of(step: Rehearsal, rows: int, width: int | None) -> str:
    """Return what `Rehearsal.table` does, of lines of at most ``width`` characters, with ``rows`` modules."""
    peak = step.peak
    where = f"in {peak.phase}" + (f" of {peak.module}" if peak.module else "")
    lines = [f"Peak of rank {step.rank} of {step.mesh}: {human_bytes(peak.nbytes)}, {where}", ""]
    if step.device_type != "cpu":
        lines.insert(1, f"With what the allocator keeps: {human_range(step.reserved())}")
    if step.device_type == "cuda":
        lines.insert(2, f"With the CUDA context and NCCL, of the GPU: {human_range(step.device_bytes())}")
    if short := step.short_of_memory():
        lines.insert(-1, short)
    if step.on_cpu:
        lines.insert(-1, f"In CPU memory, because the plan offloads: {human_bytes(step.cpu_bytes)}")
    if step.is_eager_instead:
        lines.insert(-1, EAGER_INSTEAD)
    kinds = [(kind, human_bytes(size), human_bytes(step.static.get(kind, 0))) for kind, size in peak.by_kind.items()]
    columns = [Column("kind"), Column("at the peak", right=True), Column("between steps", right=True)]
    lines += format_table(columns, kinds, width)
    held = step.held()
    shown = [(name or "(model)", kind, human_bytes(size)) for name, kind, size, _ in held[:rows]]
    lines += ["", "Held at the peak, by module:", ""]
    lines += format_table([Column("module", wraps=True), Column("kind"), Column("bytes", right=True)], shown, width)
    if held[rows:]:
        lines.append(f"... and {human_bytes(sum(row[2] for row in held[rows:]))} in {len(held) - rows} more rows")
    if step.savings:
        lines += ["", *savings_text(step.savings)]
    messages = [
        (name, str(ranks), str(count), human_bytes(size)) for (name, ranks, _), (count, size) in step.sent().items()
    ]
    if messages:
        lines += ["", "Sent in the step:", ""]
        titles = [Column("collective"), *(Column(title, right=True) for title in ("ranks", "number", "bytes"))]
        lines += format_table(titles, messages, width)
    return "\n".join(lines)
