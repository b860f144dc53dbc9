"""Divides a compiled graph into kernels: what a compiler fuses is computed at once and never written to memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from mmfsdp.rehearsal.recording.operator_costs import is_view

__all__ = ["Kernel", "kernels_of"]

_REDUCTIONS = {"sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "var", "var_mean"}
_LIKE_POINTWISE = {
    "clone", "full", "full_like", "iota", "arange", "scalar_tensor", "rand", "randn", "select_scatter", "slice_scatter",
    "constant_pad_nd", "embedding", "index", "gather", "where", "cat", "convert_element_type", "_to_copy",
}  # fmt: skip
"""Operators without torch's tag of pointwise ones that Inductor lowers to a loop over the elements of the result."""


@dataclass(eq=False)
class Kernel:
    """Nodes that are computed at once.

    Attributes:
        size: Number of elements that it goes over.
        nodes: The nodes whose values others may need, in order; what only they need is computed within.
        reads: The nodes whose values it reads from memory.
        written: The nodes whose values it writes to memory.
    """

    size: int
    nodes: list[Node] = field(default_factory=list)
    reads: set[Node] = field(default_factory=set)
    written: set[Node] = field(default_factory=set)


def kernels_of(graph: Graph) -> tuple[dict[Node, Kernel], set[Node]]:
    """Return the kernel of each node that ends a loop, and the nodes that make nothing in memory. Pure.

    The rules are the main ones of Inductor's lowering and scheduler (torch/_inductor/lowering.py, scheduler.py): a
    pointwise node that only loops use is computed where it is used; loops over equally many elements become one if one
    uses the other's result or both read the same, unless something else has to run in between. Products, convolutions,
    attention and whatever is not known is a kernel of its own, whose inputs are in memory.

    Args:
        graph: A graph of ATen's operators, with the shapes of their results as ``meta["val"]``.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    ends = [node for node in graph.nodes if _is_reduction(node) or (_is_pointwise(node) and _is_needed(node))]
    kernels: list[Kernel] = []
    found: dict[Node, Kernel] = {}
    for node in ends:
        reads, size = {*_reads(node, found)}, _size(node)
        kernel = next((one for one in reversed(kernels) if _fuses(one, reads, size, order)), None)
        if kernel is None:
            kernels.append(kernel := Kernel(size))
        kernel.nodes.append(node)
        kernel.reads |= reads.difference(kernel.nodes)
        found[node] = kernel
    for node, kernel in found.items():
        if any(user.op == "output" or _is_other(user) or found.get(user, kernel) is not kernel for user in _uses(node)):
            kernel.written.add(node)
    within = {node for node in graph.nodes if _is_pointwise(node) and node not in found}
    within |= {node for node, kernel in found.items() if node not in kernel.written}
    return found, within | {node for node in graph.nodes if _is_view(node)}


def _fuses(kernel: Kernel, reads: set[Node], size: int, order: dict[Node, int]) -> bool:
    """Return whether a node that reads these nodes can be computed together with a kernel's."""
    others = reads.difference(kernel.nodes)
    first = order[kernel.nodes[0]]
    shares = len(others) < len(reads) or not others.isdisjoint(kernel.reads)
    return size == kernel.size and shares and all(order[node] < first for node in others)


def _reads(node: Node, ends: dict[Node, Kernel]) -> Iterator[Node]:
    """Yield the nodes in memory, or computed as ends, that a node is computed from."""
    seen = set()
    waiting = [*node.all_input_nodes]
    while waiting:
        one = _base(waiting.pop())
        if one in seen:
            continue
        seen.add(one)
        if _is_pointwise(one) and one not in ends:
            waiting += one.all_input_nodes
        else:
            yield one


def _uses(node: Node) -> Iterator[Node]:
    """Yield the nodes that use a node's value, through views and through pointwise nodes that are not in memory."""
    seen = set()
    waiting = [*node.users]
    while waiting:
        user = waiting.pop()
        if user in seen:
            continue
        seen.add(user)
        if _is_view(user) or (_is_pointwise(user) and not _is_needed(user)):
            waiting += user.users
        else:
            yield user


def _is_needed(node: Node) -> bool:
    """Return whether a pointwise node's value must be in memory, because something else than a loop uses it."""
    return any(user.op == "output" or _is_other(user) or (_is_view(user) and _is_needed(user)) for user in node.users)


def _base(node: Node) -> Node:
    """Return the node that a view is of."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_pointwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or _name(target) in _LIKE_POINTWISE


def _is_reduction(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and _name(node.target) in _REDUCTIONS


def _is_view(node: Node) -> bool:
    """Return whether a node only looks at the value of another, or takes one of its results."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # operator.getitem and arithmetic of sizes, but no operator of higher order
        return node.op == "call_function" and not isinstance(target, torch._ops.OperatorBase)
    return is_view(target)


def _is_other(node: Node) -> bool:
    return node.op == "call_function" and not (_is_pointwise(node) or _is_reduction(node) or _is_view(node))


def _size(node: Node) -> int:
    """Return the number of elements that a node's loop goes over: for a reduction, the elements of its input."""
    of = _base(node.all_input_nodes[0]) if _is_reduction(node) else node
    value: Any = of.meta["val"]
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _name(target: Any) -> str:
    name: str = target._schema.name
    return name.partition("::")[2]
