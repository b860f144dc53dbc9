"""Sums up the tensors of a checkpoint along the parts of their names, as a tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmfsdp.checkpoint.layout import Layout, TensorEntry

__all__ = ["TreeNode", "tensor_tree"]


@dataclass
class TreeNode:
    """A prefix of names: how many tensors it has below it, and how large they are."""

    name: str
    """The part of the name that it adds, its separator included: ``'backbone.'``."""
    tensors: int = 0
    """Number of tensors here and below."""
    nbytes: int = 0
    """Their bytes."""
    entry: TensorEntry | None = None
    """The tensor whose name ends here."""
    children: dict[str, TreeNode] = field(default_factory=dict)
    """What is below, in the order of the checkpoint."""

    def walk(self, depth: int | None = None) -> Iterator[tuple[int, TreeNode]]:
        """Yield each node below this one with its level, from 0, down to ``depth`` levels."""
        for child in self.children.values():
            yield 0, child
            if depth is None or depth > 1:
                yield from ((level + 1, node) for level, node in child.walk(None if depth is None else depth - 1))

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        content: dict[str, Any] = {"name": self.name, "tensors": self.tensors, "bytes": self.nbytes}
        if self.entry is not None:
            content |= {"tensor": self.entry.name, "dtype": self.entry.dtype, "shape": list(self.entry.shape)}
        if self.children:
            content["children"] = [child.describe() for child in self.children.values()]
        return content


def tensor_tree(layout: Layout) -> TreeNode:
    """Return the tree of a checkpoint's tensors; names are split at ``/`` and ``.``, and lone children joined.

    Args:
        layout: The checkpoint.
    """
    root = TreeNode("")
    for entry in layout.tensors.values():
        node = root
        root.tensors, root.nbytes = root.tensors + 1, root.nbytes + entry.nbytes
        for part in re.findall(r"[^/.]*[/.]|[^/.]+$", entry.name) or [entry.name]:
            node = node.children.setdefault(part, TreeNode(part))
            node.tensors, node.nbytes = node.tensors + 1, node.nbytes + entry.nbytes
        node.entry = entry
    for name, child in root.children.items():
        root.children[name] = _joined(child)
    return root


def _joined(node: TreeNode) -> TreeNode:
    while len(node.children) == 1 and node.entry is None:
        [child] = node.children.values()
        node = TreeNode(node.name + child.name, child.tensors, child.nbytes, child.entry, child.children)
    node.children = {name: _joined(child) for name, child in node.children.items()}
    return node
