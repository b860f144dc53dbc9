"""Refuses optimizer steps that would silently train nothing, or train incorrectly, and divides mixed param groups."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mmfsdp.errors import GradScalerError
from mmfsdp.runtime.gradients.gradient_hooks import check_gradient_hooks
from mmfsdp.runtime.refusals.frameworks import guard_optimizer_saves
from mmfsdp.runtime.refusals.grad_scaler import agrees_on_inf, refuse_stage
from mmfsdp.runtime.roles import check_roles
from mmfsdp.runtime.sharded_model import ShardedModel, live_models

__all__ = ["are_watching", "divide_groups", "is_mixed", "join_groups", "unwatched", "watch_optimizers"]


@dataclass(slots=True)
class _Known:
    """Facts about an optimizer, known since its first step."""

    num_params: int
    models: list[weakref.ref[ShardedModel]]
    has_mixed: bool
    """Whether a param group must be divided for a step."""


_hooks: list[Any] = []
_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
_paused = False


def watch_optimizers() -> None:
    """Check the steps of every optimizer from now on; steps of optimizers of other models are not changed."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def are_watching() -> bool:
    """Return whether checks run; they do not where steps are only tried, or on tensors without values."""
    return not _paused


@contextmanager
def unwatched() -> Iterator[None]:
    """Suspend the checks: torch steps an optimizer with zero gradients to create its state."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _paused:
        divide_groups(optimizer)
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _known.get(optimizer)
    if known is None or known.num_params != count:
        known = _known[optimizer] = _learn(optimizer, count)
        if any(model.plan.mesh.shard > 1 for reference in known.models if (model := reference())):
            guard_optimizer_saves(optimizer)
    for reference in known.models:
        if (state := reference()) is not None:
            state.check_reduced(f"{type(optimizer).__name__} is about to step")
            if state.agreement is not None:
                state.agreement.check()
            state.before_writing()
            state.check_writes()
    if known.has_mixed:
        divide_groups(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    join_groups(optimizer)


def _learn(optimizer: Optimizer, count: int) -> _Known:
    """Find and check the models that own an optimizer's parameters: once per optimizer, and when it gets more."""
    join_groups(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    models = []
    for model in live_models():
        if roles := model.roles(params):
            check_roles(roles, type(optimizer).__name__)
            _check_first_step(optimizer, model)
            models.append(weakref.ref(model))
    return _Known(count, models, bool(models) and any(is_mixed(group) for group in optimizer.param_groups))


def _check_first_step(optimizer: Optimizer, model: ShardedModel) -> None:
    check_gradient_hooks(model.module, model.plan, calls_some=not model.is_fsdp1)
    if model.is_stage and _grad_scaler() is not None:
        refuse_stage(model)
    if not model.plan.needs_grad_scaler:
        return
    scaler = _grad_scaler()
    if scaler is None:
        raise GradScalerError(
            f"The plan computes in float16, but {type(optimizer).__name__} steps without a gradient scaler: small "
            "gradients become zero. Scale the loss and step with mmfsdp.GradScaler or torch.amp.GradScaler "
            "(AmpOptimWrapper in MMEngine), or use precision 'bf16'."
        )
    if model.is_fsdp1 and model.plan.mesh.shard > 1 and not agrees_on_inf(scaler):
        raise GradScalerError(
            f"With engine 'fsdp1' an infinite gradient is in one rank's shard only: with {type(scaler).__name__} that "
            "rank alone would skip its step, and ranks would drift apart. Use mmfsdp.GradScaler."
        )


def _grad_scaler() -> GradScaler | None:
    """Return the GradScaler among the callers, which steps the optimizer itself; None if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            return scaler
        frame = frame.f_back
    return None


_KEPT = "_mmfsdp_param_groups"
"""The attribute of an optimizer that holds its param groups while they are divided."""


def is_mixed(group: dict[str, Any]) -> bool:
    """Return whether a param group must be divided. Not collective."""
    computes_many = "foreach" in group and (group["foreach"] is not False or bool(group.get("fused")))
    return computes_many and len({_kind(param) for param in group["params"]}) > 1


def divide_groups(optimizer: Optimizer) -> None:
    """Divide mixed param groups of an optimizer, in place, until `join_groups`. Not collective.

    Optimizers of torch compute many tensors in one call (``foreach``, ``fused``), but not DTensors and plain tensors,
    nor DTensors of several meshes. For the time of a step such a param group becomes one for each kind.

    Args:
        optimizer: An optimizer that is about to step. If an earlier step raised, its groups are joined first.
    """
    join_groups(optimizer)
    divided: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
        for param in group["params"] if is_mixed(group) else ():
            kinds.setdefault(_kind(param), []).append(param)
        divided += [{**group, "params": params} for params in kinds.values()] or [group]
    if len(divided) > len(optimizer.param_groups):
        vars(optimizer)[_KEPT] = list(optimizer.param_groups)
        optimizer.param_groups[:] = divided


def join_groups(optimizer: Optimizer) -> None:
    """Put back what `divide_groups` divided, with the settings that the step has changed. Not collective."""
    whole: list[dict[str, Any]] | None = vars(optimizer).pop(_KEPT, None)
    if whole is None:
        return
    parts = iter(optimizer.param_groups)
    for group in whole:
        part = next(parts)
        left = len(group["params"]) - len(part["params"])
        if part is not group:
            group.update({name: value for name, value in part.items() if name != "params"})
        while left > 0:
            left -= len(next(parts)["params"])
    optimizer.param_groups[:] = whole


def _kind(param: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh of a parameter. Models of one process often have equal meshes, which kernels take together."""
    return param.device_mesh if isinstance(param, DTensor) else None
