"""How a sharded model's runtime gets to know of forwards, gradients and reads of its parameters."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from mmfsdp.guards import watch_optimizers
from mmfsdp.runtime import ShardedModel

__all__ = ["install"]


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
        _begin_at_root(module)
        original = type(module).named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            live, this = me(), root()
            if live is not None and live.parameters_are_settled():
                live.reshard()
            return original(this, *args, **kwargs)  # type: ignore[arg-type]

        module.named_parameters = named_parameters  # type: ignore[method-assign]
        for name in state.plan.root.forward_methods:
            setattr(module, name, _as_forward(getattr(module, name), me))
    watch_optimizers()


def _begin_at_root(root: nn.Module) -> None:
    """Let units be called before their root ever was: torch takes the first module that runs for the root."""
    reference = weakref.ref(root)
    handles: list[Any] = []

    def begin(unit: nn.Module, args: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        if isinstance(live := reference(), FSDPModule):
            live._get_fsdp_state()._lazy_init()  # no public function does it

    for unit in root.modules():
        if isinstance(unit, FSDPModule) and unit is not root:
            handles.append(unit.register_forward_pre_hook(begin, prepend=True))


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
