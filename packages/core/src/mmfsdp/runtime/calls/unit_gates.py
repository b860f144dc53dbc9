"""Tracks whether a shard unit is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

__all__ = ["UnitGate"]

_tracker = ModuleTracker()


class UnitGate:
    """Knows whether a unit is in use, and runs calls other than its forward with the unit gathered.

    Layers inside the unit have stand-ins, which gather it, only while the gate is closed. While it is open each layer
    is as it was before sharding: calls within the unit cost nothing, and a compiler sees equal layers in equal units.

    Args:
        begin: Called before each use. It makes torch take the model as the root, rather than the first unit that runs,
            and lets a unit run anew whose backward has run.

    Attributes:
        is_open: Whether layers of the unit compute as usual: it is in use, or gathered for its backward.
        is_called_from_outside: Whether code outside of the unit has called a layer of it.
        members: The modules that are the unit; there are several if they share parameters.
        pending: What the unit's module runs instead of its forward; only engine ``fsdp1`` sets it.
        run: ``(forward, *args, **kwargs)``, computes ``forward`` with the unit gathered. Set once the unit is watched.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin
        self.is_open = False
        self.is_called_from_outside = False
        self.pending: Callable[..., Any] | None = None
        self.run: Callable[..., Any]
        self.members: list[nn.Module] = []
        self._in_use = self._in_backward = False
        self._missing: set[nn.Module] = set()
        self._stand_ins: list[_StandIn] = []
        self._pending_stand_ins: list[_StandIn] = []

    def watch(self, members: list[nn.Module], then: Callable[..., None] | None = None) -> None:
        """Open the gate before each call of ``members``, and close it after the call.

        Args:
            members: The modules that are the unit.
            then: ``(module, args, kwargs, output)``, called after each call that returned.
        """
        self.members = members
        self._then = then
        for module in members:
            module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True)
            module.register_forward_hook(torch.compiler.disable(self._leave), with_kwargs=True, always_call=True)

    def stand_in(self, module: nn.Module, name: str, call: Callable[..., Any], *, runs_pending: bool = False) -> None:
        """Call ``call`` instead of a method of ``module`` while the gate is closed.

        Args:
            module: A module of the unit.
            name: The method, such as ``forward``.
            call: What is called instead. Code may keep it and call it while the gate is open.
            runs_pending: Whether ``call`` also runs what is `pending`.
        """
        stand_ins = self._pending_stand_ins if runs_pending else self._stand_ins
        stand_ins.append((vars(module), name, vars(module).get(name), call))
        vars(module)[name] = call

    def begin_backward(self) -> None:
        """Open the gate for recomputations within the unit's backward, for which the unit was gathered."""
        # A layer that was called from outside may be recomputed as part of another unit, and is then gathered again.
        self._in_backward = not self.is_called_from_outside
        self._turn()

    def end_backward(self) -> None:
        """Close the gate that `begin_backward` opened, unless a use goes on."""
        self._in_backward = False
        self._turn()

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` with the gate open; the unit must be gathered."""
        self._use(True)
        try:
            return forward(*args, **kwargs)
        finally:
            self._use(False)

    def _use(self, in_use: bool) -> None:
        self._in_use = in_use
        self._turn()

    def _turn(self) -> None:
        is_open = self._in_use or self._in_backward
        if is_open is self.is_open:
            return
        self.is_open = is_open
        turn = _take_away if is_open else _put_back
        turn(self._stand_ins)
        if not is_open or self.pending is None:
            turn(self._pending_stand_ins)

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
        if self._in_backward and not _tracker.is_bw:  # that backward raised
            self._in_backward = False
        self._use(True)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._missing.discard(module)
        # Also after a nested call: torch has freed the unit now, whichever call began the use.
        self._use(False)
        if self._then is not None and output is not None:  # None: the call raised
            self._then(module, args, kwargs, output)


_StandIn = tuple[dict[str, Any], str, Any, Callable[..., Any]]
"""A module's ``__dict__``, the name of a method, the module's own attribute of that name if any, and the stand-in."""


def _take_away(stand_ins: list[_StandIn]) -> None:
    for own, name, original, stand_in in stand_ins:
        if own.get(name) is stand_in:  # no other code has replaced it
            if original is None:
                del own[name]
            else:
                own[name] = original


def _put_back(stand_ins: list[_StandIn]) -> None:
    for own, name, original, stand_in in stand_ins:
        if own.get(name) is original:
            own[name] = stand_in
