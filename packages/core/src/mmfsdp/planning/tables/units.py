"""Shows a plan as text: a table, a tree, or how it differs from another."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping

from mmfsdp.basics.tables import Column, format_table
from mmfsdp.basics.text import human_bytes, name_list
from mmfsdp.planning.matrix_steps import muon_flops
from mmfsdp.planning.optimizer_groups import WIRE_BYTES, OptimizerGroup, OptimizerPlan
from mmfsdp.planning.plan_data import PlanData
from mmfsdp.planning.plan_records import MeshSpec, ParamEntry, ShardUnit
from mmfsdp.planning.tables.repeats import join_repeated

__all__ = ["equal_units", "render_diff", "render_table", "render_tree"]

_Tree = dict[str, "_Tree"]


_COLUMNS = (
    Column("unit", wraps=True),
    Column("units", right=True),
    Column("class", wraps=True, rank=3),
    Column("params", right=True),
    Column("bytes", right=True),
    Column("bytes/rank", right=True),
    Column("dtypes", wraps=True, once=True, rank=2),
    Column("reshard", once=True, rank=1),
    Column("AC", once=True, rank=1),
    Column("compiled", once=True, rank=1),
    Column("matched by", wraps=True, rank=4),
)
_OPTIMIZER_COLUMNS = (
    Column("optimizer"),
    Column("tensors", right=True),
    Column("params", right=True),
    Column("state/rank", right=True),
    Column("messages", right=True),
    Column("sent/rank", right=True),
    Column("FLOPs", right=True),
)


def render_table(plan: PlanData, *, every_unit: bool = False, width: int | None = None) -> str:
    """Return the plan as an aligned table of shard units with a head, totals and notes.

    Args:
        plan: The plan.
        every_unit: Show each unit in a row of its own. By default equal layers share one.
        width: The longest line in characters; None for no limit.
    """
    groups = equal_units(plan, every_unit=every_unit)
    recomputed = _recomputed(plan)
    rows = [[name, str(len(units)), *_cells(plan, units[0], recomputed)] for name, units in groups]
    columns, explained = list(_COLUMNS), ["Where a row stands for several units, its sizes are those of one."]
    if len(groups) == len(plan.units):
        columns, explained = [columns[0], *columns[2:]], []
        rows = [[row[0], *row[2:]] for row in rows]
    if not compiled_units(plan):
        index = len(columns) - 2
        columns, rows = columns[:index] + columns[index + 1 :], [row[:index] + row[index + 1 :] for row in rows]
    optimizers = _optimizers(plan, width)
    lines = [*format_table(columns, rows, width), "", *explained, *_totals(plan), *_notes(plan), *optimizers]
    return "\n".join([*_wrapped([_head(plan)], width), "", *_wrapped(lines, width)])


def equal_units(plan: PlanData, *, every_unit: bool = False) -> list[tuple[str, list[ShardUnit]]]:
    """Return the units that differ in nothing but an index of their name together, under one name.

    Args:
        plan: The plan.
        every_unit: Return each unit alone.
    """
    # Its index makes the key of a unit unique, which keeps the unit alone.
    recomputed = _recomputed(plan)
    keys = [(index if every_unit else None, *_cells(plan, unit, recomputed)) for index, unit in enumerate(plan.units)]
    groups = join_repeated([(_names(unit), key) for unit, key in zip(plan.units, keys, strict=True)])
    return [(group.name, [plan.units[member] for member in group.members]) for group in groups]


def render_tree(plan: PlanData, *, every_unit: bool = False) -> str:
    """Return the shard units as a tree over the parts of their names.

    Args:
        plan: The plan.
        every_unit: Show each unit in a line of its own. By default equal layers share one.
    """
    unit_at = {fqn: unit for unit in plan.units for fqn in unit.fqns if fqn}
    nodes: _Tree = {}
    for fqn in unit_at:
        below = nodes
        for part in fqn.split("."):
            below = below.setdefault(part, {})

    def lines_of(children: _Tree, path: str) -> list[str]:
        shown = []
        for part, below in children.items():
            fqn = f"{path}.{part}" if path else part
            unit = unit_at.get(fqn)
            if unit is not None and fqn != unit.fqn:
                text = f"  [with {unit.fqn}]"  # counted there
            else:
                text = "" if unit is None else _tree_line(unit, plan)
            shown.append((part, (text, *lines_of(below, fqn))))
        keys = [(part, (index if every_unit else None, *block)) for index, (part, block) in enumerate(shown)]
        groups = join_repeated(keys)
        lines = []
        for group in groups:
            first, *rest = shown[group.members[0]][1]
            last = group is groups[-1]
            times = f" ({len(group.members)} ×)" if len(group.members) > 1 else ""
            lines.append(("└── " if last else "├── ") + group.name + times + first)
            lines += [("    " if last else "│   ") + line for line in rest]
        return lines

    root = "(root)" + _tree_line(plan.root, plan)
    return "\n".join([_head(plan), "", root, *lines_of(nodes, ""), "", *_totals(plan), *_notes(plan)])


def render_diff(old: PlanData, new: PlanData) -> str:
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


def _unit_diff(old: PlanData, new: PlanData) -> list[str]:
    changes = [*_unit_changes(old, new)]
    groups = join_repeated([(name, (sign, change)) for sign, name, change in changes])
    firsts = [(group.name, *changes[group.members[0]][::2]) for group in groups]
    return [f"{sign} unit {name}{change}" for name, sign, change in firsts]


def _unit_changes(old: PlanData, new: PlanData) -> Iterator[tuple[str, str, str]]:
    """Yield for each change its sign, the name of the unit, and the change as text."""
    before = {unit.fqns: unit for unit in old.units}
    after = {unit.fqns: unit for unit in new.units}
    for fqns, unit in before.items():
        if fqns not in after:
            yield "-", _names(unit), f" ({unit.matched_by})"
    for fqns, unit in after.items():
        if fqns not in before:
            yield "+", _names(unit), f" ({unit.matched_by})"
            continue
        for name in type(unit).model_fields:
            was, now = getattr(before[fqns], name), getattr(unit, name)
            if was != now and name == "params":
                yield "~", _names(unit), f".params: {before[fqns].numel:,} -> {unit.numel:,} elements"
            elif was != now:
                yield "~", _names(unit), f".{name}: {was} -> {now}"


def _head(plan: PlanData) -> str:
    extras = [
        f"{plan.engine} ({plan.engine_reason})",
        plan.strategy,
        str(plan.mesh),
        f"device {plan.device}",
        *(["parameters on CPU"] if plan.cpu_offload else []),
        *(["buffers broadcast"] if plan.broadcast_buffers else []),
        *(["buffers " + plan.buffer_dtype] if plan.buffer_dtype else []),
    ]
    return "ShardPlan: " + ", ".join(extras)


def _totals(plan: PlanData) -> list[str]:
    world = plan.mesh.world_size
    per_rank = [plan.param_bytes(rank) for rank in {0, world // plan.mesh.replicate - 1}]
    total = sum(param.nbytes for param in plan.all_params())
    spread = human_bytes(max(per_rank)) + (
        "" if min(per_rank) == max(per_rank) else f" (last: {human_bytes(min(per_rank))})"
    )
    whole = len(plan.ignored_params)
    held = f"; {whole} parameter{'s' if whole > 1 else ''} held whole" if whole else ""
    return [
        f"{len(plan.units)} shard units, {plan.param_numel:,} parameters, {human_bytes(total)}; "
        f"per rank of {world}: {spread}{held}",
        *_recomputed_elsewhere(plan),
    ]


def _recomputed_elsewhere(plan: PlanData) -> list[str]:
    """Return a line for the modules that recompute without being units, which no row of the table shows."""
    units = {fqn for unit in plan.units for fqn in unit.fqns}
    others = sorted(_recomputed(plan) - units)
    if not others:
        return []
    joined = name_list([group.name for group in join_repeated([(fqn, None) for fqn in others])], 4, quoted=False)
    return [f"AC also recomputes {len(others)} module{'s' if len(others) > 1 else ''} that are not units: {joined}"]


def _notes(plan: PlanData) -> list[str]:
    lines = []
    for note in plan.notes:
        names = f"{name_list(note.fqns, 4)}: " if note.fqns else ""
        lines.append(f"note ({note.kind}): {names}{note.text}")
    return lines


def _recomputed(plan: PlanData) -> frozenset[str]:
    return frozenset(plan.activation_checkpointing.fqns if plan.activation_checkpointing else ())


def _cells(plan: PlanData, unit: ShardUnit, recomputed: frozenset[str]) -> list[str]:
    """Return the cells of a unit's row, without its name."""
    return [
        unit.class_name,
        f"{unit.numel:,}",
        human_bytes(unit.nbytes),
        human_bytes(plan.unit_param_bytes(unit)),
        str(unit.precision),
        "-" if plan.engine == "replicate" else str(unit.reshard_after_forward).lower(),
        "yes" if recomputed & {*unit.fqns} else "-",
        compiled_units(plan).get(unit.fqn, "-"),
        unit.matched_by,
    ]


def compiled_units(plan: PlanData) -> dict[str, str]:
    """Return by FQN ``'yes'`` for each unit that the plan compiles, ``'already'`` for each that the user compiled."""
    planned = dict.fromkeys(plan.compile.fqns if plan.compile else (), "yes")
    return planned | dict.fromkeys(plan.compiled_already, "already")


def _names(unit: ShardUnit) -> str:
    return " + ".join(fqn or "(root)" for fqn in unit.fqns)


def _tree_line(unit: ShardUnit, plan: PlanData) -> str:
    sizes = f"{human_bytes(unit.nbytes)}, {human_bytes(plan.unit_param_bytes(unit))}/rank"
    return f"  [{unit.class_name}, {sizes}]"


def _wrapped(lines: list[str], width: int | None) -> list[str]:
    """Wrap long lines of prose; the lines of the table fit already."""
    if width is None:
        return lines
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, max(width, 20), subsequent_indent="  ") if len(line) > width else [line])
    ]


def _optimizers(plan: PlanData, width: int | None) -> list[str]:
    """Return a table of the optimizers: parameters, state, messages and FLOPs of a step."""
    chosen = plan.optimizer
    if chosen is None:
        return []
    params = {param.fqn: param for param in plan.all_params()}
    whole = {param.fqn for param in plan.ignored_params}
    # The messages of a bucket are listed at the group that it begins with.
    begun = Counter(bucket[0][0] for bucket in chosen.buckets(params, plan.mesh.world_size))
    rows = [
        _optimizer_cells(plan, chosen, group, params, whole, begun[index]) for index, group in enumerate(chosen.groups)
    ]
    return ["", *format_table(list(_OPTIMIZER_COLUMNS), rows, width)]


def _optimizer_cells(
    plan: PlanData,
    chosen: OptimizerPlan,
    group: OptimizerGroup,
    params: Mapping[str, ParamEntry],
    whole: set[str],
    buckets: int,
) -> list[str]:
    own = [params[fqn] for fqn in group.fqns]
    held = sum(param.shard_nbytes(plan.mesh, 0, gathered=param.fqn in whole) for param in own)
    numel = sum(param.numel for param in own)
    cells = [group.optimizer, str(len(own)), f"{numel:,}"]
    if group.optimizer == "adamw":
        return [*cells, human_bytes(2 * held), "-", "-", "-"]
    steps = group.settings["ns_steps"]
    flops = sum(muon_flops(rows, columns, steps) for rows, columns in chosen.matrices(group, params))
    messages = "0" if plan.mesh.world_size == 1 else str(2 * buckets) if buckets else "shared"
    return [*cells, human_bytes(held), messages, human_bytes(_sent(numel, plan.mesh)), f"{flops:.2e}"]


def _sent(numel: int, mesh: MeshSpec) -> int:
    """Return the bytes that a rank sends in a step: its shards to their owners, and updates back to all ranks.

    With n ranks that all shard, that is 2 P (n - 1) / n² bytes each way for P parameters. Each of several shard groups
    also receives the updates that the others have computed.
    """
    ranks = mesh.world_size
    there = numel * WIRE_BYTES * (mesh.shard_ranks - 1) / mesh.shard_ranks / ranks
    back = numel * WIRE_BYTES * (mesh.replicate - 1 / mesh.shard_ranks) / ranks
    return int(there + back)
