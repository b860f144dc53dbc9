"""Bars of text, where a picture tells more than a table."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmfsdp import ShardPlan

from mmfsdp_cli.console import human_bytes

__all__ = ["bar_chart"]

_LIMIT = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_chart(plan: ShardPlan) -> str:
    """Return bars of what each shard unit takes while it is gathered, and of what ranks keep between steps.

    Units come in the order of the plan, ranks as the different sizes that there are.
    """
    units = [(" + ".join(fqn or "(root)" for fqn in unit.fqns), unit.nbytes) for unit in plan.units]
    left_out = len(units) - _LIMIT
    if left_out > 0:
        largest = sorted(units, key=lambda item: -item[1])[:_LIMIT]
        units = [item for item in units if item in largest][:_LIMIT]
    sizes: dict[int, list[int]] = {}
    for coordinate in range(plan.mesh.shard):
        sizes.setdefault(plan.param_bytes(coordinate), []).append(coordinate)
    kept = [(f"{len(ranks)} ranks" if ranks[1:] else f"rank {ranks[0]}", n) for n, ranks in sizes.items()]
    lines = [f"parameters of a unit, gathered (the largest is the least that a step needs), {len(plan.units)} units:"]
    lines += _bars(units)
    if left_out > 0:
        lines.append(f"... and {left_out} smaller units")
    lines += ["", f"parameters that a rank keeps between steps, {plan.mesh}:", *_bars(kept)]
    return "\n".join(lines)


def _bars(rows: list[tuple[str, int]]) -> list[str]:
    largest = max((count for _, count in rows), default=0) or 1
    name = max((len(label) for label, _ in rows), default=0)
    size = max((len(human_bytes(count)) for _, count in rows), default=0)
    width = max(shutil.get_terminal_size().columns - name - size - 4, 10)
    lines = []
    for label, count in rows:
        whole, part = divmod(round(8 * width * count / largest), 8)
        lines.append(f"{label:{name}}  {human_bytes(count):>{size}}  {'█' * whole}{_EIGHTHS[part].strip()}".rstrip())
    return lines
