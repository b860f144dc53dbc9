"""In-place operations on the output of a unit when that is a view: ``ReLU(inplace=True)`` after a 3-D ``Linear``.

FSDP2 gathers a unit for its backward in a hook on each output. Writing to a view replaces its node in the graph, and
the hook goes with it. The node that made the base of the view stays: it gets a hook as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from mmfsdp.runtime.param_groups import begin_backward

__all__ = ["accept_views", "keep_backward_hook"]


def keep_backward_hook(module: FSDPModule, args: Any, output: Any) -> None:
    """Gather a unit for its backward whatever is written to its outputs. Called after each forward of the unit.

    Args:
        module: A module that was sharded.
        args: What forward was given, in any structure.
        output: What it returned, in any structure.
    """
    if not torch.is_grad_enabled():
        return
    views = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf._base is not None]
    if not views:
        return
    given = {id(base_of(leaf)) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    for view in views:
        base = base_of(view)
        # A view of what came in is not computed with parameters, and its base has its backward after the unit's.
        if view.requires_grad and base.grad_fn is not None and id(base) not in given:
            _hook_both(module, view, base)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which ``tensor`` is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def _hook_both(module: FSDPModule, view: torch.Tensor, base: torch.Tensor) -> None:
    began = False

    def at_view(grad: torch.Tensor) -> None:
        nonlocal began
        began = True  # torch's own hook is at the same place

    def at_base(grads: tuple[torch.Tensor, ...]) -> None:
        if not began:
            begin_backward(module, grads[0])

    view.register_hook(at_view)
    assert base.grad_fn is not None
    base.grad_fn.register_prehook(at_base)


def accept_views() -> None:
    """Do not repeat torch's warning that an in-place operation on such an output fails."""
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
