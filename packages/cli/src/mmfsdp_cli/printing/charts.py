"""Draws bytes as bars of text: those of a plan's units, and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmfsdp import ShardPlan

__all__ = ["bar_chart", "bars"]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LONGEST = 40  # characters of a name


def bar_chart(plan: ShardPlan, *, every_unit: bool, limit: int, width: int) -> str:
    """Return bars of what each shard unit takes while it is gathered, and of what ranks keep between steps.

    Args:
        plan: The plan.
        every_unit: Draw each unit; by default equal layers share a bar.
        limit: Bars to draw, the largest units; 0 draws all.
        width: Characters that a line may have.
    """
    units = [(name, members[0].nbytes) for name, members in plan.equal_units(every_unit=every_unit)]
    hidden = len(units) - (limit or len(units))
    if hidden > 0:
        largest = sorted(range(len(units)), key=lambda place: -units[place][1])[:limit]
        units = [units[place] for place in sorted(largest)]
    sizes: dict[int, list[int]] = {}
    for rank in range(plan.mesh.world_size // plan.mesh.replicate):
        sizes.setdefault(plan.param_bytes(rank), []).append(rank)
    kept = [(f"{len(ranks)} ranks" if ranks[1:] else f"rank {ranks[0]}", n) for n, ranks in sizes.items()]
    lines = [f"Parameters of a unit while it is gathered ({len(plan.units)} units):", *bars(units, width)]
    if hidden > 0:
        lines.append(f"... and {hidden} smaller units (--limit 0 shows all)")
    lines += ["", f"Parameters that a rank keeps between steps ({plan.mesh}):", *bars(kept, width)]
    return "\n".join(lines)


def bars(rows: list[tuple[str, int]], width: int) -> list[str]:
    """Return a line for each label and its bytes, with a bar as long as they are many."""
    from mmfsdp.basics import human_bytes

    rows = [(label if len(label) <= _LONGEST else f"...{label[3 - _LONGEST :]}", count) for label, count in rows]
    largest = max((count for _, count in rows), default=0) or 1
    name = max((len(label) for label, _ in rows), default=0)
    size = max((len(human_bytes(count)) for _, count in rows), default=0)
    longest = max(width - name - size - 4, 10)
    lines = []
    for label, count in rows:
        whole, part = divmod(round(8 * longest * count / largest), 8)
        lines.append(f"{label:{name}}  {human_bytes(count):>{size}}  {'█' * whole}{_EIGHTHS[part].strip()}".rstrip())
    return lines
