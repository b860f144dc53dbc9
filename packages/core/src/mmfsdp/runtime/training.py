"""Accumulates gradients without communication, and clips by the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn

from mmfsdp.collective.scopes import scope_of
from mmfsdp.collective.steps import check_same_arguments
from mmfsdp.errors import ConfigError, ShardStateError
from mmfsdp.runtime.gradients.clipping import check_finite_norm, global_norm, scale_down_
from mmfsdp.runtime.roles import check_roles
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model, live_models

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
    groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``. Collective: every rank.

    The norm is the unsharded model's: it covers all ranks and all parameters, sharded and whole. If one
    rank calls this alone, it waits for the others until the process group's timeout.

    Of a model in pipeline stages each rank gives all stages that it holds, and the group of ranks that hold the others.

    Args:
        parameters: A sharded model, or parameters of one; with engine ``fsdp1`` only the model is accepted.
        max_norm: The largest norm that is left unchanged.
        norm_type: The p of the p-norm, above 0; ``inf`` is the largest absolute value.
        error_if_nonfinite: Raise RuntimeError if the norm is NaN or infinite.
        foreach: Use one kernel for many tensors. None uses it where torch has such kernels, as
            ``torch.nn.utils.clip_grad_norm_`` does. Ignored with engine ``fsdp1``.
        groups: A process group whose ranks hold other parameters of one model, or several such groups: the norm covers
            those, too, and every rank of them makes this call with the same arguments. For pipeline stages
            ``mesh.get_group("pipe")``. ``()`` clips a stage by its own norm.

    Returns:
        The norm before clipping, a 0-d tensor of float32 or float64, the same on every rank.

    Raises:
        ShardStateError: The last forward ran inside `no_sync`; or ``parameters`` are those from before the model was
            sharded; or parameters of an ``fsdp1`` model were passed instead of the model, although they are pieces of
            flat parameters whose norm no rank knows.
        ConfigError: A group has ranks that the model is sharded over, whose norms are counted already; or a stage of a
            pipeline is clipped without ``groups``; or ``groups`` is given with engine ``fsdp1``.
        RankMismatchError: Ranks of a group gave different arguments.
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
        if groups and state.is_fsdp1:
            raise ConfigError(
                "With engine 'fsdp1' torch computes the norm and clips in one call, which knows no other stages. Leave "
                "groups out, or shard the stages with engine 'fsdp2'."
            )
        if (total := state.clip_flat(max_norm, norm_type)) is not None:
            if error_if_nonfinite:
                check_finite_norm(total, norm_type)
            return total
        models, parameters = [state], state.module.parameters()
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    others = [groups] if isinstance(groups, dist.ProcessGroup) else [*(groups or ())]
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
        _check_stage(state, others, is_given=groups is not None)
    given = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
    for group in others:
        check_same_arguments(scope_of(group), "clip_grad_norm_(groups=...)", given)
    total = global_norm(params, norm_type, foreach, others)
    if error_if_nonfinite:
        check_finite_norm(total, norm_type)
    scale_down_(params, max_norm, total, foreach)
    return total


def _check_stage(state: ShardedModel, groups: Sequence[dist.ProcessGroup], *, is_given: bool) -> None:
    """Check that groups have the other stages of a model's pipeline, and none of the ranks that it is sharded over."""
    if state.is_stage and not is_given:
        raise ConfigError(
            "This model is a stage of a pipeline, as its mesh says, and its norm is not the whole model's. Give the "
            "parameters of all stages of this rank and groups=mesh.get_group(...) of the pipeline's dimension; or "
            "groups=() to clip each stage by its own norm."
        )
    if not groups:
        return
    own = {int(rank) for rank in state.mesh.mesh.flatten()} - {dist.get_rank()}
    for group in groups:
        if counted := sorted(own & {*dist.get_process_group_ranks(group)}):
            raise ConfigError(
                f"groups has one with the ranks {counted}, which this model is sharded over: their part of the norm "
                "would count twice. Give the groups whose ranks hold other parameters, such as "
                "mesh.get_group('pipe')."
            )
