"""Accumulates gradients without communication, clips by the global norm, and shows whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.clipping import check_finite_norm, global_norm, scale_down_
from mmfsdp.runtime.dtensors import local_part, whole_tensor
from mmfsdp.runtime.sharded_model import find_sharded_model, live_models

__all__ = ["clip_grad_norm_", "full_params", "no_sync"]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them over ranks.

    As with DDP, the forward decides: if a forward runs inside this context, its backward does not communicate
    gradients, wherever the backward itself is called. Until they are reduced, gradients are whole, which costs memory.
    Run the last micro-batch outside of the context; otherwise clipping and stepping raise an error.

    Args:
        model: A sharded model.
    """
    state = find_sharded_model(model)
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
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``. Collective: every rank.

    The norm is that of the unsharded model's gradients, over all ranks and all parameters, sharded and whole. If one
    rank calls this alone, it waits for the others until the process group's timeout.

    Args:
        parameters: A sharded model, or parameters of one; with engine ``fsdp1`` only the model is accepted.
        max_norm: The largest norm that is left unchanged.
        norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite.
        foreach: Use one kernel for many tensors. None uses it where torch has such kernels, as
            ``torch.nn.utils.clip_grad_norm_`` does. Ignored with engine ``fsdp1``.

    Returns:
        The norm before clipping, a 0-d tensor of float32 or float64, the same on every rank.

    Raises:
        ShardStateError: The last forward ran inside `no_sync`; or parameters of an ``fsdp1`` model were passed instead
            of the model, although they are pieces of flat parameters whose norm no rank knows.
        LostRankError: Not all ranks called it.
        RuntimeError: See ``error_if_nonfinite``.
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}.")
    if isinstance(parameters, nn.Module):
        state = find_sharded_model(parameters)
        state.check_reduced("Gradients are about to be clipped")
        if isinstance(state.module, FullyShardedDataParallel):
            # By class: a wrapper's own method of this name ends here.
            with Waiting("computing the norm of all gradients"):
                total = FullyShardedDataParallel.clip_grad_norm_(state.module, max_norm, norm_type)
            if error_if_nonfinite:
                check_finite_norm(total, norm_type)
            return total
        parameters = state.module.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for state in (state for state in live_models() if state.owns(params)):
        state.check_reduced("Gradients are about to be clipped")
        if state.is_fsdp1:
            raise ShardStateError(
                "With engine 'fsdp1' a rank's parameters are pieces of flat parameters, so their norm is not the "
                "model's. Pass the model itself to clip_grad_norm_()."
            )
    total = global_norm(params, norm_type, foreach)
    if error_if_nonfinite:
        check_finite_norm(total, norm_type)
    scale_down_(params, max_norm, total, foreach)
    return total


@contextmanager
def full_params(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Make every parameter whole, in its stored dtype, for reading and editing. Collective: every rank.

    Inside the context every rank holds the whole model in memory. Do not run a forward inside.

    Args:
        model: A sharded model.
        writeback: Keep changes; each rank keeps its own part of its own changes.
    """
    state = find_sharded_model(model)
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
