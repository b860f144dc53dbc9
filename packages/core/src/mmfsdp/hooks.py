"""How a sharded model's runtime gets to know of forwards, gradients and reads of its parameters."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from mmfsdp.engines.outside_calls import (
    UnitGate,
    UnitParts,
    open_to_methods,
    route,
    watch_flat_unit,
    watch_unit,
)
from mmfsdp.guards import watch_optimizers
from mmfsdp.runtime import ShardedModel

__all__ = ["install", "route_calls"]


def install(state: ShardedModel, module: nn.Module) -> None:
    """Hook a sharded root so that its runtime knows what happens to it. Not collective.

    Args:
        state: The runtime; the hooks keep only weak references.
        module: The root.
    """
    me, root = weakref.ref(state), weakref.ref(module)

    def before(_: nn.Module, args: Any) -> None:
        if (live := me()) is not None:
            live.before_forward()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if (live := me()) is not None:
            # torch calls this hook from an except block when forward failed, with no output.
            live.after_forward(sys.exception() if output is None else None)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
    for param in state.whole_params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(functools.partial(_average, me))
    if not state.is_fsdp1:
        original = type(module).named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            live, this = me(), root()
            if live is not None and live.parameters_are_settled():
                live.reshard()
            return original(this, *args, **kwargs)  # type: ignore[arg-type]

        module.named_parameters = named_parameters  # type: ignore[method-assign]
    watch_optimizers()


def route_calls(state: ShardedModel, parts: Iterable[UnitParts]) -> None:
    """Let units, their methods that the plan lists, and layers inside them be called from anywhere. Not collective.

    Args:
        state: The runtime.
        parts: What `parts_of_units` returned before the model was sharded.
    """
    begin = _begin_at_root(state)
    wrappers = {id(unit.module): unit for unit in FullyShardedDataParallel.fsdp_modules(state.module)}
    for part in parts:
        gate = UnitGate(_nothing if part.unit.is_root else begin)
        if state.is_fsdp1:
            watch_flat_unit(wrappers[id(part.modules[0])], gate)
        else:
            members: list[nn.Module] = [module for module in part.owned if isinstance(module, FSDPModule)]
            watch_unit(members, gate, full_precision=part.unit.precision.full_precision)
            if part.unit.is_root:
                gate.run = _as_forward(gate.run, weakref.ref(state))
        route(part.holders, gate)
        for module in part.modules:
            open_to_methods(module, part.unit.forward_methods, gate)


def _begin_at_root(state: ShardedModel) -> Callable[[], None]:
    """Let units be called before their root ever was: torch takes the first module that runs for the root."""
    me = weakref.ref(state)
    begun = False

    def begin() -> None:
        nonlocal begun
        if begun or (live := me()) is None:
            return
        begun = True
        root = live.module
        if isinstance(root, FSDPModule):
            root._get_fsdp_state()._lazy_init()  # no public function does it
        elif not live.is_running:
            with FullyShardedDataParallel.summon_full_params(root, recurse=False, writeback=False):
                pass

    return begin


def _nothing() -> None:
    pass


def _as_forward(method: Any, me: weakref.ref[ShardedModel]) -> Any:
    """A method of the root that computes as forward does, but that no hook sees."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        live = me()
        if live is None:
            return method(*args, **kwargs)
        live.before_forward()
        try:
            output = method(*args, **kwargs)
        except Exception as error:
            live.after_forward(error)
            raise
        live.after_forward(None)
        return output

    return call


def _average(me: weakref.ref[ShardedModel], param: torch.Tensor) -> None:
    if (live := me()) is not None:
        live.average(param)
