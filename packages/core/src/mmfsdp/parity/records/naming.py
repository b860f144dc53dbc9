"""Names modules and parameters as the plain model does, and chooses the modules whose tensors are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mmfsdp.planning.compiled import is_compiled, is_compiled_wrapper

__all__ = ["plain_name", "units_of", "unwrapped"]

_INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module within DDP or FSDP1."""
    while isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        model = model.module
    return model


def plain_name(name: str) -> str:
    """Return an FQN without what FSDP1, activation checkpointing and torch.compile insert."""
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


def units_of(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model, under the name "", and its modules down to a depth, with their names; each module once.

    Containers such as ``ModuleList``, and wrappers, do not count. Modules in one that is compiled are left out: to see
    what is within would divide its graph.

    Args:
        model: The module, without DDP around it.
        depth: How many modules below the model.
    """
    seen = {id(model)}
    depth = 0 if is_compiled_wrapper(model) else depth
    yield "", model
    yield from _below(model, "", depth, seen)


def _below(module: nn.Module, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for own, child in module.named_children():
        if depth == 0 or id(child) in seen:
            continue
        seen.add(id(child))
        full = f"{name}.{own}" if name else own
        inserted = own in _INSERTED
        passed = isinstance(child, _CONTAINERS)
        if not passed and not inserted:
            yield plain_name(full), child
        if not is_compiled(child):
            yield from _below(child, full, depth - (0 if passed or inserted else 1), seen)
