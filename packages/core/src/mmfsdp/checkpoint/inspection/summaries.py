"""Sums up a checkpoint: sizes along the parts of tensor names, and the statistics of one tensor's elements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from mmfsdp.basics.dtypes import numbers_per_element
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.elements import require_numpy, tensor_blocks, values
from mmfsdp.checkpoint.files.expected_reads import read_extents
from mmfsdp.checkpoint.files.planned_files import Progress, Tracker
from mmfsdp.checkpoint.geometry import check_coverage, without_repeats
from mmfsdp.checkpoint.layout import Layout
from mmfsdp.checkpoint.tree import find_tensor
from mmfsdp.errors import ConfigError

__all__ = ["TensorStatistics", "TreeNode", "tensor_statistics", "tensor_tree"]

_BLOCK = 1 << 20  # bytes; in float64 they are up to eight times as many


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of a tensor's elements. NaNs are only counted; of a complex number the absolute value counts."""

    name: str
    """The tensor's whole name."""
    dtype: str
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape in elements."""
    elements: int
    """Number of elements."""
    min: float | None
    """Smallest element; ``None`` if there is none."""
    max: float | None
    """Largest element."""
    mean: float | None
    """Mean of the elements, added up in float64."""
    norm: float
    """Root of the sum of their squares."""
    zeros: int
    """Number of elements that are zero."""
    nans: int
    """Number of NaNs."""
    infs: int
    """Number of infinities."""

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON; what is not finite is a string such as ``'inf'``."""
        content = asdict(self)
        for key in ("min", "max", "mean", "norm"):
            if content[key] is not None and not math.isfinite(content[key]):
                content[key] = str(content[key])
        return content


def tensor_statistics(layout: Layout, name: str, *, progress: Progress | None = None) -> TensorStatistics:
    """Read all of one tensor and return statistics of its elements.

    Args:
        layout: The checkpoint.
        name: The tensor's whole name, or its name among the weights.
        progress: Called with the bytes read so far and the bytes to read.

    Raises:
        ConfigError: There is no such tensor, or no numpy, or its elements hold several numbers each.
        IncompleteCheckpointError, CorruptCheckpointError: Parts of it are missing.
    """
    require_numpy("Statistics of a tensor")
    import numpy as np

    entry = find_tensor(layout, name)
    if (count := numbers_per_element(entry.dtype)) > 1:
        raise ConfigError(
            f"{entry.name!r} is {entry.dtype}: each element holds {count} codes, and mmfsdp has no statistics of them."
        )
    check_coverage(layout, [entry.name])
    [stored], times = without_repeats(entry)
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    zeros = nans = infs = 0
    tracker = Tracker(stored.nbytes, progress)
    with OpenFiles() as files:
        files.expect(read_extents(stored))
        for block in tensor_blocks(files, stored, _BLOCK):
            found = values(block, entry.dtype)
            with np.errstate(all="ignore"):  # signalling NaNs
                wide = (np.abs(found) if found.dtype.kind == "c" else found).astype(np.float64)
            nan = np.isnan(wide)
            nans += int(nan.sum())
            wide = wide[~nan] if nan.any() else wide
            zeros += int((wide == 0).sum())
            infs += int(np.isinf(wide).sum())
            with np.errstate(all="ignore"):
                low, high = min(low, float(wide.min(initial=math.inf))), max(high, float(wide.max(initial=-math.inf)))
                total, squares = total + float(wide.sum()), squares + float(np.square(wide).sum())
            tracker.advance(len(block))
    count = stored.numel - nans
    return TensorStatistics(
        entry.name,
        entry.dtype,
        entry.shape,
        entry.numel,
        low if count else None,
        high if count else None,
        total / count if count else None,
        math.sqrt(squares * times),
        zeros * times,
        nans * times,
        infs * times,
    )


@dataclass
class TreeNode:
    """A prefix of tensor names, with the number and size of the tensors below it."""

    name: str
    """The part of the name that it adds, its separator included: ``'backbone.'``."""
    tensors: int = 0
    """Number of tensors here and below."""
    nbytes: int = 0
    """Their bytes."""
    entry: TensorEntry | None = None
    """The tensor whose name ends here."""
    children: dict[str, TreeNode] = field(default_factory=dict)
    """The nodes below, in the order of the checkpoint."""

    def walk(self, depth: int | None = None) -> Iterator[tuple[int, TreeNode]]:
        """Yield each node below this one with its level, from 0, down to ``depth`` levels."""
        for child in self.children.values():
            yield 0, child
            if depth is None or depth > 1:
                yield from ((level + 1, node) for level, node in child.walk(None if depth is None else depth - 1))

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        content: dict[str, Any] = {"name": self.name, "num_tensors": self.tensors, "bytes": self.nbytes}
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
