"""Makes in-place operations safe on a unit's output that is a view, such as ``ReLU(inplace=True)`` after a ``Linear``.

FSDP2 gathers a unit for its backward in a hook on each output. Writing to a view replaces its node in the graph, and
the hook is lost. The node that made the base of the view stays, so that node gets a hook as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from mmfsdp.runtime.torch_fsdp2.iterations import begin_backward

__all__ = ["accept_views", "keep_backward_hook"]


def keep_backward_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Make sure that a unit is gathered for its backward, also if its outputs are changed in place. Call after forward.

    Args:
        module: A module that ``fully_shard`` was given.
        args: The arguments of forward, in any structure.
        output: The result of forward, in any structure.
    """
    if not torch.is_grad_enabled() or (isinstance(output, torch.Tensor) and output._base is None):
        return
    views = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf._base is not None]
    if not views:
        return
    given = {id(base_of(leaf)) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    for view in views:
        base = base_of(view)
        # A view of an input is not computed with parameters, and the backward of its base runs after the unit's.
        if view.requires_grad and base.grad_fn is not None and id(base) not in given:
            _hook_both(module, view, base)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``tensor`` is a view of, or ``tensor`` itself."""
    return tensor if tensor._base is None else tensor._base


def _hook_both(module: nn.Module, view: torch.Tensor, base: torch.Tensor) -> None:
    began = False

    def at_view(grad: torch.Tensor) -> None:
        nonlocal began
        began = True  # torch's own hook runs at the same point

    def at_base(grads: tuple[torch.Tensor, ...]) -> None:
        if not began:
            begin_backward(module, grads[0])

    view.register_hook(at_view)
    assert base.grad_fn is not None
    base.grad_fn.register_prehook(at_base)


def accept_views() -> None:
    """Silence torch's warning that an in-place operation on such an output fails."""
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
