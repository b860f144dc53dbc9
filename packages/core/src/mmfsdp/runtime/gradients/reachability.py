"""Finds the parameters that a loss depends on, by their names in the unsharded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn
from mmfsdp.runtime.fsdp1.flat_params import flat_param_names

__all__ = ["LossReach"]


class LossReach:
    """Finds the parameters in the autograd graph of a loss. It is slow and meant for debugging.

    Modules that reentrant activation checkpointing recomputes do not appear in any graph.

    Args:
        model: A model, sharded or not, or a wrapper around one. For a sharded model this is collective: every rank,
            outside of forward and backward; each unit is gathered once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shapes: dict[str, torch.Size] = {}
        self._names: dict[int, set[str]] = {}
        self._flat: dict[int, list[str | None]] = {}
        self._part_of: dict[str, str] = {}
        self._kept: list[Any] = []  # keeps tensors alive, so that no other tensor gets an id that is noted here
        root = model
        while isinstance(inner := getattr(root, "module", None), nn.Module) and not _is_sharded(root):
            root = inner
        units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
        self._root = root
        self._note()
        for unit in units:
            # The gathered tensors are the same objects each time a unit is gathered.
            unit.unshard()
            self._note()
            unit.reshard()
        self._note_flat()

    def unreached(self, losses: Iterable[torch.Tensor]) -> dict[str, torch.Size]:
        """Return the names and shapes of trainable parameters that no graph of ``losses`` contains. Not collective.

        Args:
            losses: The losses, before or after their backward.
        """
        reached: set[str] = set()
        for node, parents in _graph(losses):
            variable = getattr(node, "variable", None)
            reached |= self._names.get(id(variable), set()) if variable is not None else set()
            for parent, output in parents:
                # A flat parameter is split into pieces; only the used pieces count.
                names = self._pieces(parent)
                if names and (name := names[output]) is not None:
                    reached.add(name)
        trained = {clean_fqn(name) for name, param in self._root.named_parameters() if param.requires_grad}
        for name, flat_name in self._part_of.items():
            if flat_name in trained:
                trained.add(name)
        return {name: shape for name, shape in self._shapes.items() if name in trained - reached}

    def _note(self) -> None:
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            for own, param in module._parameters.items():
                if param is None or own == "_flat_param":
                    continue
                name = clean_fqn(f"{prefix}.{own}".lstrip("."))
                first = self._names.setdefault(id(param), set())
                if not any(known in self._shapes for known in first):  # of tied names only the first is reported
                    self._shapes.setdefault(name, param.shape)
                    first.add(name)
                    self._kept.append(param)

    def _note_flat(self) -> None:
        for flat, own_name, pieces in flat_param_names(self._root):
            self._kept.append(flat)
            self._flat[id(flat)] = [None if piece is None else piece[0] for piece in pieces]
            for name, shape in filter(None, pieces):
                self._shapes[name] = shape
                if own_name:
                    self._part_of[name] = own_name

    def _pieces(self, node: Any) -> list[str | None]:
        """Return the names of a split's outputs if it splits a flat parameter."""
        if not self._flat or not type(node).__name__.startswith("Split"):
            return []
        for parent, _ in node.next_functions:
            names = self._flat.get(id(getattr(parent, "variable", None)))
            if names is not None:
                return names
        return []


def _graph(losses: Iterable[torch.Tensor]) -> Iterator[tuple[Any, tuple[tuple[Any, int], ...]]]:
    """Yield every node of the graphs, with the edges to its inputs."""
    waiting = [node for loss in losses if (node := loss.grad_fn) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        parents = tuple((parent, output) for parent, output in node.next_functions if parent is not None)
        yield node, parents
        new = {parent for parent, _ in parents} - seen
        seen |= new
        waiting += new


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule | FullyShardedDataParallel) or any(
        isinstance(param, DTensor) for param in module._parameters.values()
    )
