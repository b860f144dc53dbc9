"""The private parts of torch's FSDP1 that decide which gradients a backward gives to flat parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._runtime_utils import (
    _register_post_backward_final_callback,
    _register_pre_backward_hooks,
)

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.fsdp1.flat_params import flat_handles, flat_units

__all__ = [
    "clear_gradient_of",
    "complete_backwards",
    "flat_flags",
    "freeze_through_views",
    "has_piece_of",
    "refuse_unseen_backwards",
    "show_outputs",
]


def show_outputs(unit: FullyShardedDataParallel, tensors: Sequence[torch.Tensor]) -> None:
    """Gather a unit for backwards of ``tensors``, as torch does for the tensors that it finds in the unit's output.

    Call it right after a forward of the unit.
    """
    # torch has no public function that makes the backward of a tensor gather a unit. A hook of our own could not: this
    # function also sets what torch reads later, that the unit must be gathered and that its backward has not begun.
    if tensors:  # without any, torch would not gather the unit for the outputs that it knows
        _register_pre_backward_hooks(unit, unit, tuple(tensors), unit._handle)


def complete_backwards(module: nn.Module) -> None:
    """From now on, complete the gradients of backwards that begin at a unit's output, not at the root's.

    torch completes them in the root's backward, and would leave the optimizer without gradients.
    """
    for name, handle in flat_handles(module):
        handle.prepare_gradient_for_backward = _completing(
            handle.prepare_gradient_for_backward, name, weakref.ref(handle), weakref.ref(module)
        )


def _completing(
    prepare: Callable[[], None], name: str, unit: weakref.ref[Any], module: weakref.ref[nn.Module]
) -> Callable[[], None]:
    def prepare_and_complete() -> None:
        handle, root = unit(), module()
        if handle is not None and handle.uses_sharded_strategy and handle.is_sharded(handle.flat_param):
            raise _second_backward(name)
        if isinstance(root, FullyShardedDataParallel) and root.training_state is TrainingState.IDLE:
            _complete_at_end(root)
        prepare()

    return prepare_and_complete


def _complete_at_end(root: Any) -> None:
    vars(root).setdefault("_post_backward_callback_queued", False)  # torch sets it in the root's forward
    if root._is_root and not root._post_backward_callback_queued:
        # torch does this in the root's backward; it has no public function for it.
        _register_post_backward_final_callback(root, root)
        for handle in root._all_handles:
            handle._reset_flat_param_grad_info_if_needed()


def refuse_unseen_backwards(module: nn.Module) -> None:
    """From now on, raise in a backward that reaches a unit whose gradients torch would not reduce.

    It reached no tensor that torch knows as an output of a unit, which ends with an assertion; or another backward has
    ended since the unit's forward.
    """
    for (name, handle), unit in zip(flat_handles(module), flat_units(module), strict=True):
        if handle.flat_param.requires_grad:
            flat = weakref.ref(handle.flat_param)
            handle.flat_param.register_hook(functools.partial(_check_seen, name, weakref.ref(unit), flat))


def _check_seen(
    name: str, reference: weakref.ref[FullyShardedDataParallel], flat: weakref.ref[Any], _: torch.Tensor
) -> None:
    if (unit := reference()) is None:
        return
    if unit.training_state is TrainingState.IDLE:
        raise ShardStateError(
            f"A backward reached the shard unit {name or '(root)'!r}, but no output of it or of the units around it: "
            "it began at a tensor that a forward computed and did not return, and its gradients would not be reduced. "
            "Return the tensor from the forward, or use engine 'fsdp2'."
        )
    if not hasattr(flat(), "_post_backward_hook_state"):
        raise _second_backward(name)


def _second_backward(name: str) -> ShardStateError:
    return ShardStateError(
        f"A backward reached the shard unit {name or '(root)'!r}, and another backward has ended since the unit's "
        "forward. Engine 'fsdp1' gathers units and reduces gradients only in the first: run each forward right before "
        "its backward, add up losses and call backward() once, or use engine 'fsdp2'.",
        fqn=name,
    )


def flat_flags(flat: Any) -> list[bool]:
    """Return ``requires_grad`` of each parameter in a flat one; an empty list with ``use_orig_params=False``."""
    return [param.requires_grad for param in flat._params or ()]


def has_piece_of(flat: Any, wanted: Sequence[bool]) -> bool:
    """Return whether this rank's shard has elements of a wanted parameter in the flat one."""
    return any(info.in_shard for info, is_wanted in zip(flat._shard_param_infos, wanted, strict=True) if is_wanted)


def clear_gradient_of(flat: Any, index: int) -> None:
    """Set this rank's piece of a parameter's gradient to zero, if there is a flat gradient that was reduced."""
    info = flat._shard_param_infos[index]
    if info.in_shard and flat.grad is not None and flat.grad.shape == flat._local_shard.shape:
        flat.grad.narrow(0, info.offset_in_shard, info.numel_in_shard).zero_()


def freeze_through_views(unit: FullyShardedDataParallel) -> None:
    """Make ``requires_grad_()`` of a view that torch registers in place of a parameter act on the parameter.

    torch does so between forward and backward if the unit stays gathered. A view cannot be frozen, and nothing says so
    if it is thawed. Call it after a forward.
    """
    handle: Any = unit._handle
    if handle is None or not handle._use_orig_params or not handle._skipped_use_sharded_views:
        return
    for view, param in zip(handle.flat_param._tensors, handle.flat_param._params, strict=True):
        view.requires_grad_ = functools.partial(_freeze, view, param)


def _freeze(view: torch.Tensor, param: torch.nn.Parameter, requires_grad: bool = True) -> torch.Tensor:
    param.requires_grad_(requires_grad)
    return view
