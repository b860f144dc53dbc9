"""Draws the tree of a model's modules as nested rows that open and close, with units, dtypes and bytes."""

from __future__ import annotations

from collections.abc import Iterator

from mmfsdp.basics.pages.markup import bar, branch, head_row, label, name_text, row, share, size, text
from mmfsdp.planning.plan_records import ShardUnit
from mmfsdp.rehearsal.reporting.modules import Node
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["STYLE", "outline"]

_ROWS = 1500  # a browser shows them at once
_OPEN = 2  # levels that are open at first


def outline(step: Rehearsal, root: Node) -> str:
    """Return the tree of modules.

    Args:
        step: The rehearsal.
        root: Its tree, from `module_tree`.
    """
    head = head_row("module", "parameters, whole", "on this rank between steps", "held at the peak")
    budget = [_ROWS]
    rows = "".join(_rows(root, root.name, step, 0, budget))
    more = "" if budget[0] > 0 else f'<p class="note">Only the first {_ROWS:,} rows are shown.</p>'
    return f'<div class="outline">{head}{rows}</div>{more}'


def _rows(node: Node, name: str, step: Rehearsal, level: int, budget: list[int]) -> Iterator[str]:
    while len(node.children) == 1 and level and node.unit is None and not (node.params or node.held or node.kept):
        [node] = node.children.values()  # lone children are joined
        name += f".{node.name}"
    budget[0] -= 1
    if budget[0] < 0:
        return
    cells = _cells(node, name, step)
    if not node.children:
        yield row(cells)
        return
    below = (line for child in node.children.values() for line in _rows(child, child.name, step, level + 1, budget))
    yield branch(cells, below, is_open=level < _OPEN)


def _cells(node: Node, name: str, step: Rehearsal) -> str:
    params, kept, held = node.total("params"), node.total("kept").total(), node.total("held").total()
    times = f' <small class="times">{node.modules:,} \u00d7</small>' if node.modules > 1 else ""
    notes = "".join(f' <small class="tag">{text(note)}</small>' for note in _notes(node, step))
    dtypes = f" <small>{text(', '.join(params))}</small>" if params else ""
    width = 100 * held / step.peak.nbytes if step.peak.nbytes else 0.0
    return (
        f'<span class="name">{name_text(name) or "(model)"}{times}{notes}</span>'
        f"<span>{_labelled('parameters', params.total())}{dtypes}</span>"
        f"<span>{_labelled('between steps', kept)}</span>"
        f'<span class="share">{bar(width) if held else ""}{_labelled("at the peak", held)}'
        f"{f' <small>{share(held, step.peak.nbytes)}</small>' if held else ''}</span>"
    )


def _labelled(title: str, nbytes: int) -> str:
    return f"{label(title)}{size(nbytes)}" if nbytes else ""


def _notes(node: Node, step: Rehearsal) -> Iterator[str]:
    """Yield what the plan does with a module."""
    if node.unit is not None:
        yield f"unit: {node.unit.class_name}"
        yield from _precision(node.unit)
        kept = node.unit.reshard_after_forward
        if step.plan.engine != "replicate" and step.plan.mesh.shard > 1:
            if kept is False:
                yield "stays gathered"
            elif kept is not True:
                yield f"resharded to {kept} ranks"
    if node.recomputed:
        yield "recomputed"


def _precision(unit: ShardUnit) -> Iterator[str]:
    if unit.precision.full_precision:
        yield "computes in float32"
    elif unit.precision.param_dtype is not None:
        yield f"computes in {unit.precision.param_dtype}"
    if unit.precision.reduce_dtype is not None:
        yield f"reduces in {unit.precision.reduce_dtype}"


STYLE = """
.outline .row { grid-template-columns: minmax(0, 1fr) 10rem 8rem 14.5rem; }
.outline .tag { border: 1px solid var(--line); border-radius: .3rem; padding: 0 .3rem; }
.outline .share small:last-child { min-width: 3.2rem; }
@container (max-width: 46rem) { .outline .label { flex-basis: 6.5rem; } .outline .share data { min-width: 5.7rem; } }
"""
