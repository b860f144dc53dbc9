"""Gathers and frees the parameters of a group, and finds their gathered copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.runtime.torch_fsdp2.param_groups import Group, places_of

__all__ = [
    "follow_flags",
    "free",
    "gather",
    "gathered_copies",
    "gathered_params",
    "gathered_values",
    "gives_fewer_ranks_shards",
    "is_copy_on_fewer_ranks",
    "known_copies",
    "plain_flags",
    "replaced_in",
    "shard_versions",
    "shown_params",
    "stays_gathered",
    "will_gather",
]


def free(group: Group) -> bool:
    """Free a group's gathered parameters, also within a forward that uses them, and return whether there were any."""
    group.wait_for_unshard()  # a gathering under way has read the shards already
    was_gathered = not group.is_sharded
    group._to_sharded()
    return was_gathered


def gather(group: Group) -> None:
    """Gather a group's parameters after its shards were written. Collective: every rank of the group."""
    state = group._training_state
    # In a forward torch would gather on streams that do not wait for the writes.
    group._training_state = type(state).IDLE
    try:
        group.unshard()
        group.wait_for_unshard()
    finally:
        group._training_state = state


def will_gather(group: Group) -> bool:
    """Return whether the next ``unshard`` communicates."""
    return not group.is_unsharded and group._all_gather_result is None and group._all_gather_process_group.size() > 1


def gathered_params(groups: Iterable[Group]) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
    """Return the gathered parameters that are registered in place of shards: by ``id``, the parameter and its shard."""
    found = {}
    for group in groups:
        if group.is_sharded:
            continue
        for param in group.fsdp_params:
            module, name = next(places_of(param))
            registered = module._parameters[name]
            if registered is not None and registered is not param.sharded_param:
                found[id(registered)] = (registered, param.sharded_param)
    return found


def gathered_values(group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield FQN and gathered copy of each parameter of a gathered group; other tensor types are left out."""
    for param in group.fsdp_params:
        value = param.unsharded_param
        if type(value.data) is torch.Tensor or isinstance(value, DTensor):
            yield param._param_fqn or param._module_info.param_name, value


def gathered_copies(group: Group) -> Iterator[torch.Tensor]:
    """Yield the gathered copies that torch reuses, gathered or freed now; none before a parameter's first use."""
    for param in group.fsdp_params:
        if (copy := getattr(param, "_unsharded_param", None)) is not None:
            yield copy


def known_copies(groups: Iterable[Group]) -> set[int]:
    """Return the ``id`` of each gathered copy that torch reuses, gathered or freed now."""
    return {id(copy) for group in groups for copy in gathered_copies(group)}


def is_copy_on_fewer_ranks(param: torch.Tensor, groups: Iterable[Group]) -> bool:
    """Return whether ``param`` is a copy of a reshard to fewer ranks after forward, which makes new ones each time."""
    mesh = getattr(param, "device_mesh", None)
    smaller = (group.post_forward_mesh_info for group in groups if group.post_forward_mesh_info is not group.mesh_info)
    return mesh is not None and any(info is not None and info.mesh is mesh for info in smaller)


def replaced_in(group: Group) -> list[tuple[nn.Module, str]]:
    """Return owner and own name of each parameter that was replaced by a tensor other than the group's."""
    if group.is_sharded:
        expected = "sharded_param"
    else:
        expected = "_unsharded_param" if group.is_unsharded else "_sharded_post_forward_param"
    found = []
    for param in group.fsdp_params:
        info = param._module_info
        if info.module._parameters.get(info.param_name) is not getattr(param, expected, None):
            found.append((info.module, info.param_name))
    return found


def shown_params(group: Group) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Yield each parameter of a group: its FQN, the parameter that is registered now, and the shard."""
    for param in group.fsdp_params:
        info = param._module_info
        yield param._param_fqn or info.param_name, info.module._parameters[info.param_name], param.sharded_param


def plain_flags(group: Group) -> list[bool] | None:
    """Return ``requires_grad`` of a group's copies; None if one of them, or of the shards, has attributes of a user."""
    flags = []
    for param in group.fsdp_params:
        copy = param._unsharded_param
        if copy.__dict__ or len(param.sharded_param.__dict__) > 1:  # nn.Parameter() gives a DTensor one
            return None
        flags.append(copy.requires_grad)
    return flags


def follow_flags(group: Group, flags: Iterable[bool]) -> None:
    """Give gathered copies the ``requires_grad`` that their shards got since they were gathered with these flags."""
    for param, flag in zip(group.fsdp_params, flags, strict=True):
        if param.sharded_param.requires_grad != flag and param._unsharded_param.requires_grad == flag:
            param._unsharded_param.requires_grad_(not flag)


def gives_fewer_ranks_shards(group: Group) -> bool:
    """Return whether shards of fewer ranks are registered after a forward."""
    return group.post_forward_mesh_info is not None and stays_gathered(group)


def stays_gathered(group: Group) -> bool:
    """Return whether other tensors than the shards are registered after a forward. Known once the root has run."""
    return group.post_forward_mesh_info is not group.mesh_info


def shard_versions(groups: Iterable[Group]) -> int:
    """Return a number that grows with each write to shards of gathered groups, except through ``.data``."""
    total = 0
    for group in groups:
        if not group.is_sharded:
            for param in group.fsdp_params:
                shard = param.sharded_param
                total += shard._version + shard._local_tensor._version
    return total
