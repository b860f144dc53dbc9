"""Makes layers inside a shard unit callable from outside the unit's forward.

Detectors make such calls: a decoder calls branches of the head, a backbone the ``downsample`` of its stages, and a loss
``head.fc``. Such a call gathers the unit, computes, and frees the unit, with the same hooks as a call of it.

Layers inside a unit have stand-ins, which gather it, only while its gate is closed. While it is open each layer is as
it was before sharding: calls within the unit cost nothing, and a compiler sees equal layers in equal units.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

from mmfsdp.errors import ShardStateError
from mmfsdp.planning.units import has_forward
from mmfsdp.runtime.calls.casting import in_full_precision
from mmfsdp.runtime.calls.view_outputs import accept_views, keep_backward_hook
from mmfsdp.runtime.fsdp1.flat_backwards import freeze_through_views
from mmfsdp.runtime.gradients.hidden_outputs import HiddenOutputs
from mmfsdp.runtime.torch_fsdp2.iterations import enter_again
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, groups_of

__all__ = ["FlatGate", "ShardGate", "UnitGate"]

_RUN = "_mmfsdp_run"
_tracker = ModuleTracker()


class UnitGate:
    """Knows whether a unit is in use, and runs calls other than its forward with the unit gathered.

    A gate is open while one of its modules computes (``_in_use``), and while the unit is gathered for its backward
    (``_in_backward``), which may compute parts of it again. `_turn` alone opens and closes it.

    Args:
        members: The modules that are the unit; there are several if they share parameters.
        hidden: Accepts the tensors that outputs of the unit do not show.
        begin: Called before each use. It makes torch take the model as the root, rather than the first unit that runs.
    """

    def __init__(self, members: list[nn.Module], hidden: HiddenOutputs, begin: Callable[[], None]) -> None:
        self.is_open = False
        self._members, self._hidden, self._begin = members, hidden, begin
        self._in_use = self._in_backward = self._is_called_from_outside = False
        self._missing: set[nn.Module] = set()
        self._stand_ins: list[_StandIn] = []
        for module in members:
            module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True)
            module.register_forward_hook(torch.compiler.disable(self._leave), with_kwargs=True, always_call=True)

    def route(self, modules: Iterable[nn.Module]) -> None:
        """Make calls of modules inside the unit gather it.

        Args:
            modules: See `UnitParts.holders`.
        """
        members = set(self._members) if len(self._members) > 1 else set()
        for module in modules:
            # A module that only holds the members of a unit calls them in turn, and each of them gathers.
            if has_forward(module) and members.isdisjoint(module.modules()):
                self._stand_ins.append(_stand_in(module, "forward", _Routed(module, self)))

    def open_to_methods(self, module: nn.Module, names: Iterable[str]) -> None:
        """Make methods of the unit's module gather its parameters, as its forward does."""
        for name in names:
            if callable(method := getattr(module, name, None)):
                self._stand_ins.append(_stand_in(module, name, self._routed_method(method)))

    def begin(self) -> None:
        """Prepare a use of the unit."""
        self._begin()

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute ``forward`` with the unit gathered."""
        raise NotImplementedError

    def run_from_outside(self, routed: _Routed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a layer that was called while the gate is closed."""
        if bool(self._missing) and any(not isinstance(param, DTensor) for param in self._params()):
            # Only some modules of the unit have run: it stays gathered until the others have.
            return routed.forward(*args, **kwargs)
        if _tracker.is_bw and not routed.came_from_outside:
            # A layer that the unit's own forward called is recomputed, and the unit is gathered for its backward.
            params = self._params()
            if isinstance(next(params, None), DTensor) and all(isinstance(param, DTensor) for param in params):
                raise _called_in_backward(routed.module, self._members[0])
            return routed.forward(*args, **kwargs)
        routed.came_from_outside = self._is_called_from_outside = True
        self.begin()
        return self.run(routed.forward, *args, **kwargs)

    def begin_backward(self) -> None:
        """Open the gate for recomputations within the unit's backward, for which the unit was gathered."""
        # A layer that was called from outside may be recomputed as part of another unit, and is then gathered again.
        self._in_backward = not self._is_called_from_outside
        self._turn()

    def end_backward(self) -> None:
        """Close the gate that `begin_backward` opened, unless a use goes on."""
        self._in_backward = False
        self._turn()

    def _use(self, in_use: bool) -> None:
        self._in_use = in_use
        self._turn()

    def _turn(self) -> None:
        if (self._in_use or self._in_backward) is not self.is_open:
            self.is_open = not self.is_open
            _exchange(self._stand_ins, self.is_open)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.begin()
        if len(self._members) > 1 and not self._missing:
            self._missing = set(self._members)
        if self._in_backward and not _tracker.is_bw:  # that backward raised
            self._in_backward = False
        self._use(True)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._missing.discard(module)
        # Also after a nested call: torch has freed the unit now, whichever call began the use.
        self._use(False)
        # When backward recomputes a unit, the unit is gathered already. Without an output the call raised.
        if output is not None and not _tracker.is_bw:
            self._accept(module, args, kwargs, output)

    def _accept(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._hidden.accept((args, kwargs), output)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for member in self._members for param in member.parameters())

    def _routed_method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_open:
                return method(*args, **kwargs)
            self.begin()
            return self.run(method, *args, **kwargs)

        return call


class ShardGate(UnitGate):
    """The gate of a unit of ``fully_shard``. See `UnitGate`.

    Args:
        members: The modules that were passed to ``fully_shard`` together.
        hidden: See `UnitGate`.
        begin: See `UnitGate`.
        full_precision: Whether the unit computes in float32 inside a model of lower precision.
    """

    def __init__(
        self, members: list[nn.Module], hidden: HiddenOutputs, begin: Callable[[], None], *, full_precision: bool
    ) -> None:
        super().__init__(members, hidden, begin)
        self._full_precision, module = full_precision, members[0]
        setattr(module, _RUN, self._compute)
        register_fsdp_forward_method(module, _RUN)
        self._run = getattr(module, _RUN)
        # A wrapper of torch.compile() passes attributes on to the module in it.
        vars(module if _RUN in vars(module) else module._orig_mod).pop(_RUN)
        subscribe(_OpenInBackward(self), groups_of(members))
        accept_views()

    def begin(self) -> None:
        super().begin()
        if _tracker.is_bw:
            enter_again(self._members[0])

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # For a call of the unit itself, hooks do this.
        output = self._run(in_full_precision(forward) if self._full_precision else forward, *args, **kwargs)
        if not _tracker.is_bw:
            self._accept(self._members[0], args, kwargs, output)
        return output

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._use(True)
        try:
            return forward(*args, **kwargs)
        finally:
            self._use(False)

    def _accept(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        keep_backward_hook(module, (args, kwargs), output)
        super()._accept(module, args, kwargs, output)


class _OpenInBackward(Subscriber):
    """Opens a unit's gate while the unit is gathered for its backward, which may recompute parts of it."""

    turn = Turn.OPENING

    def __init__(self, gate: UnitGate) -> None:
        self.gate = gate

    def before_backward(self, group: Group) -> None:
        self.gate.begin_backward()

    def reduced(self, group: Group) -> None:
        self.gate.end_backward()


class FlatGate(UnitGate):
    """The gate of a unit of FSDP1, whose module runs everything: its own forward, and layers that are called directly.

    Args:
        unit: The wrapper around the unit's module.
        hidden: See `UnitGate`.
        begin: See `UnitGate`.
    """

    def __init__(self, unit: FullyShardedDataParallel, hidden: HiddenOutputs, begin: Callable[[], None]) -> None:
        super().__init__([unit], hidden, begin)
        self._unit = unit
        self._pending: Callable[..., Any] | None = None
        self._own = [_stand_in(unit.module, "forward", _RoutedUnit(unit.module, self))]

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._pending = forward
        try:
            return self._unit(*args, **kwargs)
        finally:
            self._pending = None

    def take_pending(self) -> Callable[..., Any] | None:
        """Return once the function that the unit's module runs instead of its forward."""
        pending, self._pending = self._pending, None
        return pending

    def _turn(self) -> None:
        was_open = self.is_open
        super()._turn()
        if self.is_open is not was_open and (was_open or self._pending is None):
            _exchange(self._own, self.is_open)

    def _accept(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        super()._accept(module, args, kwargs, output)
        freeze_through_views(self._unit)


class _Routed:
    """Stands in for ``forward`` of a module inside a unit while the unit is not in use."""

    def __init__(self, module: nn.Module, gate: UnitGate) -> None:
        self.module = module
        self.gate = gate
        self.forward = module.forward
        self.replaced = vars(module).get("forward")
        self.came_from_outside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate.is_open:
            return self.forward(*args, **kwargs)
        return _from_outside(self, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # inspect.signature(module.forward) looks here
        return self.forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["forward"], name)

    def __reduce__(self) -> Any:
        # A copy of the module is a plain module, which nothing gathers.
        if self.replaced is not None:
            return _itself, (self.replaced,)
        return MethodType, (type(self.module).forward, self.module)


class _RoutedUnit(_Routed):
    """Stands in for ``forward`` of a flat unit's module; all calls of layers inside go through it."""

    gate: FlatGate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate.is_open:
            return (self.gate.take_pending() or self.forward)(*args, **kwargs)
        return _from_outside(self, args, kwargs)


def _gather_and_run(routed: _Routed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return routed.gate.run_from_outside(routed, args, kwargs)


_from_outside = torch.compiler.disable(_gather_and_run, recursive=False)


def _called_in_backward(module: nn.Module, unit: nn.Module) -> ShardStateError:
    """Return the error for reversible networks, whose autograd functions call layers in backward."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_locals.get("self") is not unit:
        frame = frame.f_back
    method = "the method that does so" if frame is None else repr(frame.f_code.co_name)
    name = type(unit).__name__
    return ShardStateError(
        f"{type(module).__name__} of a {name} was called in backward, while the shard unit {name} was not gathered. "
        f"Reversible networks do so from an autograd function of their own. List {method} in sharding.forward_methods, "
        f"or leave {name} out of the wrap policy."
    )


def _itself(value: Any) -> Any:
    return value


_StandIn = tuple[dict[str, Any], str, Any, Callable[..., Any]]
"""A module's ``__dict__``, the name of a method, the module's own attribute of that name if any, and the stand-in."""


def _stand_in(module: nn.Module, name: str, call: Callable[..., Any]) -> _StandIn:
    """Let ``call`` stand in for a method of ``module``. Code may keep it and call it while the gate is open."""
    original = vars(module).get(name)
    vars(module)[name] = call
    return vars(module), name, original, call


def _exchange(stand_ins: list[_StandIn], is_open: bool) -> None:
    """Take stand-ins away where the gate has opened, or put them back; not where other code has put its own."""
    for own, name, original, stand_in in stand_ins:
        if own.get(name) is (stand_in if is_open else original):
            if not is_open:
                own[name] = stand_in
            elif original is None:
                del own[name]
            else:
                own[name] = original
