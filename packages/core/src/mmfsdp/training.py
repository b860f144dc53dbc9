"""Accumulating without communication, clipping by the true norm, looking at whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mmfsdp.runtime import ShardedModel, live_models, sharded_model
from mmfsdp.state.boxes import local_part, whole_tensor

__all__ = ["clip_grad_norm_", "full_params", "no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them over ranks.

    As with DDP, the forward decides: a backward whose forward ran inside this context does not communicate
    gradients, wherever the backward itself is called. Gradients stay whole meanwhile, which costs memory. The
    last micro-batch must run outside, or clipping and stepping are refused.

    Args:
        model: A sharded model.
    """
    state = sharded_model(model)
    before, state.sync_gradients = state.sync_gradients, False
    try:
        yield
    finally:
        state.sync_gradients = before


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``. Collective: every rank.

    The norm is that of the unsharded model's gradients: over all ranks, and over sharded and whole parameters.

    Args:
        parameters: A sharded model, or parameters of it; with engine ``fsdp1`` it must be the model.
        max_norm: Largest norm to keep.
        norm_type: The p of the p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank.

    Raises:
        ShardStateError: The last backward ran inside `no_sync`.
    """
    if isinstance(parameters, nn.Module):
        state = sharded_model(parameters)
        state.check_reduced("Gradients are about to be clipped")
        if isinstance(state.module, FullyShardedDataParallel):
            # By class: a wrapper's own method of this name ends here.
            return FullyShardedDataParallel.clip_grad_norm_(state.module, max_norm, norm_type)
        parameters = state.module.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for state in _owners(params):
        state.check_reduced("Gradients are about to be clipped")
    params = [param for param in params if param.grad is not None]
    total = _global_norm([param.grad for param in params if param.grad is not None], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"The gradients' norm of order {norm_type} is {total.item()}, so they cannot be clipped.")
    clip_grads_with_norm_(params, max_norm, total)
    return total


@contextmanager
def full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Show every parameter whole, in its stored dtype, for looking and editing. Collective: every rank.

    The whole model is in memory on every rank meanwhile. Do not run forward inside.

    Args:
        model: A sharded model.
        writeback: Keep what was changed; each rank keeps its own part of its own changes.
    """
    state = sharded_model(model)
    if isinstance(state.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(state.module, writeback=writeback):
            yield
        return
    state.reshard()
    whole: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in state.module.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):
                places.append((module, name, param))
                if id(param) not in whole:
                    whole[id(param)] = nn.Parameter(whole_tensor(param, cpu_offload=False), param.requires_grad)
    try:
        for module, name, param in places:
            setattr(module, name, whole[id(param)])
        yield
    finally:
        for module, name, param in places:
            setattr(module, name, param)
        if writeback:
            with torch.no_grad():
                for param in {id(param): param for _, _, param in places}.values():
                    param.to_local().copy_(local_part(whole[id(param)].detach(), param))


def _owners(params: list[torch.Tensor]) -> list[ShardedModel]:
    return [state for state in live_models() if state.unreduced and state.owns(params)]


def _global_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sharded and whole gradients cannot be stacked, so each kind gives its norm, and norms are combined."""
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    norms = []
    if sharded:
        norm = get_total_norm(sharded, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if whole:
        norms.append(get_total_norm(whole, norm_type))
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
