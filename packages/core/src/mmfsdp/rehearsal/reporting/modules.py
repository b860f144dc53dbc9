"""Builds the tree of a model's modules with what each one holds; equal layers are one node. Pure and torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from mmfsdp.planning.plan_records import ParamEntry, ShardUnit
from mmfsdp.planning.tables.repeats import join_ranges
from mmfsdp.rehearsal.allocator.accounting import held_at
from mmfsdp.rehearsal.result import Rehearsal

__all__ = ["OWNERS", "Node", "module_tree", "owner_of"]

_DEPTH = 30  # levels of modules

OWNERS = "the loss", "the model itself"
"""What `owner_of` returns."""


@dataclass
class Node:
    """A module, or equal ones together: their sizes are summed up."""

    name: str
    """The last part of its name: ``fc1``, or ``{0..31}`` for equal layers; ``''`` is the model."""
    path: str
    """Its whole name."""
    modules: int = 1
    """How many modules it stands for."""
    params: Counter[str] = field(default_factory=Counter)
    """Bytes of its own parameters by dtype, unsharded."""
    held: Counter[str] = field(default_factory=Counter)
    """Bytes that its own code holds at the peak, by kind."""
    kept: Counter[str] = field(default_factory=Counter)
    """Bytes that it holds between steps, by kind."""
    unit: ShardUnit | None = None
    recomputed: bool = False
    shapes: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shapes and dtypes of its parameters."""
    children: dict[str, Node] = field(default_factory=dict)

    def walk(self) -> Iterator[Node]:
        """Yield this node and those below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def total(self, what: str) -> Counter[str]:
        """Return ``params``, ``held`` or ``kept`` with all modules below."""
        found: Counter[str] = Counter()
        for node in self.walk():
            found.update(getattr(node, what))
        return found


def module_tree(step: Rehearsal) -> Node:
    """Return the tree of the modules that have parameters, or hold memory at the peak or between steps."""
    root = Node("", "")
    shapes: dict[str, list[ParamEntry]] = {}
    for param in step.plan.params_in_order():
        shapes.setdefault(param.fqn.rpartition(".")[0], []).append(param)
    for name, params in shapes.items():
        node = _at(root, name)
        node.shapes = tuple((param.shape, param.dtype) for param in params)
        for param in params:
            node.params[param.dtype] += param.nbytes
    for unit in step.plan.units:
        for name in unit.fqns:
            _at(root, name).unit = unit
    checkpointing = step.plan.activation_checkpointing
    for name in () if checkpointing is None else checkpointing.fqns:
        _at(root, name).recomputed = True
    for moment, what in ((step.peak.moment, "held"), (0, "kept")):
        for item in held_at(step.allocations, moment):
            getattr(_at(root, item.module), what)[item.kind] += item.nbytes
    return _folded(root)


def owner_of(kind: str) -> str:
    """Return what to call the code that holds memory of a kind outside of all modules.

    A step computes little there but the loss: in the model's own forward, or after it.
    """
    return OWNERS[kind not in ("activation", "activation gradient", "recomputed")]


def _at(root: Node, name: str) -> Node:
    node = root
    parts = name.split(".") if name else []
    for part in (*parts[:_DEPTH], *[".".join(parts[_DEPTH:])] * (len(parts) > _DEPTH)):
        path = f"{node.path}.{part}" if node.path else part
        node = node.children.setdefault(part, Node(part, path))
    return node


def _folded(node: Node) -> Node:
    """Join children that are numbered and have equal parameters and units."""
    groups: dict[Hashable, list[Node]] = {}
    for name, child in node.children.items():
        _folded(child)
        key = _signature(child) if name.isdecimal() else None
        groups.setdefault((name,) if key is None else ("", key), []).append(child)
    joined = [_joined(members) for members in groups.values()]
    node.children = {child.name: child for child in joined}
    return node


def _signature(node: Node) -> Hashable:
    """Return what equal layers have in common: parameters, units and checkpointing, below them too."""
    unit = node.unit and (node.unit.class_name, str(node.unit.precision), node.unit.reshard_after_forward)
    below = tuple((child.name, found) for child in node.children.values() if (found := _signature(child)) is not None)
    own = node.shapes, unit, node.recomputed, below
    return own if any(own) else None


def _joined(members: list[Node]) -> Node:
    first = members[0]
    if len(members) == 1:
        return first
    name = join_ranges([int(node.name) for node in members])
    _add(first, members[1:])
    _rename(first, name, f"{first.path.rpartition('.')[0]}.{name}".lstrip("."))
    return first


def _add(node: Node, others: list[Node]) -> None:
    """Add what others hold to a node, with those below them by name."""
    for other in others:
        node.modules += other.modules
        node.params.update(other.params)
        node.held.update(other.held)
        node.kept.update(other.kept)
        for name, child in other.children.items():
            if name in node.children:
                _add(node.children[name], [child])
            else:
                node.children[name] = child


def _rename(node: Node, name: str, path: str) -> None:
    node.name, node.path = name, path
    for child in node.children.values():
        _rename(child, child.name, f"{path}.{child.name}")
