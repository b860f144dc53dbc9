"""Shows whole parameters of a sharded model, with their gradients, for reading and editing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.collective.lost_ranks import Waiting
from mmfsdp.collective.scopes import rank_in
from mmfsdp.errors import ShardStateError, UnsupportedCallError
from mmfsdp.runtime.dtensors import local_part, whole_tensor
from mmfsdp.runtime.engine import Showing
from mmfsdp.runtime.sharded_model import ShardedModel, find_sharded_model

__all__ = ["full_params", "show_dtensors", "whole_params_in"]


@contextmanager
def full_params(
    model: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Make every parameter whole, in its stored dtype, for reading and editing. Collective: every rank.

    Inside the context a rank holds the whole model in memory. Do not run a forward of the whole model inside.

    Args:
        model: A sharded model.
        writeback: Keep changes; each rank keeps its own part of its own changes.
        rank0_only: Show whole parameters on the mesh's first rank only; the others see their shards. Needs
            ``writeback=False``.
        cpu_offload: Show the parameters on the CPU.
        with_grads: Make the gradients whole, too. With ``writeback`` their changes are kept as well.

    Raises:
        UnsupportedCallError: ``rank0_only`` with ``writeback``; or ``with_grads`` with flat parameters.
        ShardStateError: A forward or backward is running; parameters are shown whole already; or, with ``with_grads``,
            the last forward ran inside `no_sync`.
        LostRankError: Not all ranks called it.
    """
    state = find_sharded_model(model)
    with whole_params_in(state, state.module, Showing(True, writeback, rank0_only, cpu_offload, with_grads)):
        yield


@contextmanager
def whole_params_in(state: ShardedModel, module: nn.Module, how: Showing) -> Iterator[None]:
    """Make the parameters of a part of a sharded model whole. Collective: every rank. See `full_params`.

    Args:
        state: The model's state.
        module: The model, or a module of it.
        how: How they are shown.
    """
    if how.rank0_only and how.writeback:
        raise UnsupportedCallError(
            "Parameters that are whole on the first rank only cannot be written back, because the other ranks would "
            "keep their own values. Pass writeback=False, or rank0_only=False."
        )
    if not state.parameters_are_settled():
        raise ShardStateError(
            "Parameters cannot be made whole while a forward or backward is running. Do it before or after."
        )
    if how.with_grads:
        state.check_reduced("Gradients are about to be made whole")
    owners, showing = state.engine.show_whole(state, module, how)
    marks = {(id(owner), name) for owner, name in owners}
    if marks & state.shown.keys():
        raise ShardStateError("These parameters are whole already. Leave the enclosing context first.")
    keep = not how.rank0_only or rank_in(state.mesh) == 0
    with showing:
        state.shown |= dict.fromkeys(marks, keep)
        try:
            yield
        finally:
            state.shown = {mark: here for mark, here in state.shown.items() if mark not in marks}


def show_dtensors(
    state: ShardedModel, module: nn.Module, how: Showing
) -> tuple[list[tuple[nn.Module, str]], AbstractContextManager[None]]:
    """See `mmfsdp.runtime.engine.Engine.show_whole`."""
    state.before_writing()  # an evaluation leaves units gathered
    owners = _find_owners(state, module, how.recurse)
    return owners, _dtensors_shown(state, owners, how)


@contextmanager
def _dtensors_shown(state: ShardedModel, owners: list[tuple[nn.Module, str]], how: Showing) -> Iterator[None]:
    shards = [(owner, name, owner._parameters[name]) for owner, name in owners]
    distinct: dict[int, Any] = {id(shard): shard for _, _, shard in shards}
    keep = not how.rank0_only or rank_in(state.mesh) == 0
    whole: dict[int, nn.Parameter] = {}
    with Waiting("making parameters whole"):
        for key, shard in distinct.items():
            value = _whole(shard, how.cpu_offload, how.with_grads)
            if keep:
                whole[key] = value
    try:
        for owner, name, shard in shards if keep else ():
            setattr(owner, name, whole[id(shard)])
        yield
    finally:
        state.before_writing()  # a forward inside leaves units gathered
        for owner, name, shard in shards if keep else ():
            setattr(owner, name, shard)
        if how.writeback:
            for key, shard in distinct.items():
                _write_back(whole[key], shard, how.with_grads)


def _find_owners(state: ShardedModel, module: nn.Module, recurse: bool) -> list[tuple[nn.Module, str]]:
    """Return where sharded parameters are registered, or were before they were shown: owners with own names."""
    if recurse:
        candidates = [(owner, name) for owner in module.modules() for name in owner._parameters]
    else:
        root = state.module
        unit = next((unit for unit in state.plan.units if root.get_submodule(unit.fqn) is module), None)
        fqns = [fqn for param in (unit.params if unit else ()) for fqn in (param.fqn, *param.aliases)]
        candidates = [(root.get_submodule(owner), name) for owner, _, name in (fqn.rpartition(".") for fqn in fqns)]
    return [
        (owner, name)
        for owner, name in candidates
        if isinstance(owner._parameters[name], DTensor) or (id(owner), name) in state.shown
    ]


def _whole(shard: Any, cpu_offload: bool, with_grads: bool) -> nn.Parameter:
    value = nn.Parameter(whole_tensor(shard, cpu_offload=cpu_offload), shard.requires_grad)
    if with_grads and shard.grad is not None:
        value.grad = whole_tensor(shard.grad, cpu_offload=cpu_offload)
    return value


@torch.no_grad()
def _write_back(whole: nn.Parameter, shard: Any, with_grads: bool) -> None:
    shard.to_local().copy_(local_part(whole.detach(), shard))
    if not with_grads:
        return
    if whole.grad is None:
        shard.grad = None
        return
    part = local_part(whole.grad, shard)
    if isinstance(shard.grad, DTensor):
        shard.grad.to_local().copy_(part)
        return
    local = part.to(shard.to_local().device, copy=True).contiguous()
    shard.grad = DTensor.from_local(
        local, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
