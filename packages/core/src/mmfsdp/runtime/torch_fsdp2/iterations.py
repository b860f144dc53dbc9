"""Begins and discards torch's iterations: the state that torch keeps between the forwards and backwards of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from mmfsdp.basics.torch_releases import ACCUMULATES_IN_GRAD, RESETS_ITERATIONS, torch_has
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, groups_in_module

__all__ = ["before_first_use", "begin_backward", "begin_root", "discard_iteration", "enter_again", "reduce_at_end"]


def begin_root(root: FSDPModule) -> None:
    """Make torch take ``root`` as the root; by itself it takes the first module that runs."""
    with torch.inference_mode(False), torch.no_grad():  # torch 2.9 makes the shards' local tensors anew
        root._get_fsdp_state()._lazy_init()


def before_first_use(root: FSDPModule, check: Callable[[], None]) -> None:
    """Call ``check`` in the first forward, before torch takes the registered parameters as shards; it may raise."""
    state = root._get_fsdp_state()
    begin = state._lazy_init

    def check_and_begin() -> None:
        check()
        del state._lazy_init
        begin()

    state._lazy_init = check_and_begin  # type: ignore[method-assign]


def begin_backward(module: Any, grad: torch.Tensor) -> None:
    """Gather a unit for its backward, as torch's hook on the unit's outputs does."""
    module._get_fsdp_state()._pre_backward(grad)


def reduce_at_end(root: Any, group: Group) -> None:
    """Arrange that the backward that runs ends with the reduction of a group's gradients. Call it as often as you like.

    torch does so where a backward meets the output of a unit. It takes a group as done once the unit's inputs have
    their gradients, also if a parameter gets more of its own after that.
    """
    state = group._training_state
    if state is type(state).PRE_BACKWARD:
        return
    if state is type(state).POST_BACKWARD:
        group._training_state = type(state).IDLE
    root._get_fsdp_state()._register_root_post_backward_final_callback()


def discard_iteration(root: FSDPModule) -> None:
    """Forget a forward that raised, so that the next one starts afresh. Gradients of earlier backwards stay.

    Otherwise a unit of several modules waits for those that did not run, and units train with copies gathered ahead,
    which may be old by then.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:  # nothing has run yet
        return
    if not torch_has(RESETS_ITERATIONS):
        _reset(state)
        return
    kept = []
    if torch_has(ACCUMULATES_IN_GRAD):
        groups = [group for each in state._state_ctx.all_states for group in each._fsdp_param_groups]
        params = [param for group in groups for param in group.fsdp_params]
        kept = [param.sharded_param for param in params]
        kept += [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
    gradients = [(param, param.grad) for param in kept]
    root.reset_iter_state()
    for param, gradient in gradients:
        param.grad = gradient


def enter_again(module: Any) -> None:
    """Let a unit that has run backward run again in the same backward, like any forward that is followed by backward.

    Checkpoints with ``use_reentrant=True`` run it so if forward uses the unit several times. torch, 2.15 too, takes
    this for a recomputation whose backward is still to come, and then loses the gradients in silence.
    """
    state = module._get_fsdp_state()
    if state._training_state.name != "PRE_BACKWARD":
        return
    if {group._training_state.name for group in groups_in_module(module)} == {"POST_BACKWARD"}:
        state._training_state = type(state._training_state).IDLE


def _reset(state: Any) -> None:
    idle = type(state._training_state).IDLE
    stream = state._device_handle.current_stream()
    if (received := state._comm_ctx.all_gather_state) is not None:
        if received.event is not None:
            stream.wait_event(received.event)
        state._comm_ctx.all_gather_state = None
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
        module = each._modules[0]
        for group in groups_in_module(module):
            if (ahead := group._all_gather_result) is not None:
                if ahead.all_gather_event is not None:
                    stream.wait_event(ahead.all_gather_event)
                if ahead.all_gather_work is not None:
                    ahead.all_gather_work.wait()
                group._all_gather_result = None
            group.finalize_backward()
            group._training_state = idle
            group._to_sharded()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
