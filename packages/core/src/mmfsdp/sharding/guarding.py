"""Stops the initialisation of a module from changing parameters that another unit has sharded already."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmfsdp.errors import PlanError

__all__ = ["GuardedWrites", "storage_address"]


class GuardedWrites(TorchDispatchMode):
    """Raises for writes to parameters below a module that belong to another unit.

    Version counters do not show such writes: ``param.data.normal_()``, which most libraries use, does not change them.

    Args:
        fqn: The module's name.
        module: The module that is initialised while the guard is active.
        mine: Addresses of the storages that the unit itself owns.
        written: Receives the address of every storage that is written.
    """

    def __init__(self, fqn: str, module: nn.Module, mine: set[int], written: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written
        self._fqn, self._kind = fqn, type(module).__name__
        self._others: dict[int, list[tuple[int, str]]] = {}  # by storage: where each parameter in it begins
        for name, param in module.named_parameters():
            if storage_address(param) not in mine | {0}:
                self._others.setdefault(storage_address(param), []).append((_begin(param), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _check(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if not isinstance(tensor, torch.Tensor):
                continue
            self._written.add(storage_address(tensor))
            others = self._others.get(storage_address(tensor))
            if others is not None or isinstance(tensor, DTensor):  # this rank may hold none of its elements
                named = [repr(name) for begin, name in sorted(others or ()) if begin <= _begin(tensor)]
                self._refuse(named[-1] if named else f"a parameter of shape {tuple(tensor.shape)}")

    def check_in_place(self, module: nn.Module) -> None:
        """Raise if such a parameter has got other storage, as ``to_empty()`` of a parent gives it."""
        now = {name: storage_address(param) for name, param in module.named_parameters()}
        for address, others in self._others.items():
            for _, name in others:
                if now.get(name) != address:
                    self._refuse(repr(name))

    def _refuse(self, what: str) -> NoReturn:
        raise PlanError(
            f"Initialising {self._kind} changed {what}, which is sharded already: its values would depend on the "
            "number of ranks. Initialise it in the module that owns it, or wrap both in one unit. (A parameter that "
            "was not on the meta device is not changed either.)",
            fqn=self._fqn,
        )


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage, of the local tensor for a DTensor; 0 if it is empty."""
    local = _local(tensor)
    return 0 if local.is_meta or not local.numel() else local.untyped_storage().data_ptr()


def _begin(tensor: torch.Tensor) -> int:
    """Return the address of the first element."""
    return _local(tensor).data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
