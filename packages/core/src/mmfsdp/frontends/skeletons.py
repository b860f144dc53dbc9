"""Builds a model without a forward from the names and shapes of a checkpoint, for the static part of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn as nn

from mmfsdp.basics.dtypes import is_floating_point, to_torch
from mmfsdp.checkpoint import TensorEntry, open_layout
from mmfsdp.checkpoint.tree import part_tensors
from mmfsdp.errors import ConfigError

__all__ = ["Skeleton", "skeleton_of"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Skeleton(nn.Module):
    """A module whose parameters a checkpoint names. It has no forward, so a step of it cannot be rehearsed."""

    def forward(self, *_: object, **__: object) -> None:
        raise ConfigError("A checkpoint has no forward. Name the model itself to rehearse a step.")


def skeleton_of(path: str | Path) -> Skeleton:
    """Return modules with the names, shapes and dtypes of a checkpoint's weights, on the meta device.

    Running statistics of batch norm and tensors that are not floating are buffers, all others trained parameters.
    Numbered modules make a list, whose members of equal shapes have one class, so that ``wrap: auto`` finds the blocks.

    Args:
        path: Any checkpoint that `mmfsdp.checkpoint.open_layout` reads.

    Raises:
        ConfigError: The checkpoint holds no weights, or a name is both a tensor's and a module's.
        MmfsdpError: It cannot be read.
    """
    tensors = part_tensors(open_layout(path), "model")
    if not tensors:
        raise ConfigError(f"{str(path)!r} holds no weights to plan for.")
    root = Skeleton()
    _fill(root, tensors, "")
    return root


def _fill(module: nn.Module, tensors: Mapping[str, TensorEntry], prefix: str) -> None:
    below: dict[str, dict[str, TensorEntry]] = {}
    own: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        head, dot, rest = name.partition(".")
        if dot:
            below.setdefault(head, {})[rest] = entry
        else:
            own[head] = entry
    classes: dict[tuple[object, ...], type[Skeleton]] = {}
    for head, inner in below.items():
        if head in own or not head:
            raise ConfigError(f"{prefix + head!r} is the name of a tensor, and of a module with other tensors.")
        is_list = len(inner) > 1 and all(name.partition(".")[0].isdigit() and "." in name for name in inner)
        if inner.keys() <= {"weight", "bias"} and "weight" in inner and len(inner["weight"].shape) == 2:
            # As large embeddings and heads do, it may become a unit of its own.
            child: nn.Module = nn.Linear(1, 1, bias=False, device="meta")
        else:
            child = nn.ModuleList() if is_list else _class_for(inner, module, classes)()
        _fill(child, inner, f"{prefix}{head}.")
        module.add_module(head, child)
    for name, entry in own.items():
        value = torch.empty(entry.shape, dtype=to_torch(entry.dtype), device="meta")
        if name in _STATISTICS or not is_floating_point(entry.dtype):
            module.register_buffer(name, value)
        else:
            module.register_parameter(name, nn.Parameter(value))


def _class_for(
    tensors: Mapping[str, TensorEntry], parent: nn.Module, classes: dict[tuple[object, ...], type[Skeleton]]
) -> type[Skeleton]:
    """Return a class of its own for equal members of a list."""
    if not isinstance(parent, nn.ModuleList):
        return Skeleton
    shapes = tuple(_shapes(tensors))
    if shapes not in classes:
        classes[shapes] = type(f"Block{len(classes) or ''}", (Skeleton,), {})
    return classes[shapes]


def _shapes(tensors: Mapping[str, TensorEntry]) -> Iterator[object]:
    for name, entry in sorted(tensors.items()):
        yield name, tuple(entry.shape), entry.dtype
