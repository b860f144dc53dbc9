"""Finds the role of a tensor in a sharded model: a parameter that it trains, a copy of one, or an unseen one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmfsdp.basics.text import clean_fqn, name_list
from mmfsdp.errors import ShardStateError
from mmfsdp.runtime.torch_fsdp2.gathering import is_copy_on_fewer_ranks, known_copies
from mmfsdp.runtime.torch_fsdp2.param_groups import Group, groups_of, shards_of

__all__ = ["Roles", "check_roles", "check_unseen", "roles_of"]


@dataclass(frozen=True, slots=True)
class Roles:
    """The tensors of a list that belong to a sharded model, by role."""

    trained: list[torch.Tensor] = field(default_factory=list)
    """Its shards, flat parameters, and whole parameters."""
    copies: list[torch.Tensor] = field(default_factory=list)
    """Gathered copies of shards, current or earlier ones."""
    former: list[torch.Tensor] = field(default_factory=list)
    """Parameters that it had before it was sharded, and that sharding replaced."""
    unseen: dict[str, torch.Tensor] = field(default_factory=dict)
    """By FQN: parameters that something other than ``fully_shard`` registered after it was sharded."""

    def __bool__(self) -> bool:
        return bool(self.trained or self.copies or self.former or self.unseen)


def roles_of(
    params: Sequence[torch.Tensor],
    module: nn.Module,
    groups: Sequence[Group],
    known: Iterable[torch.Tensor],
    former: Iterable[weakref.ref[nn.Parameter]],
    *,
    shows_whole: bool,
) -> Roles:
    """Return what tensors are to a sharded model. Not collective; linear in the number of parameters.

    Args:
        params: The tensors. Those that have nothing to do with the model are in no list.
        module: The sharded root.
        groups: Its parameter groups when it was sharded; none with engine ``fsdp1``.
        known: Its parameters that are not in a group: whole ones, and with ``fsdp1`` all.
        former: References to parameters that sharding replaced.
        shows_whole: Whether whole parameters are registered in place of shards, as within `full_params`.
    """
    trained = {id(shard) for group in groups for shard in shards_of(group)} | {id(param) for param in known}
    roles = Roles()
    others: list[torch.Tensor] = []
    for param in params:
        (roles.trained if id(param) in trained else others).append(param)
    if not others:
        return roles
    copies = known_copies(groups)
    replaced = {id(earlier) for reference in former if (earlier := reference()) is not None}
    names = {id(own): name for name, own in _registered(module)}
    # Whoever shards a new part with fully_shard has its gradients reduced.
    later = {id(shard) for group in groups_of(module.modules()) for shard in shards_of(group)} if groups else set()
    for param in others:
        if id(param) in copies or is_copy_on_fewer_ranks(param, groups):
            roles.copies.append(param)
        elif id(param) in replaced:
            roles.former.append(param)
        elif id(param) in later or (shows_whole and id(param) in names):
            roles.trained.append(param)
        elif id(param) in names:
            roles.unseen[names[id(param)]] = param
    return roles


def check_roles(roles: Roles, holder: str) -> None:
    """Check that training the tensors trains the model, alike on all ranks. Not collective.

    Args:
        roles: What they are to the model.
        holder: What holds them, for the message.

    Raises:
        ShardStateError: One is a gathered copy of a shard, a parameter that sharding replaced, or one that sharding
            has not seen.
    """
    if roles.copies:
        raise ShardStateError(
            f"{holder} holds gathered copies of sharded parameters: it was built from a submodule between a "
            "forward and its backward, and would train nothing. Build it from the sharded model's parameters(), "
            "best before the first forward."
        )
    if count := len(roles.former):
        raise ShardStateError(
            f"{holder} holds {count} of the parameters that the model had before it was sharded. Sharding has "
            "replaced them, so training them would change nothing. Build the optimizer from the sharded model's "
            "parameters(), after shard()."
        )
    check_unseen(roles, holder)


def check_unseen(roles: Roles, holder: str) -> None:
    """Check that tensors to be trained were in the model when it was sharded. Not collective.

    Args:
        roles: What they are to the model.
        holder: What holds them, for the message.

    Raises:
        ShardStateError: One was not; or it was, and has been divided since.
    """
    divided = [name for name, param in roles.unseen.items() if param.requires_grad and isinstance(param, DTensor)]
    if divided:
        raise ShardStateError(
            f"{holder} holds {name_list(divided)}, which {'was' if len(divided) == 1 else 'were'} divided over a mesh "
            "after the model was sharded, as by parallelize_module: the gradients would not be averaged over ranks. "
            "Divide the model first, then call shard() with the mesh that has the axis: parallelize_module(model, "
            'mesh["tensor"], ...); mmfsdp.shard(model, config, mesh).'
        )
    if unseen := [name for name, param in roles.unseen.items() if param.requires_grad]:
        raise ShardStateError(
            f"{holder} holds {name_list(unseen)}, which {'was' if len(unseen) == 1 else 'were'} added to the model "
            "after it was sharded: the gradients would not be averaged over ranks, and the ranks' weights would drift "
            "apart. Change the model first (a new head, LoRA, a larger vocabulary), then call shard(); to keep such "
            "parameters whole on every rank, add them before shard() and list them in sharding.ignored_parameters."
        )


def _registered(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield every registered parameter, gathered or sharded, with its FQN."""
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is not None:
                yield clean_fqn(f"{prefix}.{name}" if prefix else name), param
