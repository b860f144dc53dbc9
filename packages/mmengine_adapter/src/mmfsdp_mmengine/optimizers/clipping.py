"""Clips an optimizer's gradients by their norm over all ranks, which is the norm of the unsharded model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from mmengine.optim import OptimWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp import clip_grad_norm_
from mmfsdp.errors import ConfigError
from mmfsdp.runtime import check_finite_norm, find_sharded_model
from mmfsdp_mmengine.configs.unknown import refuse_unknown

__all__ = ["clip_globally"]


def clip_globally(wrapper: Any, model: nn.Module) -> None:
    """Make an optimizer wrapper clip by the global norm; a user's own clip function is kept.

    Args:
        wrapper: An optimizer wrapper, bound to the sharded parameters. Changed.
        model: The sharded model.

    Raises:
        ConfigError: ``clip_grad`` has an argument that torch's function does not accept, or lacks one.
    """
    if not getattr(wrapper, "clip_grad_kwargs", None):
        return
    if wrapper.clip_func in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        _check_arguments(wrapper.clip_func, wrapper.clip_grad_kwargs)
    if wrapper.clip_func is torch.nn.utils.clip_grad_value_:
        wrapper.clip_func = _clip_value
        return
    if wrapper.clip_func is not torch.nn.utils.clip_grad_norm_:
        return
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)

    def clip(params: Any, max_norm: float, norm_type: Any = 2.0, error_if_nonfinite: bool = False, **_: Any) -> Any:
        if is_fsdp1:
            own = [param for group in wrapper.optimizer.param_groups for param in group["params"]]
            return _clip_pieces(model, own, float(max_norm), float(norm_type), error_if_nonfinite)
        return clip_grad_norm_(params, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)

    wrapper.clip_func = clip
    if is_fsdp1 and type(wrapper)._clip_grad is OptimWrapper._clip_grad:
        # MMEngine clips only if there are gradients. With FSDP1 a rank may have none, and the others would wait for it.
        def clip_grad() -> None:
            norm = wrapper.clip_func([], **wrapper.clip_grad_kwargs)
            wrapper.message_hub.update_scalar(f"train/{wrapper.grad_name}", float(norm))

        wrapper._clip_grad = clip_grad


def _check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    _, *known = inspect.signature(function).parameters.values()
    refuse_unknown("clip_grad", given, [item.name for item in known], "optim_wrapper.clip_grad")
    for item in known:
        if item.default is item.empty and item.name not in given:
            raise ConfigError(
                f"clip_grad lacks {item.name!r}, which {function.__name__} needs. Write "
                f"clip_grad=dict({item.name}=...).",
                config="optim_wrapper.clip_grad",
            )


def _clip_value(params: Iterable[torch.Tensor], clip_value: float, **_: Any) -> None:
    """Clip by value, which is elementwise: each rank clips its own shard."""
    for param in params:
        if param.grad is not None:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            local.clamp_(-float(clip_value), float(clip_value))


def _clip_pieces(
    model: nn.Module, params: list[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Clip by the norm of FSDP1's pieces, each held by one rank of each replica. Collective: every rank."""
    state = find_sharded_model(model)
    state.check_reduced("Gradients are about to be clipped")
    whole = {id(param) for param in state.whole_params}
    pieces = [param.grad for param in params if param.grad is not None and id(param) not in whole]
    others = [param.grad for param in params if param.grad is not None and id(param) in whole]
    device = next((param.device for param in params), torch.device("cpu"))
    mine, theirs = _norm(pieces, norm_type, device), _norm(others, norm_type, device)
    if math.isinf(norm_type):
        state.all_reduce(mine, dist.ReduceOp.MAX)
        total = torch.maximum(mine, theirs)
    else:
        powers = mine**norm_type
        state.all_reduce(powers, dist.ReduceOp.SUM)
        replicas = state.plan.mesh.world_size // state.plan.mesh.shard
        total = (powers / replicas + theirs**norm_type) ** (1 / norm_type)
    if error_if_nonfinite:
        check_finite_norm(total, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in pieces + others:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not grads:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in grads if grad.numel()]
    if not norms:
        return torch.zeros((), device=device)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
