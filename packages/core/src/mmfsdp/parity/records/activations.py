"""Tells which samples of the global batch this rank has of an activation."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten_with_path

from mmfsdp.parity.records.record_files import Spread
from mmfsdp.parity.records.slots import Placed

__all__ = ["Batch", "Order", "leaves_of"]

Order = Literal["blocks", "strided"]


class Batch:
    """This rank's part of the global batch.

    Args:
        rank: This rank.
        world: How many ranks there are. All have equally many samples.
        order: See `mmfsdp.recording`.
    """

    def __init__(self, rank: int, world: int, order: Order) -> None:
        self.rank, self._world, self._in_blocks = rank, world, order == "blocks" or world == 1
        self.samples = 0
        """Samples of this rank; 0 if that is not known."""

    def begin(self, given: Any) -> None:
        """Take the number of samples from the arguments of the model."""
        leaves = [leaf for _, leaf in tree_flatten_with_path(given)[0]]
        self.samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as it lies in the whole."""
        if self._in_blocks or not (each := self._each(value)):
            return value
        inner = value.shape[1:]
        local = value.detach().reshape(self.samples, 1, each, *inner)
        if inner:
            return local
        # One dimension is folded, so that its elements must be in place.
        spaced = local.new_zeros((self.samples, self._world, each))
        spaced[:, self.rank] = local[:, 0]
        return spaced.reshape(value.shape[0] * self._world)

    def placed(self, value: torch.Tensor) -> Placed:
        """Return where `part` lies."""
        if not (each := self._each(value)):
            spread: Spread = "mean" if value.numel() == 1 else "own"
            return Placed(spread, (0,) * value.dim(), tuple(value.shape))
        rows, inner = value.shape[0], tuple(value.shape[1:])
        shape = (rows * self._world, *inner)
        if self._in_blocks:
            return Placed("rows", (self.rank * rows, *(0,) * len(inner)), shape)
        if not inner:
            return Placed("rows", (0,), shape)
        offsets, whole = (0, self.rank, 0, *(0,) * len(inner)), (self.samples, self._world, each, *inner)
        return Placed("rows", offsets, whole, leading=3, shown=(shape, (rows, *inner)))

    def _each(self, value: torch.Tensor) -> int:
        """Return the rows of a sample; 0 if the first dimension does not count samples."""
        rows = value.shape[0] if value.dim() else 0
        return 0 if not self.samples or rows % self.samples else rows // self.samples


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Return what a module gets or returns, with where it is; most often that is one tensor."""
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    if isinstance(tree, tuple) and len(tree) == 2 and isinstance(tree[0], tuple) and tree[1] == {}:
        args = tree[0]
        if all(isinstance(arg, torch.Tensor) for arg in args):
            return [(f"[0][{index}]", arg) for index, arg in enumerate(args)]
    return [("".join(map(str, path)), leaf) for path, leaf in tree_flatten_with_path(_plain(tree))[0]]


def _plain(tree: Any) -> Any:
    """Return outputs that subclass dict, such as transformers' ``ModelOutput``, as plain dicts."""
    return dict(tree) if isinstance(tree, dict) else tree
