"""Refusing an optimizer step that would train nothing, or the wrong thing."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mmfsdp.errors import GradScalerError, ShardStateError
from mmfsdp.runtime import ShardedModel, live_models

__all__ = ["watch_optimizers"]

_watching: list[Any] = []
_models_of: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[ShardedModel]]]] = weakref.WeakKeyDictionary()


def watch_optimizers() -> None:
    """Check every optimizer's steps from now on; those of other models pass untouched."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _models_of.get(optimizer)
    if known is None or known[0] != count:
        # Once per optimizer: whose parameters are these?
        params = [param for group in optimizer.param_groups for param in group["params"]]
        models = [model for model in live_models() if model.owns(params)]
        for model in models:
            _check_first_step(optimizer, model, params)
        known = (count, [weakref.ref(model) for model in models])
        _models_of[optimizer] = known
    for reference in known[1]:
        if (state := reference()) is not None:
            state.check_reduced(f"{type(optimizer).__name__} is about to step")


def _check_first_step(optimizer: Optimizer, model: ShardedModel, params: list[torch.Tensor]) -> None:
    if model.stale(params):
        raise ShardStateError(
            f"{type(optimizer).__name__} holds gathered copies of sharded parameters: it was built from a submodule "
            "between a forward and its backward, and would train nothing. Build it from the sharded model's "
            "parameters(), best before the first forward."
        )
    if model.plan.needs_grad_scaler and not _in_grad_scaler():
        raise GradScalerError(
            f"The plan computes in float16, but {type(optimizer).__name__} steps without a gradient scaler: small "
            "gradients become zero. Scale the loss and step with torch.amp.GradScaler (AmpOptimWrapper in MMEngine), "
            "or use precision 'bf16'."
        )


def _in_grad_scaler() -> bool:
    """Whether a GradScaler is among the callers: it steps the optimizer itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            return True
        frame = frame.f_back
    return False
