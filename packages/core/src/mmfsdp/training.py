"""Accumulating without communication, clipping by the true norm, looking at whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime import live_models, sharded_model
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
        parameters: A sharded model, or parameters of one; with engine ``fsdp1`` it must be the model.
        max_norm: Largest norm to keep.
        norm_type: The p of the p-norm; ``inf`` is the largest absolute value.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank.

    Raises:
        ShardStateError: The last backward ran inside `no_sync`, or parameters of an ``fsdp1`` model are given alone:
            they are pieces of flat ones, whose norm no rank knows.
        RuntimeError: See ``error_if_nonfinite``.
    """
    if isinstance(parameters, nn.Module):
        state = sharded_model(parameters)
        state.check_reduced("Gradients are about to be clipped")
        if isinstance(state.module, FullyShardedDataParallel):
            # By class: a wrapper's own method of this name ends here.
            total = FullyShardedDataParallel.clip_grad_norm_(state.module, max_norm, norm_type)
            _check_finite(total, norm_type, error_if_nonfinite)
            return total
        parameters = state.module.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for state in (state for state in live_models() if state.owns(params)):
        state.check_reduced("Gradients are about to be clipped")
        if state.is_fsdp1:
            raise ShardStateError(
                "With engine 'fsdp1' a rank's parameters are pieces of flat ones, so their own norm is not the "
                "model's. Pass the model itself to clip_grad_norm_()."
            )
    params = [param for param in params if param.grad is not None]
    total = _global_norm([param.grad for param in params if param.grad is not None], norm_type)
    _check_finite(total, norm_type, error_if_nonfinite)
    for kind in _by_kind(params):
        clip_grads_with_norm_(kind, max_norm, total)
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
    state.before_writing()
    whole: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, DTensor]] = []
    for module in state.module.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):
                places.append((module, name, param))
                if id(param) not in whole:
                    whole[id(param)] = nn.Parameter(whole_tensor(param, cpu_offload=False), param.requires_grad)
    try:
        for module, name, shard in places:
            setattr(module, name, whole[id(shard)])
        yield
    finally:
        for module, name, shard in places:
            setattr(module, name, shard)
        if writeback:
            with torch.no_grad():
                for shard in {id(shard): shard for _, _, shard in places}.values():
                    shard.to_local().copy_(local_part(whole[id(shard)].detach(), shard))


def _check_finite(total: torch.Tensor, norm_type: float, wanted: bool) -> None:
    if wanted and not bool(torch.isfinite(total)):
        raise RuntimeError(f"The gradients' norm of order {norm_type} is {total.item()}, so they cannot be clipped.")


def _global_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    norms = []
    for kind in _by_kind(grads):
        norm = get_total_norm(kind, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) < 2:
        return norms[0] if norms else torch.tensor(0.0)
    combined: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return combined


def _by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Sharded tensors, and whole ones: torch computes with either, not with both in one call."""
    kinds: list[list[torch.Tensor]] = [
        [t for t in tensors if isinstance(t, DTensor)],
        [t for t in tensors if not isinstance(t, DTensor)],
    ]
    return [kind for kind in kinds if kind]
