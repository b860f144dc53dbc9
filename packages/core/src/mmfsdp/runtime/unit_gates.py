"""Tracks whether a shard unit is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

__all__ = ["UnitGate"]


class UnitGate:
    """Knows whether a unit is in use, and runs calls other than its forward with the unit gathered.

    Args:
        begin: Called before each use. It makes torch take the model as the root, rather than the first unit that runs,
            and lets a unit run anew whose backward has run.

    Attributes:
        is_open: Whether a use has begun and not ended; meanwhile layers of the unit compute as usual.
        members: The modules that are the unit; there are several if they share parameters.
        pending: What the unit's module runs instead of its forward; only engine ``fsdp1`` sets it.
        run: ``(forward, *args, **kwargs)``, computes ``forward`` with the unit gathered. Set once the unit is watched.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin
        self.is_open = False
        self.pending: Callable[..., Any] | None = None
        self.run: Callable[..., Any]
        self.members: list[nn.Module] = []
        self._missing: set[nn.Module] = set()

    def watch(self, members: list[nn.Module]) -> None:
        """Open the gate before each call of ``members``, and close it after the call."""
        self.members = members
        for module in members:
            module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True)
            module.register_forward_hook(torch.compiler.disable(self._leave), always_call=True)

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` with the gate open; the unit must be gathered."""
        self.is_open = True
        try:
            return forward(*args, **kwargs)
        finally:
            self.is_open = False

    @property
    def is_between_members(self) -> bool:
        """Whether only some modules of a unit have run: it stays gathered until the others have."""
        return bool(self._missing) and any(not isinstance(param, DTensor) for param in self._params())

    @property
    def is_freed(self) -> bool:
        """Whether the modules of the unit hold only shards; never with engine ``fsdp1``, whose shards are flat."""
        params = self._params()
        return isinstance(next(params, None), DTensor) and all(isinstance(param, DTensor) for param in params)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for member in self.members for param in member.parameters())

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.begin()
        if len(self.members) > 1 and not self._missing:
            self._missing = set(self.members)
        self.is_open = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._missing.discard(module)
        # Also after a nested call: torch has freed the unit now, whichever call began the use.
        self.is_open = False
