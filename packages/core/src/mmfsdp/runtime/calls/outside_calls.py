"""Makes layers inside a shard unit callable from outside the unit's forward.

Detectors make such calls: a decoder calls branches of the head, a backbone the ``downsample`` of its stages, and a loss
``head.fc``. Such a call gathers the unit, computes, and frees the unit, with the same hooks as a call of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method
from torch.utils.module_tracker import ModuleTracker

from mmfsdp.errors import ShardStateError
from mmfsdp.planning.units import has_forward
from mmfsdp.runtime.calls.casting import in_full_precision
from mmfsdp.runtime.calls.unit_gates import UnitGate
from mmfsdp.runtime.calls.view_outputs import accept_views, keep_backward_hook
from mmfsdp.runtime.fsdp1.flat_backwards import freeze_through_views
from mmfsdp.runtime.gradients.hidden_outputs import HiddenOutputs
from mmfsdp.runtime.torch_fsdp2.iterations import enter_again
from mmfsdp.runtime.torch_fsdp2.observing import Subscriber, Turn, subscribe
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, groups_of

__all__ = ["open_to_methods", "route", "watch_flat_unit", "watch_unit"]

_RUN = "_mmfsdp_run"
_tracker = ModuleTracker()


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
    """Stands in for ``forward`` of a flat unit's module, through which calls of everything inside go."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate = self.gate
        if gate.is_open:
            run, gate.pending = gate.pending or self.forward, None
            return run(*args, **kwargs)
        return _from_outside(self, args, kwargs)


def _gather_and_run(routed: _Routed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gate = routed.gate
    if gate.is_between_members:
        return routed.forward(*args, **kwargs)
    if _tracker.is_bw and not routed.came_from_outside:
        # What the unit's own forward called is recomputed, and the unit is gathered for its backward.
        if gate.is_freed:
            raise _called_in_backward(routed.module, gate.members[0])
        return routed.forward(*args, **kwargs)
    routed.came_from_outside = gate.is_called_from_outside = True
    gate.begin()
    return gate.run(routed.forward, *args, **kwargs)


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


_from_outside = torch.compiler.disable(_gather_and_run, recursive=False)


def _itself(value: Any) -> Any:
    return value


def watch_unit(members: list[nn.Module], gate: UnitGate, hidden: HiddenOutputs, *, full_precision: bool) -> None:
    """Attach a gate to a unit of ``fully_shard``. Not collective.

    Args:
        members: The modules that were passed to ``fully_shard`` together.
        gate: The unit's gate.
        hidden: Accepts the tensors that outputs of the unit do not show.
        full_precision: Whether the unit computes in float32 inside a model of lower precision.
    """
    module = members[0]
    begin = gate.begin

    def begin_anew() -> None:
        begin()
        if _tracker.is_bw:
            enter_again(module)

    gate.begin = begin_anew
    setattr(module, _RUN, gate.compute)
    register_fsdp_forward_method(module, _RUN)
    run = getattr(module, _RUN)
    # What torch.compile() returned passes attributes on to the module in it.
    vars(module if _RUN in vars(module) else module._orig_mod).pop(_RUN)

    def run_and_keep_hook(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # For a call of the unit itself, hooks do this.
        output = run(in_full_precision(forward) if full_precision else forward, *args, **kwargs)
        keep_hook(module, args, kwargs, output)
        return output

    def keep_hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _tracker.is_bw:  # when backward recomputes a unit, the unit is gathered already
            keep_backward_hook(module, (args, kwargs), output)
            hidden.accept((args, kwargs), output)

    gate.run = run_and_keep_hook
    gate.watch(members, keep_hook)
    subscribe(_OpenInBackward(gate), groups_of(members))
    accept_views()


class _OpenInBackward(Subscriber):
    """Opens a unit's gate while the unit is gathered for its backward, which may recompute parts of it."""

    turn = Turn.OPENING

    def __init__(self, gate: UnitGate) -> None:
        self.gate = gate

    def before_backward(self, group: Group) -> None:
        """Open the gate."""
        self.gate.begin_backward()

    def reduced(self, group: Group) -> None:
        """Close the gate."""
        self.gate.end_backward()


def watch_flat_unit(unit: FullyShardedDataParallel, gate: UnitGate, hidden: HiddenOutputs) -> None:
    """Attach a gate to a unit of FSDP1. Not collective.

    Args:
        unit: The wrapper around the unit's module.
        gate: The unit's gate.
        hidden: Accepts the tensors that outputs of the unit do not show.
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gate.pending = forward
        try:
            return unit(*args, **kwargs)
        finally:
            gate.pending = None

    def accept_hidden(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _tracker.is_bw:
            hidden.accept((args, kwargs), output)
            freeze_through_views(unit)

    gate.run = run
    gate.watch([unit], accept_hidden)
    gate.stand_in(unit.module, "forward", _RoutedUnit(unit.module, gate), runs_pending=True)


def open_to_methods(module: nn.Module, names: Iterable[str], gate: UnitGate) -> None:
    """Make methods of a unit's module gather its parameters, as its forward does."""
    for name in names:
        if callable(method := getattr(module, name, None)):
            gate.stand_in(module, name, _routed_method(method, gate))


def _routed_method(method: Callable[..., Any], gate: UnitGate) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if gate.is_open:
            return method(*args, **kwargs)
        gate.begin()
        return gate.run(method, *args, **kwargs)

    return call


def route(modules: Iterable[nn.Module], gate: UnitGate) -> None:
    """Make calls of modules inside a unit gather the unit.

    Args:
        modules: See `UnitParts.holders`.
        gate: The unit's gate.
    """
    members = set(gate.members) if len(gate.members) > 1 else set()
    for module in modules:
        # A module that only holds the members of a unit calls them in turn, and each of them gathers.
        if has_forward(module) and members.isdisjoint(module.modules()):
            gate.stand_in(module, "forward", _Routed(module, gate))
