"""Accumulates gradients without communication, and clips by the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.gradients.clipping import check_finite_norm, global_norm, scale_down_
from mmfsdp.runtime.roles import check_roles
from mmfsdp.runtime.sharded_model import find_sharded_model, live_models

__all__ = ["clip_grad_norm_", "no_sync"]


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

    The norm is the unsharded model's: it covers all ranks and all parameters, sharded and whole. If one
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
        ShardStateError: The last forward ran inside `no_sync`; or ``parameters`` are those from before the model was
            sharded; or parameters of an ``fsdp1`` model were passed instead of the model, although they are pieces of
            flat parameters whose norm no rank knows.
        LostRankError: Not all ranks called it.
        RuntimeError: See ``error_if_nonfinite``.
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}.")
    models = live_models()
    if isinstance(parameters, nn.Module):
        state = find_sharded_model(parameters)
        state.check_reduced("Gradients are about to be clipped")
        if (total := state.clip_flat(max_norm, norm_type)) is not None:
            if error_if_nonfinite:
                check_finite_norm(total, norm_type)
            return total
        models, parameters = [state], state.module.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for state in models:
        if not (roles := state.roles(params)):
            continue
        state.check_reduced("Gradients are about to be clipped")
        check_roles(roles, "The list given to clip_grad_norm_()")
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
