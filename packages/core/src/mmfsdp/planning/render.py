"""A plan as text: a table, a tree, a diff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mmfsdp.basics.text import human_bytes, name_list

if TYPE_CHECKING:
    from mmfsdp.planning.schema import ShardPlan, ShardUnit

__all__ = ["render_diff", "render_table", "render_tree"]


def render_table(plan: ShardPlan) -> str:
    """Return the plan as an aligned table of shard units with a head, totals and notes."""
    header = ("unit", "class", "params", "bytes", "bytes/rank", "dtypes", "reshard", "AC", "matched by")
    recomputed = set(plan.activation_checkpointing.fqns) if plan.activation_checkpointing else set()
    rows = [
        (
            _names(unit),
            unit.class_name,
            f"{unit.numel:,}",
            human_bytes(unit.nbytes),
            human_bytes(plan.unit_param_bytes(unit)),
            str(unit.precision),
            "-" if plan.engine == "replicate" else str(unit.reshard_after_forward).lower(),
            "yes" if recomputed & set(unit.fqns) else "-",
            unit.matched_by,
        )
        for unit in plan.units
    ]
    return "\n".join([_head(plan), "", *_align([header, *rows], right={2, 3, 4}), "", *_totals(plan), *_notes(plan)])


def render_tree(plan: ShardPlan) -> str:
    """Return the shard units as a tree over the parts of their names."""
    lines = [_head(plan), "", _tree_line("(root)", plan.root, plan)]
    unit_at = {fqn: unit for unit in plan.units for fqn in unit.fqns if fqn}
    nodes: dict[str, dict] = {}  # type: ignore[type-arg]
    for fqn in unit_at:
        below = nodes
        for part in fqn.split("."):
            below = below.setdefault(part, {})

    def walk(children: dict, prefix: str, path: str) -> None:  # type: ignore[type-arg]
        for index, (part, below) in enumerate(children.items()):
            last = index == len(children) - 1
            fqn = f"{path}.{part}" if path else part
            unit = unit_at.get(fqn)
            if unit is not None and fqn != unit.fqn:
                line = f"{part}  [with {unit.fqn}]"  # counted there
            else:
                line = part if unit is None else _tree_line(part, unit, plan)
            lines.append(prefix + ("└── " if last else "├── ") + line)
            walk(below, prefix + ("    " if last else "│   "), fqn)

    walk(nodes, "", "")
    return "\n".join([*lines, "", *_totals(plan), *_notes(plan)])


def render_diff(old: ShardPlan, new: ShardPlan) -> str:
    """Return what differs, a line each: ``~`` changed, ``-`` only in the old plan, ``+`` only in the new one."""
    lines: list[str] = []
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if name == "units":
            lines += _unit_diff(old, new)
        elif name == "notes":
            lines += [f"- note: {note.text}" for note in before if note not in after]
            lines += [f"+ note: {note.text}" for note in after if note not in before]
        elif isinstance(before, tuple):
            lines += [f"- {name}: {getattr(item, 'fqn', item)}" for item in before if item not in after]
            lines += [f"+ {name}: {getattr(item, 'fqn', item)}" for item in after if item not in before]
        else:
            lines.append(f"~ {name}: {before} -> {after}")
    if old.param_bytes() != new.param_bytes():
        lines.append(f"~ bytes on rank 0: {human_bytes(old.param_bytes())} -> {human_bytes(new.param_bytes())}")
    return "\n".join(lines)


def _unit_diff(old: ShardPlan, new: ShardPlan) -> Iterable[str]:
    before = {unit.fqns: unit for unit in old.units}
    after = {unit.fqns: unit for unit in new.units}
    for fqns, unit in before.items():
        if fqns not in after:
            yield f"- unit {_names(unit)} ({unit.matched_by})"
    for fqns, unit in after.items():
        if fqns not in before:
            yield f"+ unit {_names(unit)} ({unit.matched_by})"
            continue
        for name in type(unit).model_fields:
            was, now = getattr(before[fqns], name), getattr(unit, name)
            if was == now:
                continue
            if name == "params":
                yield f"~ unit {_names(unit)}.params: {before[fqns].numel:,} -> {unit.numel:,} elements"
            else:
                yield f"~ unit {_names(unit)}.{name}: {was} -> {now}"


def _head(plan: ShardPlan) -> str:
    extras = [
        f"{plan.engine} ({plan.engine_reason})",
        plan.strategy,
        str(plan.mesh),
        f"device {plan.device}",
        *(["parameters on CPU"] if plan.cpu_offload else []),
        *(["buffers " + plan.buffer_dtype] if plan.buffer_dtype else []),
    ]
    return "ShardPlan: " + ", ".join(extras)


def _totals(plan: ShardPlan) -> list[str]:
    world = plan.mesh.world_size
    per_rank = [plan.param_bytes(rank) for rank in {0, plan.mesh.shard - 1}]
    total = sum(param.nbytes for param in plan.all_params())
    spread = human_bytes(max(per_rank)) + (
        "" if min(per_rank) == max(per_rank) else f" (last: {human_bytes(min(per_rank))})"
    )
    whole = len(plan.ignored_params)
    held = f"; {whole} parameter{'s' if whole > 1 else ''} held whole" if whole else ""
    return [
        f"{len(plan.units)} shard units, {plan.param_numel:,} parameters, {human_bytes(total)}; "
        f"per rank of {world}: {spread}{held}"
    ]


def _notes(plan: ShardPlan) -> list[str]:
    lines = []
    for note in plan.notes:
        names = f"{name_list(note.fqns, 4)}: " if note.fqns else ""
        lines.append(f"note ({note.kind}): {names}{note.text}")
    return lines


def _names(unit: ShardUnit) -> str:
    return " + ".join(fqn or "(root)" for fqn in unit.fqns)


def _tree_line(label: str, unit: ShardUnit, plan: ShardPlan) -> str:
    sizes = f"{human_bytes(unit.nbytes)}, {human_bytes(plan.unit_param_bytes(unit))}/rank"
    return f"{label}  [{unit.class_name}, {sizes}]"


def _align(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
